"""Triton from end to end: what is built loads, merges and answers rightly in the real core, or doesn't pass."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

import packager
from packager.errors import GoldenError
from packager.host import this_host
from packager.results import Report, TargetResult
from packager.room import kind_named
from packager.targets.triton.infer import Model
from packager.targets.triton.kit import STAND_IN, missing_parts
from packager.targets.triton.server import serving
from tests.builders import BOOL, FLOAT, INT64, STRING, model, relu, save, value
from tests.sealing import reseal

MISSING = missing_parts(this_host())
pytestmark = pytest.mark.skipif(bool(MISSING), reason="; ".join(f"{item.what}: {item.how}" for item in MISSING))


def build(path: Path, out: Path, **more) -> TargetResult:
    """Build an ONNX file, or a manifest, for Triton alone."""
    report: Report
    if path.suffix == ".toml":
        report = packager.build(manifest=path, out=out, cache=False, **more)
    else:
        report = packager.build(path, targets=["triton"], out=out, cache=False, **more)
    return report.targets[0]


def passed(path: Path, out: Path, **more) -> Path:
    """The folder of a bundle that passed."""
    result = build(path, out, **more)
    assert result.status == "passed", result.message
    assert result.verdict is not None and result.verdict.level == "emulated"
    return out / str(result.bundle)


def run(bundle: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Over HTTP and gRPC, which must agree."""
    with kind_named("triton").load().runner(bundle) as runner:
        outputs: dict[str, np.ndarray] = runner.run(feeds)
    return outputs


def config(bundle: Path) -> str:
    (file,) = bundle.glob("model_repository/*/config.pbtxt")
    return file.read_text(encoding="utf-8")


def parsed(bundle: Path) -> Any:
    """The configuration as Triton's schema reads it."""
    return text_format.Parse(config(bundle), ModelConfig())


DTYPES = {
    "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8, "int16": TensorProto.INT16, "int32": TensorProto.INT32, "int64": INT64,
    "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16, "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64, "bool": BOOL, "object": STRING,
}  # fmt: skip


def every_dtype(path: Path, dims: Sequence[int | str], names: Sequence[str]) -> Path:
    """A model that gives back an input of each dtype, under names with slash and colon."""
    nodes = [helper.make_node("Identity", [f"in/{name}:0"], [f"out/{name}"]) for name in names]
    inputs = [value(f"in/{name}:0", DTYPES[name], dims) for name in names]
    return save(model(nodes, inputs, [value(f"out/{name}", DTYPES[name], dims) for name in names]), path)


def extremes(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The ends of a dtype's range, over and over."""
    if name == "object":
        found = np.array(["", "naïve 名前 🎈", "line\nend", "a" * 300], object)
    elif name == "bool":
        found = np.array([True, False])
    elif name.startswith("float"):
        limits = np.finfo(name)
        found = np.array([limits.max, limits.min, limits.tiny, -0.0, 1.5], name)
    else:
        found = np.array([np.iinfo(name).max, np.iinfo(name).min, 1], name)
    return np.resize(found, shape)


@pytest.mark.parametrize("dims", [("n", 3), (2, "m"), ("n",), ()], ids=str)
def test_every_dtype_is_exact(tmp_path: Path, dims: tuple[int | str, ...]):
    names = [name for name in DTYPES if dims or name != "object"]  # a scalar string is refused
    built = passed(every_dtype(tmp_path / "m.onnx", dims, names), tmp_path / "dist")
    shape = tuple(dim if isinstance(dim, int) else 4 for dim in dims)
    feeds = {f"in/{name}:0": extremes(name, shape) for name in names}
    outputs = run(built, feeds)
    for name in names:
        given, got = feeds[f"in/{name}:0"], outputs[f"out/{name}"]
        assert (got.dtype, got.shape) == (given.dtype, given.shape), name
        np.testing.assert_array_equal(got, given)
    batched = dims[:1] == ("n",)
    assert ("max_batch_size: 8" in config(built)) == batched
    assert ("dynamic_batching" in config(built)) == batched


def test_more_rows_than_the_server_merges_and_empty_tensors(tmp_path: Path):
    rows = np.arange(60, dtype=np.float32).reshape(20, 3) - 30
    batched = passed(relu(tmp_path / "m.onnx"), tmp_path / "one")
    np.testing.assert_array_equal(run(batched, {"x": rows})["y"], np.maximum(rows, 0))
    with kind_named("triton").load().runner(batched) as runner, pytest.raises(Exception, match="at least 1"):
        runner.run({"x": rows[:0]})
    np.savez(tmp_path / "none.npz", x=rows[:0])
    with pytest.raises(GoldenError, match="every output is empty, so nothing can be compared"):
        build(relu(tmp_path / "m.onnx"), tmp_path / "two", golden=tmp_path / "none.npz")
    middle = passed(relu(tmp_path / "k.onnx", shape=[2, "m"]), tmp_path / "three")
    assert run(middle, {"x": np.zeros((2, 0), np.float32)})["y"].shape == (2, 0)


def case(path: Path, nodes: list[onnx.NodeProto], dims: tuple, out: tuple, *more: onnx.TensorProto) -> Path:
    return save(model(nodes, [value("x", FLOAT, dims)], [value("y", FLOAT, out)], more), path)


def test_traps_give_a_repository_that_works(tmp_path: Path):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    mean = [helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)]
    lost = passed(case(tmp_path / "scalar.onnx", mean, ("n", 3), ()), tmp_path / "a")
    assert "max_batch_size" not in config(lost) and "output 'y' is a scalar" in config(lost)
    assert run(lost, {"x": x})["y"].shape == () and run(lost, {"x": x})["y"] == x.mean()
    # The same with a first dim that only pretends to be the batch.
    kept = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0], keepdims=1)]
    pretends = passed(case(tmp_path / "mean.onnx", kept, ("n", 3), ("k", 3)), tmp_path / "b")
    assert "max_batch_size" not in config(pretends)
    np.testing.assert_allclose(run(pretends, {"x": x})["y"], x.mean(0, keepdims=True))
    # Rows that see each other.
    both = [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])]
    mixed = passed(case(tmp_path / "mix.onnx", both, ("n", 3), ("n", 3)), tmp_path / "c")
    assert "max_batch_size" not in config(mixed) and "answers differently in a batch of 2" in config(mixed)
    np.testing.assert_allclose(run(mixed, {"x": x})["y"], x - x.mean(0))
    # Batch baked to 4, and batch in the second dim.
    baked = passed(relu(tmp_path / "baked.onnx", shape=[4, 3]), tmp_path / "d")
    assert list(parsed(baked).input[0].dims) == [4, 3]
    np.testing.assert_array_equal(run(baked, {"x": x})["y"], x)
    sums = [helper.make_node("CumSum", ["x", "zero"], ["y"])]
    zero = numpy_helper.from_array(np.array(0, np.int64), "zero")
    second = passed(case(tmp_path / "time.onnx", sums, ("t", "n"), ("t", "n"), zero), tmp_path / "e")
    assert "max_batch_size" not in config(second)
    np.testing.assert_array_equal(run(second, {"x": x})["y"], x.cumsum(0))


def test_an_input_with_a_default_is_left_to_the_model(tmp_path: Path):
    nodes = [helper.make_node("Add", ["x", "bias"], ["y"])]
    bias = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "bias")
    proto = model(nodes, [value("x"), value("bias", FLOAT, [3])], [value("y")], [bias])
    built = passed(save(proto, tmp_path / "m.onnx"), tmp_path / "dist")
    assert '"bias"' not in config(built)
    np.testing.assert_array_equal(run(built, {"x": np.zeros((2, 3), np.float32)})["y"], [[1, 2, 3]] * 2)


def test_dims_that_onnx_runtime_infers_are_what_the_configuration_says(tmp_path: Path):
    """The backend compares output dims exactly with those of ONNX Runtime, which knows more than the file says."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = numpy_helper.from_array(np.ones((3, 5), np.float32), "w")
    built = passed(case(tmp_path / "m.onnx", nodes, ("n", 3), ("n", "classes"), weights), tmp_path / "dist")
    assert list(parsed(built).output[0].dims) == [5]


def test_external_weights_are_bundled_under_names_of_our_own(tmp_path: Path):
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="project")]
    proto = model(nodes, [value("x")], [value("y", FLOAT, ["n", 4])], [numpy_helper.from_array(weights, "w")])
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="odd ' name", size_threshold=0)
    built = passed(tmp_path / "m.onnx", tmp_path / "dist")
    x = np.array([[1, 0, 2]], np.float32)
    np.testing.assert_allclose(run(built, {"x": x})["y"], x @ weights)
    assert not list(built.rglob("odd*"))


CASES = {"silero_vad": 4}
"""Golden cases, where one is added for a branch that the first three leave out."""


@pytest.mark.parametrize("name", ["orientation", "file_type", "silero_vad", "text_encoder"])
def test_a_real_model_passes(corpus: Path, tmp_path: Path, name: str):
    built = passed(corpus / f"{name}.onnx", tmp_path / "dist")
    document = json.loads((built / "verdict.json").read_text())
    assert document["runtime"]["name"] == "Triton core 2.51.0 + python-hosted onnxruntime"
    assert document["runtime"]["version"] == "1.19.2" and len(document["cases"]) == CASES.get(name, 3)
    assert "stand-in for the C++ onnxruntime backend" in document["level_reason"]
    assert ("max_batch_size: 8" in config(built)) == (name != "silero_vad")
    again = packager.verify(built.with_name(f"{built.name}.tar.gz"))
    assert again.exit_code == 0 and again.verdict is not None and again.verdict.level == "emulated"


@pytest.mark.parametrize("precision", ["fp16", "int8-static", "int8-dynamic", "auto"])
def test_a_real_model_at_other_precisions(corpus: Path, tmp_path: Path, precision: str):
    shutil.copyfile(corpus / "file_type.onnx", tmp_path / "m.onnx")
    (tmp_path / "packager.toml").write_text(
        f'[model]\npath = "m.onnx"\n[targets.triton]\nprecision = "{precision}"\ninstances = 2\nmodel_version = 3\n'
    )
    built = passed(tmp_path / "packager.toml", tmp_path / "dist")
    assert (built / "model_repository/m/3/model.onnx").is_file() and "count: 2" in config(built)
    if precision == "int8-dynamic":
        assert parsed(built).max_batch_size == 0, "quantised by the whole batch, rows influence each other"


def test_what_the_release_has_no_kernel_for_is_lowered(corpus: Path, tmp_path: Path):
    shutil.copyfile(corpus / "surrogate_classifier.onnx", tmp_path / "m.onnx")
    (tmp_path / "packager.toml").write_text('[model]\npath = "m.onnx"\n[targets.triton]\nprecision = "int8-static"\n')
    result = build(tmp_path / "packager.toml", tmp_path / "dist")
    assert result.status == "passed", result.message
    assert "operator set ai.onnx went from 21 to 20" in result.notes


def test_a_batch_that_goldens_disprove_is_an_error_where_it_was_asked_for(tmp_path: Path):
    both = [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])]
    case(tmp_path / "m.onnx", both, ("n", 3), ("n", 3))
    (tmp_path / "packager.toml").write_text('[model]\npath = "m.onnx"\n[targets.triton]\nmax_batch = 4\n')
    result = build(tmp_path / "packager.toml", tmp_path / "dist")
    assert result.exit_code == 5 and "output 'y'" in result.message and "max_batch is 4" in result.message


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of ``y = x @ w`` whose weights can be told apart in ``model.onnx``."""
    folder = tmp_path_factory.mktemp("dense")
    weights = np.array([[0.7311, -1.25], [2.5, 0.125], [-0.875, 1.75]], np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="project")]
    proto = model(nodes, [value("x")], [value("y", FLOAT, ["n", 2])], [numpy_helper.from_array(weights, "w")])
    return passed(save(proto, folder / "dense.onnx"), folder / "dist")


@pytest.fixture
def bundle(dense: Path, tmp_path: Path) -> Path:
    """A copy of it to harm, in a folder with a space in its name."""
    return Path(shutil.copytree(dense, tmp_path / "a bundle"))


def edit(bundle: Path, old: str, new: str) -> None:
    (file,) = bundle.glob("model_repository/*/config.pbtxt")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    reseal(bundle)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("dims: 2\n", "dims: 4\n", r"tensor 'y'.*\[-1,4\]"),
        ('"x"\n  data_type: TYPE_FP32', '"x"\n  data_type: TYPE_FP16', "datatype TYPE_FP16 for input 'x'"),
        ("versions: 1\n", "versions: 9\n", "version"),
        ("max_batch_size", "max_batch_sise", "schema refuses it.*max_batch_sise"),
    ],
)
def test_an_edited_configuration_fails_with_tritons_reason(bundle: Path, old: str, new: str, reason: str):
    edit(bundle, old, new)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None
    assert ("Triton can't load model 'dense'" in result.error.message) == ("schema" not in reason)
    assert re.search(reason, result.error.message), result.error.message


EVIL = """
from pathlib import Path
Path({mark!r}).touch()
class TritonPythonModel:
    def execute(self, requests): return []
"""


def test_a_bundle_that_brings_code_is_not_served(bundle: Path, tmp_path: Path):
    mark, home = tmp_path / "ran", bundle / "model_repository/dense"
    before = (home / "config.pbtxt").read_text()
    for name in ("1/model.py", "libtriton_onnxruntime.so", "1/libtriton_onnxruntime.so.1"):
        (home / name).write_text(EVIL.format(mark=str(mark)))
        reseal(bundle)
        result = packager.verify(bundle)
        assert result.exit_code == 6 and result.error is not None
        assert f"{name} has no place in the bundle" in result.error.message
        (home / name).unlink()
    (home / "1/model.onnx").write_text(EVIL.format(mark=str(mark)))
    for old, new, reason in (
        ('backend: "onnxruntime"', 'backend: "python"', "backend 'python'"),
        (
            "max_batch_size: 8",
            'max_batch_size: 8 model_operations { op_library_filename: "a" }',
            "sets model_operations",
        ),
        (
            "max_batch_size: 8",
            'max_batch_size: 8 parameters { key: "EXECUTION_ENV_PATH" }',
            "sets parameter EXECUTION_ENV_PATH",
        ),
    ):
        assert old in before
        (home / "config.pbtxt").write_text(before.replace(old, new))
        reseal(bundle)
        result = packager.verify(bundle)
        assert result.exit_code == 6 and result.error is not None and reason in result.error.message
    assert not mark.exists()


@pytest.mark.parametrize("dims", [("n", 3), ("n",), (2, 3)], ids=str)
def test_a_model_is_warmed_up_by_a_golden_case(tmp_path: Path, dims: tuple[int | str, ...]):
    every_dtype(tmp_path / "m.onnx", dims, list(DTYPES))
    (tmp_path / "packager.toml").write_text('[model]\npath = "m.onnx"\n[targets.triton]\nwarm_up = true\n')
    built = passed(tmp_path / "packager.toml", tmp_path / "dist")
    assert len(list((built / "model_repository/m/warmup").iterdir())) == len(DTYPES)
    with serving(built / "model_repository") as server:
        server.load("m")
        assert "failed to run warmup" not in server.log.read_text()
    (built / "model_repository/m/warmup/input-0").write_bytes(b"odd")
    reseal(built)
    result = packager.verify(built)
    assert result.exit_code == 6 and result.error is not None
    assert "warmup setting expects" in result.error.message


def test_many_instances_merge_too(tmp_path: Path):
    relu(tmp_path / "m.onnx")
    (tmp_path / "packager.toml").write_text(
        '[model]\npath = "m.onnx"\n[targets.triton]\ninstances = 4\nqueue_delay_us = 0\nmax_batch = 2\n'
        'preferred_batch_sizes = [2]\ndevice = "auto"\n'
    )
    built = passed(tmp_path / "packager.toml", tmp_path / "dist")
    (group,) = parsed(built).instance_group
    assert (group.kind, group.count) == (ModelInstanceGroup.KIND_AUTO, 4)
    assert list(parsed(built).dynamic_batching.preferred_batch_size) == [2]
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(run(built, {"x": x})["y"], x)


def test_a_renamed_version_folder_fails_with_tritons_reason(bundle: Path):
    (bundle / "model_repository/dense/1").rename(bundle / "model_repository/dense/2")
    reseal(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None and "version" in result.error.message


def test_changed_weights_fail(bundle: Path):
    path = bundle / "model_repository/dense/1/model.onnx"
    old, new = np.float32(0.7311).tobytes(), np.float32(0.7411).tobytes()
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    result = packager.verify(bundle)
    assert (
        result.exit_code == 6 and result.error is not None and "model.onnx (model) was changed" in result.error.message
    )
    reseal(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.verdict is not None
    assert "output 'y': max abs" in result.verdict.failures[0]


def test_a_configuration_that_merges_what_must_not_be_is_caught(tmp_path: Path):
    """The trap: it loads like any other, and answers wrongly only when requests meet."""
    both = [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])]
    built = passed(case(tmp_path / "m.onnx", both, ("n", 3), ("n", 3)), tmp_path / "dist")
    edit(built, "dims: -1\n", "")
    edit(built, 'backend: "onnxruntime"', 'backend: "onnxruntime" max_batch_size: 8')
    result = packager.verify(built)
    assert result.exit_code == 6 and result.error is not None
    assert "answers differently to a batch of 2 than to one request alone" in result.error.message


def test_no_batcher_no_merging(bundle: Path):
    (file,) = bundle.glob("model_repository/*/config.pbtxt")
    made = parsed(bundle)
    made.ClearField("dynamic_batching")
    file.write_text(text_format.MessageToString(made))
    reseal(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None
    assert "Triton merged none of 8 parallel requests" in result.error.message


def test_two_builds_are_the_same_bytes(corpus: Path, tmp_path: Path):
    for out in ("one", "two"):
        passed(corpus / "orientation.onnx", tmp_path / out)
    name = "orientation-0.0.0-triton.tar.gz"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


ALONE = """
import runpy, sys
sys.modules["packager"] = None  # the import system's own "not found"
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_partner_checks_a_running_server_without_packager(bundle: Path, tmp_path: Path):
    def check(url: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", ALONE, str(bundle / "verify.py"), "--out", str(tmp_path / "selfcheck.json")],
            cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_URL": url},
        )  # fmt: skip

    with serving(bundle / "model_repository") as server:
        assert check(server.http).returncode == 2, "the model isn't loaded yet"
        server.load("dense")
        for url in (server.http, server.grpc):
            done = check(url)
            assert done.returncode == 0, done.stdout + done.stderr
            document = json.loads((tmp_path / "selfcheck.json").read_text())
            assert (document["status"], document["runtime"]["name"]) == ("passed", STAND_IN)
            assert document["runtime"]["device"] == url
    assert check(server.http).returncode == 2


def test_the_client_refuses_what_is_not_the_models(bundle: Path):
    with pytest.raises(ValueError, match="is no server"):
        Model(bundle, "localhost:8000")
    with serving(bundle / "model_repository") as server:
        server.load("dense")
        client = Model(bundle, server.grpc)
        x = np.zeros((1, 3), np.float32)
        for feeds, reason in (
            ({}, "no array is given for input 'x'"),
            ({"x": x, "z": x}, "no input 'z'"),
            ({"x": x.astype(np.float64)}, "takes float32"),
            ({"x": x[0]}, "has shape"),
        ):
            with pytest.raises(ValueError, match=reason):
                client.run(feeds)
        strided = np.arange(12, dtype=">f4").reshape(3, 4).T
        np.testing.assert_allclose(client.run({"x": strided})["y"][0], strided[0] @ _weights(bundle), rtol=1e-6)
        client.close()


def _weights(bundle: Path) -> np.ndarray:
    proto = onnx.load(bundle / "model_repository/dense/1/model.onnx")
    found: np.ndarray = numpy_helper.to_array(proto.graph.initializer[0])
    return found


def test_the_manifests_are_yaml_that_names_the_release(bundle: Path):
    compose, kubernetes = ((bundle / name).read_text() for name in ("compose.yaml", "kubernetes.yaml"))
    for text in (compose, kubernetes):
        assert "nvcr.io/nvidia/tritonserver:24.10-py3" in text and "--load-model=dense" in text
        assert "\t" not in text
    assert subprocess.run(["sh", "-n", str(bundle / "perf.sh")], check=False).returncode == 0
    step = json.loads((bundle / "perf.json").read_text())["data"][0]["x"]
    assert step["shape"] == [3] and len(step["content"]) == 3


def test_a_node_that_the_release_computes_wrongly_is_found(tmp_path: Path):
    """ONNX Runtime 1.19 takes a length of 0 for another; the diagnosis asks a server about single nodes."""
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], name="turn", batch_axis=0, time_axis=1)
    inputs = [value("x", FLOAT, [4, 4]), value("n", INT64, [4])]
    path = save(model([node], inputs, [value("y", FLOAT, [4, 4])]), tmp_path / "m.onnx")
    x, n = np.arange(16, dtype=np.float32).reshape(4, 4), np.array([0, 2, 3, 4])
    np.savez(tmp_path / "case.npz", x=x, n=n)
    result = build(path, tmp_path / "dist", golden=tmp_path / "case.npz")
    assert result.status == "failed"
    assert any(text.startswith("first divergence: node ReverseSequence 'turn'") for text in result.diagnosis)
