"""The generated Swift package, compiled and run here over the stand-in. Wants a Swift toolchain; skips by name without.

A compilation takes a good while, so one package carries all that can be told of names and dtypes at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import packager
from packager import golden_store, parity
from packager.errors import VerificationError
from packager.goldens import GoldenCase, GoldenSet
from packager.room import kind_named
from packager.targets.ios import swift_run, toolchain
from tests.builders import BOOL, FLOAT, INT32, INT64, STRING, model, save, value

NAMES = ["class", "self", "a-b", "1x", "名前", "a b", "a_b", 'q"\\(1)', "line\nend", "init", "?"]
DTYPES = {
    "f32": FLOAT, "i64": INT64, "i32": INT32, "u8": TensorProto.UINT8, "i8": TensorProto.INT8,
    "u32": TensorProto.UINT32, "u64": TensorProto.UINT64, "bool": BOOL, "str": STRING,
}  # fmt: skip
PINS = kind_named("ios").facts.pins


@pytest.fixture(scope="module")
def swift() -> toolchain.Toolchain:
    found = toolchain.find_toolchain()
    if found is None:
        pytest.skip(f"not required: there is no Swift toolchain here ({toolchain.HOW})")
    return found


def everything(path: Path) -> Path:
    """Hostile names, every dtype, a scalar, an empty tensor, and two outputs that differ in a sign."""
    nodes, inputs, outputs = [], [], []
    for number, name in enumerate(NAMES):
        nodes.append(helper.make_node("Relu", [name], [f"{name} out"], name=f"n{number}"))
        inputs.append(value(name, FLOAT, ["n", 3]))
        outputs.append(value(f"{name} out", FLOAT, ["n", 3]))
    for name, dtype in DTYPES.items():
        nodes.append(helper.make_node("Identity", [name], [f"{name}_o"], name=name))
        inputs.append(value(name, dtype, [2, 2]))
        outputs.append(value(f"{name}_o", dtype, [2, 2]))
    nodes += [
        helper.make_node("Add", ["scalar", "scalar"], ["twice"], name="twice"),
        helper.make_node("Neg", ["class"], ["negative"], name="negative"),
        helper.make_node("Abs", ["class"], ["positive"], name="positive"),
    ]
    inputs.append(value("scalar", FLOAT, []))
    outputs += [value("twice", FLOAT, []), *(value(name, FLOAT, ["n", 3]) for name in ("negative", "positive"))]
    return save(model(nodes, inputs, outputs), path)


@pytest.fixture(scope="module")
def bundle(swift: toolchain.Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of :func:`everything`, built without being verified."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("everything")
        patch.setenv("PACKAGER_CACHE_DIR", str(folder / "cache"))
        made = packager.build(everything(folder / "all.onnx"), targets=["ios"], out=folder / "dist", verify=False)
        assert made.exit_code == 0, made.targets[0].message
        return folder / "dist" / str(made.targets[0].bundle)


@pytest.fixture(scope="module")
def work(swift: toolchain.Toolchain, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder in which the package is compiled."""
    folder = tmp_path_factory.mktemp("work")
    swift_run.lay_out(bundle, folder)
    swift_run.build(swift, folder, "All")
    return folder


@pytest.fixture
def running(swift: toolchain.Toolchain, work: Path) -> Iterator[swift_run.SwiftModel]:
    started = swift_run.SwiftModel(swift, work)
    yield started
    started.close()


def feeds_of(bundle: Path) -> dict[str, np.ndarray]:
    return dict(parity.read_golden(bundle / "golden").cases[0].inputs)


def test_every_name_and_dtype_crosses_both_ways(running: swift_run.SwiftModel, bundle: Path):
    golden = parity.read_golden(bundle / "golden")
    for case in golden.cases:
        outputs = running.run(case.inputs)
        found = parity.compare_case(case.name, case.outputs, outputs, golden.rules, golden.excluded_names)
        assert found.passed, found.reasons
        for name, array in outputs.items():
            assert array.dtype == case.outputs[name].dtype and array.shape == case.outputs[name].shape, name


def test_extremes_cross_unchanged(running: swift_run.SwiftModel, bundle: Path):
    feeds = feeds_of(bundle)
    feeds["i64"] = np.array([[2**63 - 1, -(2**63)], [0, -1]], np.int64)
    feeds["u64"] = np.array([[2**64 - 1, 0], [1, 2]], np.uint64)
    feeds["f32"] = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
    feeds["bool"] = np.array([[True, False], [False, True]])
    feeds["str"] = np.array([["", "名前"], ["line\nend", 'q"\\(1)']], dtype=object)
    outputs = running.run(feeds)
    for name in ("i64", "u64", "bool", "str"):
        assert np.array_equal(outputs[f"{name}_o"], feeds[name]), name
    assert outputs["f32_o"].tobytes() == feeds["f32"].tobytes()


def test_wrong_shapes_are_errors_that_name_the_tensor(running: swift_run.SwiftModel, bundle: Path):
    feeds = feeds_of(bundle)
    with pytest.raises(VerificationError, match=r"'scalar' has shape \[1\], not \[\]"):
        running.run({**feeds, "scalar": np.zeros(1, np.float32)})
    with pytest.raises(VerificationError, match=r"'class' has shape \[2, 4\], not \[any, 3\]"):
        running.run({**feeds, "class": np.zeros((2, 4), np.float32)})
    with pytest.raises(VerificationError, match="'i64' is int32, not int64"):
        running.run({**feeds, "i64": feeds["i64"].astype(np.int32)})
    assert running.run(feeds), "an error must not end the program"


def test_a_swapped_pair_of_outputs_in_the_marshalling_is_caught(swift: toolchain.Toolchain, work: Path, bundle: Path):
    """The same work folder, its wrapper edited as a slip of the template would, compiled again."""
    source = work / "bundle/Sources/All/AllModel.swift"
    text = source.read_text(encoding="utf-8")
    parts = text.replace('tensors["negative"]', "\0").replace('tensors["positive"]', 'tensors["negative"]')
    assert parts.count("\0") == 1
    source.write_text(parts.replace("\0", 'tensors["positive"]'), encoding="utf-8")
    shutil.rmtree(work / "harness/Sources")
    try:
        swift_run.build(swift, work, "All")
        golden = parity.read_golden(bundle / "golden")
        case = golden.cases[0]
        started = swift_run.SwiftModel(swift, work)
        try:
            outputs = started.run(case.inputs)
        finally:
            started.close()
        found = parity.compare_case(case.name, case.outputs, outputs, golden.rules, frozenset())
    finally:
        source.write_text(text, encoding="utf-8")
    assert not found.passed
    assert {output.name for output in found.outputs if output.reasons} == {"negative", "positive"}


def test_a_damaged_model_is_refused_by_the_wrapper(swift: toolchain.Toolchain, work: Path):
    (packed,) = (work / "harness/.build/debug").glob("*All.resources/model.onnx")
    data = packed.read_bytes()
    packed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(VerificationError, match=r"model\.onnx is not the file that was verified"):
            swift_run.SwiftModel(swift, work)
    finally:
        packed.write_bytes(data)


def plain(folder: Path) -> Path:
    """A model of numbers, one that its own test in the package is run on."""
    weights = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2) / 7, "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="project"),
        helper.make_node("Softmax", ["h"], ["score"], name="score"),
        helper.make_node("ArgMax", ["h"], ["best"], name="best", axis=1, keepdims=0),
    ]
    outputs = [value("score", FLOAT, [2, 2]), value("best", INT64, [2])]
    return save(model(nodes, [value("x", FLOAT, [2, 3])], outputs, [weights]), folder / "plain.onnx")


def test_the_packages_own_test_writes_a_verdict_that_packager_takes(swift: toolchain.Toolchain, tmp_path: Path):
    """``swift build`` and ``swift test`` on the package as it ships, then ``packager verify --import``."""
    made = packager.build(plain(tmp_path), targets=["ios"], out=tmp_path / "dist", verify=False, cache=False)
    bundle = tmp_path / "dist" / str(made.targets[0].bundle)
    work = tmp_path / "work"
    work.mkdir()
    swift_run.lay_out(bundle, work)
    assert mirrored(swift, work)
    verdict = work / "verdict.json"
    done = swift_test(swift, work)
    assert done.returncode == 0, done.stdout[-3000:]
    found = packager.verify(bundle, imported=verdict)
    assert found.error is None and found.verdict is not None
    assert (found.verdict.status, found.verdict.level, found.verdict.cases) == ("passed", "emulated", 3)
    assert found.verdict.version and found.verdict.top1 == 1.0
    document = json.loads((bundle / "verdict.json").read_text())
    assert document["imported"] is True
    check_metrics(bundle, document)
    spoil(work / "bundle/golden")
    failed = swift_test(swift, work)
    assert failed.returncode != 0
    assert json.loads(verdict.read_text())["status"] == "failed"
    refused = packager.verify(bundle, imported=verdict)
    assert refused.exit_code == 6


def mirrored(swift: toolchain.Toolchain, work: Path) -> bool:
    """Let the runtime's own address lead to the stand-in, tagged with the pinned version."""
    inside = swift.inside(work)
    folder = f"{inside}/{swift_run.STANDIN}"
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*"]
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        [*who, "commit", "-qm", "stand-in"],
        [*who, "tag", PINS["runtime"]],
    ):
        assert swift.run(work, "git", "-c", "safe.directory=*", "-C", folder, *arguments).returncode == 0
    setting = ["swift", "package", "--package-path", f"{inside}/bundle", "config", "set-mirror"]
    done = swift.run(work, *setting, "--original", PINS["repository"], "--mirror", f"file://{folder}")
    assert done.returncode == 0, done.stdout
    return True


def swift_test(swift: toolchain.Toolchain, work: Path):
    """With memories of its own: SwiftPM holds a tag to the revision that it saw of it once."""
    inside = swift.inside(work)
    return swift.run(
        work, "env", f"PACKAGER_VERDICT={inside}/verdict.json", "swift", "test",
        "--cache-path", f"{inside}/cache", "--security-path", f"{inside}/security",
        "--package-path", f"{inside}/bundle", *swift_run.linking(swift, work), seconds=1200,
    )  # fmt: skip


def check_metrics(bundle: Path, document: dict) -> None:
    """The judge in Swift measures what the one in Python does: here, everything is exact or nearly so."""
    golden = parity.read_golden(bundle / "golden")
    for case, told in zip(golden.cases, document["cases"], strict=True):
        for output in told["outputs"]:
            metrics = output["metrics"]
            assert metrics["elements"] == metrics["compared"] == case.outputs[output["name"]].size
            if output["name"] == "score":
                assert 0 <= metrics["max_abs"] < 1e-5 and metrics["cosine"] > 0.999


def spoil(folder: Path) -> None:
    """Make one golden number wrong by far."""
    golden = parity.read_golden(folder)
    cases = [GoldenCase(case.name, case.inputs, dict(case.outputs), case.source, "test") for case in golden.cases]
    wrong = np.array(cases[0].outputs["score"], dtype=np.float32)
    wrong.flat[0] += 0.5
    cases[0] = GoldenCase(cases[0].name, cases[0].inputs, {**cases[0].outputs, "score": wrong}, "test", "test")
    golden_store.write(
        folder, GoldenSet(tuple(cases)), golden.rules, policy=golden.policy, precision=golden.precision, excluded={}
    )
