"""The TensorRT room: what its plan refuses and says, and what the real TensorRT for RTX builds from small models.

No GPU is needed: TensorRT for RTX parses and builds without one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.errors import BuildError, Refused
from packager.golden_synth import synthesise
from packager.goldens import GoldenCase, GoldenSet
from packager.host import this_host
from packager.model import open_model
from packager.room import Plan, PlanRequest, Reach, Stage, kind_named, reach_of
from packager.targets import tensorrt
from packager.targets.tensorrt import fit
from packager.targets.tensorrt.building import binding_differences, command_line
from packager.targets.tensorrt.options import Options
from packager.targets.tensorrt.rules import refusals, rewrites
from tests.builders import BOOL, FLOAT, INT32, INT64, model, save, value
from tests.transform_models import array

KIND = kind_named("tensorrt")


def request(path: Path, goldens: GoldenSet | None = None, **options: object) -> PlanRequest:
    opened = open_model(path)
    return PlanRequest(
        target="tensorrt", kind="tensorrt", name="m", version="1", model=opened, goldens=goldens or synthesise(opened),
        precision="fp32", shapes=(), options=Options.model_validate(options), facts=KIND.facts,
    )  # fmt: skip


def cases(*inputs: dict[str, np.ndarray]) -> GoldenSet:
    return GoldenSet(tuple(GoldenCase(str(number), one) for number, one in enumerate(inputs)))


def saved(folder: Path, nodes, inputs=None, outputs=None, initializers=(), **options) -> Path:
    inputs = [value("x")] if inputs is None else inputs
    outputs = outputs or [value(nodes[-1].output[0], FLOAT, None)]
    return save(model(nodes, inputs, outputs, initializers, **options), folder / "m.onnx")


def built(path: Path, folder: Path, goldens: GoldenSet | None = None, **options: object) -> tuple[Plan, Path]:
    asked = request(path, goldens, **options)
    plan = tensorrt.plan(asked)
    folder.mkdir(exist_ok=True)
    tensorrt.build(plan, Stage(folder, path, asked.goldens))
    return plan, folder


def sidecar(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / fit.SIDECAR).read_text())
    return found


def quantised(zero: object) -> list[onnx.NodeProto]:
    more = [] if zero is None else ["z"]
    return [
        helper.make_node("QuantizeLinear", ["x", "s", *more], ["q"], name="quant/1:0"),
        helper.make_node("DequantizeLinear", ["q", "s", *more], ["y"], name="dequant"),
    ]


# What is refused: what TensorRT would misread


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (np.uint8(0), "is uint8, which TensorRT reads as int8"),
        (np.uint8(128), "is uint8, which TensorRT reads as int8"),
        (np.int8(3), "isn't zero"),
        (None, "without a zero point it makes uint8"),
    ],
)
def test_quantisation_that_isnt_symmetric_int8_is_refused_by_node(tmp_path: Path, zero, words: str):
    constants = [array("s", np.float32(0.1)), *([] if zero is None else [array("z", zero)])]
    with pytest.raises(Refused, match=words) as caught:
        tensorrt.plan(request(saved(tmp_path, quantised(zero), None, None, constants)))
    assert "QuantizeLinear 'quant/1:0'" in caught.value.message


def test_symmetric_int8_is_taken(tmp_path: Path):
    constants = [array("s", np.float32(0.1)), array("z", np.int8(0))]
    path = saved(tmp_path, quantised(np.int8(0)), None, [value("y")], constants)
    _, folder = built(path, tmp_path / "out")
    assert (folder / fit.ENGINE).stat().st_size > 1000


def test_every_node_of_a_foreign_domain_is_refused_in_one_message(tmp_path: Path):
    """TensorRT takes a node of any domain for ONNX's operator of the same name."""
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], name="mine/relu:0", domain="my.ops"),
        helper.make_node("Gelu", ["h"], ["y"], name="gelu", domain="com.microsoft"),
    ]
    path = saved(tmp_path, nodes, domains=[("my.ops", 1), ("com.microsoft", 1)])
    asked = request(path, cases({"x": np.zeros((1, 3), np.float32)}, {"x": np.zeros((2, 3), np.float32)}))
    with pytest.raises(Refused, match="ignores domains") as caught:
        tensorrt.plan(asked)
    assert "my.ops.Relu 'mine/relu:0'" in caught.value.message and "com.microsoft.Gelu 'gelu'" in caught.value.message


def test_the_parser_indeed_takes_a_foreign_relu_for_its_own(tmp_path: Path):
    """The reason for the rule; if this fails, a release has learned to look at domains."""
    import tensorrt_rtx_bindings as trt

    from packager.targets.tensorrt.compile import _logger

    node = helper.make_node("Relu", ["x"], ["y"], domain="my.ops")
    path = saved(tmp_path, [node], [value("x", FLOAT, [3])], [value("y", FLOAT, [3])], domains=[("my.ops", 1)])
    network = trt.Builder(_logger(trt)).create_network(1)
    assert trt.OnnxParser(network, _logger(trt)).parse(path.read_bytes())
    assert network.num_layers == 1 and network.get_layer(0).type == trt.LayerType.ACTIVATION


def resize(transformation: str, mode: str = "nearest", rounding: str = "floor") -> onnx.NodeProto:
    return helper.make_node(
        "Resize", ["x", "roi", "scales"], ["y"], name="up", mode=mode, nearest_mode=rounding,
        coordinate_transformation_mode=transformation,
    )  # fmt: skip


def resized(folder: Path, node: onnx.NodeProto, scales: Sequence[float] = (1, 1, 2.5, 2.5)) -> Path:
    constants = [array("roi", np.zeros(0, np.float32)), array("scales", np.array(scales, np.float32))]
    inputs = [value("x", FLOAT, ["n", 1, 4, 5])]
    return saved(folder, [node], inputs, [value("y", FLOAT, None)], constants, opset=11)


def test_an_interpolating_resize_half_a_pixel_off_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="Resize 'up': TensorRT reads tf_half_pixel_for_nn as half_pixel"):
        tensorrt.plan(request(resized(tmp_path, resize("tf_half_pixel_for_nn", "linear"))))


@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 2.5, 1.5), (1, 1, 0.5, 0.75)])
def test_a_nearest_resize_with_floor_is_rewritten_exactly(tmp_path: Path, scales: Sequence[float]):
    path = resized(tmp_path, resize("tf_half_pixel_for_nn"), scales)
    plan, folder = built(path, tmp_path / "out")
    assert any("half_pixel" in step.title for step in plan.steps)
    feeds = {"x": np.arange(40, dtype=np.float32).reshape(2, 1, 4, 5)}
    before, after = (ort.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, feeds)
                     for each in (path, folder / "model.onnx"))  # fmt: skip
    assert before[0].tolist() == after[0].tolist()


def branches(condition: str, *more: onnx.NodeProto) -> list[onnx.NodeProto]:
    then = helper.make_graph([helper.make_node("Identity", ["x"], ["t"])], "t", [], [value("t", FLOAT, [2, 3])])
    other = helper.make_graph(
        [helper.make_node("Unsqueeze", ["x", "zero"], ["e"])], "e", [], [value("e", FLOAT, [1, 2, 3])]
    )
    return [*more, helper.make_node("If", [condition], ["y"], name="which", then_branch=then, else_branch=other)]


def test_branches_of_different_rank_are_refused_where_values_decide(tmp_path: Path):
    inputs = [value("x", FLOAT, [2, 3]), value("c", BOOL, [])]
    path = saved(tmp_path, branches("c"), inputs, [value("y", FLOAT, None)], [array("zero", np.array([0]))])
    (found,) = refusals(open_model(path).structure)
    assert found.node == "If 'which'" and "ranks 3 and 2" in found.reason


def test_branches_that_sizes_decide_are_left_to_tensorrt(tmp_path: Path):
    nodes = [helper.make_node("Size", ["x"], ["n"]), helper.make_node("Greater", ["n", "six"], ["c"])]
    constants = [array("zero", np.array([0])), array("six", np.array(6))]
    path = saved(tmp_path, branches("c", *nodes), [value("x", FLOAT, [2, 3])], [value("y", FLOAT, None)], constants)
    assert refusals(open_model(path).structure) == []


def test_every_unsupported_operator_is_named_with_the_parsers_reason(tmp_path: Path):
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="det/0:1"),
        helper.make_node("Relu", ["x"], ["h"], name="relu"),
        helper.make_node("MatMulInteger", ["a", "a"], ["m"], name="mmi"),
    ]
    inputs, outputs = [value("x", FLOAT, [3, 3]), value("a", TensorProto.INT8, [3, 3])], [
        value("d", FLOAT, []), value("h", FLOAT, [3, 3]), value("m", INT32, [3, 3])]  # fmt: skip
    with pytest.raises(Refused) as caught:
        built(saved(tmp_path, nodes, inputs, outputs), tmp_path / "out")
    assert caught.value.message.count("\n") == 2
    assert "node Det 'det/0:1': " in caught.value.message and "node MatMulInteger 'mmi': " in caught.value.message
    assert "Relu" not in caught.value.message
    assert [each.node for each in caught.value.nodes] == ["Det 'det/0:1'", "MatMulInteger 'mmi'"]


def test_an_unnamed_node_is_found_by_its_place(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Det", ["h"], ["y"])]
    with pytest.raises(Refused, match="node Det 'number 1'") as caught:
        built(saved(tmp_path, nodes, [value("x", FLOAT, [3, 3])], [value("y", FLOAT, [])]), tmp_path / "out")
    assert [each.node for each in caught.value.nodes] == ["Det (unnamed, makes 'y')"]


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.INT16, TensorProto.STRING])
def test_a_signature_tensorrt_hasnt_is_refused_by_name(tmp_path: Path, dtype: int):
    node = helper.make_node("Identity", ["in:0"], ["out/0"])
    path = saved(tmp_path, [node], [value("in:0", dtype, [2])], [value("out/0", dtype, [2])])
    with pytest.raises(Refused) as caught:
        tensorrt.plan(request(path))
    assert "input 'in:0'" in caught.value.message and "output 'out/0'" in caught.value.message


def test_a_newer_operator_set_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match=r"opset 25 of ai\.onnx, TensorRT's ONNX parser reads up to 24"):
        tensorrt.plan(request(saved(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], opset=25)))


# Profiles


def relu(folder: Path, shape: Sequence[int | str | None]) -> Path:
    node = helper.make_node("Relu", ["in/0:1"], ["out"])
    return saved(folder, [node], [value("in/0:1", FLOAT, shape)], [value("out", FLOAT, shape)])


def of_sizes(*shapes: tuple[int, ...]) -> GoldenSet:
    return cases(*({"in/0:1": np.zeros(shape, np.float32)} for shape in shapes))


def test_ranges_come_from_goldens_where_the_manifest_has_none(tmp_path: Path):
    goldens = of_sizes((2, 3), (7, 3), (4, 3))
    plan = tensorrt.plan(request(relu(tmp_path, ["n", 3]), goldens))
    (step,) = [step for step in plan.steps if step.title == "Giving the profile"]
    assert step.settings == (("n", "2 to 4 to 7"),)
    assert any("only sizes that golden cases show of n" in note for note in plan.notes)


def test_a_missing_range_prints_the_lines_to_add_and_they_are_taken(tmp_path: Path):
    path, goldens = relu(tmp_path, ["n", None]), of_sizes((1, 48), (2, 48))
    with pytest.raises(Refused, match=r"no range is known for 'in/0:1:1'") as caught:
        tensorrt.plan(request(path, goldens))
    assert caught.value.hint is not None
    lines = '[targets.tensorrt.profiles]\n  "in/0:1:1" = [48, 48, 48]'
    assert lines in caught.value.hint
    plan = tensorrt.plan(request(path, goldens, profiles={"in/0:1:1": [48, 48, 48]}))
    (step,) = [step for step in plan.steps if step.title == "Giving the profile"]
    assert dict(step.settings) == {"n": "1 to 2 to 2", "in/0:1:1": "48 to 48 to 48"}


def test_what_is_wrong_with_ranges_is_told_all_at_once(tmp_path: Path):
    asked = request(relu(tmp_path, ["n", "width"]), of_sizes((1, 4), (2, 8)),
                    profiles={"m": [1, 2, 3], "n": [3, 2, 1], "width": [1, 2, 4]})  # fmt: skip
    with pytest.raises(Refused) as caught:
        tensorrt.plan(asked)
    for words in ("'m' is no free dim", "isn't least, usual and greatest", "leaves out golden cases of size [8]"):
        assert words in caught.value.message


def reshape(folder: Path) -> Path:
    node = helper.make_node("Reshape", ["x", "shape/0:1"], ["y"])
    inputs = [value("x", FLOAT, ["n", 4]), value("shape/0:1", INT64, [2])]
    return saved(folder, [node], inputs, [value("y", FLOAT, ["a", "b"])])


def test_a_shape_tensor_gets_a_range_of_values(tmp_path: Path):
    goldens = cases(*({"x": np.zeros((n, 4), np.float32), "shape/0:1": np.array([2 * n, 2])} for n in (1, 2)))
    path = reshape(tmp_path)
    with pytest.raises(Refused, match="decides shapes, and no range of its values is known") as caught:
        built(path, tmp_path / "out", goldens)
    assert caught.value.hint is not None and '[targets.tensorrt.values]\n  "shape/0:1"' in caught.value.hint
    _, folder = built(path, tmp_path / "out2", goldens, values={"shape/0:1": [[2, 2], [4, 2], [4, 2]]})
    (binding,) = [each for each in sidecar(folder)["bindings"] if each["name"] == "shape/0:1"]
    assert binding["shape_tensor"] is True


def test_sizes_the_graph_cannot_have_are_tensorrts_to_refuse(tmp_path: Path):
    node = helper.make_node("Reshape", ["in/0:1", "c"], ["out"], name="cut")
    constants = [array("c", np.array([24, 2]))]
    path = saved(tmp_path, [node], [value("in/0:1", FLOAT, [1, "w"])], [value("out", FLOAT, [24, 2])], constants)
    with pytest.raises(BuildError, match="cut") as caught:
        built(path, tmp_path / "out", of_sizes((1, 48)), profiles={"w": [48, 64, 96]})
    assert caught.value.hint is not None and "profiles" in caught.value.hint


def test_dims_that_exporters_know_nothing_of_are_not_one_size(tmp_path: Path):
    """TensorRT takes dims of one name for one size; ``?`` is what some exporters write for any."""
    path = relu(tmp_path, ["?", "?"])
    goldens = of_sizes((1, 48), (2, 48))
    _, folder = built(path, tmp_path / "out", goldens, profiles={"in/0:1:1": [48, 48, 48]})
    (profile,) = sidecar(folder)["profiles"]
    assert profile["dims"] == ["in/0:1:0", "in/0:1:1"] and profile["shapes"] == [[1, 48], [2, 48], [2, 48]]


def test_goldens_with_two_sizes_of_one_name_are_refused(tmp_path: Path):
    node = helper.make_node("Concat", ["a", "b"], ["y"], axis=0)
    path = saved(tmp_path, [node], [value("a", FLOAT, ["n"]), value("b", FLOAT, ["n"])], [value("y", FLOAT, ["m"])])
    goldens = cases(*({"a": np.zeros(n, np.float32), "b": np.zeros(n + 1, np.float32)} for n in (1, 2)))
    with pytest.raises(Refused, match=r"'n' is \[1, 2\] in golden case '0'"):
        tensorrt.plan(request(path, goldens))


# What is built


def test_a_bundle_says_what_it_fits(tmp_path: Path):
    _, folder = built(relu(tmp_path, ["n", 3]), tmp_path / "out", compute_capabilities=["7.5", "8.9"], tf32=True)
    found = sidecar(folder)
    assert found["compute_capabilities"] == ["7.5", "8.9"] and found["later_too"] is False
    assert found["tf32"] is True and found["strongly_typed"] is True and found["precision"] == "fp32"
    assert found["library"] == "TensorRT for RTX" and found["version"].startswith("1.7.")
    assert found["systems"] == ["Linux", "Windows"] and found["recipe"] is False
    assert [(each["name"], each["dtype"], each["dims"]) for each in found["bindings"]] == [
        ("in/0:1", "float32", [-1, 3]), ("out", "float32", [-1, 3]),
    ]  # fmt: skip
    assert found["profiles"][0]["shapes"] == [[1, 3], [2, 3], [3, 3]]


def test_the_command_line_tool_gets_names_as_one_word_each(tmp_path: Path):
    _, folder = built(relu(tmp_path, ["n", 3]), tmp_path / "out", compute_capabilities=["8.6"])
    assert command_line(sidecar(folder)) == [
        "tensorrt_rtx", "--onnx=model.onnx", "--minShapes='in/0:1':1x3", "--optShapes='in/0:1':2x3",
        "--maxShapes='in/0:1':3x3", "--noTF32", "--computeCapabilities=8.6",
    ]  # fmt: skip
    assert "'--minShapes='\"'\"'in/0:1'\"'\"':1x3'" in (folder / "trtexec.sh").read_text()


WEIGHT = np.arange(-60, 60, dtype=np.int8).reshape(10, 12)


@pytest.mark.parametrize(
    ("scale", "opset", "operators"),
    [
        (np.linspace(0.1, 1, 12, dtype=np.float32).reshape(1, 12), 17, ["DequantizeLinear", "MatMul"]),
        (np.linspace(0.1, 1, 10, dtype=np.float32).reshape(10, 1), 17, ["DequantizeLinear", "MatMul"]),
        (np.float32(0.5), 17, ["DequantizeLinear", "MatMul"]),
        (np.linspace(0.1, 1, 120, dtype=np.float32).reshape(10, 12), 17, ["Cast", "Mul", "MatMul"]),
        (np.float32(0.5), 12, ["Cast", "Mul", "MatMul"]),
    ],
)
def test_weights_stored_as_int8_become_what_tensorrt_takes(tmp_path: Path, scale, opset: int, operators: list[str]):
    nodes = [
        helper.make_node("Cast", ["w"], ["wf"], to=FLOAT, name="unpack"),
        helper.make_node("Mul", ["wf", "scale"], ["ws"]),
        helper.make_node("MatMul", ["x", "ws"], ["y"]),
    ]
    constants = [array("w", WEIGHT), array("scale", scale)]
    path = saved(
        tmp_path, nodes, [value("x", FLOAT, ["n", 10])], [value("y", FLOAT, ["n", 12])], constants, opset=opset
    )
    assert rewrites(open_model(path).structure)
    _, folder = built(path, tmp_path / "out")
    made = onnx.load(folder / "model.onnx")
    assert [node.op_type for node in made.graph.node] == operators
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    before, after = (ort.InferenceSession(each, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
                     for each in (path, folder / "model.onnx"))  # fmt: skip
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_the_modes_of_grid_sample_are_read_as_onnx_means_them(tmp_path: Path, mode: str):
    node = helper.make_node("GridSample", ["x", "g"], ["y"], name="warp", mode=mode)
    inputs = [value("x", FLOAT, [1, 1, 4, 4]), value("g", FLOAT, [1, 2, 2, 2])]
    _, folder = built(saved(tmp_path, [node], inputs, [value("y", FLOAT, [1, 1, 2, 2])], opset=20), tmp_path / "out")
    assert sidecar(folder)["grid_sample"] == [mode]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64", "bool"])
@pytest.mark.parametrize("shape", [[], ["n", 2]])
def test_every_dtype_and_scalars_keep_their_bindings(tmp_path: Path, dtype: str, shape: list):
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Identity", ["x"], ["y"])
    plan, folder = built(
        saved(tmp_path, [node], [value("x", code, shape)], [value("y", code, shape)]), tmp_path / "out"
    )
    assert list(binding_differences(plan.signature, sidecar(folder)["bindings"])) == []
    assert {each["dtype"] for each in sidecar(folder)["bindings"]} == {dtype}


def test_a_network_of_another_signature_is_told_apart(tmp_path: Path):
    plan = tensorrt.plan(request(relu(tmp_path, ["n", 3])))
    bindings = [{"name": "in/0:1", "side": "input", "dtype": "float16", "dims": [-1, 4], "shape_tensor": False}]
    assert list(binding_differences(plan.signature, bindings)) == [
        "input 'in/0:1' is float16, not float32",
        "input 'in/0:1' has dims [-1, 4], not ['n', 3]",
        "output 'out' is gone",
    ]


def test_an_input_that_nothing_reads_stays(tmp_path: Path):
    node = helper.make_node("Relu", ["x"], ["y"])
    path = saved(tmp_path, [node], [value("x"), value("idle", FLOAT, [2])], [value("y")])
    _, folder = built(path, tmp_path / "out")
    assert [each["name"] for each in sidecar(folder)["bindings"]] == ["x", "idle", "y"]


def test_weights_outside_the_file_come_along(tmp_path: Path):
    weights = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", FLOAT, ["n", 64])],
                  [value("y", FLOAT, ["n", 64])], [weights])  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    _, folder = built(path, tmp_path / "out")
    assert (folder / fit.ENGINE).stat().st_size > 64 * 64 * 4
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {"x": np.ones((2, 64), np.float32)}
    assert session.run(None, feeds)[0].tolist() == feeds["x"].tolist()


def test_all_but_the_engine_is_the_same_twice(tmp_path: Path):
    path = relu(tmp_path, ["n", 3])
    one, other = (built(path, tmp_path / name)[1] for name in ("a", "b"))
    files = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert files == sorted(str(file.relative_to(other)) for file in other.rglob("*") if file.is_file())
    differing = [name for name in files if (one / name).read_bytes() != (other / name).read_bytes()]
    assert set(differing) <= {fit.ENGINE}
    plan = tensorrt.plan(request(path))
    assert any("model.engine isn't byte-reproducible" in note for note in plan.notes)


def test_pinned_shapes_need_no_profile(tmp_path: Path):
    asked = replace(request(relu(tmp_path, ["n", 3])), shapes=(("n", 2),))
    plan = tensorrt.plan(asked)
    assert not [step for step in plan.steps if step.title == "Giving the profile"]


def test_what_verification_reaches_here_is_the_engine_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch):
    gpu = fit.Machine("", "9.0", "Linux", "x86_64")
    bare = replace(gpu, lacking=("no CUDA device 0 is here",))
    monkeypatch.setattr("packager.targets.tensorrt.fit.look", lambda *_: gpu)
    assert reach_of(kind_named("tensorrt"), this_host()) == Reach("runtime")
    monkeypatch.setattr("packager.targets.tensorrt.fit.look", lambda *_: bare)
    found = reach_of(kind_named("tensorrt"), this_host())
    assert found.level == "structural" and "no CUDA device 0 is here" in found.reason


# What a model's dtypes ask of a GPU


def eighths(folder: Path, dtype: int) -> Path:
    """A product whose activations and weights are rounded to a dtype, which comes with the model."""
    attribute = {"output_dtype": dtype}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], **attribute),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("QuantizeLinear", ["w", "s"], ["r"], **attribute),
        helper.make_node("DequantizeLinear", ["r", "s"], ["e"]),
        helper.make_node("MatMul", ["d", "e"], ["y"]),
    ]
    constants = [array("s", np.float32(0.01)), array("w", np.ones((16, 16), np.float32))]
    inputs = [value("x", FLOAT, [4, 16])]
    return saved(folder, nodes, inputs, [value("y", FLOAT, [4, 16])], constants, opset=21, ir=10)


def test_an_fp8_engine_is_for_gpus_that_have_fp8(tmp_path: Path):
    plan, folder = built(eighths(tmp_path, TensorProto.FLOAT8E4M3FN), tmp_path / "out")
    facts = sidecar(folder)
    assert (facts["compute_capabilities"], facts["later_too"]) == (["8.9", "12.0"], True)
    assert ("compute capabilities", "8.9 and later") in [pair for step in plan.steps for pair in step.settings]


@pytest.mark.parametrize("older", ["7.5", "8.0", "8.6"])
def test_an_older_gpu_is_refused_for_fp8_before_building(tmp_path: Path, older: str):
    asked = request(eighths(tmp_path, TensorProto.FLOAT8E4M3FN), compute_capabilities=[older, "12.0"])
    with pytest.raises(Refused, match=rf"capability {older} have no float8e4m3fn; they have it from 8\.9 on"):
        tensorrt.plan(asked)


def test_int8_is_for_every_gpu(tmp_path: Path):
    plan = tensorrt.plan(request(eighths(tmp_path, TensorProto.INT8), compute_capabilities=["7.5"]))
    assert ("compute capabilities", "7.5") in [pair for step in plan.steps for pair in step.settings]


def test_the_builder_indeed_refuses_fp8_for_an_older_gpu(tmp_path: Path):
    """The reason for the rule, and that 8.9 is where it ends."""
    import tensorrt_rtx_bindings as trt

    from packager.targets.tensorrt.compile import Failed, compile_engine

    path = eighths(tmp_path, TensorProto.FLOAT8E4M3FN)
    wanted = {
        "builder": "rtx", "tf32": False, "compute_capabilities_named": True, "grid_sample": [], "profiles": [],
    }  # fmt: skip
    assert compile_engine(trt, path, wanted | {"compute_capabilities": ["8.9"]}).data
    with pytest.raises(Failed, match="HW-specific datatypes: fp8_e4m3"):
        compile_engine(trt, path, wanted | {"compute_capabilities": ["8.6"]})


def test_bfloat16_isnt_for_turing(tmp_path: Path):
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
        helper.make_node("Mul", ["h", "c"], ["m"]),
        helper.make_node("Cast", ["m"], ["y"], to=FLOAT),
    ]
    held = helper.make_tensor("c", TensorProto.BFLOAT16, [1], [2.0])
    path = saved(tmp_path, nodes, [value("x", FLOAT, [4])], [value("y", FLOAT, [4])], [held])
    one = {"x": np.ones(4, np.float32)}
    with pytest.raises(Refused, match=r"capability 7\.5 have no bfloat16; they have it from 8\.0 on"):
        tensorrt.plan(request(path, cases(one), compute_capabilities=["7.5"]))
