"""A third party's room, as small as one can be: it copies the model and runs it with ONNX Runtime.

``fault`` makes it misbehave, so that tests can see what the engine does about it.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from packager.errors import BuildError, Refused, UsageError
from packager.host import Host
from packager.room import Missing, Plan, PlanRequest, RoomOptions, Runner, RuntimeInfo, Stage, Step
from packager.shapes import pin_shapes

if TYPE_CHECKING:
    import numpy as np

Fault = Literal[
    "", "missing", "refuse", "raise", "unexpected", "segfault", "hang", "full", "wrong", "nan", "run", "half", "scale"
]


class Options(RoomOptions):
    """How to misbehave."""

    fault: Fault = Field("", description="what goes wrong")
    note: str = Field("", description="an option that only changes the plan")
    level: Literal["runtime", "proxy"] = Field("runtime", description="the level claimed")
    extra: str | None = Field(None, description="a file that is put into the bundle")

    def files(self) -> tuple[str, ...]:
        """The extra one."""
        return () if self.extra is None else (self.extra,)


def missing(host: Host) -> list[Missing]:
    """Nothing is ever missing: the options aren't known yet when this is asked."""
    return []


def plan(request: PlanRequest) -> Plan:
    """Copy the model, nothing else."""
    options = request.options
    assert isinstance(options, Options)
    if options.fault == "refuse":
        node = request.model.structure.graph.nodes[0]
        raise Refused(f"tiny can't take node {node.label}", "choose another target")
    steps = (Step("Copying the model", (("note", options.note),)),)
    return request.plan(pin_shapes(request.model.signature, request.shapes), steps)


def build(plan: Plan, stage: Stage) -> None:
    """Copy the model, or do what ``fault`` says."""
    options = Options.model_validate_json(plan.options)
    shutil.copyfile(stage.model, stage.folder / "model.onnx")
    (stage.folder / "options.json").write_text(plan.options)
    for name, path in stage.files.items():
        shutil.copyfile(path, stage.folder / Path(name).name)
    if options.fault == "raise":
        raise BuildError("node Relu 'act' can't be converted", "use another node")
    if options.fault == "unexpected":
        raise RuntimeError("the SDK raised something of its own")
    if options.fault == "full":
        raise OSError(28, "No space left on device", str(stage.folder / "model.onnx"))
    if options.fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if options.fault == "hang":
        time.sleep(600)
    if options.fault in ("half", "scale"):
        from . import broken

        {"half": broken.halve_blindly, "scale": broken.spoil_scale}[options.fault](stage.folder / "model.onnx")


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """ONNX Runtime on the copied model."""
    yield _Runner(bundle, Options.model_validate_json((bundle / "options.json").read_text()))


@contextmanager
def remote(bundle: Path, endpoint: str) -> Iterator[Runner]:
    """The same, said to be somewhere else."""
    if not endpoint.startswith("tiny://"):
        raise UsageError(f"'{endpoint}' is no tiny service", "write tiny://NAME")
    with runner(bundle) as made:
        made.info = replace(made.info, device=endpoint)
        yield made


class _Runner:
    def __init__(self, bundle: Path, options: Options) -> None:
        import onnxruntime as ort

        self._fault = options.fault
        self._session = ort.InferenceSession(str(bundle / "model.onnx"), providers=["CPUExecutionProvider"])
        reason = "" if options.level == "runtime" else "a stand-in ran it"
        self.info = RuntimeInfo("ONNX Runtime", ort.__version__, "CPU", options.level, reason)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once, wrongly where asked to."""
        names = [output.name for output in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        first = outputs[names[0]].copy()
        if self._fault == "run":
            raise RuntimeError("out of device memory")
        if self._fault == "wrong":
            first.flat[0] += 1
        if self._fault == "nan":
            first.flat[0] = float("nan")
        return {**outputs, names[0]: first}
