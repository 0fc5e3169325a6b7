"""The Triton room: a model repository that a real Triton server has loaded, served and batched.

``plan`` (:mod:`.planning`) decides from the signature alone; ``build`` (:mod:`.repository`) lays out the repository,
writes its configuration (:mod:`.config`) and proves whether requests may be merged (:mod:`packager.rows`); verification
(:mod:`.serving`) starts a server (:mod:`.server`) from a kit of registry packages (:mod:`.kit`) and asks it through
:mod:`.infer`, the client that ships, alone and under :mod:`.traffic`; :mod:`.asking` asks a server that runs already.
The kit's server has no onnxruntime backend of its own: :mod:`.standin` is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packager.host import Host
from packager.room import Missing, Plan, PlanRequest, Reach, Runner, Stage
from packager.targets.triton.options import Options

__all__ = ["Options", "build", "missing", "plan", "reach", "remote", "runner"]


def missing(host: Host) -> list[Missing]:
    """The kit, and the shared libpython it needs."""
    from packager.targets.triton.kit import missing_parts

    found: list[Missing] = missing_parts(host)
    return found


def reach(host: Host) -> Reach:
    """Triton's own onnxruntime backend where there is one, else the stand-in for it."""
    from packager.targets.triton.kit import BACKENDS_VARIABLE, find_program

    program = find_program()
    if program is not None and program.backends is not None:
        return Reach("runtime")
    return Reach("emulated", f"a stand-in hosts the model; {BACKENDS_VARIABLE} names a folder with the real backend")


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph alone.

    Raises:
        Refused: Triton can't serve the signature, or options, shapes or precision make no sense; tensors are named.
    """
    from packager.targets.triton.planning import plan_for

    made: Plan = plan_for(request)
    return made


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder`` with the model repository, the client and deployment files.

    Raises:
        BuildError: batching was asked for by number and golden cases disprove it, or the model doesn't load.
        StorageError: a file could not be written.
    """
    from packager.targets.triton.repository import build_repository

    build_repository(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Serve ``bundle`` (a folder with ``bundle.json``) by a Triton server of its own.

    Raises:
        VerificationError: Triton refuses the model, with its own reason, or answers wrongly when requests meet.
        ToolchainMissing: there is no server on this machine.
    """
    from packager.targets.triton.serving import served

    with served(bundle) as made:
        yield made


@contextmanager
def remote(bundle: Path, endpoint: str) -> Iterator[Runner]:
    """Ask a Triton server that runs already, at ``http://host:8000`` or ``grpc://host:8001``.

    Raises:
        UsageError: that is no address.
        VerificationError: nobody answers there, or not with this bundle's model.
    """
    from packager.targets.triton.asking import asked

    with asked(bundle, endpoint) as made:
        yield made
