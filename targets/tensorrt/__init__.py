"""The TensorRT room: an engine, built where it can be, and never mistaken for another.

``plan`` (:mod:`.planning`) refuses what TensorRT's parser would misread (:mod:`.rules`), finds the ranges of sizes
(:mod:`.profiles`) and the builder (:mod:`.library`); ``build`` (:mod:`.building`) rewrites the model
(:mod:`.rewrite`), compiles the engine (:mod:`.compile`, which ships as ``build.py``) and adds loaders: :mod:`.infer`
with :mod:`.fit`, which tells whether an engine fits a machine before it is read, and one in C++. Verification is
:mod:`.running`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packager.host import Host
from packager.room import Answer, Covered, Missing, Plan, PlanRequest, Reach, Runner, Stage
from packager.targets.tensorrt.options import Options

__all__ = ["Options", "build", "missing", "plan", "query", "reach", "remarks", "runner"]


def missing(host: Host) -> list[Missing]:
    """Nothing beyond the Python packages that ``target.toml`` requires; TensorRT proper is an option's business."""
    return []


def reach(host: Host) -> Reach:
    """The engine where a GPU can run it, else what is known of it from building."""
    from packager.targets.tensorrt.fit import load_cuda, look

    lacking = look("", load_cuda(), "rtx").lacking
    if not lacking:
        return Reach("runtime")
    why = f"the engine isn't executed here, model.onnx answers in its place: {'; '.join(lacking)}"
    return Reach("structural", why)


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph and the golden inputs; for TensorRT proper, from the GPU here too.

    Raises:
        Refused: TensorRT can't take the model, or ranges, shapes or options make no sense; nodes and dims are named.
        ToolchainMissing: TensorRT proper is asked for, and library or GPU isn't here.
    """
    from packager.targets.tensorrt.planning import plan_for

    made: Plan = plan_for(request)
    return made


def remarks(request: PlanRequest) -> tuple[Covered, ...]:
    """The nodes that are rewritten for TensorRT, as the plan's steps name them."""
    from packager.targets.tensorrt.rules import rewritten_nodes

    found = rewritten_nodes(request.model.structure)
    return tuple(Covered(node.label, node.operator, "rewritten", title) for node, title in found)


def query(plan: Plan, stage: Stage) -> Answer:
    """Parse, as a build does, and build no engine. Meant for a process of its own.

    Raises:
        Refused: TensorRT's parser can't take nodes; each is named.
        ToolchainMissing: the builder's library isn't here.
    """
    from packager.targets.tensorrt.building import queried

    answer: Answer = queried(plan, stage)
    return answer


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder`` with engine, ONNX file, ``engine.json`` and loaders. Meant for a process of its own.

    Raises:
        Refused: TensorRT's parser can't take nodes; each is named.
        BuildError: TensorRT refused to build.
        StorageError: a file could not be written.
    """
    from packager.targets.tensorrt.building import build_bundle

    build_bundle(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Load ``bundle``: its engine where the GPU here fits it, else its ONNX file in ONNX Runtime.

    Raises:
        VerificationError: the bundle isn't whole, or TensorRT can't load an engine that should fit.
    """
    from packager.targets.tensorrt.running import loaded

    with loaded(bundle) as made:
        yield made
