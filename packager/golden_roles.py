"""What each input of each operator asks of its values, as the ONNX and ai.onnx.ml operator pages say it.

The tables are data; :func:`roles` turns one occurrence of an input at one operator into its :class:`Use`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packager.graph import Node, Tensor

Size = int | str | None
"""A size that bounds values: known, the key of an open dimension (known once a case's sizes are), or unknown."""

Kind = Literal[
    "index",  # selects along an axis of one of `sizes`: [0, size)
    "scatter",  # the same, and no place may be written twice; `axis` counts places, None where the last axis is a tuple
    "range",  # within [low, high]
    "length",  # a number of elements: [1, size]
    "reshape",  # a whole target shape: [-1, 1, 1, ...]
    "axes",  # different axes: 0, 1, ...
    "parts",  # sizes of parts that add up to the size
    "mask",  # 0 or 1
    "choice",  # one of `values`; `closed` where nothing else is allowed
    "scaled",  # features about `values` (offsets) with spread 1 / `scales`
    "waveform",  # samples of a signal with one channel
    "thresholds",  # feature number `values[i]` is compared with `scales[i]`
    "arithmetic",  # `amount` says how large integers may be
]


@dataclass(frozen=True)
class Use:
    """One thing the graph does with an input's values. Which fields count depends on ``kind`` (see :data:`Kind`)."""

    kind: Kind
    sizes: tuple[Size, ...] = ()
    axis: int | None = None
    low: float = 0
    high: float = 0
    values: tuple[float | str, ...] = ()
    scales: tuple[float, ...] = ()
    closed: bool = False
    amount: Literal["any", "product", "small", "feature"] = "any"


@dataclass(frozen=True)
class Trace:
    """An input's values on their way: a constant may have been added, and they may have been cast to float.

    ``whole`` says that the tensor is still the input itself and not a part or a longer one.
    """

    input: str
    offset: int = 0
    cast: bool = False
    whole: bool = True


PASSED: dict[str, tuple[int, ...]] = {
    "Identity": (0,), "Cast": (0,), "Reshape": (0,), "Unsqueeze": (0,), "Squeeze": (0,), "Flatten": (0,),
    "Transpose": (0,), "Slice": (0,), "Split": (0,), "Expand": (0,), "Tile": (0,), "Gather": (0,),
    "GatherElements": (0,), "GatherND": (0,), "Pad": (0, 2), "Dropout": (0,), "Where": (1, 2), "Concat": (),
    "Max": (), "Min": (), "Clip": (0,), "Compress": (0,), "TopK": (0,), "DepthToSpace": (0,), "SpaceToDepth": (0,),
    "ReverseSequence": (0,), "ReduceMax": (0,), "ReduceMin": (0,), "ScatterElements": (0, 2), "ScatterND": (0, 2),
    "Trilu": (0,), "MaxPool": (0,), "CastLike": (0,), "Unique": (0,),
}  # fmt: skip
"""Operators that hand values on as they are, with the inputs they take them from (none listed: all of them)."""

_PARTIAL = frozenset({"Slice", "Split", "Gather", "GatherElements", "GatherND", "Concat", "Tile", "Expand", "Pad"})

REDUCED = frozenset(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)

RANGES: dict[tuple[str, int], tuple[float, float]] = {
    ("ConstantOfShape", 0): (1, 4), ("Expand", 1): (1, 1), ("Tile", 1): (1, 2), ("Range", 0): (0, 0),
    ("Range", 1): (1, 8), ("Range", 2): (1, 1), ("Pad", 1): (0, 1), ("Pad", 3): (0, 0), ("Slice", 1): (0, 0),
    ("Slice", 2): (1, 4), ("Slice", 4): (1, 1), ("OneHot", 1): (4, 8), ("Loop", 0): (1, 4),
    ("Loop", 1): (1, 1), ("CumSum", 1): (0, 0), ("CumProd", 1): (0, 0), ("DFT", 2): (1, 1), ("Trilu", 1): (-1, 1),
    ("BitShift", 1): (0, 7), ("Resize", 2): (1, 1), ("Upsample", 1): (1, 1), ("Dropout", 1): (0, 0.5),
    ("Dropout", 2): (0, 0), ("Clip", 1): (-3, -2), ("Clip", 2): (2, 3), ("NonMaxSuppression", 2): (1, 8),
    ("NonMaxSuppression", 3): (0.3, 0.7), ("NonMaxSuppression", 4): (0.1, 0.5), ("Log", 0): (0.05, 1),
    ("Sqrt", 0): (0.05, 1), ("Acosh", 0): (1.1, 3), ("Asin", 0): (-0.9, 0.9), ("Acos", 0): (-0.9, 0.9),
    ("Atanh", 0): (-0.9, 0.9), ("Reciprocal", 0): (0.5, 2), ("Div", 1): (0.5, 2), ("Mod", 1): (0.5, 2),
    ("Pow", 0): (0.05, 2), ("Pow", 1): (0, 2), ("BatchNormalization", 4): (0.5, 1.5), ("Bernoulli", 0): (0, 1),
    ("QuantizeLinear", 1): (0.01, 0.1), ("DequantizeLinear", 1): (0.01, 0.1), ("Multinomial", 0): (-2, 0),
    ("DFT", 1): (8, 16), ("HannWindow", 0): (4, 16), ("HammingWindow", 0): (4, 16), ("BlackmanWindow", 0): (4, 16),
}  # fmt: skip
"""Values that an operator's input may take at all, or that keep it in its domain."""

DIVISORS = {("Div", 1): (1, 7), ("Mod", 1): (1, 7), ("Pow", 0): (-3, 3), ("Pow", 1): (0, 3)}
"""The same for integers, where they differ."""

TABLES: dict[tuple[str, str, int], tuple[int, int]] = {
    ("", "RotaryEmbedding", 3): (1, 0), ("com.microsoft", "RotaryEmbedding", 1): (2, 0),
    ("com.microsoft", "EmbedLayerNormalization", 0): (2, 0), ("com.microsoft", "EmbedLayerNormalization", 1): (4, 0),
    ("com.microsoft", "EmbedLayerNormalization", 8): (3, 0), ("com.microsoft", "QEmbedLayerNormalization", 0): (2, 0),
    ("com.microsoft", "QEmbedLayerNormalization", 1): (4, 0), ("ai.onnx.ml", "ArrayFeatureExtractor", 1): (0, -1),
}  # fmt: skip
"""Indices into another input of the same node: which input, and along which axis of it."""

MASKS = {("com.microsoft", "EmbedLayerNormalization", 7), ("com.microsoft", "QEmbedLayerNormalization", 7),
         ("com.microsoft", "Attention", 3), ("com.microsoft", "MultiHeadAttention", 4)}  # fmt: skip

KNOWN_VALUES = ("keys_int64s", "keys_strings", "keys_floats", "cats_int64s", "cats_strings", "classes_strings",
                "pool_int64s", "pool_strings")  # fmt: skip
"""Attributes of ai.onnx.ml operators that list the values they know."""

_SELECTING = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "Scatter", "ScatterND", "OneHot"})
_LOSSES = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
_AXES = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1}
_RECURRENT = {"RNN": 4, "GRU": 4, "LSTM": 4, "DynamicQuantizeLSTM": 4, "ReverseSequence": 1}
_ELEMENTWISE = frozenset({"Add", "Sub", "Div", "Mod", "Neg", "Abs", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
                          "BitwiseNot"})  # fmt: skip
_COMPARING = frozenset({"Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Sign"})


@dataclass(frozen=True)
class View:
    """A node with the constants and shapes known where it stands, and the names of the model's outputs."""

    node: Node
    constants: Mapping[str, Tensor]
    dims: Mapping[str, tuple[Size, ...]]
    last: frozenset[str] = frozenset()

    def numbers(self, position: int) -> tuple[float, ...] | None:
        """The values of a small constant input."""
        tensor = self.constants.get(self.name(position))
        return None if tensor is None else tensor.numbers()

    def name(self, position: int) -> str:
        """The input's name; empty where it isn't there."""
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def size(self, position: int, axis: int) -> Size:
        """The size of one axis of an input."""
        dims = self.dims.get(self.name(position))
        return dims[axis] if dims is not None and -len(dims) <= axis < len(dims) else None

    def onward(self, position: int, trace: Trace) -> Trace | None:
        """The trace as the node's outputs carry it; ``None`` where its values end here."""
        op = self.node.op_type
        if op in ("Add", "Sub") and len(self.node.inputs) == 2:
            other = self.numbers(1 - position)
            if other is None or len(set(other)) != 1 or other[0] != int(other[0]) or (op == "Sub" and position == 1):
                return None
            return replace(trace, offset=trace.offset + int(other[0]) * (1 if op == "Add" else -1))
        if op not in PASSED or (PASSED[op] and position not in PASSED[op]):
            return None
        to = self.node.integer("to", 0) if op == "Cast" else 0
        return replace(trace, cast=trace.cast or to in (1, 10, 11, 16), whole=trace.whole and op not in _PARTIAL)


def roles(view: View, position: int, trace: Trace) -> Iterator[Use]:
    """The uses of one input of one node. ``trace`` shifts and widens them back to the values of the graph's input."""
    node = view.node
    place = (node.domain, node.op_type, position)
    if place in TABLES:
        table, axis = TABLES[place]
        yield _index(trace, (view.size(table, axis),))
    elif place in MASKS:
        yield Use("mask")
    elif node.domain == "ai.onnx.ml":
        yield from _features(view)
    elif node.op_type in _RECURRENT and position == _RECURRENT[node.op_type]:
        time = node.integer("time_axis", 0) if node.op_type == "ReverseSequence" else node.integer("layout", 0)
        yield Use("length", (view.size(0, time),))
    elif node.op_type == "GatherBlockQuantized" and position == 1:
        yield _index(trace, (view.size(0, node.integer("gather_axis", 0)),))
    elif not node.domain:
        yield from _standard(view, position, trace)
    else:
        yield Use("arithmetic", amount="small")


def _standard(view: View, position: int, trace: Trace) -> Iterator[Use]:
    node, op = view.node, view.node.op_type
    if op in _SELECTING and position == (0 if op == "OneHot" else 1):
        yield _selection(view, trace)
    elif op in _LOSSES and position == 1:
        yield _index(trace, (view.size(0, 1),))
    elif op == "Reshape" and position == 1:
        yield Use("reshape") if trace.whole else Use("range", low=1, high=4)
    elif op == "TopK" and position == 1:
        yield Use("length", (view.size(0, node.integer("axis", -1)),))
    elif op == "Expand" and position == 1:
        dims = view.dims.get(view.name(0))
        free = dims is not None and all(dim == 1 for dim in dims)
        yield Use("range", low=1, high=4 if free else 1)
    elif (op in _AXES or op in REDUCED) and position == _AXES.get(op, 1):
        yield Use("axes")
    elif op == "Split" and position == 1:
        yield Use("parts", (view.size(0, node.integer("axis", 0)),))
    elif op == "Equal":
        known = view.numbers(1 - position)
        if known is not None and len(known) > 0:
            yield Use("choice", values=tuple(dict.fromkeys(value - trace.offset for value in known)))
    elif (op, position) in RANGES:
        whole = (op, position) in DIVISORS and not trace.cast
        low, high = RANGES[op, position]
        yield Use("range", low=low - trace.offset, high=high - trace.offset)
        if whole:
            low, high = DIVISORS[op, position]
            yield Use("range", low=low - trace.offset, high=high - trace.offset, closed=True)
    elif _is_mask(view, position):
        yield Use("mask")
    elif op not in PASSED:
        if _is_waveform(view, position):
            yield Use("waveform")
        yield Use("arithmetic", amount="feature" if trace.cast else _amount(view))


def _amount(view: View) -> Literal["any", "product", "small"]:
    """How large integers may be here without overflowing, or leaving a margin for one product further on."""
    op = view.node.op_type
    if op in _COMPARING or (op in _ELEMENTWISE and view.node.outputs[0] in view.last):
        return "any"
    return "product" if op in _ELEMENTWISE or op == "Mul" else "small"


def _is_mask(view: View, position: int) -> bool:
    """``Cast`` to bool, or ``1 - x``: how exporters apply an attention mask of ones and zeros."""
    if view.node.op_type == "Cast":
        return view.node.integer("to", 0) == 9
    return view.node.op_type == "Sub" and position == 1 and set(view.numbers(0) or ()) == {1}


def _is_waveform(view: View, position: int) -> bool:
    """A short-time Fourier transform, or a one-dimensional convolution over a single channel."""
    if view.node.op_type == "STFT":
        return position == 0
    weights = view.dims.get(view.name(1)) or ()
    single = len(weights) == 3 and weights[1] == 1 and view.node.integer("group", 1) == 1
    return view.node.op_type == "Conv" and position == 0 and single


def _index(trace: Trace, sizes: tuple[Size, ...]) -> Use:
    return Use("index", sizes, low=-trace.offset)


def _selection(view: View, trace: Trace) -> Use:
    """Indices of the gathering and scattering operators: along one axis, or tuples over the leading ones."""
    node, op = view.node, view.node.op_type
    if op == "OneHot":
        depth = view.numbers(1)
        return _index(trace, (int(depth[0]) if depth else None,))
    if op in ("GatherND", "ScatterND"):
        dims = view.dims.get(view.name(0))
        indices = view.dims.get(view.name(1))
        first = node.integer("batch_dims", 0)
        count = indices[-1] if indices else None
        sizes = (dims or (None,))[first : first + count if isinstance(count, int) else None] or (None,)
        return Use("scatter" if op == "ScatterND" else "index", sizes, low=-trace.offset)
    axis = node.integer("axis", 0)
    sizes = (view.size(0, axis),)
    if op in ("ScatterElements", "Scatter"):
        return Use("scatter", sizes, axis=axis, low=-trace.offset)
    return _index(trace, sizes)


def _features(view: View) -> Iterator[Use]:
    """Uses of a feature in the operators of classical models."""
    node = view.node
    for name in KNOWN_VALUES:
        found = node.attribute(name)
        if found is not None and isinstance(found.value, tuple) and found.value and not name.startswith("classes"):
            known = tuple(
                value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value for value in found.value
            )
            closed = node.op_type == "OneHotEncoder" and node.integer("zeros", 1) == 0
            yield Use("choice", values=known, closed=closed)
    offsets, scales = _floats(node, "offset"), _floats(node, "scale")
    if node.op_type == "Scaler" and offsets and scales:
        yield Use("scaled", values=offsets, scales=scales)
    features = _floats(node, "nodes_featureids")
    thresholds = _floats(node, "nodes_values") or _tensor_floats(node, "nodes_splits")
    if features and len(features) == len(thresholds):
        modes = node.attribute("nodes_modes")
        leaves = modes.value if modes is not None and isinstance(modes.value, tuple) else ()
        kept = [
            (feature, threshold)
            for place, (feature, threshold) in enumerate(zip(features, thresholds, strict=True))
            if not (place < len(leaves) and leaves[place] == b"LEAF")
        ]
        if kept:
            yield Use("thresholds", values=tuple(one for one, _ in kept), scales=tuple(two for _, two in kept))
    yield Use("arithmetic", amount="feature")


def _floats(node: Node, name: str) -> tuple[float, ...]:
    found = node.attribute(name)
    value = found.value if found is not None else None
    if isinstance(value, int | float):
        return (float(value),)
    if isinstance(value, tuple):
        return tuple(float(item) for item in value if not isinstance(item, bytes))
    return ()


def _tensor_floats(node: Node, name: str) -> tuple[float, ...]:
    found = node.attribute(name)
    return (found.tensors[0].numbers() or ()) if found is not None and found.tensors else ()
