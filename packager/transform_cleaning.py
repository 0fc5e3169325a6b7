"""Cleaning: what a deployed model doesn't need, or shouldn't carry, goes; what it computes stays bit for bit.

Exporters leave dead nodes, copies of the same weights, inference-time Dropout, stack traces with the paths of
somebody's machine, and initializers that callers could override. Classifiers from scikit-learn end in a ZipMap, a
sequence of maps that most runtimes can't return.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from packager.errors import Refused
from packager.graph import Graph, Node, Structure
from packager.model import Signature, TensorSpec
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_graphs import all_names, constant, drop_dead, label, remove, replace_value
from packager.transform_inference import infer

if TYPE_CHECKING:
    import onnx_ir as ir

PATH = re.compile(r"(?<![\w:/])/(?:home|root|Users|tmp|mnt|opt|usr|var|data|workspace)/|\b[A-Za-z]:\\|\\\\\w")
"""What looks like a path on somebody's machine."""

MANY_CLASSES = 500
"""Class lists from this length on are not kept whole in :class:`packager.graph.Attribute`."""

LABELS = ("classlabels_strings", "classlabels_int64s")


@dataclass(frozen=True)
class Clean:
    """Remove dead nodes and initializers, duplicate initializers, doc strings, node metadata, paths, idle nodes.

    Before: no node is in training mode. After: names, order, types and dims of inputs and outputs are the same, and
    so is every value computed. Initializers that were also inputs can no longer be overridden.
    """

    name: Literal["clean"] = "clean"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Cleaning")

    def signature(self, before: Signature) -> Signature:
        """Unchanged: inputs with a default were never part of it."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Clean; notes say what went.

        Raises:
            Refused: a node is in training mode.
        """
        notes: list[str] = []
        fixed = _fix_overridable(model)
        if fixed:
            notes.append(f"initializers are no longer inputs: {', '.join(fixed)}")
        _refuse_training(model)
        idle = sum(_remove_idle(model, graph) for graph in list(model.graphs()))
        nodes, initializers = drop_dead(model)
        merged = sum(_merge(graph) for graph in model.graphs())
        texts = _drop_texts(model)
        for count, what in (
            (idle, "Identity and Dropout nodes"),
            (nodes, "unused nodes"),
            (initializers, "unused initializers"),
            (merged, "duplicate initializers"),
            (texts, "doc strings and metadata entries"),
        ):
            if count:
                notes.append(f"{count} {what} removed")
        return Outcome(model, tuple(notes))


def _fix_overridable(model: ir.Model) -> list[str]:
    names: list[str] = []
    for value in list(model.graph.inputs):
        if value.is_initializer() and value.const_value is not None:
            model.graph.inputs.remove(value)
            names.append(value.name or "")
    return names


def _refuse_training(model: ir.Model) -> None:
    """Raise for Dropout and BatchNormalization that train; a Dropout whose mode is an input can still be run."""
    bad: list[str] = []
    functions = [node for function in model.functions.values() for node in function.all_nodes()]
    for node in (*model.graph.all_nodes(), *functions):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization":
            mode = node.attributes.get("training_mode")
            training = mode is not None and not mode.is_ref() and mode.value == 1
        else:
            training = node.op_type == "Dropout" and _training(node) is True
        if training:
            bad.append(label(node))
    if bad:
        raise Refused(
            f"in training mode: {', '.join(bad[:8])}{', ...' if len(bad) > 8 else ''}",
            "export the model in evaluation mode (model.eval() in PyTorch)",
        )


def _training(node: ir.Node) -> bool | None:
    """Whether a Dropout trains; ``None`` where that is decided at run time."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    tensor = constant(node.inputs[2])
    return None if tensor is None else bool(tensor.numpy().reshape(-1)[0])


def _remove_idle(model: ir.Model, graph: ir.Graph) -> int:
    """Take out Identity nodes and inference-time Dropout; graph inputs and outputs keep their names."""
    taken, count = all_names(model), 0
    for node in list(graph):
        if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
            continue
        if node.op_type == "Dropout":
            masked = len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output())
            if _training(node) is not False or masked:
                continue
        elif node.op_type != "Identity":
            continue
        source, made = node.inputs[0], node.outputs[0]
        producer = source.producer()
        movable = producer is not None and producer.graph is graph and not source.is_graph_output()
        if made.is_graph_output() and not movable:
            _to_identity(node)
            continue
        replace_value(made, source, graph, taken)
        remove(node)
        count += 1
    return count


def _to_identity(node: ir.Node) -> None:
    """A Dropout that must stay, to give an output its name, becomes an Identity."""
    if node.op_type == "Dropout":
        node.op_type = "Identity"
        node.attributes.clear()
        node.resize_inputs(1)
        node.resize_outputs(1)


class _Hash:
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self.state = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.state.update(data)
        return len(data)


def _merge(graph: ir.Graph) -> int:
    """Let initializers of equal dtype, shape and bytes share one; only those alike in size are read.

    8-bit integers stay apart: where ONNX Runtime makes signed weights unsigned (``session.x64quantprecision``), it
    replaces the zero point of each use, and fails at the second of a shared one.
    """
    import onnx_ir as ir

    quantised = (ir.DataType.INT8, ir.DataType.UINT8)
    alike: dict[object, list[ir.Value]] = defaultdict(list)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype in quantised:
            continue
        if not value.is_graph_output() and not value.is_graph_input():
            alike[tensor.dtype, tuple(tensor.shape)].append(value)
    count = 0
    for values in alike.values():
        seen: dict[str, ir.Value] = {}
        for value in values if len(values) > 1 else ():
            kept = seen.setdefault(_digest(value.const_value), value)
            if kept is not value:
                value.replace_all_uses_with(kept)
                del graph.initializers[value.name]
                count += 1
    return count


def _digest(tensor: Any) -> str:  # noqa: ANN401 - onnx-ir's tensors are a protocol of its own
    import onnx_ir as ir

    sink = _Hash()
    if tensor.dtype == ir.DataType.STRING:
        for text in tensor.string_data():
            sink.write(len(text).to_bytes(8, "little") + text)
    else:
        tensor.tofile(sink)
    return sink.state.hexdigest()


def _drop_texts(model: ir.Model) -> int:
    """Empty doc strings and the metadata of nodes, values, graphs; of the model's own, only entries with a path."""
    count = 0
    functions = list(model.functions.values())
    holders: list[Any] = [model, *functions]
    for graph in model.graphs():
        holders += [graph, *graph.inputs, *graph.initializers.values()]
        holders += [value.const_value for value in graph.initializers.values() if value.const_value is not None]
    for node in (*model.graph.all_nodes(), *(node for function in functions for node in function.all_nodes())):
        holders += [node, *node.outputs]
    for holder in holders:
        if getattr(holder, "doc_string", None):
            try:
                holder.doc_string = None
            except AttributeError:
                continue  # a constant still in the file's own message; saving writes its bytes only
            count += 1
        if holder is not model:
            count += len(holder.metadata_props)
            holder.metadata_props.clear()
    for key in [key for key, text in model.metadata_props.items() if PATH.search(text)]:
        del model.metadata_props[key]
        count += 1
    return count


@dataclass(frozen=True)
class StripZipMap:
    """Expose the probabilities a ZipMap at an output turns into a sequence of maps.

    Before: each of ``outputs`` (name and number of classes, 0 for unknown) is made by an ai.onnx.ml ZipMap. After:
    it has the same name and is a float32 tensor [N, classes], the classes in the order the notes list them.
    """

    outputs: tuple[tuple[str, int], ...]
    name: Literal["strip-zipmap"] = "strip-zipmap"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Stripping ZipMap", tuple((output, f"{count or '?'} classes") for output, count in self.outputs))

    def signature(self, before: Signature) -> Signature:
        """The named outputs become float32 tensors [N, classes].

        Raises:
            Refused: there is no such output.
        """
        counts = dict(self.outputs)
        missing = set(counts) - {spec.name for spec in before.outputs}
        if missing:
            raise Refused(f"no output is named '{min(missing)}'")
        return replace(
            before,
            outputs=tuple(
                TensorSpec(spec.name, "float32", (None, counts[spec.name] or None)) if spec.name in counts else spec
                for spec in before.outputs
            ),
        )

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Strip; a note per output lists its classes.

        Raises:
            Refused: an output isn't a ZipMap's, or its map is used inside the model too.
        """
        import onnx_ir as ir

        notes: list[str] = []
        found, taken = infer(model), all_names(model)
        for name, count in self.outputs:
            output = next((value for value in model.graph.outputs if value.name == name), None)
            node = None if output is None else output.producer()
            if output is None or node is None or (node.domain, node.op_type) != ("ai.onnx.ml", "ZipMap"):
                raise Refused(f"output '{name}' isn't made by a ZipMap")
            source = node.inputs[0]
            known = None if source is None else found.get(source)
            if output.uses() or source is None or (known and known.dims is not None and len(known.dims) != 2):
                raise Refused(f"{label(node)} can't be stripped: its map is used inside the model, or is of one row")
            classes = next((list(node.attributes[key].value) for key in LABELS if key in node.attributes), [])
            if count and count != len(classes):
                raise Refused(f"{label(node)} has {len(classes)} classes, not {count}")
            shape = ir.Shape([None, count or None])
            output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), shape
            replace_value(output, source, model.graph, taken)
            remove(node)
            listed = ", ".join(str(item) for item in classes)
            notes.append(f"output '{name}' is a float32 tensor [N, {len(classes)}], classes in this order: {listed}")
        return Outcome(model, tuple(notes))


def planned_strip(structure: Structure) -> StripZipMap | None:
    """The pass that strips every ZipMap at an output of the main graph; ``None`` where there is none."""
    found = tuple((name, _class_count(node)) for node, name in _zipmaps(structure.graph))
    return StripZipMap(found) if found else None


def _zipmaps(graph: Graph) -> list[tuple[Node, str]]:
    outputs = {value.name for value in graph.outputs}
    return [
        (node, node.outputs[0])
        for node in graph.nodes
        if node.operator == "ai.onnx.ml.ZipMap" and node.outputs[0] in outputs
    ]


def _class_count(node: Node) -> int:
    """How many classes a ZipMap has; 0 where the list is too long to be kept whole."""
    for key in LABELS:
        attribute = node.attribute(key)
        if attribute is not None and isinstance(attribute.value, tuple) and len(attribute.value) < MANY_CLASSES:
            return len(attribute.value)
    return 0
