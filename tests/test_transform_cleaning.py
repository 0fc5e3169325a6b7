from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from packager.errors import Refused
from packager.model import open_model
from packager.reference import OrtSession
from packager.transform_cleaning import Clean, StripZipMap, planned_strip
from tests import builders
from tests.builders import BOOL, FLOAT, INT64, value
from tests.golden_models import node
from tests.test_transform_shapes import REAL, feeds_for
from tests.transform_models import answer, array, f32, floats, model, names, same, transform

HOME = "/" + "home/me"
WINDOWS = "C:" + r"\Users\me"


@pytest.mark.parametrize("name", REAL)
def test_real_models_answer_bit_for_bit(corpus: Path, tmp_path: Path, name: str) -> None:
    path = corpus / f"{name}.onnx"
    made = transform(path, tmp_path, Clean())
    assert made.applied.signature == open_model(path).signature
    same(made, **feeds_for(path, REAL[name]))


def test_dead_nodes_and_initializers_go(tmp_path: Path) -> None:
    dead = helper.make_graph([node("Add", ["x", "only_there"], ["t"])], "t", [], [value("t", FLOAT, None)])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "e", [], [value("e", FLOAT, None)])
    nodes = [
        node("Neg", ["x"], ["a"]),
        node("Abs", ["a"], ["b"]),
        helper.make_node("If", ["c"], ["d"], then_branch=dead, else_branch=other),
        node("Relu", ["x"], ["y"]),
    ]
    constants = [array("unused", floats(4)), array("only_there", floats(3)), array("c", np.array(True))]
    inputs = [value("x"), value("not used", FLOAT, (2,))]
    made = transform(model(tmp_path, nodes, inputs, initializers=constants), tmp_path, Clean())
    assert made.ops() == ["Relu"]
    assert names(made) == (["x", "not used"], ["y"])
    assert not made.proto.graph.initializer
    assert made.applied.notes == ("3 unused nodes removed", "3 unused initializers removed")
    same(made, **{"x": floats(2, 3), "not used": floats(2)})


def test_an_initializer_used_only_in_a_body_stays(tmp_path: Path) -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["still"]), node("Add", ["state", "outer"], ["next"])], "body",
        [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
        [value("still", BOOL, []), value("next", FLOAT, None)],
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)]
    constants = [array("count", np.array(3)), array("outer", floats(3)), array("same as outer", floats(3))]
    made = transform(model(tmp_path, nodes, initializers=constants), tmp_path, Clean())
    assert [item.name for item in made.proto.graph.initializer] == ["count", "outer"]
    same(made, x=floats(2, 3))


def test_duplicates_are_merged_by_their_bytes(tmp_path: Path) -> None:
    weight = floats(3, 100)
    constants = [
        array("a", weight),
        array("b", weight),
        array("c", weight + 1),
        array("turned", weight.reshape(100, 3)),
        array("zero", f32([0.0] * 3)),
        array("minus zero", f32([-0.0] * 3)),
        array("d", weight.astype(np.float64)),
    ]
    nodes = [
        node("MatMul", ["x", "a"], ["h"]),
        node("MatMul", ["x", "b"], ["i"]),
        node("MatMul", ["x", "c"], ["j"]),
        node("Sum", ["h", "i", "j"], ["k"]),
        node("MatMul", ["k", "turned"], ["y"]),
        node("Div", ["x", "zero"], ["up"]),
        node("Div", ["x", "minus zero"], ["down"]),
        node("Cast", ["d"], ["z"], to=FLOAT),
    ]
    outputs = [value(name, FLOAT, None) for name in ("y", "up", "down", "z")]
    made = transform(model(tmp_path, nodes, outputs=outputs, initializers=constants), tmp_path, Clean())
    assert [item.name for item in made.proto.graph.initializer] == ["a", "c", "turned", "zero", "minus zero", "d"]
    assert made.applied.notes == ("1 duplicate initializers removed",)
    same(made, x=np.abs(floats(2, 3)))


def test_a_quantised_model_loads_as_the_reference_loads_it(corpus: Path, tmp_path: Path) -> None:
    """Its zero points are alike, and ``session.x64quantprecision`` makes ONNX Runtime stumble over shared ones."""
    made = transform(corpus / "arabic_diacritics.onnx", tmp_path, Clean())
    OrtSession(made.applied.path, quantized=True)
    zeros = [item for item in made.proto.graph.initializer if item.data_type in (TensorProto.INT8, TensorProto.UINT8)]
    assert len(zeros) > len({item.SerializeToString().replace(item.name.encode(), b"") for item in zeros})


def test_duplicate_strings_and_external_tensors_are_merged(tmp_path: Path) -> None:
    texts = [
        helper.make_tensor(name, TensorProto.STRING, [2], [b"a", last])
        for name, last in (("s", b"b"), ("t", b"b"), ("u", b"c"))
    ]
    nodes = [node("Concat", ["x", "s", "t", "u"], ["y"], axis=0)]
    kind = [value("x", TensorProto.STRING, ("n",))]
    made = transform(model(tmp_path, nodes, kind, [value("y", TensorProto.STRING, None)], texts), tmp_path, Clean())
    assert [item.name for item in made.proto.graph.initializer] == ["s", "u"]
    assert same(made, x=np.array(["é"], object))[0].tolist() == ["é", "a", "b", "a", "b", "a", "c"]
    folder = tmp_path / "external"
    folder.mkdir()
    weights = [array("v", floats(3, 2000)), array("w", floats(3, 2000))]
    nodes = [node("MatMul", ["x", "v"], ["h"]), node("MatMul", ["x", "w"], ["i"]), node("Add", ["h", "i"], ["y"])]
    proto = builders.model(nodes, [value("x")], [value("y", FLOAT, None)], weights)
    onnx.save(proto, str(folder / "m.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    made = transform(folder / "m.onnx", tmp_path, Clean())
    assert [item.name for item in made.proto.graph.initializer] == ["v"]
    same(made, x=floats(2, 3))


def test_outputs_that_are_initializers_keep_their_names(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "a"], ["h"]), node("Add", ["h", "b"], ["y"])]
    outputs = [value("y"), value("a", FLOAT, (3,)), value("b", FLOAT, (3,))]
    constants = [array("a", floats(3)), array("b", floats(3))]
    made = transform(model(tmp_path, nodes, outputs=outputs, initializers=constants), tmp_path, Clean())
    assert names(made)[1] == ["y", "a", "b"]
    same(made, x=floats(2, 3))


@pytest.mark.parametrize("opset", [10, 17])
def test_idle_nodes_go_and_outputs_keep_their_names(tmp_path: Path, opset: int) -> None:
    nodes = [
        node("Identity", ["x"], ["a:0"]), node("Dropout", ["a:0"], ["b"]), node("Relu", ["b"], ["c"]),
        node("Identity", ["c"], ["d/é"]), node("Dropout", ["d/é"], ["y"]),
    ]  # fmt: skip
    made = transform(model(tmp_path, nodes, outputs=[value("y")], opset=opset), tmp_path, Clean())
    assert made.ops() == ["Relu"]
    assert names(made) == (["x"], ["y"])
    assert made.applied.notes == ("4 Identity and Dropout nodes removed",)
    same(made, x=floats(2, 3))


def test_identities_that_give_outputs_their_names_stay(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["x"], ["same"]),
        node("Relu", ["x"], ["r"]),
        node("Identity", ["r"], ["again"]),
        node("Identity", ["k"], ["const"]),
        node("Dropout", ["x"], ["dropped"]),
    ]
    outputs = [value(name, FLOAT, None) for name in ("same", "r", "again", "const", "dropped")]
    made = transform(model(tmp_path, nodes, outputs=outputs, initializers=[array("k", floats(3))]), tmp_path, Clean())
    assert made.ops() == ["Identity", "Relu", "Identity", "Identity", "Identity"]
    assert names(made)[1] == ["same", "r", "again", "const", "dropped"]
    same(made, x=floats(2, 3))


def test_identities_around_branches(tmp_path: Path) -> None:
    inner = helper.make_graph([node("Identity", ["outer"], ["t"])], "t", [], [value("t", FLOAT, None)])
    other = helper.make_graph(
        [node("Identity", ["outer"], ["e1"]), node("Neg", ["e1"], ["e2"]), node("Identity", ["e2"], ["e3"])], "e", [],
        [value("e3", FLOAT, None)],
    )  # fmt: skip
    nodes = [
        node("Abs", ["x"], ["h"]),
        node("Identity", ["h"], ["outer"]),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other),
    ]
    made = transform(model(tmp_path, nodes, [value("x"), value("c", BOOL, [])]), tmp_path, Clean())
    branches = {item.name: [one.op_type for one in item.g.node] for item in made.proto.graph.node[1].attribute}
    assert branches == {"then_branch": ["Identity"], "else_branch": ["Neg"]}
    for condition in (True, False):
        same(made, x=floats(2, 3), c=np.array(condition))


def test_dropout_with_a_used_mask_or_an_open_mode_stays(tmp_path: Path) -> None:
    masked = model(tmp_path, [node("Dropout", ["x"], ["y", "m"])], outputs=[value("y"), value("m", BOOL)])
    assert transform(masked, tmp_path, Clean()).ops() == ["Dropout"]
    nodes = [node("Dropout", ["x", "", "train"], ["h"]), node("Relu", ["h"], ["y"])]
    decided = transform(model(tmp_path, nodes, [value("x"), value("train", BOOL, [])]), tmp_path, Clean())
    assert decided.ops() == ["Dropout", "Relu"]
    same(decided, x=floats(2, 3), train=np.array(False))


def test_training_mode_is_refused_by_name(tmp_path: Path) -> None:
    constants = [array(name, np.abs(floats(3)) + 1) for name in "sbmv"] + [array("on", np.array(True))]
    nodes = [
        helper.make_node("BatchNormalization", ["x", *"sbmv"], ["h", "rm", "rv"], name="norm:1", training_mode=1),
        helper.make_node("Dropout", ["h", "", "on"], ["y"], name="drop/2"),
    ]
    source = model(tmp_path, nodes, [value("x", FLOAT, ("n", 3, 4))], initializers=constants)
    with pytest.raises(Refused, match=r"in training mode: BatchNormalization 'norm:1', Dropout 'drop/2'$") as caught:
        transform(source, tmp_path, Clean())
    assert caught.value.hint == "export the model in evaluation mode (model.eval() in PyTorch)"


def test_overridable_initializers_become_plain(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "w"], ["y"])]
    source = model(tmp_path, nodes, [value("w", FLOAT, (3,)), value("x")], initializers=[array("w", floats(3))])
    made = transform(source, tmp_path, Clean())
    assert names(made)[0] == ["x"]
    assert made.applied.notes == ("initializers are no longer inputs: w",)
    assert made.applied.signature == open_model(source).signature
    same(made, x=floats(2, 3))


def test_texts_and_paths_go(tmp_path: Path) -> None:
    proto = builders.model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")], [array("w", floats(1))], ir=10)
    proto.doc_string = proto.graph.doc_string = proto.graph.node[0].doc_string = proto.graph.input[0].doc_string = (
        "by me"
    )
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{HOME}/secret.py", line 3')
    proto.graph.metadata_props.add(key="g", value="h")
    for key, text in (
        ("author", HOME),
        ("win", f"saved to {WINDOWS}"),
        ("names", "{0: 'cat'}"),
        ("url", f"https://a.b{HOME}"),
        ("units", "m/s"),
    ):
        proto.metadata_props.add(key=key, value=text)
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path, Clean())
    assert {item.key: item.value for item in made.proto.metadata_props} == {
        "names": "{0: 'cat'}",
        "url": f"https://a.b{HOME}",
        "units": "m/s",
    }
    data = made.applied.path.read_bytes()
    assert b"by me" not in data
    assert HOME.encode() not in data.replace(f"https://a.b{HOME}".encode(), b"")
    assert made.applied.notes == ("1 unused initializers removed", "8 doc strings and metadata entries removed")


def classifier(folder: Path, shape=("n", 3), **labels) -> Path:
    """Probabilities by Softmax, then the label and a ZipMap, as scikit-learn converters write them."""
    nodes = [
        node("Softmax", ["x"], ["probabilities"], axis=-1),
        node("ArgMax", ["probabilities"], ["label"], axis=-1, keepdims=0),
        helper.make_node("ZipMap", ["probabilities"], ["out:map"], domain="ai.onnx.ml", name="zip", **labels),
    ]
    key = TensorProto.STRING if "classlabels_strings" in labels else INT64
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(key, helper.make_tensor_type_proto(FLOAT, [])))
    outputs = [value("label", INT64, None), helper.make_value_info("out:map", kind)]
    return model(folder, nodes, [value("x", FLOAT, shape)], outputs, domains=[("ai.onnx.ml", 3)])


@pytest.mark.parametrize("labels", [{"classlabels_strings": ["a", "b:c", "é"]}, {"classlabels_int64s": [7, -1, 3]}])
def test_zipmap_gives_way_to_the_probabilities(tmp_path: Path, labels: dict) -> None:
    source = classifier(tmp_path, **labels)
    opened = open_model(source)
    strip = planned_strip(opened.structure)
    assert strip == StripZipMap((("out:map", 3),))
    made = transform(source, tmp_path, strip)
    assert str(made.applied.signature.outputs[1]) == "out:map: float32[?, 3]"
    assert made.applied.signature == strip.signature(opened.signature)
    listed = ", ".join(map(str, next(iter(labels.values()))))
    assert made.applied.notes == (f"output 'out:map' is a float32 tensor [N, 3], classes in this order: {listed}",)
    label, maps = answer(source, {"x": floats(4, 3)})
    same_label, tensor = answer(made.applied.path, {"x": floats(4, 3)})
    assert label.tolist() == same_label.tolist()
    classes = next(iter(labels.values()))  # maps come back sorted by key, the tensor in the order of the classes
    assert [[row[key] for key in classes] for row in maps] == tensor.tolist()
    assert planned_strip(open_model(made.applied.path).structure) is None


def test_zipmap_of_an_output_or_of_many_classes(tmp_path: Path) -> None:
    proto = onnx.load(str(classifier(tmp_path, classlabels_int64s=[1, 2, 3])))
    proto.graph.output.append(value("probabilities", FLOAT, None))
    source = builders.save(proto, tmp_path / "m.onnx")
    made = transform(source, tmp_path, StripZipMap((("out:map", 3),)))
    _, tensor, probabilities = answer(made.applied.path, {"x": floats(2, 3)})
    assert tensor.tolist() == probabilities.tolist()
    many = classifier(tmp_path, ("n", 600), classlabels_strings=[f"c{index}" for index in range(600)])
    strip = planned_strip(open_model(many).structure)
    assert strip == StripZipMap((("out:map", 0),))
    assert transform(many, tmp_path, strip).applied.signature.outputs[1].dims == (None, None)


def test_zipmaps_that_can_not_be_stripped_are_refused(tmp_path: Path) -> None:
    source = classifier(tmp_path, classlabels_int64s=[1, 2, 3])
    with pytest.raises(Refused, match="no output is named 'nope'"):
        transform(source, tmp_path, StripZipMap((("nope", 3),)))
    with pytest.raises(Refused, match="output 'label' isn't made by a ZipMap"):
        transform(source, tmp_path, StripZipMap((("label", 3),)))
    with pytest.raises(Refused, match="'zip' has 3 classes, not 4"):
        transform(source, tmp_path, StripZipMap((("out:map", 4),)))
    with pytest.raises(Refused, match="of one row"):
        transform(classifier(tmp_path, (3,), classlabels_int64s=[1, 2, 3]), tmp_path, StripZipMap((("out:map", 3),)))
    assert planned_strip(open_model(builders.relu(tmp_path / "m.onnx")).structure) is None


def test_steps_print() -> None:
    assert Clean().step().title == "Cleaning"
    assert StripZipMap((("p", 0), ("q", 2))).step().settings == (("p", "? classes"), ("q", "2 classes"))
