"""What each operation of Core ML's ML Programs computes, in ONNX operators.

One rule per operation, after its definition in coremltools (``mil/ops/defs``, iOS 15 to 18). Padding, epsilons and
defaults are those of Core ML, which differ from ONNX's in places.
"""

from __future__ import annotations

from packager.targets.ios.mil_onnx import Call, Rule, Untranslated


def _unary(op_type: str) -> Rule:
    return lambda call: call.give(op_type, [call.name("x")])


def _binary(op_type: str) -> Rule:
    return lambda call: call.give(op_type, [call.name("x"), call.name("y")])


def _not_equal(call: Call) -> None:
    call.give("Not", [call.step("Equal", [call.name("x"), call.name("y")])])


def _with(op_type: str, **names: str) -> Rule:
    """An operator whose attributes are constant arguments: ONNX's name to Core ML's."""

    def rule(call: Call) -> None:
        call.give(op_type, [call.name("x")], **{name: call.number(key) for name, key in names.items()})

    return rule


def _epsilon(op_type: str, default: float) -> Rule:
    """A function of x + epsilon."""

    def rule(call: Call) -> None:
        epsilon = call.literal(call.number("epsilon", default), call.dtype("x"))
        call.give(op_type, [call.step("Add", [call.name("x"), epsilon])])

    return rule


def _rsqrt(call: Call) -> None:
    epsilon = call.literal(call.number("epsilon", 1e-12), call.dtype("x"))
    root = call.step("Sqrt", [call.step("Add", [call.name("x"), epsilon])])
    call.give("Reciprocal", [root])


def _square(call: Call) -> None:
    call.give("Mul", [call.name("x"), call.name("x")])


def _clip(call: Call) -> None:
    dtype = call.dtype("x")
    bounds = [call.literal(call.number(key), dtype) for key in ("alpha", "beta")]
    call.give("Clip", [call.name("x"), *bounds])


def _relu6(call: Call) -> None:
    bounds = [call.literal(number, call.dtype("x")) for number in (0, 6)]
    call.give("Clip", [call.name("x"), *bounds])


def _prelu(call: Call) -> None:
    rank = len(call.dims("x"))
    slope = call.constant("alpha").reshape([-1, *[1] * (rank - 2)])
    call.give("PRelu", [call.name("x"), call.literal(slope, call.dtype("x"))])


def _gelu(call: Call) -> None:
    mode = call.text("mode", "EXACT")
    if mode == "SIGMOID_APPROXIMATION":
        raise Untranslated("operation gelu of mode SIGMOID_APPROXIMATION has no translation")
    call.give("Gelu", [call.name("x")], approximate="none" if mode == "EXACT" else "tanh")


def _softmax(call: Call) -> None:
    call.give("Softmax", [call.name("x")], axis=call.integer("axis", -1))


def _cast(call: Call) -> None:
    dtype = {"fp32": "float32", "fp16": "float16"}.get(call.text("dtype", ""), call.text("dtype", ""))
    if dtype not in ("float32", "float16", "int32", "bool", "int8", "uint8", "int16", "uint16"):
        raise Untranslated(f"operation cast to {dtype} has no translation")
    call.give_as(dtype, call.name("x"))


def _padding(call: Call, spatial: int) -> dict[str, object]:
    """ONNX's pads of ``pad_type`` and ``pad``: begins of all axes, then ends."""
    kind = call.text("pad_type", "valid")
    if kind == "custom":
        pads = call.integers("pad", [0] * (2 * spatial))
        return {"pads": [*pads[0::2], *pads[1::2]]}
    known = {"valid": "VALID", "same": "SAME_UPPER", "same_lower": "SAME_LOWER"}
    if kind not in known:
        raise Untranslated(f"operation {call.operation.type} of pad_type {kind} has no translation")
    return {"auto_pad": known[kind]}


def _conv(call: Call) -> None:
    spatial = len(call.dims("x")) - 2
    ones = [1] * spatial
    inputs = [call.name("x"), call.name("weight"), *([call.name("bias")] if call.has("bias") else [])]
    call.give(
        "Conv", inputs, strides=call.integers("strides", ones), dilations=call.integers("dilations", ones),
        group=call.integer("groups", 1), **_padding(call, spatial),
    )  # fmt: skip


def _conv_transpose(call: Call) -> None:
    """Core ML's output_shape, where it is given, says by how much the last places are filled up."""
    spatial = len(call.dims("x")) - 2
    ones = [1] * spatial
    strides, dilations = call.integers("strides", ones), call.integers("dilations", ones)
    padding = _padding(call, spatial)
    if padding.get("auto_pad") not in (None, "VALID"):
        raise Untranslated("operation conv_transpose of pad_type same has no translation")
    pads = padding.get("pads") or [0] * (2 * spatial)
    assert isinstance(pads, list)  # noqa: S101 - for the type checker
    kernel, wanted = call.dims("weight")[2:], call.operation.outputs[0].dims[2:]
    extra = [
        wanted[at] - ((size - 1) * strides[at] + (kernel[at] - 1) * dilations[at] + 1 - pads[at] - pads[at + spatial])
        for at, size in enumerate(call.dims("x")[2:])
    ]
    if any(each < 0 for each in extra):
        raise Untranslated("operation conv_transpose of that output_shape has no translation")
    inputs = [call.name("x"), call.name("weight"), *([call.name("bias")] if call.has("bias") else [])]
    call.give(
        "ConvTranspose", inputs, strides=strides, dilations=dilations, group=call.integer("groups", 1), pads=pads,
        output_padding=extra,
    )  # fmt: skip


def _linear(call: Call) -> None:
    weight = call.step("Transpose", [call.name("weight")], perm=[1, 0])
    inputs = [call.name("x"), weight]
    if not call.has("bias"):
        call.give("MatMul", inputs)
    else:
        call.give("Add", [call.step("MatMul", inputs), call.name("bias")])


def _matmul(call: Call) -> None:
    sides = []
    for key in ("x", "y"):
        name, rank = call.name(key), len(call.dims(key))
        if call.flag(f"transpose_{key}"):
            name = call.step("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])
        sides.append(name)
    call.give("MatMul", sides)


def _pool(op_type: str) -> Rule:
    def rule(call: Call) -> None:
        spatial = len(call.dims("x")) - 2
        settings = _padding(call, spatial)
        if op_type == "AveragePool":
            settings["count_include_pad"] = 0 if call.flag("exclude_padding_from_average") else 1
        call.give(
            op_type, [call.name("x")], kernel_shape=call.integers("kernel_sizes"),
            strides=call.integers("strides", [1] * spatial), ceil_mode=int(call.flag("ceil_mode")), **settings,
        )  # fmt: skip

    return rule


def _scaled(call: Call, rank: int, key: str, default: float) -> str:
    """gamma or beta by channel, or a scalar for all."""
    dtype = call.dtype("x")
    values = call.constant(key).reshape([-1, *[1] * (rank - 2)]) if call.has(key) else default
    made: str = call.literal(values, dtype)
    return made


def _batch_norm(call: Call) -> None:
    rank, dtype = len(call.dims("x")), call.dtype("x")
    centred = call.step("Sub", [call.name("x"), _scaled(call, rank, "mean", 0.0)])
    epsilon = call.literal(call.number("epsilon", 1e-5), dtype)
    spread = call.step("Sqrt", [call.step("Add", [_scaled(call, rank, "variance", 1.0), epsilon])])
    scaled = call.step("Mul", [call.step("Div", [centred, spread]), _scaled(call, rank, "gamma", 1.0)])
    call.give("Add", [scaled, _scaled(call, rank, "beta", 0.0)])


def _instance_norm(call: Call) -> None:
    channels, dtype = call.dims("x")[1], call.dtype("x")
    given = [
        call.name(key) if call.has(key) else call.literal([number] * channels, dtype)
        for key, number in (("gamma", 1.0), ("beta", 0.0))
    ]
    call.give("InstanceNormalization", [call.name("x"), *given], epsilon=call.number("epsilon", 1e-5))


def _layer_norm(call: Call) -> None:
    dims, dtype = call.dims("x"), call.dtype("x")
    axes = sorted(axis % len(dims) for axis in call.integers("axes", list(range(len(dims)))))
    if axes != list(range(axes[0], len(dims))):
        raise Untranslated("operation layer_norm over axes that aren't the last ones has no translation")
    sizes = dims[axes[0] :]
    total = 1
    for size in sizes:
        total *= size
    scale = call.name("gamma") if call.has("gamma") else call.literal([1.0] * total, dtype)
    if not call.has("gamma"):
        scale = call.step("Reshape", [scale, call.literal(sizes, "int64")])
    inputs = [call.name("x"), scale, *([call.name("beta")] if call.has("beta") else [])]
    call.give("LayerNormalization", inputs, axis=axes[0], epsilon=call.number("epsilon", 1e-5))


def _reshape(call: Call) -> None:
    call.give("Reshape", [call.name("x"), call.step("Cast", [call.name("shape")], to=7)])


def _transpose(call: Call) -> None:
    rank = len(call.dims("x"))
    call.give("Transpose", [call.name("x")], perm=[axis % rank for axis in call.integers("perm")])


def _concat(call: Call) -> None:
    if call.flag("interleave"):
        raise Untranslated("operation concat that interleaves has no translation")
    call.give("Concat", call.names("values"), axis=call.integer("axis"))


def _stack(call: Call) -> None:
    axis = call.integer("axis")
    places = call.literal([axis], "int64")
    call.give("Concat", [call.step("Unsqueeze", [name, places]) for name in call.names("values")], axis=axis)


def _split(call: Call) -> None:
    sizes = [each.dims for each in call.operation.outputs]
    axis = call.integer("axis") % len(call.dims("x"))
    call.give("Split", [call.name("x"), call.literal([dims[axis] for dims in sizes], "int64")], axis=axis)


def _to_shape(call: Call) -> None:
    """squeeze and expand_dims: the same elements in the sizes that the program states."""
    call.give("Reshape", [call.name("x"), call.literal(call.operation.outputs[0].dims, "int64")])


def _slice(call: Call) -> None:
    dims = call.dims("x")
    rank = len(dims)
    off = [False] * rank
    begin, end = call.integers("begin"), call.integers("end")
    stride = call.integers("stride", [1] * rank)
    masks = [[bool(each) for each in call.constant(key, off).reshape(-1)] for key in (
        "begin_mask", "end_mask", "squeeze_mask")]  # fmt: skip
    starts, ends = [], []
    for axis, size in enumerate(dims):
        back = stride[axis] < 0
        first = (size - 1 if back else 0) if masks[0][axis] else begin[axis]
        last = (-size - 1 if back else size) if masks[1][axis] else end[axis]
        if masks[2][axis]:
            last = first + 1 if first != -1 else size
        starts.append(first)
        ends.append(last)
    inputs = [call.literal(each, "int64") for each in (starts, ends, list(range(rank)), stride)]
    part = call.step("Slice", [call.name("x"), *inputs])
    call.give("Reshape", [part, call.literal(call.operation.outputs[0].dims, "int64")])


def _gather(op_type: str) -> Rule:
    def rule(call: Call) -> None:
        if call.integer("batch_dims", 0):
            raise Untranslated(f"operation {call.operation.type} with batch_dims has no translation")
        indices = call.step("Cast", [call.name("indices")], to=7)
        call.give(op_type, [call.name("x"), indices], axis=call.integer("axis", 0))

    return rule


def _gather_nd(call: Call) -> None:
    indices = call.step("Cast", [call.name("indices")], to=7)
    call.give("GatherND", [call.name("x"), indices], batch_dims=call.integer("batch_dims", 0))


def _tile(call: Call) -> None:
    call.give("Tile", [call.name("x"), call.literal(call.integers("reps"), "int64")])


def _pad(call: Call) -> None:
    """Pads of the last axes, two for each."""
    rank, pads = len(call.dims("x")), call.integers("pad")
    before = [0] * (rank - len(pads) // 2) + pads[0::2]
    after = [0] * (rank - len(pads) // 2) + pads[1::2]
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    mode = call.text("mode", "constant")
    if mode not in modes:
        raise Untranslated(f"operation pad of mode {mode} has no translation")
    inputs = [call.name("x"), call.literal([*before, *after], "int64")]
    if mode == "constant":
        inputs.append(call.literal(call.number("constant_val", 0.0), call.dtype("x")))
    call.give("Pad", inputs, mode=modes[mode])


def _reduce(op_type: str) -> Rule:
    def rule(call: Call) -> None:
        axes = call.integers("axes", list(range(len(call.dims("x")))))
        inputs = [call.name("x"), call.literal(axes, "int64")]
        call.give(op_type, inputs, keepdims=int(call.flag("keep_dims")))

    return rule


def _reduce_arg(op_type: str) -> Rule:
    def rule(call: Call) -> None:
        keep = int(call.flag("keep_dims"))
        found = call.step(op_type, [call.name("x")], axis=call.integer("axis", -1), keepdims=keep)
        call.give_as("int32", found)

    return rule


def _select(call: Call) -> None:
    call.give("Where", [call.name("cond"), call.name("a"), call.name("b")])


def _resize(mode: str) -> Rule:
    def rule(call: Call) -> None:
        heights = [call.number("scale_factor_height", 1.0), call.number("scale_factor_width", 1.0)]
        scales = call.literal([1.0, 1.0, *heights], "float32")
        corners = mode == "linear" and call.flag("align_corners", True)
        if mode == "linear":
            half = call.flag("half_pixel_centers", not corners)
            coordinates = "align_corners" if corners else "half_pixel" if half else "asymmetric"
            call.give("Resize", [call.name("x"), "", scales], mode=mode, coordinate_transformation_mode=coordinates)
            return
        call.give(
            "Resize", [call.name("x"), "", scales], mode=mode, coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )  # fmt: skip

    return rule


def _blocks(op_type: str) -> Rule:
    return lambda call: call.give(op_type, [call.name("x")], blocksize=call.integer("block_size"))


def _shape(call: Call) -> None:
    call.give_as("int32", call.step("Shape", [call.name("x")]))


def _mod(call: Call) -> None:
    """By the sign of the divisor, floats too: x - floor(x / y) * y."""
    x, y = call.name("x"), call.name("y")
    if call.dtype("x") in ("int32", "int16", "int8"):
        call.give("Mod", [x, y])
        return
    whole = call.step("Floor", [call.step("Div", [x, y])])
    call.give("Sub", [x, call.step("Mul", [whole, y])])


RULES: dict[str, Rule] = {
    **{name: _unary(op_type) for name, op_type in {
        "abs": "Abs", "acos": "Acos", "asin": "Asin", "atan": "Atan", "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos",
        "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor", "identity": "Identity", "logical_not": "Not",
        "relu": "Relu", "round": "Round", "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh",
        "softplus": "Softplus", "softsign": "Softsign", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh"}.items()},
    **{name: _binary(op_type) for name, op_type in {
        "add": "Add", "equal": "Equal", "greater": "Greater", "greater_equal": "GreaterOrEqual", "less": "Less",
        "less_equal": "LessOrEqual", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor", "maximum": "Max",
        "minimum": "Min", "mul": "Mul", "pow": "Pow", "real_div": "Div", "sub": "Sub"}.items()},
    **{f"reduce_{name}": _reduce(f"Reduce{op_type}") for name, op_type in {
        "l1_norm": "L1", "l2_norm": "L2", "log_sum": "LogSum", "log_sum_exp": "LogSumExp", "max": "Max",
        "mean": "Mean", "min": "Min", "prod": "Prod", "sum": "Sum", "sum_square": "SumSquare"}.items()},
    "avg_pool": _pool("AveragePool"), "batch_norm": _batch_norm, "cast": _cast, "clip": _clip, "concat": _concat,
    "conv": _conv, "conv_transpose": _conv_transpose, "depth_to_space": _blocks("DepthToSpace"),
    "elu": _with("Elu", alpha="alpha"), "expand_dims": _to_shape, "gather": _gather("Gather"),
    "gather_along_axis": _gather("GatherElements"), "gather_nd": _gather_nd, "gelu": _gelu,
    "instance_norm": _instance_norm, "inverse": _epsilon("Reciprocal", 1e-4), "layer_norm": _layer_norm,
    "leaky_relu": _with("LeakyRelu", alpha="alpha"), "linear": _linear, "log": _epsilon("Log", 1e-45),
    "matmul": _matmul, "max_pool": _pool("MaxPool"), "mod": _mod, "not_equal": _not_equal, "pad": _pad,
    "prelu": _prelu, "reduce_argmax": _reduce_arg("ArgMax"), "reduce_argmin": _reduce_arg("ArgMin"),
    "relu6": _relu6, "reshape": _reshape, "rsqrt": _rsqrt, "select": _select, "shape": _shape,
    "sigmoid_hard": _with("HardSigmoid", alpha="alpha", beta="beta"), "slice_by_index": _slice, "softmax": _softmax,
    "space_to_depth": _blocks("SpaceToDepth"), "split": _split, "square": _square, "squeeze": _to_shape,
    "stack": _stack, "tile": _tile, "transpose": _transpose, "upsample_bilinear": _resize("linear"),
    "upsample_nearest_neighbor": _resize("nearest"),
}  # fmt: skip
"""Operation to how it is written in ONNX."""
