from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from packager.errors import Refused
from packager.model import open_model
from packager.transform_shapes import Annotate, Fold, PinShapes
from tests import builders
from tests.builders import BOOL, FLOAT, INT64, value
from tests.golden_models import node, numbers
from tests.transform_models import array, floats, model, names, same, transform

REAL = {
    "arabic_diacritics": {"batch_size": 1, "sequence": 12},
    "file_type": {"unk__214": 1},
    "french_forms": {"batch": 1, "src_seq": 7, "tgt_seq": 5},
    "ocr_detector": {"p2o.DynamicDimension.0": 1, "p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 96},
    "ocr_recogniser": {"p2o.DynamicDimension.0": 1, "x:2": 48, "p2o.DynamicDimension.1": 64},
    "orientation": {"x:0": 1, "x:2": 48, "x:3": 192},
    "silero_vad": {"input:0": 1, "input:1": 512, "state:1": 1},
    "silero_vad_16k": {"batch": 1, "sequence": 512},
    "silero_vad_ifless": {"batch": 1, "sequence": 512},
    "surrogate_classifier": {"input:0": 2},
    "surrogate_regressor": {"input:0": 2},
    "text_encoder": {"batch": 2, "sequence": 9},
    "traffic_decoder": {"X:0": 3},
}
"""Sizes each real model takes."""


def feeds_for(path: Path, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Small numbers of the right dtypes; ids stay below any vocabulary, rates are real ones."""
    rng = np.random.default_rng(0)
    feeds = {}
    for spec in open_model(path).signature.inputs:
        dims = [
            dim if isinstance(dim, int) else sizes[dim if isinstance(dim, str) else f"{spec.name}:{axis}"]
            for axis, dim in enumerate(spec.dims or ())
        ]
        if spec.name == "sr":
            feeds[spec.name] = np.array(16000)
        elif spec.dtype == "float32":
            feeds[spec.name] = rng.random(dims, np.float32)
        else:
            feeds[spec.name] = np.asarray(rng.integers(1, 2, dims), spec.dtype)
    return feeds


@pytest.mark.parametrize("name", REAL)
def test_real_models_answer_bit_for_bit(corpus: Path, tmp_path: Path, name: str) -> None:
    path, sizes = corpus / f"{name}.onnx", REAL[name]
    made = transform(path, tmp_path, PinShapes(tuple(sizes.items())), Fold())
    assert all(isinstance(dim, int) for spec in made.applied.signature.inputs for dim in spec.dims or ())
    assert made.applied.bytes < path.stat().st_size * 1.06 + 20000
    same(made, **feeds_for(path, sizes))
    unpinned = transform(path, tmp_path, Fold())
    assert unpinned.applied.signature == open_model(path).signature
    same(unpinned, **feeds_for(path, sizes))


@pytest.mark.parametrize("name", ["arabic_diacritics", "file_type", "ocr_recogniser", "silero_vad_16k", "text_encoder"])
def test_shape_arithmetic_of_real_models_goes(corpus: Path, tmp_path: Path, name: str) -> None:
    made = transform(corpus / f"{name}.onnx", tmp_path, PinShapes(tuple(REAL[name].items())), Fold())
    assert not {"Shape", "If", "ConstantOfShape", "Range"} & set(made.ops())


def test_pinned_dims_are_everywhere(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    proto = builders.model(nodes, [value("x")], [value("y", FLOAT, ("n", 4))], [array("w", floats(3, 4))])
    proto.graph.value_info.append(value("h", FLOAT, ("n", 3)))
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, PinShapes((("n", 2),)))
    assert made.applied.signature.inputs[0].dims == (2, 3)
    assert made.applied.signature.outputs[0].dims == (2, 4)
    (inner,) = [info for info in made.proto.graph.value_info if info.name == "h"]
    assert [dim.dim_value for dim in inner.type.tensor_type.shape.dim] == [2, 3]
    assert made.applied.notes == ()
    same(made, x=floats(2, 3))


def test_unnamed_dims_are_pinned_by_place(tmp_path: Path) -> None:
    source = model(tmp_path, [node("Relu", ["a:b"], ["y"])], [value("a:b", FLOAT, (None, 3))])
    assert transform(source, tmp_path, PinShapes((("a:b:0", 5),))).applied.signature.inputs[0].dims == (5, 3)


def test_a_symbol_with_a_colon_is_a_symbol(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["h"]), node("Relu", ["h"], ["y"])]
    source = model(tmp_path, nodes, [value("x", FLOAT, ("b:0", 3))], [value("y", FLOAT, ("b:0", 3))])
    made = transform(source, tmp_path, PinShapes((("b:0", 5),)))
    assert made.applied.signature.outputs[0].dims == (5, 3)


def test_wrong_keys_and_sizes_are_refused(tmp_path: Path) -> None:
    source = builders.relu(tmp_path / "m.onnx")
    with pytest.raises(Refused, match="no input has a free dim 'm'"):
        transform(source, tmp_path, PinShapes((("m", 1),)))
    with pytest.raises(Refused, match="pinned to 0"):
        transform(source, tmp_path, PinShapes((("n", 0),)))


def test_an_output_that_can_not_have_its_declared_size_is_noted(tmp_path: Path) -> None:
    source = model(tmp_path, [node("Concat", ["x", "x"], ["y"], axis=0)], outputs=[value("y", FLOAT, ("n", 3))])
    made = transform(source, tmp_path, PinShapes((("n", 2),)))
    assert made.applied.notes == ("output 'y' is declared [2, 3] but will be [4, 3] at these sizes",)


def shape_chain(last: str = "y") -> list[onnx.NodeProto]:
    """Flattens x [n, 3] to [n * 3] through Shape, Gather, Mul, Unsqueeze, Concat and Reshape."""
    return [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "i0"], ["a"]), node("Gather", ["s", "i1"], ["b"]),
        node("Mul", ["a", "b"], ["c"]), node("Unsqueeze", ["c", "zero"], ["d"]),
        node("Concat", ["d", "one"], ["e"], axis=0), node("Reshape", ["x", "e"], [last]),
    ]  # fmt: skip


CHAIN = [array("i0", np.array(0)), array("i1", np.array(1)), numbers("zero", 0), numbers("one", 1)]


def test_a_shape_chain_folds_once_the_shape_is_fixed(tmp_path: Path) -> None:
    source = model(tmp_path, shape_chain(), initializers=CHAIN)
    free = transform(source, tmp_path, Fold())
    assert free.ops() == ["Shape", "Gather", "Mul", "Unsqueeze", "Concat", "Reshape"]  # only the 3 was known
    assert same(free, x=floats(2, 3))[0].shape == (6, 1)
    pinned = transform(source, tmp_path, PinShapes((("n", 2),)), Fold())
    assert pinned.ops() == ["Reshape"]
    assert [item.name for item in pinned.proto.graph.initializer] == ["e"]
    same(pinned, x=floats(2, 3))


def test_known_dims_fold_even_beside_unknown_ones(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]), node("Slice", ["s", "one", "two"], ["a"]), node("Squeeze", ["a"], ["b"]),
        node("Cast", ["b"], ["c"], to=FLOAT), node("Div", ["x", "c"], ["y"]),
    ]  # fmt: skip
    made = transform(model(tmp_path, nodes, initializers=[numbers("one", 1), numbers("two", 2)]), tmp_path, Fold())
    assert made.ops() == ["Div"]
    same(made, x=floats(2, 3))


def test_shape_with_start_and_end(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"], start=-1),
        node("Shape", ["x"], ["t"], start=1, end=9),
        node("Add", ["s", "t"], ["u"]),
        node("Cast", ["u"], ["v"], to=FLOAT),
        node("Add", ["x", "v"], ["y"]),
    ]
    made = transform(model(tmp_path, nodes), tmp_path, Fold())
    assert made.ops() == ["Add"]
    same(made, x=floats(2, 3))


def test_stale_annotations_are_not_believed(tmp_path: Path) -> None:
    proto = builders.model(
        [node("Relu", ["x"], ["h"]), *[node("Shape", ["h"], ["s"]), node("Cast", ["s"], ["y"], to=FLOAT)]],
        [value("x")], [value("y", FLOAT, (2,))],
    )  # fmt: skip
    proto.graph.value_info.append(value("h", FLOAT, (7, 3)))  # an exporter's trace at n = 7
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, Fold())
    assert same(made, x=floats(2, 3))[0].tolist() == [2, 3]


@pytest.mark.parametrize("dim", [-1, "?", "", None])
def test_unknown_dims_stay_unknown(tmp_path: Path, dim: object) -> None:
    proto = builders.model([node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["y"], to=FLOAT)], [value("x")],
                           [value("y", FLOAT, (2,))])  # fmt: skip
    axis = proto.graph.input[0].type.tensor_type.shape.dim[0]
    axis.Clear()
    if isinstance(dim, int):
        axis.dim_value = dim
    elif dim is not None:
        axis.dim_param = str(dim)
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, Fold())
    assert "Shape" in made.ops()
    if dim != -1:  # ONNX Runtime takes -1 for a size and refuses every input
        assert same(made, x=floats(2, 3))[0].tolist() == [2, 3]


def test_zero_rank_and_empty_constants(tmp_path: Path) -> None:
    nodes = [
        node("Add", ["a", "b"], ["c"]), node("Add", ["x", "c"], ["d"]), node("Concat", ["e", "f"], ["g"], axis=0),
        node("ReduceSum", ["g"], ["h"], keepdims=0), node("Add", ["d", "h"], ["y"]),
    ]  # fmt: skip
    constants = [array("a", np.float32(1)), array("b", np.float32(2)), array("e", floats(0)), array("f", floats(2))]
    made = transform(model(tmp_path, nodes, initializers=constants), tmp_path, Fold())
    assert made.ops() == ["Add", "Add"]
    assert {item.name: list(item.dims) for item in made.proto.graph.initializer} == {"c": [], "h": []}
    same(made, x=floats(2, 3))


def test_outputs_never_become_bare_constants(tmp_path: Path) -> None:
    nodes = [node("Add", ["a", "a"], ["b"]), node("Mul", ["b", "b"], ["y"])]
    made = transform(model(tmp_path, nodes, [], initializers=[array("a", floats(2))]), tmp_path, Fold())
    assert made.ops() == ["Mul"]
    same(made)


def test_an_output_that_is_an_initializer_stays_one(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "a"], ["y"])]
    outputs = [value("y"), value("a", FLOAT, (3,))]
    made = transform(model(tmp_path, nodes, outputs=outputs, initializers=[array("a", floats(3))]), tmp_path, Fold())
    assert names(made)[1] == ["y", "a"]
    same(made, x=floats(2, 3))


def test_weights_kept_small_stay_small(tmp_path: Path) -> None:
    weight = np.ones((300, 300), np.int8)
    nodes = [node("Cast", ["w"], ["f"], to=FLOAT), node("Mul", ["f", "s"], ["g"]), node("MatMul", ["x", "g"], ["y"])]
    source = model(
        tmp_path, nodes, [value("x", FLOAT, ("n", 300))], initializers=[array("w", weight), array("s", np.float32(2))]
    )
    made = transform(source, tmp_path, Fold())
    assert made.ops() == ["Cast", "Mul", "MatMul"]
    assert made.applied.bytes < 100_000


def test_large_results_are_not_folded(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["big"], ["z"]),
        node("Slice", ["z", "zero", "three"], ["a"]),
        node("Add", ["x", "a"], ["y"]),
    ]
    constants = [numbers("big", 1 << 40), numbers("zero", 0), numbers("three", 3)]
    proto = builders.model(nodes, [value("x")], [value("y", FLOAT, None)], constants)
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, Fold())
    assert made.ops() == ["ConstantOfShape", "Slice", "Add"]  # and nobody allocated 4 TiB


def test_limits_are_settings(tmp_path: Path) -> None:
    nodes = [node("Add", ["a", "a"], ["b"]), node("Add", ["b", "a"], ["c"]), node("Add", ["x", "c"], ["y"])]
    source = model(tmp_path, nodes, initializers=[array("a", floats(3))])
    assert transform(source, tmp_path, Fold()).ops() == ["Add"]
    assert transform(source, tmp_path, Fold(max_bytes=8)).ops() == ["Add"] * 3
    assert transform(source, tmp_path, Fold(total_bytes=12)).ops() == ["Add"] * 2


def test_what_must_stay_stays(tmp_path: Path) -> None:
    nodes = [
        node("DequantizeLinear", ["q", "scale"], ["w"]), node("RandomNormalLike", ["w"], ["r"]),
        node("Gelu", ["w"], ["g"], domain="com.microsoft"), node("Sum", ["x", "w", "g"], ["y"]),
        node("Sub", ["r", "r"], ["z"]),
    ]  # fmt: skip
    constants = [array("q", np.array([1, 2, 3], np.int8)), array("scale", np.float32(0.5))]
    outputs = [value("y", FLOAT, None), value("z", FLOAT, None)]
    source = model(tmp_path, nodes, outputs=outputs, initializers=constants, domains=[("com.microsoft", 1)])
    made = transform(source, tmp_path, Fold())
    assert made.ops() == ["DequantizeLinear", "RandomNormalLike", "Gelu", "Sum", "Sub"]
    same(made, x=floats(2, 3))


def test_overridable_initializers_are_not_constants(tmp_path: Path) -> None:
    nodes = [node("Add", ["a", "b"], ["c"]), node("Add", ["x", "c"], ["y"])]
    source = model(
        tmp_path,
        nodes,
        [value("x"), value("a", FLOAT, (3,))],
        initializers=[array("a", floats(3)), array("b", floats(3))],
    )
    made = transform(source, tmp_path, Fold())
    assert made.ops() == ["Add", "Add"]
    assert same(made, x=floats(2, 3), a=np.ones(3, np.float32))[0].shape == (2, 3)


def test_strings_fold(tmp_path: Path) -> None:
    table = helper.make_tensor("t", TensorProto.STRING, [2], [b"a", "é".encode()])
    nodes = [node("Gather", ["t", "i"], ["p"]), node("Concat", ["p", "x"], ["y"], axis=0)]
    source = model(
        tmp_path,
        nodes,
        [value("x", TensorProto.STRING, ("n",))],
        [value("y", TensorProto.STRING, None)],
        [table, numbers("i", 1)],
    )
    made = transform(source, tmp_path, Fold())
    assert made.ops() == ["Concat"]
    assert same(made, x=np.array(["b"], object))[0].tolist() == ["é", "b"]


def branch(name: str, nodes: list[onnx.NodeProto], output: str, initializers=()) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(output, FLOAT, None)], list(initializers))


@pytest.mark.parametrize("taken", [True, False])
def test_an_if_with_a_constant_condition_is_inlined(tmp_path: Path, taken: bool) -> None:
    """Both branches use the same inner names, hold constants and capture an outer one; the next If does so too."""
    nodes = []
    for index, source in ((1, "x"), (2, "h1")):
        branches = {
            key: branch(
                key,
                [node("Mul", [source, "k"], ["m"]), node(op, ["m", "outer"], ["r"])],
                "r",
                [array("k", np.float32(number))],
            )
            for key, op, number in (("then_branch", "Add", 2), ("else_branch", "Sub", 3))
        }
        nodes.append(helper.make_node("If", ["c"], [f"h{index}"], **branches))
    constants = [array("c", np.array(taken)), array("outer", floats(3))]
    made = transform(model(tmp_path, nodes, initializers=constants), tmp_path, Fold())
    assert made.ops() == ["Mul", "Add" if taken else "Sub"] * 2
    assert names(made) == (["x"], ["h2"])
    same(made, x=floats(2, 3))


def test_a_branch_that_gives_an_outer_value_or_a_constant(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [
            node("Identity", ["x"], ["r"]),
        ],
        "t",
        [],
        [value("r", FLOAT, None), value("k", FLOAT, None)],
        [array("k", floats(3))],
    )
    other = helper.make_graph(
        [node("Neg", ["x"], ["q"]), node("Neg", ["x"], ["p"])],
        "e",
        [],
        [value("q", FLOAT, None), value("p", FLOAT, None)],
    )
    nodes = [helper.make_node("If", ["c"], ["y", "z"], then_branch=inner, else_branch=other)]
    outputs = [value("y", FLOAT, None), value("z", FLOAT, None)]
    source = model(tmp_path, nodes, outputs=outputs, initializers=[array("c", np.array(True))])
    made = transform(source, tmp_path, Fold())
    assert made.ops() == ["Identity", "Identity"]
    same(made, x=floats(2, 3))


def test_an_if_inside_a_loop_body_and_a_chain_inside_a_branch(tmp_path: Path) -> None:
    inner = helper.make_node(
        "If", ["yes"], ["s"],
        then_branch=branch("t", [node("Add", ["state", "outer"], ["r"])], "r"),
        else_branch=branch("e", [node("Sub", ["state", "outer"], ["r"])], "r"),
    )  # fmt: skip
    body = helper.make_graph(
        [
            inner,
            node("Add", ["two", "two"], ["four"]),
            node("Mul", ["s", "four"], ["next"]),
            node("Identity", ["go"], ["still"]),
        ],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
        [value("still", BOOL, []), value("next", FLOAT, None)],
        [array("two", np.float32(2))],
    )
    nodes = [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)]
    constants = [array("count", np.array(3)), array("outer", floats(3)), array("yes", np.array(True))]
    made = transform(model(tmp_path, nodes, initializers=constants), tmp_path, Fold())
    inside = made.proto.graph.node[0].attribute[0].g
    assert [item.op_type for item in inside.node] == ["Add", "Mul", "Identity"]
    same(made, x=floats(2, 3))


def test_functions_are_left_alone(tmp_path: Path) -> None:
    body = [helper.make_node("Constant", [], ["k"], value_float=2.0), helper.make_node("Mul", ["a", "k"], ["b"])]
    function = helper.make_function("local", "Double", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    proto = builders.model([node("Double", ["c"], ["d"], domain="local"), node("Add", ["x", "d"], ["y"])], [value("x")],
                           [value("y", FLOAT, None)], [array("c", floats(3))], domains=[("local", 1)])  # fmt: skip
    proto.functions.append(function)
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, Fold())
    assert made.ops() == ["Double", "Add"]
    same(made, x=floats(2, 3))


def test_a_branch_that_contradicts_the_sizes_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    """At 512 samples the 8 kHz branch of this model has a tensor of the wrong rank; it is never taken."""
    sizes = REAL["silero_vad"]
    made = transform(corpus / "silero_vad.onnx", tmp_path, PinShapes(tuple(sizes.items())), Fold())
    assert made.applied.notes == (
        "branches and loop bodies weren't folded: at these sizes one of them contradicts itself",
    )


def test_steps_print_their_settings() -> None:
    assert PinShapes((("n", 2),)).step().settings == (("n", "2"),)
    assert Fold().step().settings == (("largest constant", "1048576 bytes"),)


def test_shapes_that_follow_are_written_into_the_file(tmp_path: Path) -> None:
    """Stale annotations go, the signature and the answers stay."""
    nodes = [node("Relu", ["x"], ["h"]), node("Transpose", ["h"], ["y"], perm=[1, 0])]
    proto = builders.model(nodes, [value("x", FLOAT, [2, 3])], [value("y", FLOAT, [None, 2])])
    proto.graph.value_info.append(value("h", FLOAT, [7, 3]))
    path = builders.save(proto, tmp_path / "m.onnx")
    made = transform(path, tmp_path, Annotate()).applied
    structure = open_model(made.path).structure
    assert {each.name: each.type.dims for each in structure.graph.values} == {"h": (2, 3)}
    assert made.signature == open_model(path).signature
