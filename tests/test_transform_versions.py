from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from packager.errors import Refused
from packager.model import open_model
from packager.transform_cleaning import Clean
from packager.transform_steps import DOWN, UP
from packager.transform_versions import (
    DropUnusedImports,
    InlineFunctions,
    SetVersions,
    changes,
    planned_versions,
    schema_at,
)
from tests import builders
from tests.builders import BOOL, FLOAT, INT64, value
from tests.golden_models import node, numbers
from tests.test_transform_shapes import REAL, feeds_for
from tests.transform_models import Made, answer, array, f32, floats, model, same, transform, u8


def to(version: int, ir: int | None = None) -> SetVersions:
    return SetVersions((("", version),), ir)


def moved(folder: Path, start: int, end: int, nodes, **options) -> Made:
    """A model at one opset brought to another, with the imports checked."""
    made = transform(model(folder, nodes, opset=start, **options), folder, to(end))
    assert dict(made.applied.opsets)[""] == end
    return made


X = [value("x", FLOAT, ("n", 3, 4))]
x = floats(2, 3, 4)


@pytest.mark.parametrize(("start", "end"), [(12, 13), (11, 21), (13, 12), (21, 11)])
def test_axes_move_between_attribute_and_input(tmp_path: Path, start: int, end: int) -> None:
    def axes(op: str, source: str, made: str, *items: int, since: int = 13, **attributes) -> onnx.NodeProto:
        if start < since:
            return node(op, [source], [made], axes=list(items), **attributes)
        return node(op, [source, f"a{made}"], [made], **attributes)

    places = {"a": (0, 3), "b": (-1,), "c": (0,), "d": (1,)}
    nodes = [
        axes("Unsqueeze", "x", "a", 0, 3), axes("ReduceSum", "a", "b", -1, keepdims=1), axes("Squeeze", "b", "c", 0),
        axes("ReduceMean", "c", "d", 1, since=18, keepdims=0), node("Squeeze", ["d"], ["y"]),
    ]  # fmt: skip
    constants = [numbers(f"a{name}", *items) for name, items in places.items() if start >= (18 if name == "d" else 13)]
    made = moved(tmp_path, start, end, nodes, inputs=X, initializers=constants)
    same(made, x=x)


@pytest.mark.parametrize(
    "op",
    [
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSumSquare",
    ],
)
def test_reductions_cross_18_both_ways(tmp_path: Path, op: str) -> None:
    up = moved(tmp_path, 17, 18, [node("Abs", ["x"], ["h"]), node(op, ["h"], ["y"], axes=[1, -1])], inputs=X)
    assert len(up.proto.graph.node[1].input) == 2
    same(up, x=x)
    nodes = [node("Abs", ["x"], ["h"]), node(op, ["h", "a"], ["y"], noop_with_empty_axes=1)]
    down = moved(tmp_path, 18, 17, nodes, inputs=X, initializers=[numbers("a", 1, -1)])
    same(down, x=x)
    everything = moved(tmp_path, 18, 17, [node("Abs", ["x"], ["h"]), node(op, ["h"], ["y"])], inputs=X)
    same(everything, x=x)


def test_axes_that_older_versions_can_not_say_are_refused(tmp_path: Path) -> None:
    source = model(
        tmp_path,
        [helper.make_node("ReduceMean", ["x", "a"], ["y"], name="mean/1")],
        [*X, value("a", INT64, (1,))],
        opset=18,
    )
    with pytest.raises(Refused) as caught:
        transform(source, tmp_path, to(17))
    assert caught.value.message == (
        "no exact conversion of operator set ai.onnx from 18 to 17:\n"
        "  node ReduceMean 'mean/1': the operator changed at 18: its axes are computed at run time ('a')"
    )
    source = model(tmp_path, [node("ReduceMean", ["x"], ["y"], noop_with_empty_axes=1)], X, opset=18)
    with pytest.raises(Refused, match="reduces nothing when axes are empty"):
        transform(source, tmp_path, to(17))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, None])
def test_softmax_means_the_same_across_13(tmp_path: Path, op: str, axis: int | None) -> None:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    nodes = [node(op, ["x"], ["h"], **attributes), node("Neg", ["h"], ["y"])]
    outputs = [value("y", FLOAT, None), value("h", FLOAT, None)]
    for start, end in ((11, 13), (13, 11)):
        made = moved(tmp_path, start, end, nodes, inputs=X, outputs=outputs)
        assert [item.name for item in made.applied.signature.outputs] == ["y", "h"]
        np.testing.assert_allclose(
            answer(made.applied.path, {"x": x})[0], answer(made.source, {"x": x})[0], rtol=1e-6, atol=1e-7
        )


def test_a_softmax_of_unknown_rank_goes_up_but_not_down(tmp_path: Path) -> None:
    inputs = [value("x", FLOAT, None)]
    made = moved(tmp_path, 12, 13, [node("Softmax", ["x"], ["y"])], inputs=inputs)
    assert made.ops() == ["Shape", "Flatten", "Softmax", "Reshape"]
    np.testing.assert_allclose(answer(made.applied.path, {"x": x})[0], answer(made.source, {"x": x})[0], rtol=1e-6)
    source = model(tmp_path, [node("Softmax", ["x"], ["y"], axis=1)], inputs, opset=13)
    with pytest.raises(Refused, match="rank of its input isn't known"):
        transform(source, tmp_path, to(12))


def test_what_is_known_survives_a_rewritten_node(tmp_path: Path) -> None:
    nodes = [node("Softmax", ["x"], ["h"], axis=1), node("LogSoftmax", ["h"], ["y"], axis=0)]
    for start, end in ((13, 12), (12, 13)):
        made = moved(tmp_path, start, end, nodes, inputs=X)
        np.testing.assert_allclose(answer(made.applied.path, {"x": x})[0], answer(made.source, {"x": x})[0], rtol=1e-6)


def test_split(tmp_path: Path) -> None:
    outputs = [value(name, FLOAT, None) for name in "abc"]
    given = [node("Split", ["x"], list("abc"), axis=1, split=[1, 1, 1])]
    same(moved(tmp_path, 11, 18, given, inputs=X, outputs=outputs), x=x)
    equal = [node("Split", ["x"], list("abc"), axis=1)]
    up = moved(tmp_path, 13, 18, equal, inputs=X, outputs=outputs)
    assert up.proto.graph.node[0].attribute[1].i == 3
    same(up, x=x)
    uneven = [node("Split", ["x"], list("abc"), axis=2, num_outputs=3)]
    for end in (17, 11):
        feed = floats(2, 3, 5)
        wide = [value("x", FLOAT, ("n", 3, 5))]
        parts = same(moved(tmp_path, 18, end, uneven, inputs=wide, outputs=outputs), x=feed)
        assert [part.shape[2] for part in parts] == [2, 2, 1]
    by_input = [node("Split", ["x", "s"], list("abc"), axis=1)]
    same(moved(tmp_path, 13, 11, by_input, inputs=X, outputs=outputs, initializers=[numbers("s", 1, 1, 1)]), x=x)
    unknown = model(tmp_path, [node("Split", ["x"], list("abc"), axis=0, num_outputs=3)], X, outputs, opset=18)
    with pytest.raises(Refused, match="splits a dim of unknown size"):
        transform(unknown, tmp_path, to(17))


def test_dropout(tmp_path: Path) -> None:
    for start in (7, 10):
        same(
            moved(tmp_path, start, 13, [node("Dropout", ["x"], ["h"], ratio=0.3), node("Abs", ["h"], ["y"])]),
            x=floats(2, 3),
        )
    nodes = [node("Dropout", ["x", "r", "t"], ["h"], seed=4), node("Abs", ["h"], ["y"])]
    constants = [array("r", np.float32(0.3)), array("t", np.array(False))]
    same(moved(tmp_path, 13, 11, nodes, initializers=constants), x=floats(2, 3))
    training = model(tmp_path, nodes, initializers=[constants[0], array("t", np.array(True))])
    with pytest.raises(Refused, match="in training mode"):
        transform(training, tmp_path, to(11))
    masked = model(tmp_path, [node("Dropout", ["x"], ["y", "m"])], outputs=[value("y"), value("m", BOOL)], opset=10)
    with pytest.raises(Refused, match="its mask is used"):
        transform(masked, tmp_path, to(13))


def batch_norm(**attributes) -> tuple[list, list]:
    constants = [array(name, np.abs(floats(3, seed=seed)) + 0.5) for seed, name in enumerate("sbmv")]
    return [node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], **attributes)], constants


def test_batch_normalization(tmp_path: Path) -> None:
    for start, end in ((8, 17), (9, 15), (15, 11), (17, 13)):
        nodes, constants = batch_norm(**({"spatial": 1} if start < 9 else {}))
        same(moved(tmp_path, start, end, nodes, inputs=X, initializers=constants), x=x)
    nodes, constants = batch_norm(spatial=0)
    with pytest.raises(Refused, match="per activation"):
        transform(model(tmp_path, nodes, X, initializers=constants, opset=8), tmp_path, to(13))
    nodes, constants = batch_norm(training_mode=1)
    nodes[0].output.extend(["rm", "rv"])
    with pytest.raises(Refused, match="training mode"):
        transform(model(tmp_path, nodes, X, initializers=constants, opset=15), tmp_path, to(13))


def test_attributes_that_became_inputs(tmp_path: Path) -> None:
    cases = [
        (8, [node("Clip", ["x"], ["y"], min=-0.5, max=0.5)]),
        (8, [node("Clip", ["x"], ["y"])]),
        (8, [node("Pad", ["x"], ["y"], pads=[0, 1, 2, 0, 0, 1], value=3.0)]),
        (8, [node("Slice", ["x"], ["y"], starts=[1, -3], ends=[3, 9], axes=[1, 2])]),
        (8, [node("TopK", ["x"], ["y", "i"], k=2, axis=2)]),
        (9, [node("Pad", ["x"], ["y"], pads=[0, 1, 2, 0, 0, 1], mode="edge")]),
    ]
    for start, nodes in cases:
        same(moved(tmp_path, start, 17, nodes, inputs=X), x=x)
    infinite = moved(tmp_path, 8, 17, [node("Clip", ["x"], ["y"], min=-1.0)], inputs=X)
    same(infinite, x=np.full((1, 3, 4), np.inf, np.float32))
    half = [value("x", TensorProto.FLOAT16, (2,))]
    clipped = moved(
        tmp_path,
        8,
        13,
        [node("Clip", ["x"], ["y"], max=1.0)],
        inputs=half,
        outputs=[value("y", TensorProto.FLOAT16, (2,))],
    )
    assert same(clipped, x=np.array([2, -np.inf], np.float16))[0].tolist()[0] == 1


def image(mode: str, factor: float) -> tuple[list, list, list]:
    scales = [1.0, 1.0, factor, factor]
    return [value("x", FLOAT, (1, 1, 4, 4))], [node("Upsample", ["x"], ["y"], mode=mode, scales=scales)], scales


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_becomes_resize(tmp_path: Path, mode: str) -> None:
    inputs, nodes, scales = image(mode, 2.5)
    made = moved(tmp_path, 8, 18, nodes, inputs=inputs)
    assert made.ops() == ["Resize"]
    same(made, x=floats(1, 1, 4, 4))
    nodes = [node("Resize", ["x", "s"], ["y"], mode=mode)]
    same(
        moved(tmp_path, 10, 13, nodes, inputs=inputs, initializers=[array("s", f32(scales))]),
        x=floats(1, 1, 4, 4),
    )


def test_resize(tmp_path: Path) -> None:
    inputs = [value("x", FLOAT, (1, 1, 4, 4))]
    shrink = model(
        tmp_path,
        [node("Resize", ["x", "s"], ["y"])],
        inputs,
        opset=10,
        initializers=[array("s", f32([1, 1, 0.5, 0.5]))],
    )
    with pytest.raises(Refused, match="nearest neighbour"):
        transform(shrink, tmp_path, to(13))
    sized = [node("Resize", ["x", "", "", "z"], ["y"], mode="cubic", coordinate_transformation_mode="align_corners")]
    for start, end in ((13, 11), (19, 13), (18, 21)):
        same(
            moved(tmp_path, start, end, sized, inputs=inputs, initializers=[numbers("z", 1, 1, 7, 3)]),
            x=floats(1, 1, 4, 4),
        )
    for start, mode in ((11, "tf_half_pixel_for_nn"), (19, "half_pixel_symmetric")):
        nodes = [node("Resize", ["x", "r", "s"], ["y"], coordinate_transformation_mode=mode)]
        constants = [array("r", floats(0)), array("s", f32([1, 1, 2, 2]))]
        with pytest.raises(Refused, match=mode):
            transform(model(tmp_path, nodes, inputs, opset=start, initializers=constants), tmp_path, to(30 - start))
    nodes = [node("Resize", ["x", "", "s"], ["y"], mode="linear", antialias=1)]
    half = [array("s", f32([1, 1, 0.5, 0.5]))]
    with pytest.raises(Refused, match="antialias = 1 can't be said"):
        transform(model(tmp_path, nodes, inputs, opset=18, initializers=half), tmp_path, to(17))


def test_pad_down(tmp_path: Path) -> None:
    nodes = [node("Pad", ["x", "p", "", "a"], ["y"])]
    constants = [numbers("p", 1, 2, 0, 1), numbers("a", -1, 1)]
    for end in (17, 11):
        same(moved(tmp_path, 19, end, nodes, inputs=X, initializers=constants), x=x)
    wrapping = model(
        tmp_path,
        [node("Pad", ["x", "p"], ["y"], mode="wrap")],
        X,
        opset=19,
        initializers=[numbers("p", 0, 1, 1, 0, 0, 0)],
    )
    with pytest.raises(Refused, match="wrapping around"):
        transform(wrapping, tmp_path, to(18))


def test_grid_sample(tmp_path: Path) -> None:
    inputs = [value("x", FLOAT, (1, 1, 4, 4)), value("g", FLOAT, (1, 2, 2, 2))]
    feeds = {"x": floats(1, 1, 4, 4), "g": np.clip(floats(1, 2, 2, 2), -1, 1)}
    for old, new in (("bilinear", "linear"), ("bicubic", "cubic"), ("nearest", "nearest")):
        same(moved(tmp_path, 16, 20, [node("GridSample", ["x", "g"], ["y"], mode=old)], inputs=inputs), **feeds)
        same(moved(tmp_path, 20, 16, [node("GridSample", ["x", "g"], ["y"], mode=new)], inputs=inputs), **feeds)
    for start, end in ((16, 20), (20, 16)):
        same(moved(tmp_path, start, end, [node("GridSample", ["x", "g"], ["y"])], inputs=inputs), **feeds)


def test_dft(tmp_path: Path) -> None:
    inputs, signal = [value("x", FLOAT, (1, 4, 4, 1))], floats(1, 4, 4, 1)
    options: list[dict[str, Any]] = [{}, {"axis": 2}]
    for attributes in options:
        same(moved(tmp_path, 17, 20, [node("DFT", ["x"], ["y"], **attributes)], inputs=inputs), x=signal)
    same(moved(tmp_path, 20, 17, [node("DFT", ["x"], ["y"])], inputs=inputs), x=signal)
    same(
        moved(
            tmp_path,
            20,
            17,
            [node("DFT", ["x", "", "a"], ["y"])],
            inputs=inputs,
            initializers=[array("a", np.array(1))],
        ),
        x=signal,
    )


def test_group_normalization(tmp_path: Path) -> None:
    inputs, feed = [value("x", FLOAT, ("n", 4, 5))], floats(2, 4, 5)
    nodes = [node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)]
    made = moved(
        tmp_path, 18, 21, nodes, inputs=inputs, initializers=[array("s", floats(2)), array("b", floats(2, seed=1))]
    )
    np.testing.assert_allclose(
        answer(made.applied.path, {"x": feed})[0], answer(made.source, {"x": feed})[0], rtol=1e-5, atol=1e-6
    )
    grouped = model(tmp_path, nodes, inputs, opset=21, initializers=[array("s", floats(4)), array("b", floats(4))])
    lowered = transform(grouped, tmp_path, to(18))
    assert lowered.applied.notes[0].startswith("expanded by ONNX's own definition: GroupNormalization")
    np.testing.assert_allclose(
        answer(lowered.applied.path, {"x": feed})[0], answer(grouped, {"x": feed})[0], rtol=1e-4, atol=1e-5
    )


def test_quantization(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
    ]
    zero = array("z", np.uint8(3))
    made = moved(tmp_path, 13, 11, nodes, initializers=[array("s", np.float32(0.1)), zero])
    same(made, x=floats(2, 3))
    per_axis = model(
        tmp_path,
        nodes,
        opset=13,
        initializers=[array("s", f32([0.1, 0.2, 0.3])), array("z", u8([0, 1, 2]))],
    )
    with pytest.raises(Refused, match="per axis") as caught:
        transform(per_axis, tmp_path, to(11))
    assert caught.value.message.count("\n") == 2
    same(transform(per_axis, tmp_path, to(21)), x=floats(2, 3))


def test_shapes_of_some_axes_become_slices(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"start": 1}, {"start": -2, "end": -1}, {"end": 9}, {"start": -9, "end": 2}, {}]
    for attributes in options:
        nodes = [node("Shape", ["x"], ["s"], **attributes), node("Cast", ["s"], ["y"], to=FLOAT)]
        made = moved(tmp_path, 17, 13, nodes, inputs=X)
        assert ("Slice" in made.ops()) == bool(attributes)
        same(made, x=x)


def test_reshape_that_never_sees_a_zero_goes_down(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "r"], ["y"], allowzero=1)]
    same(moved(tmp_path, 14, 13, nodes, inputs=X, initializers=[numbers("r", -1, 4)]), x=x)
    source = model(tmp_path, nodes, [*X, value("r", INT64, (2,))], opset=14)
    with pytest.raises(Refused, match="one of which may be an actual zero"):
        transform(source, tmp_path, to(13))


def test_constants_of_numbers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["a"], value_float=1.5),
        helper.make_node("Constant", [], ["b"], value_ints=[1, 2, 3]),
        node("Cast", ["b"], ["c"], to=FLOAT),
        node("Sum", ["x", "a", "c"], ["y"]),
    ]
    same(moved(tmp_path, 13, 11, nodes), x=floats(2, 3))


def test_other_refusals_name_the_change(tmp_path: Path) -> None:
    image_in = [value("x", FLOAT, (1, 1, 4, 4))]
    pool = [node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], ceil_mode=1)]
    cases = [
        (18, 13, [node("Trilu", ["x"], ["y"])], "begins at 14"),
        (22, 21, pool, "changed at 22: with ceil_mode"),
        (14, 13, [node("Reshape", ["x", "r"], ["y"], allowzero=1)], "makes a dim of size zero"),
        (16, 15, [node("RoiAlign", ["x", "roi", "bi"], ["y"])], "shifts regions by half a pixel"),
        (18, 16, [node("ScatterND", ["x", "i", "u"], ["y"], reduction="max")], "its reduction is max"),
        (10, 13, [node("ConvTranspose", ["x", "k"], ["y"], auto_pad="SAME_UPPER")], "automatic padding"),
        (13, 10, [node("Squeeze", ["x"], ["y"])], "nothing is lowered across changes up to 11"),
        (14, 13, [node("Add", ["n", "n"], ["y"])], r"doesn't take tensor\(uint8\) there \('n'\)"),
        (10, 13, [node("OneHot", ["i", "d", "v"], ["y"])], "changed at 11: indices out of range"),
    ]
    constants = [
        array("w", floats(4)), array("r", np.array([0, 4])), array("roi", floats(1, 4)), array("bi", np.array([0])),
        numbers("i", 0, 0, 0, shape=(1, 3)), array("u", floats(1, 4)), array("k", floats(1, 1, 2, 2)),
        array("n", u8([1])), array("d", np.array(3)), array("v", floats(2)),
    ]  # fmt: skip
    for start, end, nodes, phrase in cases:
        used = [item for item in constants if item.name in nodes[0].input]
        kind = TensorProto.UINT8 if nodes[0].op_type == "Add" else FLOAT
        source = model(tmp_path, nodes, image_in, [value("y", kind, None)], used, opset=start)
        with pytest.raises(Refused, match=phrase):
            transform(source, tmp_path, to(end))


def test_a_pool_keeps_ceil_mode_where_nothing_changed(tmp_path: Path) -> None:
    pool = [node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], ceil_mode=1)]
    same(moved(tmp_path, 21, 13, pool, inputs=[value("x", FLOAT, (1, 1, 4, 4))]), x=floats(1, 1, 4, 4))


def test_roi_align_keeps_its_pixels(tmp_path: Path) -> None:
    inputs = [value("x", FLOAT, (1, 1, 6, 6))]
    constants = [array("roi", f32([[0.5, 0.5, 4.2, 4.2]])), array("bi", np.array([0]))]
    nodes = [node("RoiAlign", ["x", "roi", "bi"], ["y"], output_height=2, output_width=2)]
    up = moved(tmp_path, 10, 16, nodes, inputs=inputs, initializers=constants)
    same(up, x=floats(1, 1, 6, 6))
    same(
        moved(tmp_path, 16, 11, list(up.proto.graph.node), inputs=inputs, initializers=constants), x=floats(1, 1, 6, 6)
    )


def test_the_list_of_refused_nodes_is_short(tmp_path: Path) -> None:
    nodes = [node("Trilu", ["x" if index == 0 else f"h{index}"], [f"h{index + 1}"]) for index in range(12)]
    with pytest.raises(Refused) as caught:
        transform(model(tmp_path, nodes, opset=17), tmp_path, to(13))
    assert caught.value.message.endswith("begins at 14\n  ... and 4 more")


def test_nodes_in_branches_and_bodies_are_converted(tmp_path: Path) -> None:
    inner = helper.make_graph([node("Softmax", ["x"], ["s"], axis=1)], "t", [], [value("s", FLOAT, None)])
    other = helper.make_graph(
        [node("Unsqueeze", ["x"], ["u"], axes=[0]), node("Squeeze", ["u"], ["v"], axes=[0])],
        "e",
        [],
        [value("v", FLOAT, None)],
    )
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other)]
    made = moved(tmp_path, 11, 13, nodes, inputs=[*X, value("c", BOOL, [])])
    for condition in (True, False):
        feeds = {"x": x, "c": np.array(condition)}
        np.testing.assert_allclose(answer(made.applied.path, feeds)[0], answer(made.source, feeds)[0], rtol=1e-6)


def with_function(folder: Path, function_opset: int = 17) -> Path:
    """``y = Double(Double(x))``, a local function whose factor is an attribute with a default."""
    body = [helper.make_node("Constant", [], ["k"]), helper.make_node("Mul", ["a", "k"], ["b"])]
    body[0].attribute.add(name="value_float", ref_attr_name="factor", type=onnx.AttributeProto.FLOAT)
    function = helper.make_function(
        "local",
        "Scale",
        ["a"],
        ["b"],
        body,
        [helper.make_opsetid("", function_opset)],
        attribute_protos=[helper.make_attribute("factor", 2.0)],
    )
    nodes = [node("Scale", ["x"], ["h"], domain="local"), node("Scale", ["h"], ["y"], domain="local", factor=3.0)]
    proto = builders.model(nodes, [value("x")], [value("y")], ir=10, domains=[("local", 1)])
    proto.functions.append(function)
    return builders.save(proto, folder / "m.onnx")


def test_functions_are_inlined(tmp_path: Path) -> None:
    made = transform(with_function(tmp_path), tmp_path, InlineFunctions(), DropUnusedImports(), Clean())
    assert made.ops() == ["Constant", "Mul", "Constant", "Mul"]
    assert not made.proto.functions
    assert made.applied.opsets == (("", 17),)
    assert answer(made.applied.path, {"x": floats(2, 3)})[0] == pytest.approx(floats(2, 3) * 6)
    same(made, x=floats(2, 3))
    plain = transform(builders.relu(tmp_path / "m.onnx"), tmp_path, InlineFunctions())
    assert plain.applied.notes == ()


def test_functions_that_can_not_be_inlined_or_converted_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"can't be inlined: .*version 17 in the model but version 13"):
        transform(with_function(tmp_path, 13), tmp_path, InlineFunctions())
    source = with_function(tmp_path)
    with pytest.raises(Refused, match="inside a local function"):
        transform(source, tmp_path, to(11))
    unchanged = transform(source, tmp_path, to(18))
    assert [item.version for item in unchanged.proto.functions[0].opset_import if not item.domain] == [18]
    same(unchanged, x=floats(2, 3))


def test_unused_imports_go(tmp_path: Path) -> None:
    source = model(
        tmp_path,
        [node("Gelu", ["x"], ["y"], domain="com.microsoft")],
        domains=[("com.microsoft", 1), ("ai.onnx.ml", 3)],
    )
    made = transform(source, tmp_path, DropUnusedImports())
    assert made.applied.opsets == (("", 17), ("com.microsoft", 1))
    assert made.applied.notes == ("the unused import of operator set ai.onnx.ml was dropped",)


def test_other_domains(tmp_path: Path) -> None:
    scaler = [node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])]
    source = model(tmp_path, scaler, domains=[("ai.onnx.ml", 3)])
    made = transform(source, tmp_path, SetVersions((("ai.onnx.ml", 1), ("not.there", 2))))
    assert made.applied.opsets == (("", 17), ("ai.onnx.ml", 1))
    same(made, x=floats(2, 3))
    tensors = helper.make_node(
        "LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", keys_tensor=array("k", f32([1])),
        values_tensor=array("v", f32([2])),
        default_tensor=array("d", f32([0])),
    )  # fmt: skip
    with pytest.raises(Refused, match=r"ai.onnx.ml.LabelEncoder .*changed at 4: its attribute"):
        transform(model(tmp_path, [tensors], domains=[("ai.onnx.ml", 4)]), tmp_path, SetVersions((("ai.onnx.ml", 3),)))
    custom = model(tmp_path, [node("Gelu", ["x"], ["y"], domain="com.microsoft")], domains=[("com.microsoft", 1)])
    with pytest.raises(Refused, match="the operator isn't known"):
        transform(custom, tmp_path, SetVersions((("com.microsoft", 2),)))


@pytest.mark.parametrize("end", [4, 7, 9, 11])
def test_ir_versions(tmp_path: Path, end: int) -> None:
    proto = builders.model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")], ir=10)
    proto.graph.node[0].metadata_props.add(key="k", value="v")
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, SetVersions((), end))
    assert made.applied.ir_version == end
    assert len(made.proto.graph.node[0].metadata_props) == (1 if end >= 10 else 0)
    same(made, x=floats(2, 3))


def test_ir_versions_that_can_not_hold_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"IR version 8 can't hold default attributes of function 'Scale' \(IR 9\)"):
        transform(with_function(tmp_path), tmp_path, SetVersions((), 8))
    with pytest.raises(Refused, match="local functions"):
        transform(with_function(tmp_path), tmp_path, SetVersions((), 7))
    with pytest.raises(Refused, match="4 is the lowest"):
        transform(builders.relu(tmp_path / "m.onnx"), tmp_path, SetVersions((), 3))
    small = helper.make_tensor("q", TensorProto.INT4, [2], [1, 2])
    nodes = [node("DequantizeLinear", ["q", "s"], ["w"]), node("Add", ["x", "w"], ["y"])]
    source = model(
        tmp_path, nodes, [value("x", FLOAT, (2,))], initializers=[small, array("s", np.float32(1))], opset=21, ir=10
    )
    with pytest.raises(Refused, match=r"int4 of 'q' \(IR 10\)"):
        transform(source, tmp_path, SetVersions((), 9))


def test_plans_come_from_the_structure(tmp_path: Path) -> None:
    structure = open_model(
        model(tmp_path, [node("Relu", ["x"], ["y"])], opset=21, ir=10, domains=[("ai.onnx.ml", 5)])
    ).structure
    assert planned_versions(structure, {}, None) is None
    assert planned_versions(structure, {"ai.onnx": 21, "ai.onnx.ml": 5}, 10) is None
    assert planned_versions(structure, {"ai.onnx": 17, "com.microsoft": 1}, 12) == SetVersions((("", 17),))
    assert planned_versions(structure, {"": 22, "ai.onnx.ml": 3}, 9) == SetVersions((("ai.onnx.ml", 3),), 9)


@pytest.mark.parametrize(
    ("name", "end"),
    [("ocr_detector", 17), ("ocr_recogniser", 18), ("orientation", 21), ("file_type", 13), ("arabic_diacritics", 21),
     ("french_forms", 21), ("text_encoder", 22), ("silero_vad_ifless", 21), ("silero_vad_16k", 21),
     ("surrogate_regressor", 17), ("silero_vad_16k", 13), ("ocr_detector", 11)],
)  # fmt: skip
def test_real_models_answer_alike_at_other_versions(corpus: Path, tmp_path: Path, name: str, end: int) -> None:
    made = transform(corpus / f"{name}.onnx", tmp_path, to(end))
    assert dict(made.applied.opsets)[""] == end
    feeds = feeds_for(made.source, REAL[name])
    for one, other in zip(answer(made.source, feeds), answer(made.applied.path, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


FAMILIES = (
    "softmax",
    "hardmax",
    "reduce_",
    "squeeze",
    "split",
    "resize",
    "pad",
    "dropout",
    "clip",
    "top_k",
    "slice",
    "batchnorm",
    "gridsample",
    "roialign",
    "scatter",
    "quantizelinear",
    "dft",
    "group_normalization",
    "averagepool",
    "maxpool",
    "constant",
    "reshape",
    "upsample",
    "cast_",
    "gelu",
    "lstm",
    "loop",
    "if_",
)


def test_onnx_own_cases_answer_alike_wherever_they_convert() -> None:
    """Each of ONNX's node tests at each of these versions is refused, or answers as it did before."""
    import onnx_ir as ir

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = [case for case in collect_testcases(None) if any(name in case.name for name in FAMILIES)]
    wrong, converted = [], 0
    for case in cases:
        proto = case.model
        proto.ir_version = min(proto.ir_version, 11)
        inputs = dict(zip((item.name for item in proto.graph.input), case.data_sets[0][0], strict=False))
        before = _run(proto, inputs)
        for end in (11, 13, 17, 18, 21, 22) if before is not None else ():
            loaded = ir.serde.deserialize_model(proto)
            try:
                SetVersions((("", end),)).run(loaded, None)  # type: ignore[arg-type]
            except Refused:
                continue
            after = _run(ir.serde.serialize_model(loaded), inputs)
            converted += 1
            if after is None or not all(map(_alike, before or [], after)):
                wrong.append((case.name, end))
    assert wrong == []
    assert converted > 2000


def _run(proto: onnx.ModelProto, inputs) -> list | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ort.set_default_logger_severity(4)
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        answers: list = session.run(None, inputs)
    except Exception:  # noqa: BLE001 - a kernel that isn't there; ORT's exception types are not public
        return None
    return answers


def _alike(one, other) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_alike, one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return bool(one.tolist() == other.tolist())
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, rtol=1e-6, atol=1e-7, equal_nan=True))
    return bool(one.tobytes() == other.tobytes())


def test_every_rule_names_a_change_that_exists() -> None:
    for op, change in (*UP, *DOWN):
        assert change in changes(op, ""), (op, change)
        assert schema_at(op, "", change) is not None
