"""The web room: what onnxruntime-web can't take is refused by name, the rest answers in a browser as in ONNX."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import brotli
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.bundle import seal
from packager.errors import BuildError, Refused, ToolchainMissing, VerificationError
from packager.goldens import GoldenSet
from packager.host import this_host
from packager.model import open_model
from packager.room import Plan, PlanRequest, Reach, Runner, Stage, kind_named, reach_of
from packager.targets import web as room
from packager.targets.web import browser, node, planning, runtime, wire_format
from packager.targets.web.running import _Runner
from tests.builders import FLOAT, INT64, model, relu, save, value

KIND = kind_named("web")
NONE = GoldenSet(())
DTYPES = {
    "float32": [np.nan, np.inf, -np.inf, -0.0, 1.5, np.finfo(np.float32).max, 1e-42],
    "float64": [np.nan, np.inf, -1e300, 5e-324, 0.1],
    "float16": [np.nan, np.inf, 65504, -6e-8, 0.333],
    "int8": [-128, 127], "int16": [-(2**15), 2**15 - 1], "int32": [-(2**31), 2**31 - 1],
    "int64": [-(2**63), 2**63 - 1, 2**53 + 1], "uint8": [0, 255], "uint16": [0, 65535], "uint32": [0, 2**32 - 1],
    "uint64": [0, 2**64 - 1, 2**53 + 1], "bool": [True, False], "string": ["", "名前 🙂", "</script>", "a\nb"],
}  # fmt: skip
HARD_NAMES = [
    "class", "a/b", 'x"];alert(1)//', "</script>", "名前", "0", "constructor", "it's", "`${x}`", "a\\b", "line\nend",
    "toString", " ",
]  # fmt: skip

needs_browser = pytest.mark.skipif(
    browser.find_browser() is None, reason="needs Chromium: `make setup` installs it as root on Debian"
)
needs_node = pytest.mark.skipif(node.find_node() is None, reason="needs Node")


def plan_of(path: Path, **options: object) -> Plan:
    request = PlanRequest(
        target="web", kind="web", name="m", version="1.0.0", model=open_model(path), goldens=NONE,
        precision="fp32", shapes=(), options=room.Options(**options), facts=KIND.facts,
    )  # fmt: skip
    made: Plan = room.plan(request)
    return made


def bundle(path: Path, **options: object) -> Path:
    """Plan, build and seal; no goldens."""
    plan = plan_of(path, **options)
    folder = path.with_name(f"{path.stem}-bundle")
    folder.mkdir()
    room.build(plan, Stage(folder, path, NONE))
    return reseal(folder, plan)


def reseal(folder: Path, plan: Plan) -> Path:
    seal(folder, plan, {}, KIND.facts.roles)
    return folder


def running_programs(folder: Path) -> list[str]:
    """Command lines of processes whose temporary files are in that folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/packager-web-" in line:
            found.append(line)
    return found


@pytest.fixture
def own_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own with a short path, to see that nothing stays in it."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
        monkeypatch.undo()


@contextmanager
def without_browser(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv(browser.CHOSEN, "")
        yield


def same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind == "O":
        return one.shape == other.shape and one.tolist() == other.tolist()
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def every_dtype(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """``<dtype> out = Concat(<dtype>, <dtype>)`` for each dtype, a scalar, an empty tensor, rank 8; and inputs."""
    nodes, inputs, outputs = [], [], []
    feeds: dict[str, np.ndarray] = {}
    others: dict[str, list[int]] = {"scalar": [], "empty": [0, 3], "rank8": [1, 2, 1, 1, 2, 1, 1, 3]}
    for dtype, values in DTYPES.items():
        kind = TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper()))
        nodes.append(helper.make_node("Concat", [dtype, dtype], [f"{dtype} out"], name=dtype, axis=0))
        inputs.append(value(dtype, kind, ["n"]))
        outputs.append(value(f"{dtype} out", kind, ["m"]))
        feeds[dtype] = np.array(values, object if dtype == "string" else dtype)
    for name, dims in others.items():
        nodes.append(helper.make_node("Neg", [name], [f"{name} out"], name=name))
        declared: list[int | str | None] = ["e", 3] if name == "empty" else [*dims]
        inputs.append(value(name, FLOAT, declared))
        outputs.append(value(f"{name} out", FLOAT, declared))
        feeds[name] = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
    # "n" would tie all inputs together: each has a symbol of its own.
    for at, info in enumerate(inputs[: len(DTYPES)]):
        info.type.tensor_type.shape.dim[0].dim_param = f"n{at}"
    return save(model(nodes, inputs, outputs), path), feeds


def check_every_dtype(runner: Runner, feeds: Mapping[str, np.ndarray]) -> None:
    outputs = runner.run(feeds)
    for dtype in DTYPES:
        assert same(outputs[f"{dtype} out"], np.concatenate([feeds[dtype], feeds[dtype]])), dtype
    for name in ("scalar", "empty", "rank8"):
        assert same(outputs[f"{name} out"], -feeds[name]), name


@needs_browser
def test_every_dtype_scalars_empty_tensors_and_rank_8_come_through_a_browser(tmp_path: Path, own_temp: Path):
    path, feeds = every_dtype(tmp_path / "m.onnx")
    folder = bundle(path)
    with room.runner(folder) as runner:
        check_every_dtype(runner, feeds)
        info = runner.info
    assert (info.level, info.reason, info.device) == ("runtime", "", "1 and 2 threads")
    assert info.name == "onnxruntime-web 1.30.0 in Chromium" and int(info.version.split(".")[0]) > 100
    details = dict(info.details)
    assert details["plain page"] == "threads 1, isolated no"
    assert details["isolated page"] == "threads 2, isolated yes"
    assert details["pages agree"] == "bit for bit"
    assert details.get("gate", "").startswith("loaded in Node ") == (node.find_node() is not None)
    for name in ("model.onnx", "m.js", *(f"runtime/{shipped}" for shipped in runtime.SHIPPED.values())):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert details[f"served {name}"] == f"sha256:{digest}", "what was executed is what ships"
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


@needs_node
def test_without_a_browser_node_stands_in_and_says_so(tmp_path: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch):
    path, feeds = every_dtype(tmp_path / "m.onnx")
    folder = bundle(path)
    with without_browser(monkeypatch), room.runner(folder) as runner:
        check_every_dtype(runner, feeds)
        info = runner.info
    assert info.level == "emulated" and info.name.endswith("in Node") and info.device == "1 thread"
    assert "no browser" in info.reason and "install Chromium" in info.reason
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


@needs_browser
def test_names_reach_javascript_as_they_are(tmp_path: Path):
    nodes = [helper.make_node("Neg", [name], [f"{name}!"], name=f"n{at}") for at, name in enumerate(HARD_NAMES)]
    inputs = [value(name, FLOAT, [2]) for name in HARD_NAMES]
    proto = model(nodes, inputs, [value(f"{name}!", FLOAT, [2]) for name in HARD_NAMES])
    feeds = {name: np.array([at, 0.5], np.float32) for at, name in enumerate(HARD_NAMES)}
    folder = bundle(save(proto, tmp_path / "m.onnx"))
    with room.runner(folder) as runner:
        outputs = runner.run(feeds)
    assert list(outputs) == [spec for spec in outputs if spec.endswith("!")] and len(outputs) == len(HARD_NAMES)
    for name, array in feeds.items():
        assert same(outputs[f"{name}!"], -array), name


def refusal(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        plan_of(path)
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("dtype", ["BFLOAT16", "FLOAT8E4M3FN", "COMPLEX64", "INT4"])
def test_dtypes_without_an_array_in_javascript_are_refused_by_name(tmp_path: Path, dtype: str):
    kind = TensorProto.DataType.Value(dtype)
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    said = refusal(save(model(nodes, [value("x", kind)], [value("y", kind)], opset=21), tmp_path / "m.onnx"))
    assert f"input 'x' is {dtype.lower()}" in said and f"output 'y' is {dtype.lower()}" in said


def test_sequence_and_map_outputs_are_refused_by_name_with_what_to_do(tmp_path: Path):
    output = helper.make_tensor_sequence_value_info("parts", FLOAT, None)
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["parts"])]
    said = refusal(save(model(nodes, [value("x")], [output]), tmp_path / "m.onnx"))
    assert "output 'parts' is a sequence" in said and "ConcatFromSequence" in said
    table = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, []))
    labels = {"classlabels_int64s": [0, 1, 2]}
    nodes = [helper.make_node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", **labels)]
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(table))
    said = refusal(save(model(nodes, [value("x")], [maps], domains=[("ai.onnx.ml", 3)]), tmp_path / "z.onnx"))
    assert "output 'maps' is a sequence" in said


def test_operators_of_a_domain_the_runtime_lacks_are_refused_by_node(tmp_path: Path):
    nodes = [
        helper.make_node("Fancy", ["x"], ["h"], name="odd one", domain="com.example"),
        helper.make_node("Conv", ["h"], ["g"], name="saved layout", domain="com.microsoft.nchwc"),
        helper.make_node("Gelu", ["g"], ["y"], name="fused", domain="com.microsoft"),
    ]
    nodes[2:2] = [helper.make_node("ScaledSiLU", ["g"], ["s"], name="new", domain="com.microsoft")]
    domains = [("com.example", 1), ("com.microsoft", 1), ("com.microsoft.nchwc", 1)]
    said = refusal(save(model(nodes, [value("x")], [value("y")], domains=domains), tmp_path / "m.onnx"))
    assert "node com.example.Fancy 'odd one'" in said and "node com.microsoft.nchwc.Conv 'saved layout'" in said
    assert "node com.microsoft.ScaledSiLU 'new': it came to ONNX Runtime after 1.30" in said
    assert "'fused'" not in said and "only operators of ai.onnx, ai.onnx.ml, com.microsoft are known there" in said


def test_a_models_own_functions_are_no_foreign_domain(tmp_path: Path):
    nodes = [helper.make_node("Twice", ["x"], ["y"], name="own", domain="own")]
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    proto = model(nodes, [value("x")], [value("y")], domains=[("own", 1)])
    opset = [helper.make_opsetid("", 17)]
    proto.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], body, opset))
    assert plan_of(save(proto, tmp_path / "m.onnx")).steps


@pytest.mark.parametrize("name", ["__proto__", "nul\0inside"])
def test_names_that_javascript_would_lose_are_refused(tmp_path: Path, name: str):
    assert "rename it" in refusal(relu(tmp_path / "m.onnx", name_in="x", name_out=name))


@pytest.mark.parametrize(
    ("opset", "ir", "ml", "said"),
    [(27, 8, 3, "opset 27 of ai.onnx, onnxruntime-web reads up to 26"),
     (17, 14, 3, "IR version 14, onnxruntime-web reads up to 13"),
     (17, 8, 6, "opset 6 of ai.onnx.ml, onnxruntime-web reads up to 5")],
)  # fmt: skip
def test_versions_beyond_the_runtime_are_refused(tmp_path: Path, opset: int, ir: int, ml: int, said: str):
    proto = model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x")], [value("y")], opset=opset, ir=ir,
        domains=[("ai.onnx.ml", ml)],
    )  # fmt: skip
    assert said in refusal(save(proto, tmp_path / "m.onnx"))


def test_a_model_too_large_for_wasm_is_refused_before_anything_is_copied(tmp_path: Path):
    opened = open_model(relu(tmp_path / "m.onnx"))
    request = PlanRequest(
        target="web", kind="web", name="m", version="1", model=replace(opened, bytes=planning.MAX_BYTES + 1),
        goldens=NONE, precision="fp32", shapes=(), options=room.Options(), facts=KIND.facts,
    )  # fmt: skip
    with pytest.raises(Refused, match="WASM has room for"):
        room.plan(request)


def dense(path: Path, size: int = 512) -> tuple[Path, np.ndarray]:
    """``y = (x @ a) @ b`` with two weights of 4 * size * size bytes each."""
    rng = np.random.default_rng(5)
    weights = [rng.standard_normal((size, size), np.float32) / 16 for _ in range(2)]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])]
    constants = [numpy_helper.from_array(array, name) for array, name in zip(weights, "ab", strict=True)]
    shape: list[int | str | None] = ["n", size]
    save(model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], constants), path)
    return path, weights[0] @ weights[1]


@needs_browser
def test_a_model_with_weights_in_two_files_runs(tmp_path: Path):
    path, product = dense(tmp_path / "m.onnx")
    folder = bundle(path, max_file_mb=1)
    files = sorted(file.name for file in folder.glob("weights-*.bin"))
    assert files == ["weights-000.bin", "weights-001.bin"]
    assert (folder / "model.onnx").stat().st_size < 10_000
    x = np.eye(512, dtype=np.float32)[:3]
    with room.runner(folder) as runner:
        np.testing.assert_allclose(runner.run({"x": x})["y"], product[:3], rtol=1e-4, atol=1e-4)
        assert {f"served {name}" for name in files} <= set(dict(runner.info.details))


@needs_browser
def test_a_model_in_onnx_runtimes_own_format_runs(tmp_path: Path):
    path, product = dense(tmp_path / "m.onnx", 64)
    folder = bundle(path, format="ort")
    assert (folder / "model.ort").read_bytes()[4:8] == b"ORTM" and not (folder / "model.onnx").exists()
    assert "model.ort" in json.loads((folder / "sri.json").read_text())
    x = np.eye(64, dtype=np.float32)[:3]
    with room.runner(folder) as runner:
        np.testing.assert_allclose(runner.run({"x": x})["y"], product[:3], rtol=1e-4, atol=1e-4)
        assert "served model.ort" in dict(runner.info.details)
    again, _ = dense(tmp_path / "again.onnx", 64)
    assert (bundle(again, format="ort") / "model.ort").read_bytes() == (folder / "model.ort").read_bytes()


def test_a_model_that_compresses_well_is_shipped_compressed_too(tmp_path: Path):
    rng = np.random.default_rng(7)
    for name, weights in (("few", rng.integers(-2, 2, (256, 256))), ("noise", rng.standard_normal((256, 256)))):
        constant = numpy_helper.from_array(weights.astype(np.float32), "w")
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        shape: list[int | str | None] = ["n", 256]
        path = save(
            model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], [constant]), tmp_path / f"{name}.onnx"
        )
        folder = bundle(path)
        data = path.read_bytes()
        assert (folder / "model.onnx.br").exists() == (folder / "model.onnx.gz").exists() == (name == "few")
        if name == "few":
            assert brotli.decompress((folder / "model.onnx.br").read_bytes()) == data
            assert gzip.decompress((folder / "model.onnx.gz").read_bytes()) == data
            roles = {file["path"]: file["role"] for file in json.loads((folder / "bundle.json").read_text())["files"]}
            assert roles["model.onnx.gz"] == "precompressed" == roles["runtime/ort.wasm.min.js.br"]


def test_an_ort_file_is_not_split(tmp_path: Path):
    path, _ = dense(tmp_path / "m.onnx")
    with pytest.raises(Refused, match=r"an \.ort file holds all weights"):
        plan_of(path, format="ort", max_file_mb=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(relu(tmp_path_factory.mktemp("small") / "m.onnx"))


@pytest.fixture
def harmed(small: Path, tmp_path: Path) -> Path:
    """A copy to harm; :func:`reseal` makes the seal fit."""
    return Path(shutil.copytree(small, tmp_path / "bundle"))


def html_for_wasm(folder: Path) -> None:
    (folder / "runtime/ort-wasm-simd-threaded.wasm").write_text("<!doctype html><title>Home</title>")


def cut_wasm(folder: Path) -> None:
    path = folder / "runtime/ort-wasm-simd-threaded.wasm"
    path.write_bytes(path.read_bytes()[:-100])


def no_glue(folder: Path) -> None:
    (folder / "runtime/ort-wasm-simd-threaded.js").unlink()


def no_runtime(folder: Path) -> None:
    (folder / "runtime/ort.wasm.min.js").unlink()


def other_model(folder: Path) -> None:
    nodes = [helper.make_node("Abs", ["x"], ["y"], name="act")]
    save(model(nodes, [value("x")], [value("y")]), folder / "model.onnx")


def no_loader(folder: Path) -> None:
    (folder / "m.js").unlink()


def broken_loader(folder: Path) -> None:
    (folder / "m.js").write_text("export const load = (;")


def blocked_eval(folder: Path) -> None:
    (folder / "m.js").write_text("export const load = () => eval('1');")


def dead_loader(folder: Path) -> None:
    (folder / "m.js").write_text("export const load = () => { throw new Error('out of luck'); };")


HARM = {
    html_for_wasm: r"ort-wasm-simd-threaded.wasm: the server answered with an HTML page \(application/wasm\)",
    cut_wasm: "ort-wasm-simd-threaded.wasm has 14239797 bytes",
    no_glue: "ort-wasm-simd-threaded.js: the server answered 404",
    no_runtime: "ort.wasm.min.js: the server answered 404",
    other_model: "model.onnx (has|is not the file that was packaged)",
    no_loader: "m.js",
    broken_loader: "Unexpected token",
    blocked_eval: "(unsafe-eval|CSP)",
    dead_loader: "out of luck",
}


def resealed(harmed: Path, harm: Callable[[Path], None]) -> Path:
    harm(harmed)
    plan = plan_of(harmed / "model.onnx") if harm is not other_model else plan_of(relu(harmed.parent / "m.onnx"))
    return reseal(harmed, plan)


@needs_browser
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_a_broken_bundle_is_reported_within_seconds_in_the_browsers_words(
    harmed: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch, harm
):
    monkeypatch.setattr("packager.targets.web.node.find_node", lambda: None)  # Node would be asked first
    folder = resealed(harmed, harm)
    started = time.monotonic()
    words = f"the plain page can't load the bundle: .*{HARM[harm]}"
    with pytest.raises(VerificationError, match=words), room.runner(folder):
        pass
    assert time.monotonic() - started < 15
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


IN_NODE = {
    html_for_wasm: r"ort-wasm-simd-threaded.wasm: the server answered with an HTML page",
    no_glue: "ort-wasm-simd-threaded.js can't be fetched",
    no_loader: "Cannot find module",
    dead_loader: "out of luck",
}


def marking_browser(folder: Path) -> Path:
    """A program that leaves a file where it was started."""
    fake = folder / "browser"
    fake.write_text(f"#!/bin/sh\ntouch '{folder}/started'\n")
    fake.chmod(0o755)
    return fake


@needs_node
@pytest.mark.parametrize("harm", IN_NODE, ids=lambda harm: harm.__name__)
def test_a_broken_bundle_is_reported_by_node_before_a_browser_starts(
    harmed: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harm
):
    monkeypatch.setenv(browser.CHOSEN, str(marking_browser(tmp_path)))
    folder = resealed(harmed, harm)
    with pytest.raises(VerificationError, match=f"Node can't load the bundle: .*{IN_NODE[harm]}"), room.runner(folder):
        pass
    assert not (tmp_path / "started").exists()
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


@pytest.mark.parametrize("stand_in", ["echo too old >&2; exit 1", None])
def test_a_node_that_does_not_run_says_nothing_of_the_bundle(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stand_in: str | None
):
    monkeypatch.setenv(browser.CHOSEN, str(marking_browser(tmp_path)))
    command = None if stand_in is None else ["/bin/sh", "-c", stand_in]
    monkeypatch.setattr("packager.targets.web.node.find_node", lambda: command)
    with pytest.raises(ToolchainMissing, match="the program of the plain page is gone"), room.runner(small):
        pass
    assert (tmp_path / "started").exists()


@needs_browser
def test_a_browser_that_dies_is_an_error_with_its_last_words(small: Path, own_temp: Path, monkeypatch, tmp_path: Path):
    fake = tmp_path / "browser"
    fake.write_text("#!/bin/sh\necho no display here >&2\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv(browser.CHOSEN, str(fake))
    with pytest.raises(ToolchainMissing, match=r"status 7\n  \| no display here"), room.runner(small):
        pass
    assert list(own_temp.iterdir()) == []


@needs_browser
def test_a_page_that_crashes_is_noticed_within_seconds(small: Path, own_temp: Path):
    """As where a model doesn't fit into memory: the tab's process is gone, the browser's isn't."""
    with room.runner(small) as runner:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().decode(errors="replace")
                if "--type=renderer" in line and f"{own_temp}/packager-web-" in line:
                    os.kill(int(path.parent.name), 9)
        started = time.monotonic()
        with pytest.raises(VerificationError, match="the page is gone"):
            runner.run({"x": np.zeros((1, 3), np.float32)})
        assert time.monotonic() - started < 10
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


@needs_browser
def test_a_page_that_hangs_ends_at_the_time_limit(harmed: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch):
    (harmed / "m.js").write_text("export const load = () => new Promise(() => {});")
    reseal(harmed, plan_of(harmed / "model.onnx"))
    monkeypatch.setattr("packager.targets.web.conversation.GREETING_SECONDS", 2.0)
    monkeypatch.setattr("packager.targets.web.node.find_node", lambda: None)
    with pytest.raises(VerificationError, match="plain page said nothing for 4 s"), room.runner(harmed):
        pass
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


HANGING = """
import sys, time
from pathlib import Path
from packager.targets import web
with web.runner(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@needs_browser
def test_nothing_is_left_when_the_process_that_verifies_is_killed(small: Path, own_temp: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(small)], stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "TMPDIR": str(own_temp)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    assert running_programs(own_temp)
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()
    limit = time.monotonic() + 10
    while time.monotonic() < limit and (running_programs(own_temp) or any(own_temp.iterdir())):
        time.sleep(0.05)
    assert running_programs(own_temp) == [] and list(own_temp.iterdir()) == []


@needs_browser
def test_two_pages_that_disagree_fail(small: Path, monkeypatch: pytest.MonkeyPatch):
    """The second page's answer is changed on its way: the runner must notice, with no golden to say so."""
    answered = _Runner._answer

    def wrong(self, page):
        outputs = answered(self, page)
        return {name: array + 1 for name, array in outputs.items()} if page.channel.isolated else outputs

    monkeypatch.setattr(_Runner, "_answer", wrong)
    from packager import golden_store
    from packager.goldens import GoldenCase
    from packager.parity import OutputRule, Tolerance

    x = np.array([[1, -2, 3]], np.float32)
    case = GoldenCase("one", {"x": x}, {"y": np.maximum(x, 0)}, "made", "made")
    rules = {"y": OutputRule(Tolerance(max_abs=1e-3))}
    golden_store.write(small / "golden", GoldenSet((case,)), rules, policy="p", precision="fp32", excluded={})
    with room.runner(small) as runner, pytest.raises(VerificationError, match="isolated page answers otherwise"):
        runner.run({"x": x})


def test_node_comes_from_the_wheel_where_the_machine_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(node, "_wheel_folder", lambda: None)
    assert node.find_node() is None and node.find_npm() is None
    monkeypatch.setattr(node, "_wheel_folder", lambda: tmp_path)
    assert node.find_node() is None and node.find_npm() is None
    binary, script = tmp_path / "bin/node", tmp_path / "lib/node_modules/npm/bin/npm-cli.js"
    for file in (binary, script):
        file.parent.mkdir(parents=True)
        file.touch()
    assert node.find_node() == [str(binary)] and node.find_npm() == [str(binary), str(script)]


def test_neither_browser_nor_node_is_a_missing_toolchain(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packager.targets.web.node.find_node", lambda: None)
    with without_browser(monkeypatch):
        assert [item.what for item in room.missing(None)] == ["a Chromium browser, or Node"]
        with pytest.raises(ToolchainMissing, match="neither a browser nor Node"), room.runner(small):
            pass


def test_the_runtime_is_three_files_and_their_licence(small: Path):
    names = {file.name for file in (small / "runtime").iterdir()}
    shipped = set(runtime.SHIPPED.values())
    assert not (small / "demo/style.css").exists(), "both pages share one"
    assert names == shipped | {f"{name}.{end}" for name in shipped for end in ("gz", "br")} | {"LICENSE.txt"}
    assert sum((small / "runtime" / name).stat().st_size for name in shipped) < 14_400_000
    assert sum((small / "runtime" / f"{name}.br").stat().st_size for name in shipped) < 2_750_000
    assert "Permission is hereby granted" in (small / "runtime/LICENSE.txt").read_text()
    assert not [name for name in shipped if b"sourceMappingURL" in (small / "runtime" / name).read_bytes()]


def test_a_runtime_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKAGER_RUNTIME_DIR", str(tmp_path / "none"))
    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(ToolchainMissing, match="holds neither"):
        bundle(relu(tmp_path / "a.onnx"), runtime_dir=str(given))
    (given / "onnxruntime-web-1.30.0.tgz").write_bytes(b"not it")
    with pytest.raises(BuildError, match="is not the pinned package: its sha512 is"):
        bundle(relu(tmp_path / "b.onnx"), runtime_dir=str(given))
    (given / "onnxruntime-web-1.30.0.tgz").unlink()
    for name in runtime.SHIPPED:
        (given / name).write_bytes(b"not it either")
    with pytest.raises(BuildError, match=r"ort\.wasm\.min\.mjs is not that of onnxruntime-web 1\.30\.0"):
        bundle(relu(tmp_path / "c.onnx"), runtime_dir=str(given))
    assert not (tmp_path / "none").exists()


def a_package(folder: Path) -> dict[str, str]:
    """A tarball like the runtime's, with small files; gives the pins that fit it."""
    folder.mkdir()
    files = {
        name: b"/* a script */ " + b" ".join(before for before, _ in runtime.EDITS.get(name, ())) + b" done"
        for name in runtime.SHIPPED
    }
    files["ort.wasm.min.mjs"] += b"\n//# sourceMappingURL=ort.wasm.min.mjs.map\n"
    tarball = folder / "made-1.2.3.tgz"
    with tarfile.open(tarball, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/dist/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    digest = base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    pins = {"package": "made", "version": "1.2.3", "integrity": f"sha512-{digest}"}
    return pins | {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_a_runtime_is_taken_from_a_folder_checked_edited_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKAGER_RUNTIME_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("packager.targets.web.runtime.find_npm", lambda: None)
    pins = a_package(tmp_path / "given")
    with ThreadPoolExecutor(4) as pool:  # builds that run at once all get the whole of it
        wanted = [tmp_path / f"out{at}" for at in range(4)]
        list(pool.map(lambda out: runtime.place_runtime(pins, "licence", str(tmp_path / "given"), out), wanted))
    runtime.place_runtime(pins, "licence", "", tmp_path / "later")  # out of the cache: there is no npm
    for out in (*wanted, tmp_path / "later"):
        script = (out / "ort.wasm.min.js").read_bytes()
        assert script == b'/* a script */ "ort.wasm.min.js" "ort-wasm-simd-threaded.js" done\n'
        assert gzip.decompress((out / "ort.wasm.min.js.gz").read_bytes()) == script
        assert brotli.decompress((out / "ort.wasm.min.js.br").read_bytes()) == script
        assert (out / "LICENSE.txt").read_text() == "licence"
    assert len(list((tmp_path / "kept").iterdir())) == 1
    with pytest.raises(BuildError, match=r"ort\.wasm\.min\.mjs is not that of made 1\.2\.3"):
        runtime.place_runtime(pins | {"ort.wasm.min.mjs": "0"}, "licence", str(tmp_path / "given"), tmp_path / "wrong")


def test_where_the_runtime_lies_is_recorded_nowhere(tmp_path: Path):
    plan = plan_of(relu(tmp_path / "m.onnx"), runtime_dir=str(tmp_path / "given"))
    assert dict(plan.local) == {"runtime_dir": str(tmp_path / "given")}
    assert str(tmp_path) not in plan.options
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "model.onnx").touch()
    reseal(folder, plan)
    assert str(tmp_path) not in (folder / "bundle.json").read_text()


def test_a_spoilt_cached_runtime_is_not_used(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cached = Path(os.environ["PACKAGER_RUNTIME_DIR"])
    monkeypatch.setenv("PACKAGER_RUNTIME_DIR", str(tmp_path / "runtimes"))
    for one in cached.glob("onnxruntime-web-*"):
        made = Path(shutil.copytree(one, tmp_path / "runtimes" / one.name))
        (made / "files/ort.wasm.min.js").write_text("alert(1)")
    with pytest.raises(ToolchainMissing, match="there is no npm"), monkeypatch.context() as patch:
        patch.setattr("packager.targets.web.runtime.find_npm", lambda: None)
        bundle(relu(tmp_path / "m.onnx"))


def test_two_builds_give_the_same_bytes(small: Path, tmp_path: Path):
    again = bundle(relu(tmp_path / "m.onnx"))
    assert {file.relative_to(again) for file in again.rglob("*")} == {
        file.relative_to(small) for file in small.rglob("*") if file.parent.name != "golden" and file.name != "golden"
    }
    for file in again.rglob("*"):
        if file.is_file() and file.name != "bundle.json":
            assert file.read_bytes() == (small / file.relative_to(again)).read_bytes(), file


def test_the_package_description_exports_loader_and_types(small: Path):
    described = json.loads((small / "package.json").read_text())
    assert described["type"] == "module" and described["types"] == "./m.d.ts"
    assert described["exports"]["."] == {"types": "./m.d.ts", "default": "./m.js"}
    assert (small / "m.js").is_file() and (small / "m.d.ts").is_file()


def test_messages_are_read_back_or_refused(small: Path):
    signature = plan_of(small / "model.onnx").signature
    y = np.array([[1, 2, 3]], np.float32)
    message = wire_format.encode({"y": y})
    assert same(wire_format.decode(message, signature)["y"], y)
    for spoilt in (
        message[:5],
        message[:-8],
        b"",
        wire_format.encode({"z": y}),
        wire_format.encode({"y": y.astype("f8")}),
    ):
        with pytest.raises(VerificationError, match="makes no sense"):
            wire_format.decode(spoilt, signature)


def test_int64_is_an_input_a_user_can_give_as_numbers(tmp_path: Path):
    """The types say so; the loader's own tests run it."""
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    folder = bundle(save(model(nodes, [value("x", INT64, [])], [value("y", INT64, [])]), tmp_path / "m.onnx"))
    types = (folder / "m.d.ts").read_text()
    assert '"x": BigInt64Array | readonly (bigint | number)[] | bigint | number | Given<' in types


def test_what_verification_reaches_here_is_a_browser_or_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packager.targets.web.browser.find_browser", lambda: "chromium")
    assert reach_of(kind_named("web"), this_host()) == Reach("runtime")
    monkeypatch.setattr("packager.targets.web.browser.find_browser", lambda: None)
    found = reach_of(kind_named("web"), this_host())
    assert found.level == "emulated" and "install Chromium" in found.reason
