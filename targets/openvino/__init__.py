"""The OpenVINO room: ``model.xml`` and ``model.bin`` with a small Python loader, executed here by OpenVINO on CPU.

``plan`` (:mod:`.planning`) decides from the graph alone what OpenVINO can't take, what it would compute differently
(:mod:`.hazards`) and what is rewritten for it (:mod:`.rewrite`); ``build`` (:mod:`.convert`) converts and gives every
input and output its ONNX name back (:mod:`.restore`); :mod:`.infer` is what runs the result, here and at the partner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packager.host import Host
from packager.room import Answer, Covered, Missing, Plan, PlanRequest, Runner, RuntimeInfo, Stage
from packager.targets.openvino.hazards import REWRITES, rewritten_nodes
from packager.targets.openvino.options import Options
from packager.targets.openvino.planning import plan_for

if TYPE_CHECKING:
    import numpy as np

    from packager.targets.openvino.infer import Model

__all__ = ["Options", "build", "missing", "plan", "query", "remarks", "runner"]


def missing(host: Host) -> list[Missing]:
    """Nothing beyond the Python packages that ``target.toml`` requires."""
    return []


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph alone.

    Raises:
        Refused: OpenVINO can't take the model, or shapes or precision make no sense; the message names every node.
    """
    made: Plan = plan_for(request)
    return made


def remarks(request: PlanRequest) -> tuple[Covered, ...]:
    """The nodes that are rewritten for OpenVINO, as the plan's steps name them."""
    return tuple(
        Covered(node.label, node.operator, "rewritten", REWRITES[kind])
        for kind, nodes in rewritten_nodes(request.model.structure).items()
        for node in nodes
    )


def query(plan: Plan, stage: Stage) -> Answer:
    """Convert, as a build does, and save nothing. Meant for a process of its own.

    Raises:
        BuildError: OpenVINO refused; the ONNX nodes are named.
    """
    from packager.targets.openvino.convert import queried

    answer: Answer = queried(plan, stage)
    return answer


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder`` with ``model.xml``, ``model.bin`` and ``infer.py``. Meant for a process of its own.

    Raises:
        BuildError: OpenVINO refused; the message names the ONNX nodes.
        StorageError: a file could not be written.
    """
    from packager.targets.openvino.convert import convert

    convert(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Load ``bundle`` (a folder with ``bundle.json``) in OpenVINO on CPU. Meant for a process of its own.

    Raises:
        VerificationError: the bundle doesn't load, or OpenVINO can't compile it.
    """
    from packager.errors import VerificationError
    from packager.targets.openvino.convert import plain
    from packager.targets.openvino.infer import Model

    try:
        model = Model(bundle)
    except ValueError as error:
        raise VerificationError(str(error), "build the bundle again") from error
    except RuntimeError as error:
        raise VerificationError(
            f"OpenVINO can't compile the model for CPU: {plain(str(error))}",
            "pin symbolic dimensions with `shapes` in the manifest, so that every rank is known",
        ) from error
    yield _Runner(model)


class _Runner:
    """A compiled model behind the engine's Protocol."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.info = RuntimeInfo(
            name=model.info["name"],
            version=model.info["version"],
            device=model.info["device"],
            level="runtime",
            details=tuple((key, model.info[key]) for key in ("inference_precision", "dynamic_quantization")),
        )

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once.

        Raises:
            VerificationError: OpenVINO refused the inputs or failed while computing.
        """
        from packager.errors import VerificationError
        from packager.targets.openvino.convert import plain

        try:
            outputs: dict[str, np.ndarray] = self._model.run(feeds)
        except ValueError as error:
            raise VerificationError(str(error)) from error
        except RuntimeError as error:
            raise VerificationError(f"OpenVINO failed while computing: {plain(str(error))}") from error
        return outputs
