"""What a manifest may ask of Triton: every option is loaded by the real core, and what it can't do is refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

import packager
from packager.errors import Refused, VerificationError
from packager.targets.triton import Options
from packager.targets.triton.accelerators import KNOWN
from packager.targets.triton.config import Config, Entry, config_text, safety_objection, without_gpu
from packager.targets.triton.planning import flags
from packager.targets.triton.server import Server, serving
from tests.builders import relu
from tests.targets.test_triton import MISSING, needs_server, plan

GPU = {"device": "gpu", "gpus": (0, 1), "instances": 2}
TENSORRT = {"precision_mode": "FP16", "max_workspace_size_bytes": "1073741824", "trt_engine_cache_enable": "1"}
CUDA = {"gpu_mem_limit": "4294967296", "cudnn_conv_algo_search": "1", "use_tf32": "0"}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "instances": {"instances": 3},
    "gpu": GPU,
    "tensorrt": {**GPU, "accelerator": "tensorrt", "accelerator_options": TENSORRT},
    "cuda": {"device": "gpu", "accelerator": "cuda", "accelerator_options": CUDA},
    "auto": {"device": "auto", "accelerator": "tensorrt"},
    "openvino": {"accelerator": "openvino"},
    "cache": {"response_cache": True},
    "rates": {"rate_limit": {"R1": 2, "R2": 1}, "priority": 1},
    "basic": {"graph_optimization": "basic"},
    "extended": {"graph_optimization": "extended"},
    "unoptimised": {"graph_optimization": "none"},
    "threads": {"intra_op_threads": 2},
    "latest": {"version_policy": "latest"},
    "all": {"version_policy": "all"},
    "batches": {"preferred_batch_sizes": (2, 4), "queue_delay_us": 7},
}


def config_of(name: str, options: Options) -> Config:
    return Config(name, (Entry("x", "TYPE_FP32", (-1, 3)),), (Entry("y", "TYPE_FP32", (-1, 3)),), 8, "", options)


def parsed(options: dict[str, Any]) -> Any:
    return text_format.Parse(config_text(config_of("m", Options(**options))), ModelConfig())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with a model for each set of options, and one whose output has labels."""
    if MISSING:
        pytest.skip(MISSING[0].how)
    folder = tmp_path_factory.mktemp("options")
    model = relu(folder / "m.onnx").read_bytes()
    configs = {name: config_of(name, Options(**options)) for name, options in OPTIONS.items()}
    labelled = config_of("labelled", Options())
    configs["untouched"] = config_of("untouched", Options(**GPU))
    configs["labelled"] = replace(labelled, outputs=(replace(labelled.outputs[0], labels="labels-0.txt"),))
    for name, config in configs.items():
        home = folder / "repository" / name
        (home / "1").mkdir(parents=True)
        (home / "1/model.onnx").write_bytes(model)
        (home / "config.pbtxt").write_text(config_text(config))
    (folder / "repository/labelled/labels-0.txt").write_text("left\nmiddle\nright\n")
    with serving(folder / "repository", rate_limited=True) as running:
        yield running


@needs_server
@pytest.mark.parametrize("name", OPTIONS)
def test_the_core_loads_and_serves_it(server: Server, name: str):
    text = config_text(config_of(name, Options(**OPTIONS[name])))
    assert safety_objection(text) == ""
    server.load(name, without_gpu(text))
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [-1.0, 2.0, 3.0]}]}
    assert infer(server, name, body)["outputs"][0]["data"] == [0.0, 2.0, 3.0]
    served = server.get(f"/v2/models/{name}/config")
    meant = json.loads(json.dumps(OPTIONS[name]))
    if "instances" in meant:
        groups: Any = served["instance_group"]
        assert groups[0]["count"] == meant["instances"]


def infer(server: Server, name: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(f"{server.http}/v2/models/{name}/infer", json.dumps(body).encode())  # noqa: S310 - our own
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
        return json.loads(answer.read())


@needs_server
def test_the_core_gives_labels_to_who_asks(server: Server):
    server.load("labelled")
    body = {
        "inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [-1.0, 2.0, 3.0]}],
        "outputs": [{"name": "y", "parameters": {"classification": 2}}],
    }
    assert [each.split(":")[1:] for each in infer(server, "labelled", body)["outputs"][0]["data"]] == [
        ["2", "right"], ["1", "middle"],
    ]  # fmt: skip


@needs_server
def test_gpus_are_refused_here_unless_they_are_overridden(server: Server):
    with pytest.raises(VerificationError, match="GPU"):
        server.load("untouched")


@needs_server
def test_a_verdict_says_what_a_stand_in_left_out(tmp_path: Path):
    relu(tmp_path / "m.onnx")
    (tmp_path / "packager.toml").write_text(
        '[model]\npath = "m.onnx"\n[targets.triton]\ndevice = "gpu"\naccelerator = "tensorrt"\nresponse_cache = true\n'
        'rate_limit = { R = 1 }\nlabels = { y = ["a", "b", "c"] }\n'
    )
    (result,) = packager.build(manifest=tmp_path / "packager.toml", out=tmp_path / "dist", cache=False).targets
    assert result.status == "passed" and result.verdict is not None, result.message
    assert "with KIND_CPU in place of KIND_GPU, without the accelerator tensorrt" in result.verdict.level_reason
    built = tmp_path / "dist" / str(result.bundle)
    assert (built / "model_repository/m/labels-0.txt").read_text() == "a\nb\nc\n"
    for name in ("compose.yaml", "kubernetes.yaml", "README.md"):
        text = (built / name).read_text()
        assert "--cache-config=local,size=67108864" in text and "--rate-limit=execution_count" in text, name
    assert "nvidia" in (built / "compose.yaml").read_text(), "a GPU is reserved"


def test_what_the_configuration_says():
    made = parsed(OPTIONS["tensorrt"])
    (group,) = made.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (ModelInstanceGroup.KIND_GPU, 2, [0, 1])
    (accelerator,) = made.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt" and dict(accelerator.parameters) == TENSORRT
    assert not made.optimization.execution_accelerators.cpu_execution_accelerator
    (accelerator,) = parsed(OPTIONS["openvino"]).optimization.execution_accelerators.cpu_execution_accelerator
    assert accelerator.name == "openvino"
    limiter = parsed(OPTIONS["rates"]).instance_group[0].rate_limiter
    assert {each.name: each.count for each in limiter.resources} == {"R1": 2, "R2": 1} and limiter.priority == 1
    assert parsed(OPTIONS["cache"]).response_cache.enable
    levels = [parsed(OPTIONS[name]).optimization.graph.level for name in ("basic", "extended", "unoptimised")]
    assert levels == [-1, 1, 2] and not parsed({}).HasField("optimization")
    assert parsed(OPTIONS["threads"]).parameters["intra_op_thread_count"].string_value == "2"
    assert parsed(OPTIONS["latest"]).version_policy.latest.num_versions == 1
    assert parsed(OPTIONS["all"]).version_policy.HasField("all")
    assert list(parsed({}).version_policy.specific.versions) == [1]


def test_only_instances_and_accelerators_are_overridden():
    assert without_gpu(config_text(config_of("m", Options()))) == ""
    made = json.loads(without_gpu(config_text(config_of("m", Options(**OPTIONS["tensorrt"])))))
    assert made["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}]
    assert made["optimization"]["execution_accelerators"] == {}
    assert made["max_batch_size"] == 8 and made["input"][0]["dims"] == ["3"]


def test_options_that_need_the_server_started_so_are_told():
    assert flags(Options()) == ()
    both = flags(Options(response_cache=True, rate_limit={"R": 1}))
    assert both == ("--cache-config=local,size=67108864", "--rate-limit=execution_count")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accelerator": "tensorrt"}, "accelerator tensorrt needs a GPU, and device is cpu"),
        ({"accelerator": "openvino", "device": "gpu"}, "openvino runs on CPU, and device is gpu"),
        ({"gpus": (0,)}, "gpus names some, and device is cpu"),
        ({"accelerator_options": {"use_tf32": "1"}}, "accelerator none has no option 'use_tf32' in Triton 24.10"),
        (
            {"device": "gpu", "accelerator": "cuda", "accelerator_options": {"gpu_mem_limits": "1"}},
            "did you mean `gpu_mem_limit`",
        ),
        (
            {"device": "gpu", "accelerator": "tensorrt", "accelerator_options": {"trt_op_types_to_exclude": "Add"}},
            "Triton 24.10 has no tensorrt option 'trt_op_types_to_exclude'; Triton 25.03, with ONNX Runtime 1.20, does",
        ),
        (
            {"device": "gpu", "accelerator": "tensorrt", "accelerator_options": {"precision_mode": "BF16"}},
            "precision_mode is 'BF16', not one of FP32, FP16, INT8",
        ),
        (
            {"device": "gpu", "accelerator": "tensorrt", "accelerator_options": {"trt_engine_cache_enable": "yes"}},
            "trt_engine_cache_enable is 'yes'",
        ),
        ({"labels": {"z": ("a",)}}, "labels has 'z', and the outputs are 'y'"),
        ({"labels": {"y": ("a", "b")}}, "labels of 'y' are 2, and it has 3 classes"),
        ({"labels": {"y": ("a", "b", "c\nd")}}, "labels of 'y' must be one or more texts of one line each"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], reason: str):
    with pytest.raises(Refused) as caught:
        plan(relu(tmp_path / "m.onnx"), **options)
    assert reason in caught.value.message


def test_every_wrong_option_is_named_at_once(tmp_path: Path):
    with pytest.raises(Refused) as caught:
        plan(relu(tmp_path / "m.onnx"), accelerator="cuda", gpus=(1,), labels={"z": ("a",)})
    assert caught.value.message.count("\n") == 3


def test_a_configuration_may_not_name_code():
    text = config_text(config_of("m", Options()))
    for more, told in (
        ('parameters { key: "EXECUTION_ENV_PATH" }', "parameter EXECUTION_ENV_PATH"),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" '
            'parameters { key: "trt_extra_plugin_lib_paths" value: "a.so" } } } }',
            "tensorrt option trt_extra_plugin_lib_paths",
        ),
        ('model_operations { op_library_filename: "a.so" }', "model_operations"),
    ):
        assert told in safety_objection(f"{text} {more}")
    assert not any("plugin" in key for known in KNOWN.values() for key in known)
