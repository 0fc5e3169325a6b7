"""The NPU room before anything is compiled: chips, options, what is refused by name, and QNN's account of nodes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from pydantic import ValidationError

from packager import manifest
from packager.errors import BuildError, ManifestError, Refused
from packager.goldens import GoldenSet
from packager.host import Host
from packager.model import open_model
from packager.room import Plan, PlanRequest, Reach, kind_named, reach_of
from packager.targets import npu as room
from packager.targets.npu import infer
from packager.targets.npu.chips import CHIPS, chip
from packager.targets.npu.coverage import TRACE, plain_reason, read_trace, refused_in
from packager.targets.npu.options import Options
from tests.builders import BOOL, FLOAT, model, relu, save, value

KIND = kind_named("npu")


def plan_of(path: Path, **options: object) -> Plan:
    request = PlanRequest(
        target="npu", kind="npu", name="m", version="1", model=open_model(path), goldens=GoldenSet(()),
        precision="int8-a16w8", shapes=(), options=Options.model_validate(options), facts=KIND.facts,
    )  # fmt: skip
    made: Plan = room.plan(request)
    return made


def test_a_chip_brings_its_architecture():
    assert Options().htp_arch == 75 and Options().soc_model is None
    assert Options(soc_model=52).htp_arch == 73
    assert Options(soc_model=69, htp_arch=79).htp_arch == 79
    assert Options.model_validate_json(Options(soc_model=39).model_dump_json()) == Options(soc_model=39)
    assert chip(39).name == "SA8295" and {each.arch for each in CHIPS.values()} <= {68, 69, 73, 75, 79, 81}


def test_a_chip_of_another_architecture_is_a_mistake():
    with pytest.raises(ValidationError, match=r"soc_model 57 \(SM8650\) has HTP v75, and htp_arch says 73"):
        Options(soc_model=57, htp_arch=73)
    with pytest.raises(ValidationError, match=r"soc_model 1 is no chip .* 52 \(SA8255\)"):
        Options(soc_model=1)


def written(folder: Path, target: str) -> Path:
    relu(folder / "m.onnx")
    file = folder / "packager.toml"
    file.write_text(f'[model]\npath = "m.onnx"\n[targets.npu]\n{target}\n')
    return file


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("htp_arch = 74", r"line 4: targets\.npu\.htp_arch: must be 68, 69, 73, 75, 79 or 81, not 74"),
        ("soc_model = 1", r"soc_model 1 is no chip that is known here; known are 30 \(SM8350\)"),
        ("soc_model = 57\nhtp_arch = 68", r"soc_model 57 \(SM8650\) has HTP v75, and htp_arch says 68"),
        ('performance = "fast"', r"performance: must be 'default', 'burst'"),
        ('precision = "fp16"', r"unknown precision `fp16`"),
    ],
)
def test_mistakes_of_the_manifest_have_their_line(tmp_path: Path, target: str, said: str):
    with pytest.raises(ManifestError, match=said):
        manifest.load(written(tmp_path, target))


def test_a_plan_says_what_is_compiled_and_for_what(tmp_path: Path):
    path = relu(tmp_path / "m.onnx", shape=[1])
    compiling, loaders = plan_of(path, soc_model=52, allow_fallback=True).steps
    assert dict(compiling.settings) == {
        "htp_arch": "73", "soc_model": "52 (SA8255)", "optimisation": "3", "nodes on the CPU": "allowed",
    }  # fmt: skip
    assert dict(loaders.settings) == {"languages": "Python, C++, Kotlin", "performance mode": "burst"}
    notes = " ".join(plan_of(path).notes)
    assert "HTP v75 only" in notes and "Qualcomm's own licence" in notes


def test_control_flow_is_refused_by_node(tmp_path: Path):
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"], name="inner")], "g", [], [value("a", FLOAT, [1])]
    )
    nodes = [helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch)]
    proto = model(nodes, [value("x", FLOAT, [1]), value("c", BOOL, [])], [value("y", FLOAT, [1])])
    with pytest.raises(Refused, match=r"node If 'choice': the NPU runs one straight graph"):
        plan_of(save(proto, tmp_path / "m.onnx"))


def test_a_gru_which_crashes_the_compiler_is_refused_by_node(tmp_path: Path):
    nodes = [helper.make_node("GRU", ["x", "w", "r"], ["y"], name="memory", hidden_size=2)]
    shapes = {"x": [1, 1, 3], "w": [1, 6, 3], "r": [1, 6, 2]}
    inputs = [value(name, FLOAT, dims) for name, dims in shapes.items()]
    path = save(model(nodes, inputs, [value("y", FLOAT, [1, 1, 1, 2])]), tmp_path / "m.onnx")
    with pytest.raises(Refused, match="node GRU 'memory': QNN takes it and then can't compile it"):
        plan_of(path)


def test_dtypes_the_npu_does_not_take_are_refused_by_tensor(tmp_path: Path):
    double = onnx.TensorProto.DOUBLE
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=double)]
    proto = model(nodes, [value("x", onnx.TensorProto.FLOAT16, [1])], [value("y", double, [1])])
    with pytest.raises(Refused) as caught:
        plan_of(save(proto, tmp_path / "m.onnx"))
    assert "input 'x' is float16" in caught.value.message and "output 'y' is float64" in caught.value.message
    constant = helper.make_node("Constant", [], ["y"], value=numpy_helper.from_array(np.float32(1)))
    with pytest.raises(Refused, match="the model has no inputs"):
        plan_of(save(model([constant], [], [value("y", FLOAT, [])]), tmp_path / "m.onnx"))


def test_a_machine_without_a_wheel_is_told():
    assert room.missing(Host("Linux", "x86_64", "", (), 1, "3.11")) == []
    (missing,) = room.missing(Host("Darwin", "arm64", "", (), 1, "3.11"))
    assert missing.what == "QNN for Darwin" and "Linux or Windows" in missing.how


def test_nodes_left_out_have_their_own_names_and_qnns_reason(tmp_path: Path):
    nodes = [helper.make_node("Celu", ["x"], ["h"], name="odd"), helper.make_node("Relu", ["h"], ["y"], name="act_2")]
    path = save(model(nodes, [value("x", FLOAT, [1])], [value("y", FLOAT, [1])]), tmp_path / "m.onnx")
    left = [
        {"node_name": "odd_token_31", "op_type": "Celu",
         "reason": "Operators of type `Celu` are not supported by QNN EP.Celu node `odd` will not be "
                   "assigned to QNN EP."},
        {"node_name": "act_2", "op_type": "Relu", "reason": ""},
        {"node_name": "made_by_the_optimiser", "op_type": "Transpose", "reason": "too\n large"},
    ]  # fmt: skip
    mapped = [{"dst_qnn_op_type": "Quantize"}, {"dst_qnn_op_type": "Conv2d"}, {"dst_qnn_op_type": "Conv2d"}]
    trace = {
        "unsupported_nodes": left,
        "subgraph_traces": [{"op_mappings": mapped}],
        "summary": {"total_onnx_nodes": 9},
    }
    (tmp_path / TRACE).write_text(json.dumps(trace))
    found = read_trace(tmp_path, open_model(path).structure)
    assert (found.nodes, found.graphs, found.on_npu) == (9, 1, (("Conv2d", 2), ("Quantize", 1)))
    assert [(node.node, node.operator, node.reason) for node in found.on_cpu] == [
        ("Celu 'odd'", "Celu", "Operators of type `Celu` are not supported by QNN EP"),
        ("Relu 'act_2'", "Relu", "QNN gives no reason"),
        ("Transpose 'made_by_the_optimiser'", "Transpose", "too large"),
    ]
    assert {node.state for node in found.on_cpu} == {"fallback"}
    told = found.document()
    assert told["schema"] == "packager.coverage/1" and told["states"] == {"supported": 6, "fallback": 3}
    assert told["left"] == [asdict(node) for node in found.on_cpu] and told["npu"] == {"Conv2d": 2, "Quantize": 1}


LOG = """2026 [V:onnxruntime:, qnn.cc:1713 Log] Validation PASSED for 1 nodes in OrtNodeUnit (QuantizeLinear) :
\tOperator type: QuantizeLinear Node name: x_QuantizeLinear Node index: 0

2026 [V:onnxruntime:, qnn.cc:1713 LogNodeSupport] Validation FAILED for 2 nodes in OrtNodeUnit (ArgMin) :
\tOperator type: DequantizeLinear Node name: x_DequantizeLinear Node index: 1
\tOperator type: ArgMin Node name: last one_token_3 Node index: 2
\tREASON : QNN ArgMax/ArgMin only support select_last_index=0.

2026 [V:onnxruntime:, qnn.cc:1713 LogNodeSupport] Validation FAILED for 1 nodes in OrtNodeUnit (Relu) :
\tOperator type: Relu Node name:  Node index: 2

"""


def test_the_log_names_nodes_where_qnn_took_none(tmp_path: Path):
    nodes = [helper.make_node("ArgMin", ["x"], ["i"], name="last one"), helper.make_node("Relu", ["x"], ["y"])]
    outputs = [value("i", onnx.TensorProto.INT64, [1]), value("y", FLOAT, [1])]
    path = save(model(nodes, [value("x", FLOAT, [1])], outputs), tmp_path / "m.onnx")
    assert [(node.node, node.reason) for node in refused_in(LOG, open_model(path).structure)] == [
        ("ArgMin 'last one'", "QNN ArgMax/ArgMin only support select_last_index=0"),
        ("Relu (unnamed, makes 'y')", "QNN gives no reason"),
    ]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"unsupported_nodes": [{}]}'])
def test_a_trace_of_another_form_is_no_coverage(tmp_path: Path, text: str | None):
    path = relu(tmp_path / "m.onnx")
    if text is not None:
        (tmp_path / TRACE).write_text(text)
    with pytest.raises(BuildError, match="QNN doesn't say which nodes it took"):
        read_trace(tmp_path, open_model(path).structure)


def test_reasons_are_one_sentence():
    assert plain_reason("") == "QNN gives no reason"
    assert plain_reason("Failed to create Cast node.Cast node `c 1` will not be assigned to QNN EP.") == (
        "Failed to create Cast node"
    )


def test_settings_of_the_loaders_are_those_of_the_build():
    options = Options(soc_model=52, performance="balanced")
    assert infer.provider_options(options.model_dump(), "lib") == {
        "backend_path": "lib", "htp_arch": "73", "htp_performance_mode": "balanced",
        "offload_graph_io_quantization": "0", "soc_model": "52",
    }  # fmt: skip
    assert "soc_model" not in infer.provider_options(Options().model_dump(), "lib")


def test_what_verification_reaches_here_is_the_emulator_but_on_arm():
    found = reach_of(kind_named("npu"), Host("Linux", "x86_64", "", (), 1, "3.11"))
    assert found.level == "emulated" and "emulator" in found.reason
    assert reach_of(kind_named("npu"), Host("Windows", "ARM64", "", (), 1, "3.11")) == Reach("runtime")
