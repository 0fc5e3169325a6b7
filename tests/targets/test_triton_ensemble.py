"""Ensembles: steps around the model, joined by name, each served and checked alone and all of them together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc.model_config_pb2 import ModelConfig

import packager
from packager.errors import Refused
from packager.host import this_host
from packager.model import Signature, TensorSpec
from packager.targets.triton.ensemble import chained
from packager.targets.triton.infer import Model
from packager.targets.triton.kit import missing_parts
from packager.targets.triton.server import serving
from tests.builders import FLOAT, INT64, model, relu, save, value
from tests.sealing import reseal
from tests.targets.test_triton_builds import build, passed

MISSING = missing_parts(this_host())
needs_server = pytest.mark.skipif(bool(MISSING), reason="; ".join(f"{item.what}: {item.how}" for item in MISSING))

UINT8 = TensorProto.UINT8


def scaled(path: Path, name: str = "x") -> Path:
    """``raw`` bytes to ``name`` between -1 and 1."""
    half = numpy_helper.from_array(np.array(127.5, np.float32), "half")
    nodes = [
        helper.make_node("Cast", ["raw"], ["float"], to=FLOAT), helper.make_node("Sub", ["float", "half"], ["centred"]),
        helper.make_node("Div", ["centred", "half"], [name]),
    ]  # fmt: skip
    return save(model(nodes, [value("raw", UINT8, ["n", 3])], [value(name, FLOAT, ["n", 3])], [half]), path)


def best(path: Path) -> Path:
    """``y`` to the index of the largest of each row, and the row's sum."""
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    nodes = [
        helper.make_node("ArgMax", ["y"], ["class"], axis=1, keepdims=0),
        helper.make_node("ReduceSum", ["y", "axes"], ["sum"], keepdims=1),
    ]
    outputs = [value("class", INT64, ["n"]), value("sum", FLOAT, ["n", 1])]
    return save(model(nodes, [value("y", FLOAT, ["n", 3])], outputs, [axes]), path)


def manifest(folder: Path, more: str) -> Path:
    path = folder / "packager.toml"
    path.write_text(f'[model]\npath = "m.onnx"\n[targets.triton]\n{more}\n')
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with both steps, the files of which lie in a folder of their own."""
    if MISSING:
        pytest.skip(MISSING[0].how)
    folder = tmp_path_factory.mktemp("ensemble")
    (folder / "steps").mkdir()
    relu(folder / "m.onnx")
    scaled(folder / "steps/pre.onnx")
    best(folder / "steps/post.onnx")
    return passed(manifest(folder, 'pre = "steps/pre.onnx"\npost = "steps/post.onnx"'), folder / "dist")


RAW = np.array([[0, 255, 10], [200, 100, 30], [0, 0, 255], [1, 2, 3]], np.uint8)
SCALED = (RAW.astype(np.float32) - 127.5) / 127.5
CLIPPED = np.maximum(SCALED, 0)


@needs_server
def test_the_whole_is_the_steps_in_sequence(whole: Path):
    with serving(whole / "model_repository") as server:
        server.load("m-ensemble")  # Triton loads its steps
        for url in (server.http, server.grpc):
            client = Model(whole / "ensemble/whole", url)
            assert client.max_batch == 8
            outputs = client.run({"raw": RAW})
            np.testing.assert_array_equal(outputs["class"], CLIPPED.argmax(1))
            np.testing.assert_allclose(outputs["sum"], CLIPPED.sum(1, keepdims=True), rtol=1e-6)
            client.close()
        step = Model(whole / "ensemble/pre", server.grpc)
        np.testing.assert_allclose(step.run({"raw": RAW})["x"], SCALED, atol=1e-6)
        step.close()
        alone = Model(whole, server.grpc)
        np.testing.assert_array_equal(alone.run({"x": SCALED})["y"], CLIPPED)
        alone.close()


@needs_server
def test_what_the_repository_says(whole: Path):
    home = whole / "model_repository"
    assert sorted(path.name for path in home.iterdir()) == ["m", "m-ensemble", "m-post", "m-pre"]
    made = text_format.Parse((home / "m-ensemble/config.pbtxt").read_text(), ModelConfig())
    assert [step.model_name for step in made.ensemble_scheduling.step] == ["m-pre", "m", "m-post"]
    assert [each.name for each in made.input] == ["raw"] and {each.name for each in made.output} == {"class", "sum"}
    assert (home / "m-ensemble/1/ensemble.txt").is_file(), "archives and git drop empty folders"
    assert "--load-model=m-ensemble" in (whole / "compose.yaml").read_text()
    assert "m-ensemble" in (whole / "README.md").read_text()
    document = json.loads((whole / "verdict.json").read_text())
    assert document["runtime"]["ensemble"] == "9 golden cases of its steps"
    steps = json.loads((whole / "bundle.json").read_text())["plan"]["steps"]
    assert any("pre 'steps/pre.onnx' and post 'steps/post.onnx'" in str(step) for step in steps)


@needs_server
def test_a_step_that_was_changed_fails_alone_and_a_miswired_whole_too(whole: Path, tmp_path: Path):
    copy = Path(shutil.copytree(whole, tmp_path / "a bundle"))
    weights = copy / "model_repository/m-pre/1/model.onnx"
    old, new = np.float32(127.5).tobytes(), np.float32(120.5).tobytes()
    assert weights.read_bytes().count(old) == 1
    weights.write_bytes(weights.read_bytes().replace(old, new))
    reseal(copy)
    result = packager.verify(copy)
    assert result.exit_code == 6 and result.error is not None
    assert "pre of the ensemble answers wrongly in golden case 'synthesised-0': output 'x'" in result.error.message
    copy = Path(shutil.copytree(whole, tmp_path / "another"))
    config = copy / "model_repository/m-ensemble/config.pbtxt"
    made = text_format.Parse(config.read_text(), ModelConfig())
    made.ensemble_scheduling.step[1].input_map["x"] = "nowhere"
    config.write_text(text_format.MessageToString(made))
    reseal(copy)
    result = packager.verify(copy)
    assert result.exit_code == 6 and result.error is not None and "nowhere" in result.error.message


@needs_server
def test_steps_are_batched_all_or_none(tmp_path: Path):
    relu(tmp_path / "m.onnx", shape=[2, 3])
    scaled(tmp_path / "pre.onnx")
    built = passed(manifest(tmp_path, 'pre = "pre.onnx"\nwarm_up = true'), tmp_path / "dist")
    for name in ("m", "m-pre", "m-ensemble"):
        text = (built / f"model_repository/{name}/config.pbtxt").read_text()
        assert text_format.Parse(text, ModelConfig()).max_batch_size == 0
    assert "those of 'm' in the same ensemble aren't" in (built / "model_repository/m-pre/config.pbtxt").read_text()
    with serving(built / "model_repository") as server:
        server.load("m-ensemble")
        client = Model(built / "ensemble/whole", server.grpc)
        np.testing.assert_allclose(client.run({"raw": RAW[:2]})["y"], CLIPPED[:2], atol=1e-6)
        client.close()


@needs_server
def test_another_step_is_another_bundle_even_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    relu(tmp_path / "m.onnx")
    scaled(tmp_path / "pre.onnx")
    path = manifest(tmp_path, 'pre = "pre.onnx"')

    def digest() -> tuple[bool, str]:
        (target,) = packager.build(manifest=path, out=tmp_path / "dist", verify=False).targets
        return target.cached, str(target.bundle_digest)

    first, again = digest(), digest()
    assert first[0] is False and again == (True, first[1])
    half = numpy_helper.from_array(np.array(100, np.float32), "half")
    nodes = [helper.make_node("Cast", ["raw"], ["float"], to=FLOAT), helper.make_node("Div", ["float", "half"], ["x"])]
    save(model(nodes, [value("raw", UINT8, ["n", 3])], [value("x")], [half]), tmp_path / "pre.onnx")
    changed = digest()
    assert changed[0] is False and changed[1] != first[1]


def test_what_does_not_fit_is_refused_by_tensor_before_anything_is_built(tmp_path: Path):
    relu(tmp_path / "m.onnx")
    scaled(tmp_path / "pre.onnx", "z")

    def said(more: str) -> str:
        (planned,) = packager.plan(manifest=manifest(tmp_path, more), cache=False)
        assert planned.error is not None
        return planned.error.message

    assert "model takes 'x', and the steps before it make z" in said('pre = "pre.onnx"')
    assert "none.onnx" in said('pre = "none.onnx"') and "No such file" in said('pre = "none.onnx"')
    relu(tmp_path / "fixed.onnx", shape=[2, 3])
    told = said('post = "fixed.onnx"\nmax_batch = 4')
    assert "post = 'fixed.onnx': max_batch is 4, but the model can't be batched" in told
    (tmp_path / "pre.onnx").write_bytes(b"not a model")
    assert "pre = 'pre.onnx'" in said('pre = "pre.onnx"')
    if not MISSING:
        result = build(manifest(tmp_path, 'pre = "none.onnx"'), tmp_path / "dist")
        assert result.exit_code == 2


def spec(name: str, dtype: str = "float32", dims: tuple[int | str | None, ...] = ("n", 3)) -> TensorSpec:
    return TensorSpec(name, dtype, dims)


def test_tensors_are_joined_by_name():
    chain = chained(
        {
            "pre": Signature((spec("raw", "uint8"),), (spec("x"), spec("mask", "bool"))),
            "model": Signature((spec("x"), spec("scale", dims=())), (spec("y"), spec("hidden"))),
            "post": Signature((spec("y"), spec("mask", "bool")), (spec("p"),)),
        }
    )
    assert [each.name for each in chain.whole.inputs] == ["raw", "scale"]
    assert [each.name for each in chain.whole.outputs] == ["hidden", "p"]


@pytest.mark.parametrize(
    ("pre", "wanted", "reason"),
    [
        (spec("x", "float64"), spec("x"), "model takes"),
        (spec("x", dims=("n", 3, 1)), spec("x"), "model takes"),
        (spec("x", dims=("n", 4)), spec("x"), "model takes"),
        (spec("z"), spec("x"), "model takes 'x', and the steps before it make z"),
        (spec("y"), spec("y"), "model makes 'y', which is made or taken before it already"),
    ],
)
def test_tensors_that_do_not_fit_are_named(pre: TensorSpec, wanted: TensorSpec, reason: str):
    with pytest.raises(Refused) as caught:
        chained({"pre": Signature((spec("raw"),), (pre,)), "model": Signature((wanted,), (spec("y"),))})
    assert reason in caught.value.message
