"""The NPU room: a context binary for Qualcomm's Hexagon NPUs, compiled by QNN and run here in its x86 emulator.

The dialect quantises the model (every tensor gets a scale) and measures what that costs; ``plan`` (:mod:`.planning`)
refuses what no NPU takes; ``build`` (:mod:`.compile`) compiles ahead of time and says which nodes the NPU takes
(:mod:`.coverage`); :mod:`.infer` is what runs the result, here and at the partner. :mod:`.chips` knows the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packager.host import Host
from packager.room import Answer, Missing, Plan, PlanRequest, Reach, Runner, RuntimeInfo, Stage
from packager.targets.npu.options import Options

if TYPE_CHECKING:
    import numpy as np

    from packager.targets.npu.infer import Model

__all__ = ["Options", "build", "missing", "plan", "query", "reach", "runner"]


def missing(host: Host) -> list[Missing]:
    """QNN's compiler, where there is none for the machine."""
    if host.system in ("Linux", "Windows"):
        return []
    return [Missing(f"QNN for {host.system}", "build on Linux or Windows: onnxruntime-qnn has no wheel for others")]


def reach(host: Host) -> Reach:
    """QNN finds NPUs in machines of Qualcomm's, which are Arm's; its x86 libraries have the emulator only."""
    if host.machine.lower() in ("arm64", "aarch64"):
        return Reach("runtime")
    return Reach("emulated", f"QNN's emulator stands in for the NPU on {host.machine}")


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the quantised model's graph alone.

    Raises:
        Refused: no NPU takes an operator, a shape or a dtype; every one is named.
    """
    from packager.targets.npu.planning import plan_for

    made: Plan = plan_for(request)
    return made


def query(plan: Plan, stage: Stage) -> Answer:
    """Compile, and say which nodes QNN leaves to the CPU. Meant for a process of its own.

    Raises:
        BuildError: QNN refused the model, or leaves nodes to the CPU that may not go there; they are named.
    """
    import importlib.metadata

    from packager.targets.npu.compile import covered

    left = covered(plan, stage).on_cpu
    return Answer(f"QNN by onnxruntime-qnn {importlib.metadata.version('onnxruntime-qnn')}", left)


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``. Meant for a process of its own.

    Raises:
        BuildError: QNN refused the model, or leaves nodes to the CPU that may not go there; they are named.
        StorageError: a file could not be written.
    """
    from packager.targets.npu.compile import compile_bundle

    compile_bundle(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Load the context binary of ``bundle`` in QNN. Meant for a process of its own.

    Raises:
        VerificationError: the bundle doesn't load.
    """
    from packager.errors import VerificationError
    from packager.targets.npu.infer import Model

    try:
        model = Model(bundle)
    except ValueError as error:
        raise VerificationError(str(error), "build the bundle again") from error
    except RuntimeError as error:
        raise VerificationError(f"QNN can't load the context binary: {error}", "build the bundle again") from error
    yield _Runner(model)


class _Runner:
    """A loaded context behind the engine's Protocol."""

    def __init__(self, model: Model) -> None:
        self._model = model
        info = dict(model.info)
        self.info = RuntimeInfo(
            name=info.pop("name"),
            version=info.pop("version"),
            device=info.pop("device"),
            level="runtime" if info.pop("level") == "runtime" else "emulated",
            reason=info.pop("reason"),
            details=tuple(info.items()),
        )

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once.

        Raises:
            VerificationError: the inputs are not the model's, or QNN failed.
        """
        from packager.errors import VerificationError

        try:
            outputs: dict[str, np.ndarray] = self._model.run(feeds)
        except (ValueError, RuntimeError) as error:
            raise VerificationError(str(error)) from error
        return outputs
