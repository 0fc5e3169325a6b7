"""The real Triton core: what it loads, refuses and merges, and what the room decides before it is asked."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from packager.errors import Refused, VerificationError
from packager.golden_synth import synthesise
from packager.host import this_host
from packager.model import open_model
from packager.room import Plan, PlanRequest, kind_named, reach_of
from packager.supervise import SHARED_MEMORY
from packager.targets.triton import Options
from packager.targets.triton.config import Config, Entry, config_text, safety_objection
from packager.targets.triton.kit import Program, find_kit, kit_name, make_kit, missing_parts, requirements
from packager.targets.triton.planning import plan_for
from packager.targets.triton.server import PREFIX, Server, load_failure, serving, work_folder
from packager.targets.triton.serving import runtime_info
from tests.builders import FLOAT, STRING, model, relu, save, value

MISSING = missing_parts(this_host())
needs_server = pytest.mark.skipif(bool(MISSING), reason="; ".join(f"{item.what}: {item.how}" for item in MISSING))


def request(path: Path, precision: str = "fp32", **options) -> PlanRequest:
    opened = open_model(path)
    return PlanRequest(
        target="triton", kind="triton", name="m", version="1", model=opened, goldens=synthesise(opened),
        precision=precision, shapes=(), options=Options(**options), facts=kind_named("triton").facts,
    )  # fmt: skip


def plan(path: Path, **options) -> Plan:
    made: Plan = plan_for(request(path, **options))
    return made


X, Y = '{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }', '{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }'


@dataclass(frozen=True)
class Case:
    """A repository and what becomes of it: the reason's pattern where it is refused, empty where it loads."""

    config: str
    refused: str = ""
    model: str = "free"
    version: str = "1"


def text(inputs: str = X, outputs: str = Y, batch: int = 8, more: str = "") -> str:
    return f'backend: "onnxruntime" max_batch_size: {batch} input [ {inputs} ] output [ {outputs} ] {more}'


def one(dims: str, name: str = "x", kind: str = "FP32", more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'


def accelerated(side: str, name: str) -> str:
    return f'optimization {{ execution_accelerators {{ {side}_execution_accelerator [ {{ name: "{name}" }} ] }} }}'


CASES = {
    "plain": Case(text()),
    "by platform": Case(text().replace('backend: "onnxruntime"', 'platform: "onnxruntime_onnx"')),
    "dynamic batching": Case(text(more="dynamic_batching { }")),
    "preferred at the limit": Case(text(more="dynamic_batching { preferred_batch_size: [ 4, 8 ] }")),
    "preferred over the limit": Case(text(more="dynamic_batching { preferred_batch_size: [ 9 ] }"), "preferred"),
    "full shapes": Case(text(one("-1, 3"), one("-1, 3", "y"), 0)),
    "full shapes, batch pinned": Case(text(one("2, 3"), one("-1, 3", "y"), 0)),
    "output pinned where the model is free": Case(text(one("-1, 3"), one("2, 3", "y"), 0), "model expects 2 dim"),
    "full shapes without the first": Case(text(one("3"), one("3", "y"), 0), "model expects 2 dimensions"),
    "wrong input dims": Case(text(one("4")), r"tensor 'x'.*\[-1,4\]"),
    "wrong output dims": Case(text(outputs=one("4", "y")), r"tensor 'y'.*\[-1,4\]"),
    "free output dim where the model's is fixed": Case(text(outputs=one("-1", "y")), "tensor 'y'"),
    "free input dim where the model's is fixed": Case(text(one("-1")), "tensor 'x'"),
    "too many dims": Case(text(one("3, 1")), "expects 2 dimensions"),
    "dims of zero": Case(text(one("0")), "dimension"),
    "no dims": Case(text(one("")), "dims"),
    "wrong input dtype": Case(text(one("3", kind="FP16")), "datatype TYPE_FP16 for input 'x'"),
    "wrong output dtype": Case(text(outputs=one("3", "y", "INT64")), "datatype TYPE_INT64 for output 'y'"),
    "bfloat16": Case(text(one("3", kind="BF16")), "unsupported datatype TYPE_BF16|expects datatype"),
    "no dtype": Case(text('{ name: "x" dims: [ 3 ] }'), "data_type|data type"),
    "wrong input name": Case(text(one("3", "z")), "unexpected inference input 'z'"),
    "wrong output name": Case(text(outputs=one("3", "z")), "unexpected inference output 'z'"),
    "an input too many": Case(text(f"{X}, {one('3', 'z')}"), "expects 2 inputs, model provides 1"),
    "an output too many": Case(text(outputs=f"{Y}, {one('3', 'z')}"), "unexpected inference output 'z'"),
    "an input of two missing": Case(text(), "expects 1 inputs, model provides 2", model="two"),
    "an output of two missing": Case(text(outputs=Y), model="outputs"),
    "optional input, batched": Case(text(one("3", more="optional: true")), "optional input 'x'"),
    "fixed batch as rows": Case(text(), r"first dimension must be -1", model="fixed"),
    "fixed batch in full": Case(text(one("8, 3"), one("8, 3", "y"), 0), model="fixed"),
    "scalar as [1]": Case(text(one("1"), one("1", "y"), 0), model="scalar"),
    "scalar as [2]": Case(text(one("2"), one("1", "y"), 0), "scalar tensor 'x'", model="scalar"),
    "scalar, batched": Case(text(one("1"), one("1", "y")), model="scalar"),
    "scalar by reshape": Case(text(one("1", more="reshape: { shape: [ ] }"), Y, 0), "empty reshape", model="scalar"),
    "rows without dims": Case(
        text(one("1", more="reshape: { shape: [ ] }"), one("1", "y", more="reshape: { shape: [ ] }")), model="rows"
    ),
    "reshape of another size": Case(text(one("3", more="reshape: { shape: [ 2 ] }")), "reshape"),
    "no output section": Case(f'backend: "onnxruntime" max_batch_size: 8 input [ {X} ]'),
    "name of another": Case(text(more='name: "other"'), "other|name"),
    "no version folder": Case(text(), "version|poll|Poll", version="latest"),
    "version zero": Case(text(), "version|Poll", version="zero"),
    "a version that isn't there": Case(text(more="version_policy { specific { versions: [ 7 ] } }"), "version"),
    "bad syntax": Case(text() + " }", "libprotobuf ERROR|parse|pars"),
    "unknown field": Case(text(more="no_such_field: 1"), "no_such_field|parse"),
    "unknown enum": Case(text(one("3", kind="FLOAT33")), "FLOAT33|parse"),
    "unknown backend": Case(text().replace("onnxruntime", "no_such_backend"), "no_such_backend|backend"),
    "two instances": Case(text(more="instance_group [ { count: 2 kind: KIND_CPU } ]")),
    "no instances of a kind": Case(text(more="instance_group [ { count: 1 kind: KIND_GPU } ]"), "GPU|gpu"),
    "accelerator on CPU": Case(text(more=accelerated("cpu", "openvino"))),
    "unknown accelerator on CPU": Case(
        text(more=accelerated("cpu", "opencl")), "unknown Execution Accelerator 'opencl'"
    ),
    "accelerator of a GPU that isn't used": Case(
        text(more=accelerated("gpu", "tensorrt") + " instance_group [ { count: 1 kind: KIND_CPU } ]")
    ),
    "graph not optimised": Case(text(more="optimization { graph { level: 2 } }")),
    "rates": Case(
        text(more='instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] } } ]')
    ),
    "response cache": Case(text(more="response_cache { enable: true }")),
    "label file missing": Case(text(outputs=one("3", "y", more='label_filename: "none.txt"')), "none.txt"),
    "not a model": Case(text(), "onnx runtime error", model="broken"),
    "model file missing": Case(text(more='default_model_filename: "other.onnx"'), "other.onnx"),
}


def folder_of(label: str) -> str:
    """The model's name: Triton's HTTP interface doesn't decode others."""
    return re.sub(r"\W+", "_", label)


def models(folder: Path) -> dict[str, Path]:
    """The models of the cases, by name."""
    x, y, z = value("x"), value("y"), value("z")
    both = [helper.make_node("Add", ["x", "z"], ["y"])]
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    (folder / "broken.onnx").write_bytes(b"not a protobuf")
    return {
        "free": relu(folder / "free.onnx"),
        "fixed": relu(folder / "fixed.onnx", shape=[8, 3]),
        "scalar": relu(folder / "scalar.onnx", shape=[]),
        "rows": relu(folder / "rows.onnx", shape=["n"]),
        "two": save(model(both, [x, z], [y]), folder / "two.onnx"),
        "outputs": save(model(twice, [x], [y, z]), folder / "outputs.onnx"),
        "broken": folder / "broken.onnx",
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with a repository of all cases; its path holds a space, as a bundle's may."""
    if MISSING:
        pytest.skip(MISSING[0].how)
    folder = tmp_path_factory.mktemp("cases")
    files, repository = models(folder), folder / "model repository"
    for label, case in CASES.items():
        home = repository / folder_of(label)
        (home / case.version).mkdir(parents=True)
        (home / case.version / "model.onnx").write_bytes(files[case.model].read_bytes())
        (home / "config.pbtxt").write_text(case.config)
    with serving(repository) as running:
        yield running


@needs_server
@pytest.mark.parametrize("label", CASES)
def test_the_core_loads_or_refuses(server: Server, label: str):
    name, case = folder_of(label), CASES[label]
    if not case.refused:
        server.load(name)
        assert server.get(f"/v2/models/{name}")["name"] == name
        return
    with pytest.raises(VerificationError) as caught:
        server.load(name)
    assert re.search(case.refused, caught.value.message), caught.value.message
    assert "At: /" not in caught.value.message


@needs_server
def test_a_server_leaves_nothing_behind(tmp_path: Path):
    home = tmp_path / "repository/m/1"
    home.mkdir(parents=True)
    relu(home / "model.onnx")
    (home.parent / "config.pbtxt").write_text(text())
    with serving(tmp_path / "repository") as running:
        folder = running.log.parent
        running.load("m")
        assert list(SHARED_MEMORY.glob(f"{folder.name}*"))
        command = Path("/proc").glob("[0-9]*/cmdline")
        assert any(str(folder).encode() in _read(path) for path in command)
    assert not folder.exists()
    assert not list(SHARED_MEMORY.glob(f"{folder.name}*"))
    assert not any(str(folder).encode() in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


@needs_server
def test_a_killed_run_takes_its_server_along(tmp_path: Path):
    home = tmp_path / "repository/m/1"
    home.mkdir(parents=True)
    relu(home / "model.onnx")
    (home.parent / "config.pbtxt").write_text(text())
    code = (
        "import os, sys; from pathlib import Path\n"
        "from packager.targets.triton.server import serving\n"
        "with serving(Path(sys.argv[1])) as server:\n    server.load('m')\n"
        "    print(server.log.parent, flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "repository")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith(PREFIX), done.stderr

    def left() -> bool:
        running = any(str(folder).encode() in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
        return running or folder.exists() or any(SHARED_MEMORY.glob(f"{folder.name}*"))

    end = time.monotonic() + 60
    while left():
        assert time.monotonic() < end, "the server, its folder or its shared memory outlives the run"
        time.sleep(0.1)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_a_killed_run_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os, tempfile; tempfile.tempdir = os.environ['BASE']\n"
        "from packager.targets.triton.server import work_folder\n"
        "with work_folder() as folder:\n    print(folder, flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"BASE": str(tmp_path), "PATH": "/usr/bin"},
    )  # fmt: skip
    left = Path(done.stdout.strip())
    assert left.is_dir(), done.stderr
    with work_folder() as first:
        assert not left.exists()
        with work_folder() as second:
            assert first.is_dir() and second.is_dir()
    assert list(tmp_path.glob("packager-triton-*")) == []


def test_a_space_in_the_temporary_folder_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a space").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a space"))
    with work_folder() as folder:
        assert " " not in str(folder)


def test_a_configuration_survives_any_name():
    for name in ('a"b', "line\nend", "back\\slash", "名前", "a/b:0", "\x01", "{{x}}", "tab\t"):
        config = Config(
            "m", (Entry(name, "TYPE_FP32", (-1, 3)),), (Entry(name + "!", "TYPE_BOOL", (-1,)),), 4, "why\nnot",
            Options(preferred_batch_sizes=(2, 4), instances=3, device="auto", model_version=7, queue_delay_us=5),
        )  # fmt: skip
        made = config_text(config)
        assert made.isascii() and safety_objection(made) == "" and made == config_text(config)
        parsed = text_format.Parse(made, ModelConfig())
        assert parsed.input[0].name == name and list(parsed.input[0].dims) == [3]
        assert parsed.output[0].data_type == DataType.TYPE_BOOL
        assert list(parsed.output[0].dims) == [1] and parsed.output[0].HasField("reshape")
        assert parsed.instance_group[0].count == 3 and list(parsed.version_policy.specific.versions) == [7]
        assert list(parsed.dynamic_batching.preferred_batch_size) == [2, 4]
        assert parsed.dynamic_batching.max_queue_delay_microseconds == 5


def test_no_dynamic_batching_without_batching():
    config = Config("m", (Entry("x", "TYPE_FP32", ()),), (Entry("y", "TYPE_FP32", (2,)),), 0, "", Options())
    parsed = text_format.Parse(config_text(config), ModelConfig())
    assert not parsed.HasField("dynamic_batching") and list(parsed.input[0].dims) == [1]
    assert not parsed.input[0].HasField("reshape"), "the core refuses an empty reshape without batching"


def test_every_unfit_tensor_is_named(tmp_path: Path):
    nodes = [
        helper.make_node("Identity", ["half"], ["brain"]), helper.make_node("Identity", ["word"], ["words"]),
        helper.make_node("Identity", ["any"], ["some"]), helper.make_node("Identity", ["none"], ["nothing"]),
    ]  # fmt: skip
    inputs = [
        value("half", TensorProto.BFLOAT16), value("word", STRING, []), value("any", FLOAT, None),
        value("none", FLOAT, [0, 3]),
    ]  # fmt: skip
    outputs = [
        value("brain", TensorProto.BFLOAT16), value("words", STRING, []), value("some", FLOAT, None),
        value("nothing", FLOAT, [0, 3]),
    ]  # fmt: skip
    made = request(relu(tmp_path / "m.onnx"))
    opened = open_model(save(model(nodes, inputs, outputs), tmp_path / "bad.onnx"))
    with pytest.raises(Refused) as caught:
        plan_for(replace(made, model=opened))
    for part in ("'half' is bfloat16", "'brain' is bfloat16", "'word' is a scalar string", "'any' has no declared rank",
                 "'some' has no declared rank", "'none' is [0, 3]", "'nothing' is"):  # fmt: skip
        assert part in caught.value.message


def test_a_model_newer_than_the_release_is_refused(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    with pytest.raises(Refused, match=r"opset 22.*ONNX Runtime 1\.19\.2 of Triton 24\.10 reads up to 21"):
        plan(save(model(nodes, [value("x")], [value("y")], opset=22, ir=10), tmp_path / "a.onnx"))
    with pytest.raises(Refused, match="IR version 11"):
        plan(save(model(nodes, [value("x")], [value("y")], ir=11), tmp_path / "b.onnx"))


def product(path: Path, act: type = np.uint8, weight: type = np.int8, opset: int = 21, more: str = "") -> Path:
    """A MatMul between QuantizeLinear and DequantizeLinear; ``more`` names what else the model gives."""
    constants = {
        "s": np.array(0.1, np.float32), "a": np.array(0, act), "b": np.array(0, weight), "w": np.ones((3, 3), weight),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "a"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "a"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "s", "b"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["p"], name="project"),
        helper.make_node("QuantizeLinear", ["p", "s", "a"], ["pq"]),
        helper.make_node("DequantizeLinear", ["pq", "s", "a"], ["y"]),
    ]
    outputs = [value("y"), *([value(more)] if more else [])]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return save(model(nodes, [value("x")], outputs, initializers, opset=opset, ir=10), path)


def test_a_quantised_product_of_an_operator_set_without_kernel_is_refused_by_node(tmp_path: Path):
    """ONNX Runtime 1.19 fuses it into a QLinearMatMul of operator set 21, without a kernel; others it leaves alone."""
    for number, (act, weight) in enumerate(((np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8))):
        with pytest.raises(Refused, match="node MatMul 'project'") as caught:
            plan(product(tmp_path / f"{number}.onnx", act, weight))
        assert "QLinearMatMul of operator set 21" in caught.value.message
    plan(product(tmp_path / "old.onnx", opset=20))
    plan(product(tmp_path / "wide.onnx", np.uint16))
    plan(product(tmp_path / "wide-weights.onnx", weight=np.int16))
    plan(product(tmp_path / "seen.onnx", more="p"))


@needs_server
@pytest.mark.parametrize("fused", [True, False])
def test_the_release_fuses_what_is_refused_and_nothing_else(tmp_path: Path, fused: bool):
    home = tmp_path / "repository/m/1"
    home.mkdir(parents=True)
    product(home / "model.onnx", more="" if fused else "p")
    (home.parent / "config.pbtxt").write_text(text())
    with serving(tmp_path / "repository") as running:
        if fused:
            with pytest.raises(VerificationError, match=r"Failed to find kernel for QLinearMatMul\(21\)"):
                running.load("m")
        else:
            running.load("m")


def test_an_operator_the_release_lacks_is_refused_by_node(corpus: Path):
    with pytest.raises(Refused, match=r"node ai\.onnx\.ml\.TreeEnsemble"):
        plan_for(replace(request(corpus / "traffic_decoder.onnx")))


def test_a_name_that_triton_does_not_decode_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match=r"'m\+1'"):
        plan_for(replace(request(relu(tmp_path / "m.onnx")), name="m+1"))


def test_batching_asked_for_where_it_can_not_be(tmp_path: Path):
    fixed = relu(tmp_path / "m.onnx", shape=[8, 3])
    with pytest.raises(Refused, match="first dim of input 'x' is fixed at 8"):
        plan(fixed, max_batch=4)
    with pytest.raises(Refused, match="has 4, but requests aren't batched: the first dim of input 'x'"):
        plan(fixed, preferred_batch_sizes=(4,))
    free = relu(tmp_path / "free.onnx")
    with pytest.raises(Refused, match="has 16, but max_batch is 8"):
        plan(free, preferred_batch_sizes=(4, 16))
    assert "requests aren't batched: the first dim of input 'x' is fixed at 8" in plan(fixed).notes
    assert plan(free).notes == ()
    assert ("max batch size", "0") in plan(free, max_batch=0).steps[2].settings


def test_the_reason_is_found_in_the_log_where_the_answer_has_none():
    log = "I1 fine\nE2 model_repository_manager.cc:1] Poll failed for model directory 'm': bad config\n"
    assert load_failure('{"error": "failed to load \'m\', failed to poll from model repository"}', log).startswith(
        "Poll failed for model directory 'm': bad config"
    )
    assert load_failure("", "") == "it gives no reason"


def test_a_verdict_says_which_backend_ran():
    real, hosted = runtime_info("2.51.0", True), runtime_info("2.51.0", False)
    assert (real.level, real.reason, real.name) == ("runtime", "", "Triton core 2.51.0 + onnxruntime backend")
    assert real.details == (("made for release", "24.10"),), "the server may be of another"
    assert (hosted.level, hosted.version) == ("emulated", "1.19.2")
    assert hosted.name == "Triton core 2.51.0 + python-hosted onnxruntime" and "stand-in" in hosted.reason


def test_the_kit_is_pinned_by_digest_and_named_by_its_pins():
    lines = requirements().splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "nvidia-pytriton==0.7.0", "numpy==1.26.4", "onnxruntime==1.19.2",
    ]  # fmt: skip
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "numpy-1.26.4" in kit_name() and "onnxruntime-1.19.2" in kit_name()


@needs_server
def test_a_kit_that_is_there_is_not_made_again():
    found = find_kit()
    assert found is not None and make_kit() == found


def test_what_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host = replace(this_host(), system="Linux", machine="x86_64")
    monkeypatch.setenv("PACKAGER_TRITON_KIT", str(tmp_path))
    (kit, *_) = missing_parts(host)
    assert str(tmp_path) in kit.what and kit.how == "python -m packager.targets.triton.kit"
    monkeypatch.setenv("PACKAGER_TRITON_BACKENDS", str(tmp_path))
    (backend,) = missing_parts(host)
    assert "libtriton_onnxruntime.so" in backend.what
    (elsewhere,) = missing_parts(replace(host, system="Darwin", machine="arm64"))
    assert "Darwin arm64" in elsewhere.what


def test_what_verification_reaches_here_is_the_real_backend_or_the_stand_in(monkeypatch: pytest.MonkeyPatch):
    for backends, level in ((Path("backends"), "runtime"), (None, "emulated")):
        program = Program(Path("tritonserver"), None, backends)
        monkeypatch.setattr("packager.targets.triton.kit.find_program", lambda program=program: program)
        assert reach_of(kind_named("triton"), this_host()).level == level
