"""Which nodes QNN can't compile, where it refuses a whole model and names none: each is cut out and compiled alone.

QNN builds a graph node by node and then finalises it as a whole. What fails there fails without a name ("Memory
allocation related error"), and is often one node that fails by itself too. A node is cut out with its scales, from the
quantised tensors it reads to those it makes. Nodes alike in operator and shapes are tried once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

SECONDS = 120.0
"""No node is begun after that long; what was found until then is told."""
PAIR = ("QuantizeLinear", "DequantizeLinear")


def culprits(model: Path, compiles: Callable[[bytes], bool], seconds: float = SECONDS) -> list[str]:
    """Labels of nodes that can't be compiled alone, in the model's order.

    Args:
        model: quantised throughout, in one file.
        compiles: whether QNN takes a model, given as bytes.
        seconds: how long to look.
    """
    begun, known, found = time.monotonic(), dict[str, bool](), list[str]()
    for node, likeness, part in _parts(model):
        if likeness not in known and time.monotonic() - begun < seconds:
            known[likeness] = compiles(part())
        if not known.get(likeness, True):
            found.append(f"{node.op_type} '{node.name}'")
    return found


def _parts(model: Path) -> Iterator[tuple[onnx.NodeProto, str, Callable[[], bytes]]]:
    """Every node that computes, what it is like, and what cuts it out."""
    import onnx

    whole = onnx.shape_inference.infer_shapes(onnx.load(str(model)))
    cutter = onnx.utils.Extractor(whole)
    makers = {name: node for node in whole.graph.node for name in node.output}
    constants = {tensor.name for tensor in whole.graph.initializer}
    types = {value.name: value.type for value in (*whole.graph.value_info, *whole.graph.input, *whole.graph.output)}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in whole.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in whole.graph.node:
        if node.op_type in PAIR:
            continue
        inputs = [_source(name, makers, constants) for name in node.input if name]
        given = list(dict.fromkeys(name for name in inputs if name and name not in constants))
        made = [_result(name, readers) for name in node.output if name]
        if given and all(name in types for name in (*given, *made)):
            alike = [types[name].SerializeToString() for name in (*node.input, *node.output) if name in types]
            likeness = repr((node.op_type, alike, [each.SerializeToString() for each in node.attribute]))
            yield node, likeness, partial(_cut, cutter, given, made)


def _cut(cutter: onnx.utils.Extractor, given: list[str], made: list[str]) -> bytes:
    data: bytes = cutter.extract_model(given, made).SerializeToString()
    return data


def _source(name: str, makers: dict[str, onnx.NodeProto], constants: set[str]) -> str:
    """The quantised tensor that a node's input is read from; empty for a constant, which stays with the node."""
    node = makers.get(name)
    if name in constants or (node is not None and node.op_type == PAIR[1] and node.input[0] in constants):
        return ""
    return node.input[0] if node is not None and node.op_type == PAIR[1] else name


def _result(name: str, readers: dict[str, list[onnx.NodeProto]]) -> str:
    """The quantised tensor that a node's output is written to."""
    found = [node for node in readers.get(name, ()) if node.op_type == PAIR[0]]
    return found[0].output[0] if found else name
