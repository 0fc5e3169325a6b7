"""The iOS room: a Swift package for ONNX Runtime with its CoreML provider, and the model as a Core ML package.

``plan`` (:mod:`.planning`) says what Core ML will take (:mod:`.coverage`); the pass :mod:`.fitting` rewrites what it
refuses. ``build`` (:mod:`.building`) writes the package and :mod:`.mlpackage` the Core ML one. ``runner``
(:mod:`.running`) runs the generated Swift here where there is a toolchain, over a stand-in for Apple's framework, and
else the very model file in ONNX Runtime; the Core ML package's operations are carried out one by one
(:mod:`.executing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packager.host import Host
from packager.room import Covered, Missing, Plan, PlanRequest, Reach, Runner, Stage
from packager.targets.ios.options import Options
from packager.targets.ios.planning import fallbacks, plan_for

__all__ = ["Options", "build", "missing", "plan", "reach", "remarks", "runner"]


def missing(host: Host) -> list[Missing]:
    """Nothing beyond the Python packages: without a Swift toolchain the verdict's level is lower, and says so."""
    return []


def reach(host: Host) -> Reach:
    """The generated Swift where there is a toolchain, else the model file alone."""
    from packager.targets.ios.toolchain import HOW, find_toolchain

    return Reach("emulated") if find_toolchain() is not None else Reach("proxy", f"no Swift toolchain is here: {HOW}")


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph alone.

    Raises:
        Refused: the Swift package can't carry the model, or Core ML would take too little of it; nodes are named.
    """
    made: Plan = plan_for(request)
    return made


def remarks(request: PlanRequest) -> tuple[Covered, ...]:
    """The nodes that Core ML leaves to the CPU."""
    found: tuple[Covered, ...] = fallbacks(request)
    return found


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``. Meant for a process of its own.

    Raises:
        BuildError: the model can't be written as one file.
        StorageError: a file could not be written.
    """
    from packager.targets.ios.building import build_bundle

    build_bundle(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Load ``bundle``: in generated Swift where a toolchain is found, else in ONNX Runtime.

    Raises:
        VerificationError: the Swift package doesn't build, the model doesn't load, or the Core ML package doesn't
            answer as the goldens say.
    """
    from packager.targets.ios.running import run_bundle

    with run_bundle(bundle) as made:
        yield made
