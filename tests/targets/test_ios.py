"""The iOS room without any runtime: coverage, plans, refusals, names, and the surface of the stand-in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.errors import Refused
from packager.golden_synth import synthesise
from packager.graph import ValueType
from packager.host import this_host
from packager.model import open_model
from packager.room import Plan, PlanRequest, Reach, kind_named, reach_of
from packager.targets.ios import toolchain
from packager.targets.ios.coverage import MAX_SIZE, Coverage, coverage_of, inside, types_of
from packager.targets.ios.mlpackage import deployment
from packager.targets.ios.names import KEYWORDS, alike, identifiers, module_name
from packager.targets.ios.operators import TAKEN
from packager.targets.ios.options import Options
from packager.targets.ios.toolchain import Toolchain
from tests.builders import BOOL, FLOAT, INT64, STRING, model, save, value

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "targets/ios/standin/Sources/OnnxRuntimeBindings"


DOCUMENTED = """
Add Argmax AveragePool Cast Clip Concat Conv ConvTranspose DepthToSpace Div Elu Erf Exp Gelu Gemm GlobalAveragePool
GlobalMaxPool GridSample GroupNormalization InstanceNormalization LayerNormalization LeakyRelu MatMul Max MaxPool Mul
PRelu Pow Reciprocal ReduceMax ReduceMean ReduceSum Relu Reshape Resize Round Shape Sigmoid Slice Softmax Softplus Split
Sqrt Squeeze Sub Tanh Transpose Unsqueeze
"""
"""Operators of ``coreml_supported_mlprogram_ops.md`` in the wheel of the pinned release."""


def planned(proto: onnx.ModelProto, folder: Path, **options: object) -> Plan:
    kind = kind_named("ios")
    opened = open_model(save(proto, folder / "m.onnx"))
    made: Plan = kind.load().plan(
        PlanRequest(
            target="phone", kind="ios", name="ranker", version="1.0.0", model=opened, goldens=synthesise(opened),
            precision="fp32", shapes=(), options=Options(**options), facts=kind.facts,
        )
    )  # fmt: skip
    return made


def covered(
    nodes: list[onnx.NodeProto], shapes: dict[str, list[int | str | None]], constants=(), **options
) -> Coverage:
    """Coverage of nodes whose values have these shapes, all float32 unless a constant says otherwise."""
    made = model(nodes, [], [], constants)
    data = made.SerializeToString()
    from packager.graph import read_structure

    structure = read_structure(data, len(data))
    types = {name: ValueType("tensor", "float32", tuple(dims)) for name, dims in shapes.items()}
    return coverage_of(structure, types_of(structure) | types, **options)


def why(coverage: Coverage) -> list[list[str]]:
    return [[reason.cause for reason in node.reasons] for node in coverage.nodes]


def test_operators_are_those_that_the_runtime_documents():
    """The table of the pinned release, kept here; newer wheels document all of it and more."""
    documented = set(DOCUMENTED.split())
    assert set(TAKEN) == documented - {"Argmax"} | {"ArgMax"}
    table = Path(onnxruntime.__file__).parent / "tools/mobile_helpers/coreml_supported_mlprogram_ops.md"
    assert documented <= set(re.findall(r"^\|ai\.onnx:(\w+)\|", table.read_text(), re.MULTILINE))


def test_a_chain_of_taken_nodes_is_one_partition():
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])]
    found = covered(nodes, {"x": [1, 3], "a": [1, 3], "y": [1, 3]})
    assert (found.taken, len(found.nodes), found.partitions, found.share) == (2, 2, 1, 1.0)


def test_a_node_left_to_the_cpu_cuts_what_hangs_on_it_and_nothing_else():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Det", ["a"], ["b"], name="det"),
        helper.make_node("Tanh", ["b"], ["c"]),
        helper.make_node("Sigmoid", ["a"], ["d"]),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    shapes: dict[str, list[int | str | None]] = {name: [2, 2] for name in "xabcdy"}
    found = covered(nodes, shapes)
    assert (found.taken, found.partitions) == (4, 2)
    assert why(found) == [[], ["operator"], [], [], []]
    assert found.left() == ["1 Det: the provider has no Det"]


@pytest.mark.parametrize(
    ("dims", "cause"),
    [
        (["n", 3], "dynamic shape"),
        ([None, 3], "dynamic shape"),
        ([1, 1, 1, 1, 1, 3], "rank"),
        ([1, MAX_SIZE + 1], "dimension"),
        ([0, 3], "empty"),
    ],
)
def test_shapes_that_core_ml_does_not_take(dims: list[int | str | None], cause: str):
    found = covered([helper.make_node("Relu", ["x"], ["y"])], {"x": dims, "y": [1]})
    assert why(found) == [[cause]]
    assert found.pinned == (1 if cause == "dynamic shape" else 0)


def test_a_free_dim_is_taken_where_the_provider_may():
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    assert covered(nodes, {"x": ["n", 3], "y": ["n", 3]}, static=False).taken == 1


@pytest.mark.parametrize(
    ("node", "dims", "cause"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"]), [1, 3, 4, 4, 4], "settings"),
        (helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2]), [1, 3, 4], "settings"),
        (helper.make_node("Gemm", ["x", "computed"], ["y"]), [2, 2], "settings"),
        (helper.make_node("Gemm", ["x", "w"], ["y"], alpha=2.0), [2, 2], "settings"),
        (helper.make_node("Reshape", ["x", "computed"], ["y"]), [2, 2], "settings"),
        (helper.make_node("Resize", ["x", "", "w"], ["y"], mode="cubic"), [1, 1, 2, 2], "settings"),
        (helper.make_node("Custom", ["x"], ["y"], domain="acme"), [2, 2], "operator"),
    ],
)
def test_settings_that_core_ml_does_not_take(node: onnx.NodeProto, dims: list[int], cause: str):
    weights = [numpy_helper.from_array(np.ones((2, 2), np.float32), "w")]
    shapes: dict[str, list[int | str | None]] = {"x": [*dims], "computed": [2, 2], "y": [1]}
    assert why(covered([node], shapes, weights)) == [[cause]]


def test_whole_numbers_run_on_the_cpu():
    nodes = [helper.make_node("Add", ["i", "i"], ["y"])]
    made = model(nodes, [value("i", INT64, [2])], [value("y", INT64, [2])])
    data = made.SerializeToString()
    from packager.graph import read_structure

    structure = read_structure(data, len(data))
    assert why(coverage_of(structure, types_of(structure))) == [["dtype"]]


def test_names_become_swift():
    names = ["class", "self", "a-b", "1x", "名前", "a b", "a_b", "aB", "???", "URL", "init", "tensors", "Type", "x.1"]
    made = identifiers(names, "input")
    assert made == [
        "class_", "self_", "aB", "_1x", "名前", "aB_2", "aB_3", "aB_4", "input9", "url", "init_", "tensors_", "type",
        "x1",
    ]  # fmt: skip
    assert not set(made) & KEYWORDS and len(set(made)) == len(names)


def test_a_number_behind_a_name_never_meets_another():
    assert identifiers(["a", "a ", "a_2", "A"], "input") == ["a", "a_2", "a2", "a_3"]


@pytest.mark.parametrize(
    ("name", "module"),
    [("rapid_orientation-v2", "RapidOrientationV2"), ("8bit", "Model8bit"), ("tensor", "TensorNet"), ("+", "Model")],
)
def test_modules_have_names_of_their_own(name: str, module: str):
    assert module_name(name) == module


def test_names_that_swift_takes_for_equal_are_found():
    assert alike(["é", "e\u0301", "e"]) == [("é", "e\u0301")]


def test_such_a_model_is_refused(tmp_path: Path):
    proto = model([helper.make_node("Add", ["é", "e\u0301"], ["y"])], [value("é"), value("e\u0301")], [value("y")])
    with pytest.raises(Refused, match="the same text to Swift"):
        planned(proto, tmp_path)


@pytest.mark.parametrize("dtype", ["FLOAT16", "DOUBLE", "INT16", "BFLOAT16"])
def test_dtypes_without_a_swift_tensor_are_refused_by_name(dtype: str, tmp_path: Path):
    code = getattr(TensorProto, dtype)
    proto = model([helper.make_node("Identity", ["x"], ["y"])], [value("x", code)], [value("y", code)])
    with pytest.raises(Refused, match=r"input 'x' is .*ORTTensorElementDataType") as caught:
        planned(proto, tmp_path)
    assert "Cast" in (caught.value.hint or "")


def test_dtypes_with_a_swift_tensor_are_taken(tmp_path: Path):
    for dtype in (FLOAT, INT64, BOOL, STRING):
        nodes = [helper.make_node("Identity", ["x"], ["y"])]
        planned(model(nodes, [value("x", dtype, [])], [value("y", dtype, [])]), tmp_path)


def test_a_free_batch_is_told_with_its_cost_and_the_line_to_add(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    proto = model(nodes, [value("x", shape=["batch", None])], [value("y", shape=["batch", None])])
    (note,) = [note for note in planned(proto, tmp_path).notes if "shapes =" in note]
    assert "would take 2 nodes instead of 0" in note
    assert re.search(r'under \[targets\.phone\]: shapes = \{ batch = \d+, "x:1" = \d+ \}$', note)


def test_what_is_inside_a_branch_stays_with_the_node_that_holds_it(tmp_path: Path):
    branches = [
        helper.make_graph([helper.make_node(operator, ["x"], [f"{operator}_y"], name=f"in {operator}")], operator, [],
                          [value(f"{operator}_y", FLOAT, [3])])
        for operator in ("Relu", "Exp")
    ]  # fmt: skip
    which = helper.make_node("If", ["c"], ["y"], name="which", then_branch=branches[0], else_branch=branches[1])
    proto = model([which], [value("x", FLOAT, [3]), value("c", BOOL, [])], [value("y", FLOAT, [3])])
    structure = open_model(save(proto, tmp_path / "m.onnx")).structure
    assert sorted((node.node, node.state, node.reason) for node in inside(structure)) == [
        ("Exp 'in Exp'", "fallback", "it is inside If 'which', which stays on the CPU"),
        ("Relu 'in Relu'", "fallback", "it is inside If 'which', which stays on the CPU"),
    ]


def test_min_coverage_is_a_gate_that_names_the_nodes(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["h"], name="act"), helper.make_node("Det", ["h"], ["y"], name="det")]
    proto = model(nodes, [value("x", shape=[2, 2])], [value("y", shape=[])])
    del proto.graph.value_info[:]
    proto.graph.value_info.append(value("h", shape=[2, 2]))
    assert "Core ML will take 1 of 2 nodes in 1 partition" in planned(proto, tmp_path, min_coverage=0.5).notes
    with pytest.raises(
        Refused, match=r"(?s)part of 0\.50; min_coverage asks for 0\.9.*Det 'det': the provider has no Det"
    ):
        planned(proto, tmp_path, min_coverage=0.9)


def test_provider_options_are_the_manifests():
    made = Options(compute_units="CPUAndGPU", static_shapes=False, low_precision_accumulation=True).provider()
    assert made["MLComputeUnits"] == "CPUAndGPU" and made["RequireStaticInputShapes"] == "0"
    assert made["AllowLowPrecisionAccumulationOnGPU"] == "1" and made["ModelFormat"] == "MLProgram"
    known = set(re.findall(r'"(\w+)": \[', (STANDIN / "Session.swift").read_text()))
    assert set(made) <= known


@pytest.mark.parametrize(("given", "kept"), [("15", "15.1"), ("15.1", "15.1"), ("17.0", "17.0")])
def test_deployment_targets(given: str, kept: str):
    assert Options(deployment_target=given).deployment_target == kept
    assert deployment("26.0") == "iOS18" and deployment("15.1") == "iOS15"


@pytest.mark.parametrize("given", ["14.0", "15.0", "x", "17.0.1"])
def test_deployment_targets_that_make_no_sense(given: str):
    with pytest.raises(ValueError, match=r"15\.1"):
        Options(deployment_target=given)


def swift_root(folder: Path) -> Path:
    """What looks like a Debian root with Swift in it."""
    for path in ("usr/libexec/swift/bin/swift", toolchain.HEADER):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="not required: Swift is run on Linux only")
def test_a_toolchain_is_one_that_can_be_entered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A root that isn't there, is forbidden to enter, or is switched off is none: the model file is run instead."""
    root = swift_root(tmp_path / "root")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    entered: list[bool] = [True, False]
    monkeypatch.setattr(toolchain, "_enters", lambda found: entered.pop(0))
    monkeypatch.setenv("PACKAGER_SWIFT", str(root))
    assert toolchain.find_toolchain() == toolchain.Toolchain(root)
    assert toolchain.find_toolchain() is None
    monkeypatch.setenv("PACKAGER_SWIFT", str(tmp_path / "absent"))
    assert toolchain.find_toolchain() is None
    monkeypatch.setenv("PACKAGER_SWIFT", "")
    assert toolchain.find_toolchain() is None and entered == []


def test_a_root_without_a_system_in_it_can_not_be_entered(tmp_path: Path):
    assert toolchain._enters(toolchain.Toolchain(swift_root(tmp_path / "root"))) is False


SYMBOLS = {
    # objectivec/include/ort_env.h, ort_enums.h, ort_session.h, ort_value.h of ONNX Runtime, as Swift imports them
    "func ORTVersion() -> String!",
    "class ORTEnv",
    "init(loggingLevel: ORTLoggingLevel) throws",
    "class ORTSession",
    "init(env: ORTEnv, modelPath path: String, sessionOptions: ORTSessionOptions?) throws",
    "func run(withInputs inputs: [String: ORTValue], outputNames: Set<String>, runOptions: ORTRunOptions?) throws"
    " -> [String: ORTValue]",
    "class ORTSessionOptions",
    "class ORTRunOptions",
    "init() throws",
    "func appendExecutionProvider(_ providerName: String, providerOptions: [String: String]) throws",
    "class ORTValue",
    "init(tensorData: NSMutableData, elementType: ORTTensorElementDataType, shape: [NSNumber]) throws",
    "init(tensorStringData: [String], shape: [NSNumber]) throws",
    "func tensorTypeAndShapeInfo() throws -> ORTTensorTypeAndShapeInfo",
    "func tensorData() throws -> NSMutableData",
    "func tensorStringData() throws -> [String]",
    "class ORTTensorTypeAndShapeInfo",
    "let elementType: ORTTensorElementDataType",
    "let shape: [NSNumber]",
    "enum ORTLoggingLevel: Int32",
    "enum ORTTensorElementDataType: Int32",
}


def test_the_stand_in_has_the_real_surface_and_no_more():
    text = "".join(path.read_text() for path in sorted(STANDIN.glob("*.swift")))
    found = set()
    for match in re.finditer(r"public (?:final )?((?:[^{\n(]|\([^)]*\))*)", text):
        found.add(re.sub(r"\( | \)", lambda each: each[0].strip(), " ".join(match[1].split())))
    assert found == SYMBOLS


def test_enums_have_the_real_cases_in_the_real_order():
    text = (STANDIN / "Enums.swift").read_text()
    assert "case verbose, info, warning, error, fatal" in text
    assert "case undefined, float, int8, uInt8, int32, uInt32, int64, uInt64, string, bool\n" in text


def test_generated_code_uses_nothing_of_the_runtime_beyond_that_surface():
    library = (ROOT / "templates/ios/library/Session.swift").read_text()
    used = set(re.findall(r"\bORT\w+", library))
    assert used and used <= set(re.findall(r"\bORT\w+", " ".join(SYMBOLS)))


def test_what_verification_reaches_here_is_swift_or_the_model_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packager.targets.ios.toolchain.find_toolchain", lambda: Toolchain(None))
    assert reach_of(kind_named("ios"), this_host()) == Reach("emulated")
    monkeypatch.setattr("packager.targets.ios.toolchain.find_toolchain", lambda: None)
    assert reach_of(kind_named("ios"), this_host()) == Reach(
        "proxy", "no Swift toolchain is here: make swift-toolchain"
    )
