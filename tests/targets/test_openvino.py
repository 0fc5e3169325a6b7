"""OpenVINO: what converts gives the ONNX answers under the ONNX names, and what doesn't is refused by node name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.bundle import seal
from packager.errors import BuildError, Objection, Refused, VerificationError
from packager.goldens import GoldenSet
from packager.model import open_model
from packager.render import render
from packager.room import Plan, PlanRequest, Stage, kind_named
from packager.targets import openvino as room
from packager.targets.openvino import infer
from tests.builders import BOOL, FLOAT, INT32, INT64, STRING, model, relu, save, value

KIND = kind_named("openvino")
HARD_NAMES = ["a/b:c.d", "space and 'quote\"", "line\nend", "名前", "a,b\\<&>;"]
NONE = GoldenSet(())


def plan_of(path: Path, shapes: Mapping[str, int] | None = None, precision: str = "fp32", **options: object) -> Plan:
    request = PlanRequest(
        target="openvino", kind="openvino", name="m", version="1", model=open_model(path), goldens=NONE,
        precision=precision, shapes=tuple((shapes or {}).items()), options=room.Options(**options), facts=KIND.facts,
    )  # fmt: skip
    made: Plan = room.plan(request)
    return made


@dataclass(frozen=True)
class Built:
    folder: Path
    plan: Plan

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with room.runner(self.folder) as runner:
            outputs: dict[str, np.ndarray] = runner.run(feeds)
        return outputs


def bundle(path: Path, shapes: Mapping[str, int] | None = None, precision: str = "fp32", **options: object) -> Built:
    plan = plan_of(path, shapes, precision, **options)
    folder = path.with_suffix("").with_name(f"{path.stem}-{precision}-bundle")
    folder.mkdir()
    room.build(plan, Stage(folder, path, NONE))
    seal(folder, plan, {}, KIND.facts.roles)
    return Built(folder, plan)


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> onnx.NodeProto:
    attributes.setdefault("name", f"the_{operator}")
    return helper.make_node(operator, inputs, outputs, **attributes)


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def expected(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime gives without optimisation."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def assert_same(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        if array.dtype.kind in "fV":
            np.testing.assert_allclose(got[name].astype(np.float64), array.astype(np.float64), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(got[name], array)


def child(code: str, *arguments: object, home: Path | None = None) -> str:
    """Run Python code in a fresh process; gives its stdout."""
    import os

    environment = dict(os.environ) | ({"HOME": str(home), "USERPROFILE": str(home)} if home else {})
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bundle_holds_the_model_its_weights_and_the_loader_as_it_was_executed(tmp_path: Path) -> None:
    built = bundle(relu(tmp_path / "m.onnx"))
    assert {file.name for file in built.folder.iterdir()} == {
        "bundle.json", "feeds.py", "infer.py", "model.bin", "model.xml",
    }  # fmt: skip
    own = Path(infer.__file__).read_text(encoding="utf-8")
    assert (built.folder / "infer.py").read_text(encoding="utf-8") == own.replace("packager.feeds", "feeds")
    roles = {entry["path"]: entry["role"] for entry in json.loads((built.folder / "bundle.json").read_text())["files"]}
    assert roles == {"model.xml": "model", "model.bin": "weights", "infer.py": "loader", "feeds.py": "loader"}


def test_runner_says_what_executed(tmp_path: Path) -> None:
    with room.runner(bundle(relu(tmp_path / "m.onnx")).folder) as runner:
        assert runner.info.name == "OpenVINO"
        assert runner.info.version.startswith("2026.")
        assert (runner.info.device, runner.info.level, runner.info.reason) == ("CPU", "runtime", "")
        assert runner.info.details == (("inference_precision", "f32"), ("dynamic_quantization", "off"))


def test_dynamic_quantization_is_off_unless_asked_for(corpus: Path, tmp_path: Path) -> None:
    """On a real text encoder with int8 weights OpenVINO's own default is off by a hundredth of the largest output."""
    path = Path(shutil.copy(corpus / "text_encoder.onnx", tmp_path))
    ids = np.array([[101, 7592, 2088, 102]], np.int64)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    wanted = expected(path, feeds)["last_hidden_state"]
    exact = infer.Model(bundle(path).folder)
    got = exact.run(feeds)["last_hidden_state"]
    assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert int(exact._compiled.get_property(infer.GROUP_SIZE)) == 0
    quick = infer.Model(bundle(path, precision="fp16", dynamic_quantization=True).folder)
    assert int(quick._compiled.get_property(infer.GROUP_SIZE)) > 0
    assert quick.info["dynamic_quantization"] == "on"


@pytest.mark.parametrize("name", HARD_NAMES)
def test_names_survive_exactly(tmp_path: Path, name: str) -> None:
    other = name + "!"
    path = save(model([node("Neg", [name], [other])], [value(name)], [value(other)]), tmp_path / "m.onnx")
    x = np.array([[1, -2, 3]], np.float32)
    assert_same(bundle(path).run({name: x}), {other: -x})


LOST = {
    "single-input Max": [node("Max", ["x"], ["y"])],
    "single-input Sum into Relu": [node("Sum", ["x"], ["m"]), node("Relu", ["m"], ["y"])],
    "Dropout": [node("Dropout", ["x"], ["y"])],
    "two Dropouts": [node("Dropout", ["x"], ["m"]), node("Dropout", ["m"], ["y"], name="second")],
    "Identity": [node("Identity", ["x"], ["y"])],
    "Cast to the same": [node("Cast", ["x"], ["y"], to=FLOAT)],
    "sequence of one": [
        node("SequenceConstruct", ["x", "x"], ["s"]),
        node("SequenceAt", ["s", "zero"], ["y"]),
    ],
}


@pytest.mark.parametrize("nodes", LOST.values(), ids=LOST.keys())
def test_an_input_that_is_only_passed_on_keeps_its_name(tmp_path: Path, nodes: list[onnx.NodeProto]) -> None:
    zero = constant("zero", np.array(0, np.int64))
    path = save(model(nodes, [value("x")], [value("y")], [zero]), tmp_path / "m.onnx")
    x = np.array([[1, 2, 3]], np.float32)
    assert_same(bundle(path).run({"x": x}), {"y": x})


def test_outputs_that_are_the_same_tensor_keep_a_name_each(tmp_path: Path) -> None:
    nodes = [
        node("Dropout", ["x"], ["a"]), node("Dropout", ["a"], ["b"], name="second"), node("Max", ["x"], ["c"]),
        node("Relu", ["x"], ["r"]), node("Max", ["r"], ["s"], name="max"),
    ]  # fmt: skip
    outputs = [value(name) for name in "abcrs"]
    x = np.array([[-1, 2, 3]], np.float32)
    got = bundle(save(model(nodes, [value("x")], outputs), tmp_path / "m.onnx")).run({"x": x})
    r = np.maximum(x, 0)
    assert_same(got, {"a": x, "b": x, "c": x, "r": r, "s": r})


def test_outputs_that_are_constants_and_unused_inputs_stay(tmp_path: Path) -> None:
    weights = np.array([1, 2], np.float32)
    proto = model(
        [node("Relu", ["x"], ["y"])],
        [value("unused", INT64, ["k"]), value("x")],
        [value("c", shape=[2]), value("y")],
        [constant("c", weights)],
    )
    x = np.array([[1, 2, 3]], np.float32)
    got = bundle(save(proto, tmp_path / "m.onnx")).run({"x": x, "unused": np.zeros(0, np.int64)})
    assert_same(got, {"c": weights, "y": x})


@pytest.mark.parametrize(
    ("made", "other", "array"),
    [
        (node("CastLike", ["x", "o"], ["y"]), value("o", FLOAT, ["k"]), np.zeros(2, np.float32)),
        (node("Dropout", ["x", "o"], ["y"]), value("o", FLOAT, []), np.array(0.5, np.float32)),
        (node("ReduceSum", ["x", "o"], ["y"], noop_with_empty_axes=1), value("o", INT64, [0]), np.zeros(0, np.int64)),
    ],
)
def test_an_input_whose_values_do_not_matter_stays_an_input(
    tmp_path: Path, made: onnx.NodeProto, other: onnx.ValueInfoProto, array: np.ndarray
) -> None:
    path = save(model([made], [value("x"), other], [value("y")], opset=18), tmp_path / "m.onnx")
    x = np.array([[1, 2, 3]], np.float32)
    assert_same(bundle(path).run({"x": x, "o": array}), {"y": x})


def test_an_input_that_decides_the_output_is_never_dropped_silently(tmp_path: Path) -> None:
    proto = model(
        [node("DFT", ["x", "", "axis"], ["y"])],
        [value("x", shape=[1, 4, 4, 1]), value("axis", INT64, [])],
        [value("y", shape=[1, 4, 4, 2])],
        opset=20,
    )
    with pytest.raises(Refused, match="node DFT 'the_DFT': OpenVINO ignores its axis 'axis'"):
        plan_of(save(proto, tmp_path / "m.onnx"))


def test_an_input_lost_in_conversion_is_an_error_that_names_its_reader(tmp_path: Path) -> None:
    from packager.targets.openvino.restore import restore_names

    path = save(
        model([node("Add", ["x", "b"], ["y"])], [value("x"), value("b")], [value("y")]), tmp_path / "whole.onnx"
    )
    less = relu(tmp_path / "less.onnx")
    whole = open_model(path)
    with pytest.raises(BuildError, match="drops input 'b', which decides what Add 'the_Add' gives"):
        restore_names(infer.load_openvino().Core().read_model(less), whole.structure, whole.signature)


@pytest.mark.parametrize(
    ("dtype", "numpy_name"),
    [
        (1, "float32"), (11, "float64"), (10, "float16"), (3, "int8"), (5, "int16"), (6, "int32"), (7, "int64"),
        (2, "uint8"), (4, "uint16"), (12, "uint32"), (13, "uint64"), (9, "bool"), (16, "bfloat16"),
    ],
)  # fmt: skip
def test_every_dtype_goes_in_and_comes_out(tmp_path: Path, dtype: int, numpy_name: str) -> None:
    import ml_dtypes

    numpy_type = np.dtype(ml_dtypes.bfloat16 if numpy_name == "bfloat16" else numpy_name)
    proto = model([node("Concat", ["x", "x"], ["y"], axis=0)], [value("x", dtype, ["n"])], [value("y", dtype, ["m"])])
    built = bundle(save(proto, tmp_path / "m.onnx"))
    for x in (np.array([0, 1, 100, 3], np.float32).astype(numpy_type), np.zeros(0, numpy_type)):
        assert_same(built.run({"x": x}), {"y": np.concatenate([x, x])})


def test_scalars_empty_and_strided_arrays(tmp_path: Path) -> None:
    scalar = bundle(relu(tmp_path / "scalar.onnx", shape=[]))
    assert_same(scalar.run({"x": np.array(-3, np.float32)}), {"y": np.array(0, np.float32)})
    built = bundle(relu(tmp_path / "m.onnx"))
    assert_same(built.run({"x": np.zeros((0, 3), np.float32)}), {"y": np.zeros((0, 3), np.float32)})
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[:2]
    assert_same(built.run({"x": strided}), {"y": strided})
    assert_same(built.run({"x": strided.astype(">f4")}), {"y": strided})


def test_outputs_are_copies(tmp_path: Path) -> None:
    with room.runner(bundle(relu(tmp_path / "m.onnx")).folder) as runner:
        first = runner.run({"x": np.full((1, 3), 1, np.float32)})["y"]
        runner.run({"x": np.full((1, 3), 7, np.float32)})
    np.testing.assert_array_equal(first, np.full((1, 3), 1, np.float32))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "no array is given for input 'x'"),
        ({"x": np.zeros((1, 3), np.float32), "z": np.zeros(1)}, "the model has no input 'z'"),
        ({"x": np.zeros((1, 3))}, "input 'x' takes float32.n, 3., but the array is float64"),
        ({"x": np.zeros((1, 4), np.float32)}, r"takes float32.n, 3., but the array has shape \[1, 4\]"),
        ({"x": np.zeros(3, np.float32)}, r"but the array has shape \[3\]"),
    ],
)
def test_wrong_feeds_are_told_in_plain_words(tmp_path: Path, feeds: dict[str, np.ndarray], message: str) -> None:
    built = bundle(relu(tmp_path / "m.onnx"))
    with pytest.raises(VerificationError, match=message):
        built.run(feeds)


@pytest.mark.parametrize(
    ("dtype", "array", "message"),
    [
        (INT64, np.array([2**40], np.int64), "int64 values beyond 32 bits"),
        (13, np.array([2**63], np.uint64), "uint64 values beyond 32 bits"),
        (11, np.array([np.inf]), "float64 values beyond float32"),
    ],
)
def test_values_openvino_would_cut_are_refused(tmp_path: Path, dtype: int, array: np.ndarray, message: str) -> None:
    proto = model([node("Identity", ["x"], ["y"])], [value("x", dtype, ["n"])], [value("y", dtype, ["n"])])
    built = bundle(save(proto, tmp_path / "m.onnx"))
    with pytest.raises(VerificationError, match=message):
        built.run({"x": array})
    assert any("infer.py refuses inputs beyond that (x, y)" in note for note in built.plan.notes)


def test_pinned_shapes_reach_plan_and_model(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", shape=["batch", None])], [value("y", shape=["batch", "k"])])
    built = bundle(save(proto, tmp_path / "m.onnx"), {"batch": 2, "x:1": 5})
    assert built.plan.signature.inputs[0].dims == (2, 5)
    assert built.plan.signature.outputs[0].dims == (2, "k")
    saved = infer.load_openvino().Core().read_model(built.folder / "model.xml")
    assert list(saved.input("x").get_partial_shape().to_shape()) == [2, 5]
    with pytest.raises(VerificationError, match=r"takes float32\[2, 5\]"):
        built.run({"x": np.zeros((3, 5), np.float32)})


def test_pinning_repairs_a_branch_whose_rank_is_unknown(tmp_path: Path) -> None:
    def branch(name: str, axes: list[int]) -> onnx.GraphProto:
        nodes = [node("Squeeze", ["x", f"{name}_axes"], [f"{name}_s"]), node("Neg", [f"{name}_s"], [name])]
        return helper.make_graph(
            nodes, name, [], [value(name, shape=None)], [constant(f"{name}_axes", np.array(axes, np.int64))]
        )

    nodes = [
        node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "zero"], ["first"]),
        node("Equal", ["first", "one"], ["is_one"]),
        node("If", ["is_one"], ["r"], then_branch=branch("a", [0]), else_branch=branch("b", [1])),
        node("Conv", ["r", "w"], ["y"]),
    ]  # fmt: skip
    weights = [
        constant("zero", np.array(0, np.int64)), constant("one", np.array(1, np.int64)),
        constant("w", np.ones((1, 2, 1), np.float32)),
    ]  # fmt: skip
    proto = model(nodes, [value("x", shape=["b", 1, 2, "t"])], [value("y", shape=None)], weights)
    path = save(proto, tmp_path / "m.onnx")
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    assert_same(bundle(path, {"b": 1, "t": 3}).run({"x": x}), expected(path, {"x": x}))


@pytest.mark.parametrize(
    ("shapes", "message", "hint"),
    [
        ({"batsh": 1}, "no input has a free dim 'batsh'", "did you mean 'batch'"),
        ({"x:0": 1}, "no input has a free dim 'x:0'", "free dims: batch, x:1"),
        ({"batch": 0}, "'batch' is pinned to 0", "at least 1"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(tmp_path: Path, shapes: dict[str, int], message: str, hint: str) -> None:
    path = relu(tmp_path / "m.onnx", shape=["batch", None])
    with pytest.raises(Refused, match=message) as caught:
        plan_of(path, shapes)
    assert hint in (caught.value.hint or "")


def test_newer_versions_are_refused(tmp_path: Path) -> None:
    new = save(model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")], opset=28), tmp_path / "opset.onnx")
    with pytest.raises(Refused, match=r"opset 28 of ai\.onnx, OpenVINO reads up to 27"):
        plan_of(new)
    newer = save(model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")], ir=15), tmp_path / "ir.onnx")
    with pytest.raises(Refused, match="IR version 15, OpenVINO reads up to 14"):
        plan_of(newer)


def test_weights_are_halved_only_when_asked(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", shape=["n", 64])],
        [value("y", shape=["n", 64])],
        [constant("w", weights)],
    )
    path = save(proto, tmp_path / "m.onnx")
    full, half = bundle(path), bundle(path, precision="fp16")
    assert (full.folder / "model.bin").stat().st_size == weights.nbytes
    assert (half.folder / "model.bin").stat().st_size < 0.51 * weights.nbytes
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    assert_same(full.run({"x": x}), {"y": x @ weights})
    error = np.abs(half.run({"x": x})["y"] - x @ weights.astype(np.float16).astype(np.float32)).max()
    assert error < 1e-4


def test_inference_precision_is_read_by_the_loader(tmp_path: Path) -> None:
    built = bundle(relu(tmp_path / "m.onnx"), inference_precision="bf16")
    assert infer.read_description(built.folder).options["inference_precision"] == "bf16"
    assert infer.Model(built.folder, inference_precision="f32").info["inference_precision"] == "f32"


REDUCTIONS = [
    (operator, axes, keepdims)
    for operator in ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp")
    for axes, keepdims in (([1], 1), ([1], 0), ([-1, 0], 0))
]


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize(("operator", "axes", "keepdims"), REDUCTIONS)
def test_reductions_over_attribute_axes(
    tmp_path: Path, operator: str, axes: list[int], keepdims: int, opset: int
) -> None:
    proto = model(
        [node(operator, ["x"], ["y"], axes=axes, keepdims=keepdims)],
        [value("x", shape=[2, 3, 4])],
        [value("y", shape=None)],
        opset=opset,
        ir=7,
    )
    path = save(proto, tmp_path / "m.onnx")
    built = bundle(path)
    assert ("drops" in built.plan.steps[0].title) == (opset >= 13)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    if operator == "ReduceLogSum":
        x += 1
    assert_same(built.run({"x": x}), expected(path, {"x": x}))


@pytest.mark.parametrize("opset", [7, 11, 12, 13])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -2])
def test_softmax_over_several_axes(tmp_path: Path, axis: int | None, opset: int) -> None:
    if axis is not None and axis < 0 and opset < 11:
        axis += 3
    attributes = {} if axis is None else {"axis": axis}
    proto = model(
        [node("Softmax", ["x"], ["y"], **attributes)], [value("x", shape=["a", "b", "c"])], [value("y", shape=None)],
        opset=opset, ir=6,
    )  # fmt: skip
    path = save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    built = bundle(path)
    assert_same(built.run({"x": x}), expected(path, {"x": x}))
    rewritten = opset in (11, 12) and axis not in (-1, 2)
    assert ("Softmax 'the_Softmax'" in str(built.plan.steps)) == rewritten


def test_rewriting_reaches_into_branches_and_keeps_names_apart(tmp_path: Path) -> None:
    def branch(name: str, operator: str) -> onnx.GraphProto:
        made = node(operator, ["x"], [name], axes=[1], keepdims=0, name=operator)
        return helper.make_graph([made], name, [], [value(name, shape=["n"])])

    nodes = [
        node("If", ["c"], ["y"], then_branch=branch("a", "ReduceL1"), else_branch=branch("b", "ReduceL2")),
        node("ReduceL1", ["x"], ["z"], axes=[0], keepdims=0),
        node("Neg", ["z"], ["z/axes"]),
    ]
    outputs = [value("y", shape=["n"]), value("z", shape=[3]), value("z/axes", shape=[3])]
    path = save(model(nodes, [value("c", BOOL, []), value("x")], outputs, opset=13), tmp_path / "m.onnx")
    built = bundle(path)
    assert built.plan.steps[0].settings == (("nodes", "ReduceL1 'ReduceL1', ReduceL1 'the_ReduceL1'"),)
    for condition in (True, False):
        feeds = {"c": np.array(condition), "x": np.array([[1, -2, 3], [-4, 5, 6]], np.float32)}
        assert_same(built.run(feeds), expected(path, feeds))


def test_batch_first_recurrence_equals_the_time_first_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for operator, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        names = ["y", "h", "c"][: 3 if operator == "LSTM" else 2]
        weights = [
            constant("w", rng.standard_normal((2, gates * 3, 2)).astype(np.float32)),
            constant("r", rng.standard_normal((2, gates * 3, 3)).astype(np.float32)),
        ]
        x = rng.standard_normal((5, 4, 2)).astype(np.float32)  # [sequence, batch, size]
        h = rng.standard_normal((2, 4, 3)).astype(np.float32)  # [directions, batch, size]
        attributes = {"hidden_size": 3, "direction": "bidirectional"}
        results = []
        for layout in (0, 1):
            own = attributes | ({"layout": 1} if layout else {})
            made = node(operator, ["x", "w", "r", "", "", "start"], names, **own)
            inputs = [value("x", shape=["a", "b", 2]), value("start", shape=["d", "e", 3])]
            proto = model([made], inputs, [value(name, shape=None) for name in names], weights)
            path = save(proto, tmp_path / f"{operator}{layout}.onnx")
            turned = {"x": x, "start": h} if not layout else {"x": x.swapaxes(0, 1), "start": h.swapaxes(0, 1)}
            results.append(bundle(path).run(turned))
            if not layout:
                assert_same(results[0], expected(path, turned))
        first, second = results
        wanted = {name: first[name].swapaxes(0, 1) for name in names} | {"y": first["y"].transpose(2, 0, 1, 3)}
        assert_same(second, {name: np.ascontiguousarray(wanted[name]) for name in names})


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    body = [node("Abs", ["a"], ["m"]), node("ReduceL1", ["m"], ["b"], axes=[1], keepdims=0)]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    call = helper.make_node("F", ["x"], ["y"], domain="local", name="call")
    proto = model([call], [value("x")], [value("y", shape=["n"])], domains=[("local", 1)])
    proto.functions.append(function)
    path = save(proto, tmp_path / "m.onnx")
    built = bundle(path)
    assert built.plan.steps[0].settings == (("nodes", "local.F"),)
    x = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
    assert_same(built.run({"x": x}), expected(path, {"x": x}))


@pytest.mark.parametrize("rewritten", [False, True])
def test_external_data_is_read_where_it_is(tmp_path: Path, rewritten: bool) -> None:
    weights = np.arange(6000, dtype=np.float32).reshape(3, 2000)
    nodes = [node("MatMul", ["x", "w"], ["m"])]
    nodes.append(node("ReduceL1", ["m"], ["y"], axes=[1]) if rewritten else node("Relu", ["m"], ["y"]))
    proto = model(nodes, [value("x")], [value("y", shape=None)], [constant("w", weights)], opset=13)
    path = tmp_path / "名前" / "m.onnx"
    path.parent.mkdir()
    onnx.external_data_helper.convert_model_to_external_data(proto, location="w.bin", size_threshold=0)
    onnx.save(proto, path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    x = np.array([[1, 2, 3]], np.float32)
    got = bundle(path).run({"x": x})
    np.testing.assert_allclose(got["y"], expected(path, {"x": x})["y"], rtol=1e-5)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()} == before


def test_integer_division_beyond_float32_is_never_a_quiet_mistake(tmp_path: Path) -> None:
    proto = model(
        [node("Div", ["a", "b"], ["y"], name="ratio")],
        [value("a", INT32, ["n"]), value("b", INT32, ["n"])],
        [value("y", INT32, ["n"])],
    )
    built = bundle(save(proto, tmp_path / "m.onnx"))
    a = np.array([777777777, 1111111111, 1900000000, -1999999999], np.int32)
    got = built.run({"a": a, "b": np.full(4, 11, np.int32)})["y"]
    wanted = np.array([70707070, 101010101, 172727272, -181818181], np.int32)
    assert not np.array_equal(got, wanted), "OpenVINO divides exactly now: take Div out of the known hazards"
    assert any("known hazard" in note and "Div 'ratio'" in note for note in built.plan.notes)


NOTED = {
    "aligns corners": node(
        "Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode="align_corners"
    ),
    "past keys": node("Attention", ["x", "x", "x", "x", "x", "x"], ["y"], is_causal=1),
    "four axes or more": node("Tile", ["x", "x"], ["y"]),
    "antialias": node("Resize", ["x", "", "scales"], ["y"], mode="linear", antialias=1),
    "keep_aspect_ratio_policy": node("Resize", ["x", "", "", "sizes"], ["y"], keep_aspect_ratio_policy="not_larger"),
    "ceil_mode": node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], ceil_mode=1),
    "equal values": node("TopK", ["x", "k"], ["y", "i"]),
}


@pytest.mark.parametrize("what", NOTED)
def test_hazards_that_depend_on_values_are_noted_by_node(tmp_path: Path, what: str) -> None:
    extra = [
        constant("scales", np.array([1, 1, 0.5, 0.5], np.float32)), constant("sizes", np.array([1, 1, 2, 3])),
        constant("k", np.array([2])),
    ]  # fmt: skip
    proto = model([NOTED[what]], [value("x", shape=[1, 1, 4, 4])], [value("y", shape=None)], extra, opset=23)
    plan = plan_of(save(proto, tmp_path / "m.onnx"))
    assert [note for note in plan.notes if what in note and f"'the_{NOTED[what].op_type}'" in note]


def lstm(**attributes: object) -> list[onnx.NodeProto]:
    return [node("LSTM", ["x", "w", "r", "", "", "", "", "p"], ["y"], hidden_size=2, name="cell", **attributes)]


REFUSED = {
    "peephole": (lstm(), "LSTM 'cell': OpenVINO ignores its peephole weights 'p'"),
    "input_forget": (lstm(input_forget=1), "LSTM 'cell': OpenVINO ignores its input_forget"),
    "activation": (
        lstm(activations=["HardSigmoid", "Tanh", "Tanh"]), "LSTM 'cell': .* no activation HardSigmoid",
    ),
    "exclude_outside": (
        [node("Resize", ["x", "", "w"], ["y"], mode="cubic", exclude_outside=1)],
        "Resize 'the_Resize': .* exclude_outside",
    ),
    "tf_crop_and_resize": (
        [node("Resize", ["x", "r", "w"], ["y"], coordinate_transformation_mode="tf_crop_and_resize")],
        "has no coordinate_transformation_mode 'tf_crop_and_resize'",
    ),
    "wrap": ([node("Pad", ["x", "w"], ["y"], mode="wrap")], "no padding mode 'wrap'"),
    "domain": (
        [node("Scaler", ["x"], ["y"], domain="ai.onnx.ml")],
        "ai.onnx.ml.Scaler 'the_Scaler': OpenVINO converts no operator of domain ai.onnx.ml",
    ),
    "window": (
        [node("Attention", ["x", "x", "x"], ["y"], left_window_size=4)],
        "Attention 'the_Attention': .* left_window_size",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_always_wrong_is_refused_by_node(tmp_path: Path, nodes: list[onnx.NodeProto], message: str) -> None:
    ones = np.ones((1, 8, 2), np.float32)
    extra = [constant("w", ones), constant("r", ones), constant("p", np.ones((1, 6), np.float32))]
    proto = model(nodes, [value("x", shape=[1, 1, 2])], [value("y", shape=None)], extra, opset=25, ir=10)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    with pytest.raises(Refused, match=message) as caught:
        plan_of(save(proto, tmp_path / "m.onnx"))
    assert caught.value.hint


@pytest.mark.parametrize("operator", ["Unsqueeze", "ReduceLogSum"])
def test_a_rank_that_an_input_decides_is_refused_by_node(tmp_path: Path, operator: str) -> None:
    attributes = {"keepdims": 0} if operator == "ReduceLogSum" else {}
    nodes = [node(operator, ["x", "axes"], ["y"], **attributes)]
    inputs = [value("x", shape=[2, 3]), value("axes", INT64, [1])]
    path = save(model(nodes, inputs, [value("y", shape=None)], opset=18), tmp_path / "m.onnx")
    with pytest.raises(Refused, match=f"{operator} 'the_{operator}': the rank of its output depends on .* 'axes'"):
        plan_of(path)
    held = model(nodes, inputs[:1], [value("y", shape=None)], [constant("axes", np.array([0]))], opset=18)
    path = save(held, tmp_path / "held.onnx")
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    assert_same(bundle(path).run({"x": x}), expected(path, {"x": x}))


def test_peephole_weights_of_zero_pass(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    extra = [
        constant("w", rng.standard_normal((1, 8, 2)).astype(np.float32)),
        constant("r", rng.standard_normal((1, 8, 2)).astype(np.float32)),
        constant("p", np.zeros((1, 6), np.float32)),
    ]
    path = save(model(lstm(), [value("x", shape=[3, 1, 2])], [value("y", shape=None)], extra), tmp_path / "m.onnx")
    x = rng.standard_normal((3, 1, 2)).astype(np.float32)
    assert_same(bundle(path).run({"x": x}), expected(path, {"x": x}))


def test_every_offending_node_is_listed(tmp_path: Path) -> None:
    nodes = [node("Det", ["x"], ["a"], name="first"), node("CumProd", ["x", "k"], ["b"], name="")]
    outputs = [value("a", shape=[]), value("b", shape=[3, 3])]
    proto = model(nodes, [value("x", shape=[3, 3]), value("k", INT64, [])], outputs, opset=26, ir=10)
    with pytest.raises(Refused) as caught:
        plan_of(save(proto, tmp_path / "m.onnx"))
    assert "can't take 2 nodes" in caught.value.message
    assert "node Det 'first'" in caught.value.message
    assert "node CumProd (unnamed, makes 'b')" in caught.value.message


@pytest.mark.parametrize("operator", sorted(KIND.facts.limits.refused_operators))
def test_each_operator_listed_as_refused_has_no_rule_in_openvino(operator: str) -> None:
    schema = onnx.defs.get_schema(operator, 28, "")
    inputs = [f"i{position}" for position in range(max(schema.min_input, 1 if schema.max_input else 0))]
    outputs = [f"o{position}" for position in range(max(schema.min_output, 1))]
    proto = model(
        [helper.make_node(operator, inputs, outputs)],
        [value(name) for name in inputs],
        [value(name) for name in outputs],
        opset=schema.since_version,
        ir=10,
    )
    with pytest.raises(RuntimeError, match=f"No conversion rule found for operations: {operator}"):
        infer.load_openvino().Core().read_model(proto.SerializeToString())


def test_signatures_openvino_cannot_carry_are_refused(tmp_path: Path) -> None:
    text = model([node("Identity", ["x"], ["y"])], [value("x", STRING, ["n"])], [value("y", STRING, ["n"])])
    with pytest.raises(Refused, match=r"input 'x' holds strings.*\n.*output 'y' holds strings"):
        plan_of(save(text, tmp_path / "text.onnx"))
    numbers = model([node("Identity", ["x"], ["y"])], [value("x", 14, ["n"])], [value("y", 14, ["n"])])
    with pytest.raises(Refused, match="input 'x' is complex64"):
        plan_of(save(numbers, tmp_path / "complex.onnx"))
    kind = helper.make_tensor_type_proto(FLOAT, ["n", 3])
    output = helper.make_value_info("s", helper.make_sequence_type_proto(kind))
    many = model([node("SequenceConstruct", ["x", "x"], ["s"])], [value("x")], [output])
    with pytest.raises(Refused, match="output 's' is a sequence"):
        plan_of(save(many, tmp_path / "sequence.onnx"))


def test_an_operator_only_the_reader_of_memory_expands(tmp_path: Path) -> None:
    loss = node("NegativeLogLikelihoodLoss", ["x", "t"], ["y"], reduction="mean", ignore_index=1)
    inputs = [value("x", shape=[3, 5, 2]), value("t", INT64, [3, 2])]
    path = save(model([loss], inputs, [value("y", shape=[])]), tmp_path / "m.onnx")
    feeds = {
        "x": np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.float32),
        "t": np.array([[0, 1], [2, 3], [4, 1]]),
    }
    assert_same(bundle(path).run(feeds), expected(path, feeds))


def test_an_operator_unknown_to_openvino_fails_the_build_by_node_name(tmp_path: Path) -> None:
    nodes = [node("Foo", ["x"], ["m"], domain="com.example", name="mine"), node("Relu", ["m"], ["y"])]
    path = save(model(nodes, [value("x")], [value("y")], domains=[("com.example", 1)]), tmp_path / "m.onnx")
    with pytest.raises(BuildError) as caught:
        bundle(path)
    assert caught.value.message == (
        "OpenVINO can't convert the model:\n  node com.example.Foo 'mine': OpenVINO has no conversion rule for it"
    )
    assert caught.value.nodes == (Objection("com.example.Foo 'mine'", "OpenVINO has no conversion rule for it"),)


def test_a_node_openvino_rejects_is_named_without_its_source_places(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "s"], ["m"]), node("Conv", ["m", "w"], ["y"], name="conv/1")]
    inputs = [value("x", shape=["n"]), value("s", INT64, ["rank"])]
    weights = [constant("w", np.ones((1, 1, 3, 3), np.float32))]
    with pytest.raises(BuildError) as caught:
        bundle(save(model(nodes, inputs, [value("y", shape=None)], weights), tmp_path / "m.onnx"))
    assert "node Conv 'conv/1': The input data tensor's rank has to be known" in caught.value.message
    assert not any(part in caught.value.message for part in (".cpp", "src/", "Check '", "FrontEnd"))
    assert "`shapes` in the manifest (n, rank)" in (caught.value.hint or "")


def test_a_declared_shape_that_is_wrong_fails_the_build(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", shape=["n", 3])], [value("y", shape=["n", 4])])
    with pytest.raises(BuildError, match=r"output 'y' is \[n, 4\] in the model and \[\?, 3\] in what OpenVINO made"):
        bundle(save(proto, tmp_path / "m.onnx"))


def test_saved_files_with_other_names_are_noticed(tmp_path: Path) -> None:
    from packager.targets.openvino.convert import check_saved

    built = bundle(relu(tmp_path / "m.onnx"))
    other = replace(built.plan.signature, inputs=(replace(built.plan.signature.inputs[0], name="z"),))
    with pytest.raises(BuildError, match=r"its inputs are \[\['x'\]\], the model's are \['z'\]"):
        check_saved(built.folder, other)


def test_damaged_bundles_are_told_in_plain_words(tmp_path: Path) -> None:
    built = bundle(relu(tmp_path / "m.onnx"))
    (built.folder / "model.bin").unlink()
    with pytest.raises(VerificationError, match=r"model\.bin is missing"), room.runner(built.folder):
        pass
    (built.folder / "bundle.json").write_text("{}")
    with pytest.raises(VerificationError, match=r"bundle\.json is malformed"), room.runner(built.folder):
        pass


PLAN_AND_BUILD = """
import sys, pathlib
from tests.targets import test_openvino as t
t.bundle(pathlib.Path(sys.argv[1]), precision="fp16")
"""


def test_two_processes_make_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "w"], ["m"]), node("ReduceL1", ["m"], ["y"], axes=[1]), node("Max", ["x"], ["z"]),
    ]  # fmt: skip
    weights = [constant("w", rng.standard_normal((3, 40)).astype(np.float32))]
    proto = model(nodes, [value("x")], [value("y", shape=None), value("z")], weights, opset=13)
    bundles = []
    for name in ("one", "two"):
        path = tmp_path / name / "m.onnx"
        path.parent.mkdir()
        save(proto, path)
        child(PLAN_AND_BUILD, path)
        bundles.append(path.parent / "m-fp16-bundle")
    for file in ("model.xml", "model.bin", "infer.py", "feeds.py", "bundle.json"):
        assert (bundles[0] / file).read_bytes() == (bundles[1] / file).read_bytes()


WATCHED = """
import sys, pathlib
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith("socket.") else None)
import numpy
from tests.targets import test_openvino as t
built = t.bundle(pathlib.Path(sys.argv[1]))
built.run({"x": numpy.ones((1, 3), "float32")})
assert "openvino" in sys.modules and sys.modules["openvino_telemetry"] is None
import threading, time
time.sleep(0.5)
print([event for event in seen if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto")])
print(len([thread for thread in threading.enumerate() if thread is not threading.main_thread()]))
"""


def test_nothing_is_reported_over_the_network_and_home_stays_empty(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert child(WATCHED, relu(tmp_path / "m.onnx"), home=home).split() == ["[]", "0"]
    assert list(home.iterdir()) == []


ALONE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("packager", "onnx", "onnxruntime", "ml_dtypes", "pydantic", "openvino_telemetry"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import numpy, infer
print(infer.Model(sys.argv[1]).run({"x": numpy.array([[1, -2, 3]], "float32")})["y"].tolist())
"""


def test_loader_needs_only_numpy_and_openvino(tmp_path: Path) -> None:
    built = bundle(relu(tmp_path / "m.onnx"))
    assert child(ALONE, built.folder).strip() == "[[1.0, 0.0, 3.0]]"


def test_loader_runs_from_a_shell(tmp_path: Path) -> None:
    built = bundle(relu(tmp_path / "m.onnx"))
    np.savez(tmp_path / "in.npz", x=np.zeros((2, 3), np.float32))
    script = built.folder / "infer.py"
    done = subprocess.run([sys.executable, script, tmp_path / "in.npz"], capture_output=True, text=True, check=True)
    assert done.stdout == "y: float32[2, 3]\n"
    np.savez(tmp_path / "bad.npz", x=np.zeros((2, 3)))
    bad = subprocess.run([sys.executable, script, tmp_path / "bad.npz"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stderr) == (1, "error: input 'x' takes float32[n, 3], but the array is float64\n")


def test_planning_imports_no_sdk() -> None:
    code = "import sys; import packager.targets.openvino; print({'openvino', 'onnx'} & set(sys.modules))"
    assert child(code).strip() == "set()"


def test_readme_carries_names_into_both_languages(tmp_path: Path) -> None:
    name = 'a"b\n名'
    proto = model([node("Relu", [name], ["y"])], [value(name, shape=["n", 3])], [value("y", shape=["n", 3])])
    plan = plan_of(save(proto, tmp_path / "m.onnx"), precision="fp16", inference_precision="bf16")
    text = render(
        KIND, "openvino/README.md.j2", name="m", version="1", target="t", kind="openvino", precision="fp16",
        signature=plan.signature, plan=plan, runtime=None,
    )  # fmt: skip
    assert '"a\\"b\\n\\u540d": np.zeros([1, 3], "float32")' in text
    assert r'request.set_tensor("a\"b\012\345\220\215", input0);' in text
    assert "ov::hint::inference_precision(ov::element::bf16)" in text
    assert "Weights are stored as fp16" in text


def test_types_of_onnx_that_room_and_loader_name_agree() -> None:
    from packager.targets.openvino.restore import element_type

    assert set(infer.ELEMENT_TYPES) == set(KIND.facts.limits.dtypes)
    assert {dtype: element_type(dtype) for dtype in infer.ELEMENT_TYPES} == infer.ELEMENT_TYPES
    assert TensorProto.DataType.Name(TensorProto.BFLOAT16) == "BFLOAT16"
