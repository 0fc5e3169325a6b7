"""From ONNX to ``model.xml`` and ``model.bin``, with every doubt turned into an error that names ONNX nodes.

The model file is read by OpenVINO's own frontend, in place, so external data is mapped and never copied through
Python. Shapes are pinned before conversion, which lets branches and loops convert whose ranks would stay unknown.
The saved files are read again and their signature is compared with the plan's.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import BuildError, Objection, StorageError, node_lines
from packager.graph import Dim, Node, Structure, format_dims
from packager.model import Model, Signature, TensorSpec, open_model
from packager.room import Answer, Plan, Stage
from packager.selfcheck import ship_loader
from packager.targets.openvino import infer
from packager.targets.openvino.halving import halved
from packager.targets.openvino.hazards import rewrites
from packager.targets.openvino.restore import element_type, restore_names

if TYPE_CHECKING:
    import openvino

XML, BIN = "model.xml", "model.bin"

NO_RULE = "OpenVINO has no conversion rule for it"
FILE_READER_GAP = "get_attribute is not implemented for this FrontEnd class"
"""OpenVINO's reader of files can't expand some operators (losses with ``ignore_index``); its reader of memory can."""


def convert(plan: Plan, stage: Stage) -> None:
    """Convert ``stage.model`` into ``stage.folder`` as the plan says.

    Raises:
        BuildError: OpenVINO refused the model, or what it made has another signature than the plan.
        StorageError: a file could not be written.
    """
    infer.load_openvino()
    import openvino

    made = _converted(plan, stage)
    try:
        with halved(made) if plan.precision == "fp16" else contextlib.nullcontext():
            openvino.save_model(made, stage.folder / XML, compress_to_fp16=False)
    except RuntimeError as error:
        raise StorageError(f"OpenVINO can't save the model: {plain(str(error))}", "is the disk full?") from error
    del made  # and with it the map of the weights
    check_saved(stage.folder, plan.signature)
    ship_loader(Path(infer.__file__), stage.folder)


def queried(plan: Plan, stage: Stage) -> Answer:
    """Convert as :func:`convert` does, then let the CPU plugin say which nodes it can't run.

    Raises:
        BuildError: OpenVINO refused the model, or its CPU plugin takes some nodes not; they are named.
    """
    infer.load_openvino()
    import openvino

    made = _converted(plan, stage)
    try:
        taken = openvino.Core().query_model(made, "CPU")
    except RuntimeError as error:
        raise BuildError(f"OpenVINO can't compile the model for CPU: {plain(str(error))}") from error
    structure = open_model(stage.model).structure
    left = [each.get_friendly_name() for each in made.get_ordered_ops() if each.get_friendly_name() not in taken]
    nodes = [Objection(_labels(name, (structure,)), "OpenVINO's CPU plugin doesn't take it") for name in left]
    if nodes:
        raise BuildError(
            f"OpenVINO can't compile the model for CPU:{node_lines(nodes)}", "choose another target for it", nodes
        )
    return Answer(f"OpenVINO {openvino.__version__.partition('-')[0]}")


def _converted(plan: Plan, stage: Stage) -> openvino.Model:
    model = open_model(stage.model)
    source, structure = _source(model)
    made = _read(source, model, structure, plan)
    restore_names(made, structure, plan.signature)
    return made


def _source(model: Model) -> tuple[str | io.BytesIO, Structure]:
    """What to convert: the model's own file, or a rewritten copy."""
    if not rewrites(model.structure):
        return str(model.path.resolve()), model.structure
    from packager.targets.openvino.rewrite import rewritten

    data, structure = rewritten(model.path)
    return io.BytesIO(data), structure


def _read(source: str | io.BytesIO, model: Model, structure: Structure, plan: Plan) -> openvino.Model:
    import openvino
    from openvino import frontend

    refused = (
        RuntimeError, frontend.GeneralFailure, frontend.InitializationFailure, frontend.NotImplementedFailure,
        frontend.OpConversionFailure, frontend.OpValidationFailure,
    )  # fmt: skip
    try:
        # OpenVINO looks for the external data of a model in memory in the current folder.
        with contextlib.chdir(model.path.parent):
            reader = frontend.FrontEndManager().load_by_framework("onnx")
            loaded = reader.load(source)
            for before, after in zip(model.signature.inputs, plan.signature.inputs, strict=True):
                if before.dims != after.dims and after.dims is not None:
                    dims = [dim if isinstance(dim, int) else -1 for dim in after.dims]
                    place = loaded.get_place_by_tensor_name(after.name)
                    loaded.set_partial_shape(place, openvino.PartialShape(dims))
            return reader.convert(loaded)
    except refused as error:
        if isinstance(source, str) and FILE_READER_GAP in str(error) and model.bytes < 2**31:
            return _read(io.BytesIO(model.path.read_bytes()), model, structure, plan)
        raise conversion_error(str(error), (model.structure, structure), plan.signature) from error


def conversion_error(text: str, structures: tuple[Structure, ...], signature: Signature) -> BuildError:
    """OpenVINO's message as an error about ONNX nodes.

    Args:
        text: what OpenVINO said.
        structures: the graph as the user knows it, then the graph that was converted.
        signature: pinned; its free dims are what can still be pinned.
    """
    nodes = [Objection(_labels(names, structures), reason) for names, reason in _node_failures(text)]
    unknown: list[str] = []
    for operators in re.findall(r"No conversion rule found for operations: (.+)", text):
        for operator in (re.sub(r"-\d+$", "", each) for each in operators.strip().split(", ")):
            found = _without_rule(operator, structures[0])
            nodes.extend(found)
            unknown.extend([] if found else [f"\n  operator {operator}: {NO_RULE}"])
    lines = node_lines(nodes) + "".join(unknown) or f"\n  {plain(text)}"
    kinds = {node.op_type for node in structures[0].walk()}
    free = [
        dim if isinstance(dim, str) else f"{spec.name}:{axis}"
        for spec in signature.inputs
        for axis, dim in enumerate(spec.dims or ())
        if not isinstance(dim, int)
    ]
    hint = "choose another target for this model, or export it without these operators"
    if free and (kinds & {"If", "Loop", "Scan"} or "rank" in text or "dynamic" in text):
        hint = f"pin the free dims with `shapes` in the manifest ({', '.join(dict.fromkeys(free))}), or {hint}"
    return BuildError(f"OpenVINO can't convert the model:{lines}", hint, nodes)


def _node_failures(text: str) -> list[tuple[str, str]]:
    """(output names or name, reason) of each node OpenVINO's log gives a section to."""
    found = []
    for section in re.split(r"\n-- ", text.split("\nSummary:", 1)[0])[1:]:
        match = re.search(r"ONNX node '<Node\([^)]*\): (.*?)>'", section, re.DOTALL)
        if match:
            _, _, body = section.partition("with a message:")
            found.append((match[1], plain(body)))
    return found


def _labels(names: str, structures: tuple[Structure, ...]) -> str:
    for structure in structures:
        for node in structure.walk():
            if names in (node.name, ", ".join(output for output in node.outputs if output)):
                return node.label
    return f"'{names}'"


def _without_rule(operator: str, structure: Structure) -> list[Objection]:
    """The nodes of an operator OpenVINO has no rule for; its own helper operators stand for sequences."""
    if operator.startswith("util::"):
        nodes = [node for node in structure.walk() if "Sequence" in node.op_type]
        return [Objection(node.label, "OpenVINO can't resolve this use of sequences") for node in nodes]

    def is_it(node: Node) -> bool:
        return operator in (node.operator, f"{node.domain}.{node.op_type}")

    return [Objection(node.label, NO_RULE) for node in structure.walk() if is_it(node)]


def plain(text: str) -> str:
    """A message of OpenVINO without its C++ places, conditions and headings: the last sentences a user can read."""
    text = re.sub(r"Check '.*?' failed at \S+?:\d+:?", "", text, flags=re.DOTALL)
    text = re.sub(r"(Exception from|failed at) \S+?:\d+:?", "", text)
    text = re.sub(r"While validating ONNX node '<.*?>':?", "", text, flags=re.DOTALL)
    text = re.sub(r"FrontEnd API failed with \w+:?", "", text)
    text = re.sub(r"\S*[/\\]\S+\.(cpp|hpp|c|h)\S*", "", text)
    return " ".join(text.split()) or "it gives no reason"


def check_saved(folder: Path, signature: Signature) -> None:
    """Read the saved model again and compare its signature with the one wanted.

    Raises:
        BuildError: a name doesn't resolve or resolves to another's tensor, or dtype, rank or a fixed size differs.
    """
    import openvino

    try:
        model = openvino.Core().read_model(folder / XML, folder / BIN)
    except RuntimeError as error:
        raise BuildError(f"OpenVINO can't read what it saved: {plain(str(error))}") from error
    wrong = []
    for side, specs, ports in (
        ("input", signature.inputs, model.inputs),
        ("output", signature.outputs, model.outputs),
    ):
        names = sorted(sorted(port.get_names()) for port in ports)
        if names != sorted([spec.name] for spec in specs):
            wrong.append(f"its {side}s are {names}, the model's are {[spec.name for spec in specs]}")
            continue
        for spec in specs:
            port = next(port for port in ports if port.get_names() == {spec.name})
            problem = _difference(spec, port)
            if problem:
                wrong.append(f"{side} '{spec.name}' {problem}")
    if wrong:
        raise BuildError(
            "what OpenVINO made has another signature than the model:" + "".join(f"\n  {line}" for line in wrong),
            "correct the shapes the model declares (onnx.shape_inference shows them), or pin others with `shapes`",
        )


def _difference(spec: TensorSpec, port: openvino.Output) -> str:
    found = port.get_element_type().get_type_name()
    if found != element_type(spec.dtype):
        return f"is {spec.dtype} in the model and {found} in what OpenVINO made"
    shape = port.get_partial_shape()
    if spec.dims is None or shape.rank.is_dynamic:
        return ""
    dims: tuple[Dim, ...] = tuple(dim.get_length() if dim.is_static else None for dim in shape)
    pairs = list(zip(spec.dims, dims, strict=False))
    fixed = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    if len(dims) == len(spec.dims) and fixed:
        return ""
    return f"is {format_dims(spec.dims)} in the model and {format_dims(dims)} in what OpenVINO made"
