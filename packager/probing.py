"""What a model does at other sizes than those of its goldens: marks that tracing leaves, named before any target.

An exporter that traces one run may bake that run's sizes into constants, while the file goes on declaring them open.
Such a model answers its goldens, and fails or answers wrongly at a partner's. So the model is run at batch 1, 2 and 3
and at a second length of every other open dimension, with golden inputs cut or repeated to size, and what it gives is
held against what it declares.

What is found is a hazard, a sentence that names node, constant and remedy; an output that contradicts a fixed size or
a rank that the file declares is an error, since targets are built from what it declares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from packager.errors import ModelError
from packager.golden_check import symbol
from packager.golden_shapes import BATCHES, dim_key, open_dims
from packager.goldens import Array
from packager.graph import Graph, Node, format_dims
from packager.hazards import Hazard, constant_tensors
from packager.model import Model

Feeds = Mapping[str, Array]
Run = Callable[[Feeds], Mapping[str, Array]]

MAX_ELEMENTS = 1 << 24
"""Larger inputs (64 MiB of float32) are not repeated to another length: that could take the machine's memory."""

MIXED = 1e-2
"""A row of floats that is further from itself in a batch, relative to its largest value, is mixed with others: sums in
another order are a thousand times nearer."""

MAX_NAMED = 3
FAILED_NODE = re.compile(r"while running (\S+) node\. Name:'([^']*)'")
"""How ONNX Runtime names the node at which a run ended (``OpKernel`` errors of its sequential executor)."""

BAKING = {"Reshape": 0, "Tile": 1, "Expand": 1, "ConstantOfShape": 0}
"""Operators that take sizes from a tensor, and the largest leading entry that bakes nothing: 0 and -1 of a Reshape's
shape are taken from its input, a Tile by 1 and an Expand to 1 leave the axis as it is."""


@dataclass(frozen=True)
class Observed:
    """One run: the size of every open dimension by key, what it gave, or why it failed, and what it was given."""

    sizes: Mapping[str, int]
    outputs: Mapping[str, Array] | None
    failure: str = ""
    feeds: Feeds = field(default_factory=dict)


def probe(
    model: Model, run: Run, cases: Sequence[tuple[Feeds, Mapping[str, Array]]], pinned: frozenset[str] = frozenset()
) -> list[Hazard]:
    """Run the model at other sizes and say what doesn't fit.

    Args:
        model: the opened model.
        run: named inputs to named outputs; raises :class:`ModelError` where the model doesn't run.
        cases: golden inputs with what the model answered.
        pinned: keys of open dimensions (see :func:`packager.golden_shapes.dim_key`) that stay as they are.

    Returns:
        Hazards in a fixed order, one per dimension and output.
    """
    seen = [Observed(sizes_of(model, feeds), outputs) for feeds, outputs in cases]
    found: list[Hazard] = []
    roles = {key: dim.role for key, dim in open_dims(model.signature).items() if key not in pinned}
    batch = frozenset(key for key, role in roles.items() if role == "batch")
    feeds = min((feeds for feeds, _ in cases), key=lambda each: sum(array.size for array in each.values()))
    base = sizes_of(model, feeds)
    if batch:
        known = {_first(observed.sizes, batch) for observed in seen}
        probes = [_observe(model, run, feeds, dict.fromkeys(batch, size)) for size in BATCHES if size not in known]
        found += _baked(model, batch, _first(base, batch), probes)
        seen += probes
        found += _lost_batches(model, batch, seen)
        found += _mixed_rows(model, run, cases, batch)
    for key, role in roles.items():
        if role in ("length", "height", "width") and len({observed.sizes.get(key) for observed in seen}) == 1:
            probes = list(_other_lengths(model, run, feeds, key, base.get(key, 0)))
            if all(observed.outputs is None for observed in probes):
                found += _baked(model, frozenset({key}), base.get(key, 0), probes)
            seen += probes
    return [*found, *_contradictions(model, seen)]


def sizes_of(model: Model, feeds: Feeds) -> dict[str, int]:
    """The size that every open dimension has in these inputs, by key."""
    return {
        key: int(size)
        for spec in model.signature.inputs
        if spec.name in feeds
        for axis, (dim, size) in enumerate(zip(spec.dims or (), feeds[spec.name].shape, strict=False))
        if (key := dim_key(spec, axis, dim)) is not None
    }


def resized(model: Model, feeds: Feeds, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The inputs with the dimensions named in ``sizes`` cut, or repeated, to those sizes; the others as they are."""
    made = {}
    for spec in model.signature.inputs:
        array = feeds[spec.name]
        for axis, dim in enumerate(spec.dims or ()):
            wanted = sizes.get(dim_key(spec, axis, dim) or "", -1)
            if wanted >= 0 and array.shape[axis]:
                array = np.take(array, np.arange(wanted) % array.shape[axis], axis=axis)
        made[spec.name] = array
    return made


def _first(sizes: Mapping[str, int], keys: frozenset[str]) -> int:
    return next((size for key, size in sizes.items() if key in keys), 0)


def _observe(model: Model, run: Run, feeds: Feeds, sizes: Mapping[str, int]) -> Observed:
    given = resized(model, feeds, sizes)
    try:
        return Observed(sizes_of(model, given), run(given), feeds=given)
    except ModelError as error:
        return Observed(sizes_of(model, given), None, error.message, given)


def _other_lengths(model: Model, run: Run, feeds: Feeds, key: str, size: int) -> Iterator[Observed]:
    """The model at twice the length, and where that fails (a table of positions may end there) at half of it."""
    for other in (size * 2, size // 2):
        if not 0 < other != size or sum(array.size for array in feeds.values()) * 2 > MAX_ELEMENTS:
            continue
        observed = _observe(model, run, feeds, {key: other})
        yield observed
        if observed.outputs is not None:
            return


def _baked(model: Model, keys: frozenset[str], size: int, probes: Sequence[Observed]) -> list[Hazard]:
    """A dimension that is declared open although only the size of the goldens runs."""
    failed = [observed for observed in probes if observed.outputs is None]
    if not failed:
        return []
    name = ", ".join(sorted(keys))
    others = " and ".join(str(_first(observed.sizes, keys)) for observed in failed)
    node = failing_node(model, failed[0].failure)
    culprits = baked_sizes(model, node)
    if culprits:
        where = "; ".join(culprits)
    elif node is not None:
        where = f"node {node.label} fails: {_reason(failed[0].failure)}"
    else:
        where = _reason(failed[0].failure)
    return [
        Hazard(
            "baked-size",
            f"'{name}' is declared open and runs at {size}, not at {others}: {where}",
            f"export the model with that dimension dynamic, or pin it: shapes = {{ {_toml_key(min(keys))} = {size} }}",
        )
    ]


def failing_node(model: Model, failure: str) -> Node | None:
    """The node of the main graph that ONNX Runtime's message names; of several alike unnamed ones, the first."""
    told = FAILED_NODE.search(failure)
    if told is None:
        return None
    operator, name = told.groups()
    alike = [node for node in model.structure.graph.nodes if node.op_type == operator]
    return next((node for node in alike if name and node.name == name), alike[0] if alike else None)


def baked_sizes(model: Model, node: Node | None) -> list[str]:
    """Nodes at or before ``node`` whose leading size is a constant, the nearest first; all of them for ``None``."""
    graph = model.structure.graph
    constants = constant_tensors(graph)
    wanted = None if node is None else _ancestors(graph, node)
    found = []
    for each in graph.nodes:
        sizes = constants.get(each.inputs[-1]) if each.op_type in BAKING and each.inputs else None
        numbers = None if sizes is None else sizes.numbers()
        if numbers and numbers[0] > BAKING[each.op_type] and (wanted is None or id(each) in wanted):
            listed = ", ".join(str(int(number)) for number in numbers)
            found.append(f"node {each.label} takes the fixed sizes [{listed}] from '{each.inputs[-1]}'")
    return found[::-1][:MAX_NAMED]


def _ancestors(graph: Graph, node: Node) -> set[int]:
    """Ids of the node and of every node that its inputs come from."""
    makers = {name: each for each in graph.nodes for name in each.outputs}
    found, waiting = {id(node)}, [node]
    while waiting:
        for name in waiting.pop().inputs:
            maker = makers.get(name)
            if maker is not None and id(maker) not in found:
                found.add(id(maker))
                waiting.append(maker)
    return found


def _reason(failure: str) -> str:
    told = failure.rpartition("Status Message: ")[2]
    return " ".join(told.split())[:200]


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lost_batches(model: Model, batch: frozenset[str], seen: Sequence[Observed]) -> list[Hazard]:
    """Outputs that are declared with an open first dimension, and have no axis that follows the batch."""
    whole = [(_first(observed.sizes, batch), observed.outputs) for observed in seen if observed.outputs is not None]
    if len({size for size, _ in whole}) < 2:
        return []
    found = []
    for spec in model.signature.outputs:
        shapes = [(size, outputs[spec.name].shape) for size, outputs in whole if spec.name in outputs]
        if not spec.dims or isinstance(spec.dims[0], int) or not shapes or not all(shape for _, shape in shapes):
            continue
        follows = any(all(shape[axis] == size for size, shape in shapes) for axis in range(len(spec.dims)))
        rows = {shape[0] for _, shape in shapes}
        if not follows and len(rows) == 1:
            message = f"output '{spec.name}' has {rows.pop()} rows whatever the batch, and declares"
            hint = "a node before it takes the batch for another axis; declare the first dimension as it is"
            found.append(
                Hazard("batch-lost", f"{message} {format_dims(spec.dims)}: node {_maker(model, spec.name)}", hint)
            )
    return found


def _mixed_rows(
    model: Model, run: Run, cases: Sequence[tuple[Feeds, Mapping[str, Array]]], batch: frozenset[str]
) -> list[Hazard]:
    """Outputs of the first row that are others where the row is alone: a softmax, a mean or a normalisation that takes
    the batch for another axis. Models that quantise by the range of a whole tensor do this a little, and are let be."""
    whole = None if model.is_quantized else _a_batch(model, run, cases, batch)
    if whole is None or whole.outputs is None:
        return []
    alone = _observe(model, run, whole.feeds, dict.fromkeys(batch, 1)).outputs
    found = []
    for spec in model.signature.outputs:
        axis = next((axis for axis, dim in enumerate(spec.dims or ()) if symbol(dim) in batch), None)
        if axis is None or alone is None or spec.name not in alone or alone[spec.name].dtype.kind != "f":
            continue
        one = np.asarray(alone[spec.name], np.float64)
        row = np.asarray(np.take(whole.outputs[spec.name], [0], axis=axis), np.float64)
        if one.shape != row.shape or not np.isfinite(row).all():
            continue
        apart, largest = float(np.max(np.abs(one - row), initial=0)), float(np.max(np.abs(row), initial=0))
        if apart > MIXED * largest:
            found.append(
                Hazard(
                    "mixed-rows",
                    f"output '{spec.name}' of a row changes with the other rows of its batch, by {apart:.2g} where it "
                    f"is at most {largest:.2g}: a node before {_maker(model, spec.name)} works across the batch",
                    "check the axes of its softmaxes, means and normalisations; if that is meant, pin the batch",
                )
            )
    return found


def _a_batch(
    model: Model, run: Run, cases: Sequence[tuple[Feeds, Mapping[str, Array]]], batch: frozenset[str]
) -> Observed | None:
    """A case of more than one row, or two cases of one row put together; ``None`` where neither is to be had."""
    for feeds, outputs in cases:
        if _first(sizes_of(model, feeds), batch) > 1:
            return Observed(sizes_of(model, feeds), outputs, feeds=feeds)
    for one, other in pairwise(feeds for feeds, _ in cases):
        joined: dict[str, Array] = {}
        for spec in model.signature.inputs:
            keys = [dim_key(spec, axis, dim) in batch for axis, dim in enumerate(spec.dims or ())]
            pair = (one[spec.name], other[spec.name])
            if pair[0].shape != pair[1].shape:
                break
            if True in keys:
                joined[spec.name] = np.concatenate(pair, axis=keys.index(True))
            elif np.array_equal(*pair):
                joined[spec.name] = pair[0]
        if len(joined) == len(model.signature.inputs):
            return _observe(model, run, joined, {})
    return None


def check_declared(model: Model, outputs: Feeds) -> None:
    """Hold outputs against what the model declares.

    Raises:
        ModelError: one contradicts its declared rank or a fixed size of it.
    """
    for spec in model.signature.outputs:
        if spec.kind != "tensor" or spec.dims is None or spec.name not in outputs:
            continue
        shape = outputs[spec.name].shape
        fixed = [isinstance(dim, int) and 0 <= dim != size for dim, size in zip(spec.dims, shape, strict=False)]
        if len(shape) != len(spec.dims) or any(fixed):
            raise ModelError(
                f"{model.path}: output '{spec.name}' is declared {format_dims(spec.dims)}, but the model gives "
                f"{list(shape)}: node {_maker(model, spec.name)}",
                "targets are built from what is declared: correct it (onnx.shape_inference tells), or leave it open",
            )


def _contradictions(model: Model, seen: Sequence[Observed]) -> list[Hazard]:
    """Outputs that give a symbol another size than the inputs do."""
    found: dict[str, Hazard] = {}
    for observed in seen:
        for spec in model.signature.outputs:
            array = (observed.outputs or {}).get(spec.name)
            for axis, dim in enumerate(spec.dims or () if array is not None else ()):
                name = symbol(dim)
                size = observed.sizes.get(name) if name else None
                if array is None or size is None or axis >= array.ndim or array.shape[axis] == size:
                    continue
                message = (
                    f"output '{spec.name}' declares '{name}' at axis {axis}, which is {array.shape[axis]} where the "
                    f"inputs have {size}: node {_maker(model, spec.name)}"
                )
                found.setdefault(spec.name, Hazard("other-size", message, "give that axis a name of its own"))
    return list(found.values())


def _maker(model: Model, name: str) -> str:
    nodes = model.structure.graph.nodes
    return next((node.label for node in nodes if name in node.outputs), f"that makes '{name}'")
