"""How one node crosses one change of its operator, up or down, exactly.

Operators change at certain operator-set versions (ONNX's ``since_version``). Most changes add dtypes or optional
attributes: a general rule handles those by comparing the two schemas. The others (:data:`UP`, :data:`DOWN`) have a
function each, or a reason why there is no exact way (:data:`REFUSED`). Both lists were made by going through every
change of every operator from opset 8 to 28 in ONNX 1.23's schemas and texts; changes beyond are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from packager.transform_edit import Edit, Impossible, fixed, given, peek, put, set_input, take, used
from packager.transform_graphs import constant

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

REVIEWED: Mapping[str, tuple[int, int]] = {"": (7, 28), "ai.onnx.ml": (1, 5)}
"""Per domain the versions between which every operator's changes have been gone through."""

LOWEST = 11
"""Changes at or below this opset are crossed upwards only: negative axes and indices appeared there."""

Adapter = Callable[["ir.Node", Edit], None]


def _ints(values: Any) -> np.ndarray:  # noqa: ANN401
    import numpy as np

    return np.array(list(values), dtype=np.int64)


def _axes_up(node: ir.Node, edit: Edit) -> None:
    axes = take(node, "axes")
    if axes:
        set_input(node, 1, edit.constant(node, _ints(axes), "axes"))


def _axes_down(node: ir.Node, edit: Edit) -> None:
    axes = fixed(node, 1, "axes")
    if take(node, "noop_with_empty_axes") and (axes is None or not axes.size):
        raise Impossible("it reduces nothing when axes are empty, which older versions can't say")
    node.resize_inputs(1)
    if axes is not None and axes.size:
        put(node, "axes", axes.reshape(-1).tolist())


def _split_up_13(node: ir.Node, edit: Edit) -> None:
    sizes = take(node, "split")
    if sizes:
        set_input(node, 1, edit.constant(node, _ints(sizes), "split"))


def _split_up_18(node: ir.Node, edit: Edit) -> None:
    if given(node, 1) is None:
        put(node, "num_outputs", len(node.outputs))


def _split_down_18(node: ir.Node, edit: Edit) -> None:
    count = take(node, "num_outputs")
    if count is None:
        return
    dims = edit.dims(node.inputs[0])
    size = dims[peek(node, "axis", 0)] if dims is not None else None
    if not isinstance(size, int):
        raise Impossible("it splits a dim of unknown size into equal parts; the last may be smaller")
    if size % count:
        part = -(-size // count)
        parts = [part] * (count - 1) + [size - part * (count - 1)]
        set_input(node, 1, edit.constant(node, _ints(parts), "split"))


def _split_down_13(node: ir.Node, edit: Edit) -> None:
    sizes = fixed(node, 1, "sizes")
    node.resize_inputs(1)
    if sizes is not None:
        put(node, "split", sizes.tolist())


def _softmax_up(node: ir.Node, edit: Edit) -> None:
    """Up to 12 the input is seen as a matrix, cut at ``axis``; from 13 on one axis counts."""
    axis, dims = peek(node, "axis", 1), edit.dims(node.inputs[0])
    put(node, "axis", -1)
    if axis == -1 or (dims is not None and axis in (len(dims) - 1, -1)):
        return
    source = node.inputs[0]
    shape = edit.before(node, "Shape", [source])
    node.replace_input_with(0, edit.before(node, "Flatten", [source], axis=axis))
    edit.after(node, "Reshape", [shape])


def _softmax_down(node: ir.Node, edit: Edit) -> None:
    axis, dims = peek(node, "axis", -1), edit.dims(node.inputs[0])
    put(node, "axis", -1)
    if axis == -1:
        return
    if dims is None:
        raise Impossible("it works along an axis, and the rank of its input isn't known")
    last = len(dims) - 1
    if axis % len(dims) == last:
        return
    order = list(range(len(dims)))
    order[axis], order[last] = order[last], order[axis]
    node.replace_input_with(0, edit.before(node, "Transpose", [node.inputs[0]], perm=order))
    edit.after(node, "Transpose", [], perm=order)


def _no_mask(node: ir.Node, edit: Edit) -> None:
    if len(node.outputs) > 1 and used(node.outputs[1]):
        raise Impossible("its mask is used, whose dtype and meaning changed")
    node.resize_outputs(1)


def _dropout_up(node: ir.Node, edit: Edit) -> None:
    _no_mask(node, edit)
    take(node, "ratio")  # without training_mode the ratio has no effect


def _dropout_down(node: ir.Node, edit: Edit) -> None:
    _no_mask(node, edit)
    training = fixed(node, 2, "training mode")
    if training is not None and bool(training.reshape(-1)[0]):
        raise Impossible("it is in training mode")
    node.resize_inputs(1)
    take(node, "seed")


def _norm_up_9(node: ir.Node, edit: Edit) -> None:
    if take(node, "spatial") == 0:
        raise Impossible("it normalises per activation (spatial = 0)")


def _norm_14(node: ir.Node, edit: Edit) -> None:
    if take(node, "training_mode") or any(used(value) for value in node.outputs[1:]):
        raise Impossible("it is in training mode")
    node.resize_outputs(1)


def _norm_down_15(node: ir.Node, edit: Edit) -> None:
    dtypes = {edit.dtype(value) for value in node.inputs if edit.dtype(value)}
    if len(dtypes) > 1:
        raise Impossible(f"its inputs mix {' and '.join(sorted(dtypes))}")


def _like(node: ir.Node, edit: Edit, number: float, hint: str) -> ir.Value:
    """A scalar constant of the first input's dtype."""
    import numpy as np

    dtype = edit.dtype(node.inputs[0])
    if dtype not in ("float16", "float32", "float64"):
        raise Impossible(f"the dtype of its input is {dtype or 'unknown'}")
    with np.errstate(over="ignore"):
        return edit.constant(node, np.array(number, dtype=dtype), hint)


def _clip_up(node: ir.Node, edit: Edit) -> None:
    for index, name, default in ((1, "min", -3.4028234663852886e38), (2, "max", 3.4028234663852886e38)):
        number = take(node, name)
        set_input(node, index, _like(node, edit, default if number is None else number, name))


def _pad_up_11(node: ir.Node, edit: Edit) -> None:
    set_input(node, 1, edit.constant(node, _ints(take(node, "pads")), "pads"))
    number = take(node, "value")
    if number:
        set_input(node, 2, _like(node, edit, number, "value"))


def _pad_down_18(node: ir.Node, edit: Edit) -> None:
    axes = fixed(node, 3, "axes")
    if axes is not None:
        pads, dims = fixed(node, 1, "pads"), edit.dims(node.inputs[0])
        if dims is None or pads is None:
            raise Impossible("it pads chosen axes, and the rank of its input isn't known")
        rank, count = len(dims), axes.size
        whole = [0] * (2 * rank)
        for index, axis in enumerate(axes.reshape(-1).tolist()):
            whole[axis % rank] = int(pads[index])
            whole[axis % rank + rank] = int(pads[index + count])
        set_input(node, 1, edit.constant(node, _ints(whole), "pads"))
    node.resize_inputs(min(len(node.inputs), 3))


def _no_wrap(node: ir.Node, edit: Edit) -> None:
    if peek(node, "mode", "constant") == "wrap":
        raise Impossible("it pads by wrapping around")


def _slice_up(node: ir.Node, edit: Edit) -> None:
    for index, name in ((1, "starts"), (2, "ends"), (3, "axes")):
        numbers = take(node, name)
        if numbers is not None:
            set_input(node, index, edit.constant(node, _ints(numbers), name))


def _topk_up(node: ir.Node, edit: Edit) -> None:
    set_input(node, 1, edit.constant(node, _ints([take(node, "k")]), "k"))


def _upsample_up_9(node: ir.Node, edit: Edit) -> None:
    import numpy as np

    set_input(node, 1, edit.constant(node, np.array(take(node, "scales"), dtype=np.float32), "scales"))


def _resize_up_11(node: ir.Node, edit: Edit) -> None:
    import numpy as np

    scales = fixed(node, 1, "scales")
    nearest = peek(node, "mode", "nearest") == "nearest"
    if nearest and (scales is None or bool((scales < 1).any())):
        raise Impossible("it shrinks by nearest neighbour, whose rounding wasn't defined before")
    put(node, "coordinate_transformation_mode", "asymmetric")
    if nearest:
        put(node, "nearest_mode", "floor")
    set_input(node, 2, node.inputs[1])
    set_input(node, 1, edit.constant(node, np.zeros(0, np.float32), "roi"))


def _resize_up_13(node: ir.Node, edit: Edit) -> None:
    if peek(node, "coordinate_transformation_mode") == "tf_half_pixel_for_nn":
        raise Impossible("its coordinate_transformation_mode tf_half_pixel_for_nn is gone")


def _resize_down_13(node: ir.Node, edit: Edit) -> None:
    import numpy as np

    for index, name in ((1, "roi"), (2, "scales")):
        if given(node, index) is None:
            set_input(node, index, edit.constant(node, np.zeros(0, np.float32), name))


def _resize_down_19(node: ir.Node, edit: Edit) -> None:
    if peek(node, "coordinate_transformation_mode") == "half_pixel_symmetric":
        raise Impossible("its coordinate_transformation_mode is half_pixel_symmetric")


def _roi_up(node: ir.Node, edit: Edit) -> None:
    put(node, "coordinate_transformation_mode", "output_half_pixel")


def _roi_down(node: ir.Node, edit: Edit) -> None:
    if take(node, "coordinate_transformation_mode") != "output_half_pixel":
        raise Impossible("it shifts regions by half a pixel")


def _grid_up(node: ir.Node, edit: Edit) -> None:
    mode = peek(node, "mode", "bilinear")
    put(node, "mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _grid_down(node: ir.Node, edit: Edit) -> None:
    dims = edit.dims(node.inputs[0])
    if dims is None or len(dims) != 4:
        raise Impossible("it samples a volume, or an input of unknown rank")
    mode = peek(node, "mode", "linear")
    put(node, "mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))


def _dft_up(node: ir.Node, edit: Edit) -> None:
    import numpy as np

    axis = take(node, "axis")
    set_input(node, 2, edit.constant(node, np.array(1 if axis is None else axis, np.int64), "axis"))


def _dft_down(node: ir.Node, edit: Edit) -> None:
    axis, dims = fixed(node, 2, "axes"), edit.dims(node.inputs[0])
    number = -2 if axis is None else int(axis.reshape(-1)[0])
    if number < 0 and dims is None:
        raise Impossible("the rank of its input isn't known")
    node.resize_inputs(min(len(node.inputs), 2))
    put(node, "axis", number + len(dims or ()) if number < 0 else number)


def _group_up(node: ir.Node, edit: Edit) -> None:
    """Scale and bias per group become scale and bias per channel."""
    groups, dims = peek(node, "num_groups"), edit.dims(node.inputs[0])
    channels = dims[1] if dims is not None and len(dims) > 1 else None
    if channels == groups:
        return
    if not isinstance(channels, int):
        raise Impossible("the number of channels isn't known")
    for index, name in ((1, "scale"), (2, "bias")):
        column = edit.before(node, "Reshape", [node.inputs[index], edit.constant(node, _ints([-1, 1]), f"{name}_2d")])
        wide = edit.constant(node, _ints([1, channels // groups]), f"{name}_repeat")
        spread = edit.before(node, "Expand", [column, wide])
        flat = edit.before(node, "Reshape", [spread, edit.constant(node, _ints([-1]), f"{name}_1d")])
        node.replace_input_with(index, flat)


def _shape_down(node: ir.Node, edit: Edit) -> None:
    """Shape of some axes becomes a slice of the whole shape; both clamp in the same way."""
    start, end = take(node, "start") or 0, take(node, "end")
    if start or end is not None:
        bounds = (start, "start"), (2**31 - 1 if end is None else end, "end")
        edit.after(node, "Slice", [edit.constant(node, _ints([number]), hint) for number, hint in bounds])


def _reshape_down(node: ir.Node, edit: Edit) -> None:
    """``allowzero`` matters only where the new shape has a zero."""
    if not take(node, "allowzero"):
        return
    shape = fixed(node, 1, "sizes, one of which may be an actual zero (allowzero = 1),")
    if shape is None or 0 in shape:
        raise Impossible("it makes a dim of size zero (allowzero = 1)")


def _constant_down_12(node: ir.Node, edit: Edit) -> None:
    import onnx_ir as ir

    if "value" in node.attributes:
        return
    tensor = constant(node.outputs[0])
    if tensor is None:
        raise Impossible("it holds strings outside a tensor")
    node.attributes.clear()
    node.attributes["value"] = ir.AttrTensor("value", tensor)


def _per_tensor(node: ir.Node, edit: Edit) -> None:
    """Before 13 there is one scale for the whole tensor and no axis."""
    dims, tensor = edit.dims(node.inputs[1]), constant(node.inputs[1])
    if dims != () and (tensor is None or tensor.size != 1):
        raise Impossible("it quantizes per axis, or with scales of unknown shape")
    take(node, "axis")


def _no_max(node: ir.Node, edit: Edit) -> None:
    if peek(node, "reduction", "none") in ("max", "min"):
        raise Impossible(f"its reduction is {peek(node, 'reduction')}")


def _no_ceil(node: ir.Node, edit: Edit) -> None:
    if peek(node, "ceil_mode", 0):
        raise Impossible("with ceil_mode the last windows are counted differently")


def _transposed(node: ir.Node, edit: Edit) -> None:
    if peek(node, "auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER") or peek(node, "output_shape"):
        raise Impossible("automatic padding is split differently")


def _mod_down(node: ir.Node, edit: Edit) -> None:
    if not peek(node, "fmod", 0) and edit.dtype(node.inputs[0]).startswith(("float", "bfloat")):
        raise Impossible("older versions take the remainder of floats by truncation only")


MOVED: Mapping[tuple[str, int], str] = {("Upsample", 10): "Resize", ("Scatter", 11): "ScatterElements"}
"""Operators that ended, and the one that took over."""

_REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
               "ReduceProd", "ReduceSumSquare")  # fmt: skip

UP: Mapping[tuple[str, int], Adapter] = {
    **{(op, 13): _axes_up for op in ("Squeeze", "Unsqueeze", "ReduceSum")},
    **{(op, 18): _axes_up for op in _REDUCTIONS},
    **{(op, 13): _softmax_up for op in ("Softmax", "LogSoftmax", "Hardmax")},
    ("Split", 13): _split_up_13, ("Split", 18): _split_up_18, ("Dropout", 10): _no_mask, ("Dropout", 12): _dropout_up,
    ("BatchNormalization", 9): _norm_up_9, ("BatchNormalization", 14): _norm_14, ("Clip", 11): _clip_up,
    ("Pad", 11): _pad_up_11, ("Slice", 10): _slice_up, ("TopK", 10): _topk_up, ("Upsample", 9): _upsample_up_9,
    ("Resize", 11): _resize_up_11, ("Resize", 13): _resize_up_13,
    ("RoiAlign", 16): _roi_up, ("GridSample", 20): _grid_up, ("DFT", 20): _dft_up,
    ("GroupNormalization", 21): _group_up, ("AveragePool", 19): _no_ceil, ("AveragePool", 22): _no_ceil,
    ("MaxPool", 22): _no_ceil, ("ConvTranspose", 11): _transposed,
}  # fmt: skip
"""By operator and the version it changed at: how a node crosses upwards where the general rule isn't enough."""

DOWN: Mapping[tuple[str, int], Adapter] = {
    **{(op, 13): _axes_down for op in ("Squeeze", "Unsqueeze", "ReduceSum")},
    **{(op, 18): _axes_down for op in _REDUCTIONS},
    **{(op, 13): _softmax_down for op in ("Softmax", "LogSoftmax", "Hardmax")},
    ("Split", 18): _split_down_18, ("Split", 13): _split_down_13, ("Dropout", 12): _dropout_down,
    ("BatchNormalization", 15): _norm_down_15, ("BatchNormalization", 14): _norm_14, ("Pad", 19): _no_wrap,
    ("Pad", 18): _pad_down_18, ("Resize", 19): _resize_down_19, ("Resize", 13): _resize_down_13,
    ("RoiAlign", 16): _roi_down, ("GridSample", 20): _grid_down, ("DFT", 20): _dft_down,
    ("Shape", 15): _shape_down, ("Reshape", 14): _reshape_down,
    ("Constant", 12): _constant_down_12, ("QuantizeLinear", 13): _per_tensor,
    ("DequantizeLinear", 13): _per_tensor, ("ScatterElements", 18): _no_max, ("ScatterND", 18): _no_max,
    ("AveragePool", 19): _no_ceil, ("AveragePool", 22): _no_ceil, ("MaxPool", 22): _no_ceil, ("Mod", 28): _mod_down,
}  # fmt: skip
"""The same downwards."""

REFUSED: Mapping[tuple[str, int], str] = {
    ("OneHot", 11): "indices out of range mean something else",
    ("Scan", 9): "it lost its batch dim",
    ("Attention", 24): "masks and caches are defined anew",
    ("Attention", 25): "runtimes compute its softmax at another precision",
}
"""Changes without an exact conversion, in either direction."""
