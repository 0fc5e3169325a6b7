"""The flow of a build, driven through a third party's room: what ends where, with which status, and what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager import golden_store, room
from packager import manifest as manifests
from packager.building import BuildJob, build_stage
from packager.bundle import open_bundle
from packager.errors import BuildError, GoldenError, ModelError, UsageError
from packager.goldens import GoldenCase, GoldenSet
from packager.results import Report
from packager.verifying import verify_folder
from tests import builders

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a manifest for ``y = Relu(x)`` with the given targets' tables, and other text before them."""

    def write(*targets: str, before: str = "", shape: tuple[int | str | None, ...] = ("n", 3)) -> Path:
        builders.relu(tmp_path / "relu.onnx", shape=shape)
        path = tmp_path / "packager.toml"
        path.write_text('[model]\npath = "relu.onnx"\nversion = "1.2.3"\n' + before + "\n".join(targets))
        return path

    return write


def build(path: Path, out: Path, **options) -> Report:
    return packager.build(manifest=path, out=out, **options)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_third_partys_room_is_built_verified_and_placed(tiny: str, write: Write, tmp_path: Path):
    out = tmp_path / "dist"
    report = build(write("[targets.tiny]"), out)
    assert report.exit_code == 0
    (result,) = report.targets
    assert (result.status, result.bundle, result.archive) == ("passed", "relu-1.2.3-tiny", "relu-1.2.3-tiny.tar.gz")
    assert result.verdict is not None
    assert (result.verdict.level, result.verdict.cases, result.verdict.max_abs) == ("runtime", 3, 0.0)
    assert files(out) == {
        "artifacts.json", "checksums.txt", "report.json", "report.html", "junit.xml", "relu-1.2.3-tiny.tar.gz",
        *(f"relu-1.2.3-tiny/{name}" for name in (
            "README.md", "bundle.json", "golden/golden.json", "golden/golden.safetensors", "model.onnx", "options.json",
            "verdict.json")),
    }  # fmt: skip
    readme = (out / "relu-1.2.3-tiny/README.md").read_text()
    assert "Deploying tiny" in readme and "max abs difference 0" in readme and "level **runtime**" in readme
    seal = json.loads((out / "relu-1.2.3-tiny/bundle.json").read_text())
    roles = {file["path"]: file["role"] for file in seal["files"]}
    assert roles["model.onnx"] == "model" and roles["golden/golden.json"] == "golden"
    assert "verdict.json" not in roles


def test_checksums_are_in_the_format_of_sha256sum(tiny: str, write: Write, tmp_path: Path):
    build(write("[targets.tiny]"), tmp_path / "dist")
    subprocess.run(["sha256sum", "--check", "--strict", "checksums.txt"], cwd=tmp_path / "dist", check=True)


def test_archives_are_byte_identical_from_run_to_run(tiny: str, write: Write, tmp_path: Path):
    path = write("[targets.tiny]", '[targets.other]\nkind = "tiny"\narchive = "zip"')
    for name in ("one", "two"):
        build(path, tmp_path / name, cache=False)
    for name in ("relu-1.2.3-tiny.tar.gz", "relu-1.2.3-other.zip"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    with tarfile.open(tmp_path / "one/relu-1.2.3-tiny.tar.gz") as tar:
        assert {member.mtime for member in tar} == {0}


@pytest.mark.parametrize("suffix", ["", ".tar.gz"])
def test_a_bundle_and_its_archive_verify_again(tiny: str, write: Write, tmp_path: Path, suffix: str):
    build(write("[targets.tiny]"), tmp_path / "dist")
    result = packager.verify(tmp_path / f"dist/relu-1.2.3-tiny{suffix}")
    assert result.exit_code == 0 and result.verdict is not None and result.verdict.cases == 3


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.onnx", "golden/golden.json", "golden/golden.safetensors", "README.md"])
@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_damaged_file_is_named(tiny: str, write: Write, tmp_path: Path, name: str, harm: Callable[[Path], None]):
    build(write("[targets.tiny]"), tmp_path / "dist")
    bundle = tmp_path / "dist/relu-1.2.3-tiny"
    harm(bundle / name)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None
    assert name in result.error.message


def test_a_file_that_is_not_part_of_the_bundle_is_a_warning(tiny: str, write: Write, tmp_path: Path):
    build(write("[targets.tiny]"), tmp_path / "dist")
    (tmp_path / "dist/relu-1.2.3-tiny/extra.txt").write_text("x")
    result = packager.verify(tmp_path / "dist/relu-1.2.3-tiny")
    assert result.exit_code == 0 and result.warnings == ("extra.txt is not part of the bundle",)


@pytest.mark.parametrize(
    ("fault", "code", "status", "words"),
    [
        ("refuse", 3, "refused", "Relu 'act'"),
        ("raise", 5, "error", "node Relu 'act' can't be converted"),
        ("unexpected", 5, "error", "RuntimeError: the SDK raised something of its own"),
        ("segfault", 5, "error", "SIGSEGV"),
        ("hang", 5, "error", "took longer than 3 s"),
        ("full", 5, "error", "no space left"),
        ("wrong", 6, "failed", "output 'y': max abs 1 is over 0.001"),
        ("nan", 6, "failed", "NaN on one side only"),
        ("run", 6, "failed", "out of device memory"),
    ],
)
def test_each_fault_is_that_targets_failure_and_no_other(
    tiny: str, write: Write, tmp_path: Path, fault: str, code: int, status: str, words: str
):
    out = tmp_path / "dist"
    limit = "build_timeout = 3.0" if fault == "hang" else ""  # the others must not depend on how busy the machine is
    path = write(f'[targets.bad]\nkind = "tiny"\nfault = "{fault}"\n{limit}', "[targets.tiny]")
    report = build(path, out)
    bad, good = report.targets
    assert (bad.status, bad.exit_code, report.exit_code) == (status, code, code)
    assert words in bad.message
    assert good.status == "passed"
    assert not (out / "relu-1.2.3-bad").exists() and not (out / "relu-1.2.3-bad.tar.gz").exists()
    assert (out / "rejected/relu-1.2.3-bad/verdict.json").exists() == (code == 6)
    assert "bad" not in (out / "checksums.txt").read_text()
    assert not list(out.glob(".*"))
    junit = (out / "junit.xml").read_text()
    assert 'failures="1"' in junit and words.split("'", maxsplit=1)[0] in junit.replace("&#x27;", "'")


def test_the_node_at_fault_is_named(tiny: str, write: Write, tmp_path: Path):
    report = build(write('[targets.tiny]\nfault = "wrong"'), tmp_path / "dist")
    diagnosis = " ".join(report.targets[0].diagnosis)
    assert "the ONNX reference evaluator agrees with ONNX Runtime" in diagnosis
    assert "first divergence: node Relu 'act'" in diagnosis


def test_a_failed_rebuild_takes_the_older_bundle_away(tiny: str, write: Write, tmp_path: Path):
    out = tmp_path / "dist"
    build(write("[targets.tiny]"), out)
    build(write('[targets.tiny]\nfault = "raise"'), out)
    assert not (out / "relu-1.2.3-tiny").exists() and not (out / "relu-1.2.3-tiny.tar.gz").exists()


def test_min_level_makes_weaker_evidence_a_failure(tiny: str, write: Write, tmp_path: Path):
    report = build(write('[targets.tiny]\nlevel = "proxy"\nmin_level = "emulated"'), tmp_path / "dist")
    assert report.exit_code == 6
    assert "verified only at level proxy, but min_level is emulated: a stand-in ran it" in report.targets[0].message


def test_an_unverified_bundle_says_so_and_is_not_archived(tiny: str, write: Write, tmp_path: Path):
    out = tmp_path / "dist"
    report = build(write("[targets.tiny]"), out, verify=False)
    (result,) = report.targets
    assert (report.exit_code, result.status, result.archive) == (0, "unverified", None)
    assert "tar.gz" not in (out / "checksums.txt").read_text()
    assert json.loads((out / "relu-1.2.3-tiny/verdict.json").read_text())["status"] == "unverified"
    assert 'skipped="1"' in (out / "junit.xml").read_text()


def test_an_unverified_bundle_does_not_meet_a_min_level(tiny: str, write: Write, tmp_path: Path):
    report = build(write("[targets.tiny]", before='[gates]\nmin_level = "structural"\n'), tmp_path / "d", verify=False)
    assert report.exit_code == 6


def test_the_cache_serves_an_unchanged_target_and_explains_a_miss(tiny: str, write: Write, tmp_path: Path):
    path = write("[targets.tiny]")
    first = build(path, tmp_path / "one")
    again = build(path, tmp_path / "two")
    assert not first.targets[0].cached and again.targets[0].cached
    assert files(tmp_path / "one") == files(tmp_path / "two")
    archive = "relu-1.2.3-tiny.tar.gz"
    assert (tmp_path / "one" / archive).read_bytes() == (tmp_path / "two" / archive).read_bytes()
    changed = build(write('[targets.tiny]\nnote = "x"'), tmp_path / "three").targets[0]
    assert not changed.cached
    assert [miss.split(" ")[0] for miss in changed.misses] == ["plan"]


def test_where_things_lie_on_this_machine_is_neither_sealed_nor_part_of_the_key(
    tiny: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, made = write("[targets.tiny]"), room.kind_named(tiny).load()
    planned = made.plan
    for place in ("over-here", "over-there"):
        monkeypatch.setattr(
            made, "plan", lambda request, local=(("tools", place),): replace(planned(request), local=local)
        )
        (result,) = build(path, tmp_path / place).targets
        assert result.cached == (place == "over-there")
        assert place not in (tmp_path / place / "relu-1.2.3-tiny/bundle.json").read_text()


def test_a_file_that_an_option_names_decides_the_result(tiny: str, write: Write, tmp_path: Path):
    """It is found beside the manifest, reaches the build, and a change of it is a miss of the cache."""
    path = write('[targets.tiny]\nextra = "more/notes.txt"')
    missing = build(path, tmp_path / "dist").targets[0]
    assert (missing.exit_code, "more/notes.txt" in missing.message) == (2, True)
    (tmp_path / "more").mkdir()
    for text in ("one", "two"):
        (tmp_path / "more/notes.txt").write_text(text)
        assert build(path, tmp_path / "dist").targets[0].cached is False
        assert (tmp_path / "dist/relu-1.2.3-tiny/notes.txt").read_text() == text
        assert build(path, tmp_path / "dist").targets[0].cached is True


def test_a_file_that_changes_under_a_build_is_an_error(tiny: str, write: Write, tmp_path: Path):
    write()
    (tmp_path / "notes.txt").write_text("one")
    (planned,) = packager.plan(manifest=write('[targets.tiny]\nextra = "notes.txt"'))
    assert planned.plan is not None and [name for name, _ in planned.plan.files] == ["notes.txt"]
    goldens = GoldenSet((GoldenCase("a", {"x": np.ones((1, 3), np.float32)}),))
    golden_store.write(tmp_path / "golden", goldens, {}, policy="", precision="fp32", excluded={})
    (tmp_path / "bundle").mkdir()
    files = (("notes.txt", tmp_path / "notes.txt"),)
    (tmp_path / "notes.txt").write_text("two")
    job = BuildJob("tiny", planned.plan, tmp_path / "bundle", tmp_path / "relu.onnx", tmp_path / "golden", files)
    with pytest.raises(BuildError, match=r"notes\.txt changed"):
        build_stage(job)


def test_a_poisoned_cache_entry_is_a_miss(tiny: str, write: Write, tmp_path: Path, own_cache: Path):
    path = write("[targets.tiny]")
    build(path, tmp_path / "one")
    for model in own_cache.rglob("model.onnx"):
        flip(model)
    again = build(path, tmp_path / "two")
    assert again.exit_code == 0 and not again.targets[0].cached
    assert packager.verify(tmp_path / "two/relu-1.2.3-tiny").exit_code == 0


def test_editing_a_placed_bundle_harms_neither_model_nor_cache(tiny: str, write: Write, tmp_path: Path):
    path = write("[targets.tiny]")
    before = (tmp_path / "relu.onnx").read_bytes()
    build(path, tmp_path / "one")
    flip(tmp_path / "one/relu-1.2.3-tiny/model.onnx")
    assert (tmp_path / "relu.onnx").read_bytes() == before
    assert build(path, tmp_path / "two").targets[0].cached
    assert packager.verify(tmp_path / "two/relu-1.2.3-tiny").exit_code == 0


def test_pinned_shapes_choose_the_cases_that_fit(tiny: str, write: Write, tmp_path: Path):
    path = write("[targets.tiny]\nshapes = { n = 2 }")
    assert build(path, tmp_path / "dist").exit_code == 0
    golden = json.loads((tmp_path / "dist/relu-1.2.3-tiny/golden/golden.json").read_text())
    assert {tuple(entry["shape"]) for case in golden["cases"] for entry in case["inputs"]} == {(2, 3)}


def test_goldens_of_the_source_are_compared_with_the_artifact(tiny: str, write: Write, tmp_path: Path):
    x = np.array([[-1, 2, 3]], np.float32)
    np.savez(tmp_path / "g.npz", x=x, y=np.maximum(x, 0) + np.float32(2e-4))
    report = build(write("[targets.tiny]", before='[golden]\npath = "g.npz"\n'), tmp_path / "dist")
    assert report.exit_code == 0 and report.reference is not None and report.reference.artifact is not None
    assert report.reference.artifact.max_abs == pytest.approx(2e-4, rel=1e-2)


def test_an_artifact_that_is_not_its_source_is_refused_with_the_number(tiny: str, write: Write, tmp_path: Path):
    x = np.array([[-1, 2, 3]], np.float32)
    np.savez(tmp_path / "g.npz", x=x, y=x)
    with pytest.raises(ModelError, match=r"max abs diff 1, tolerance 0\.001"):
        build(write("[targets.tiny]", before='[golden]\npath = "g.npz"\n'), tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def random_model(path: Path) -> Path:
    noise = helper.make_node("RandomUniformLike", ["x"], ["r"], name="noise", seed=1.0)
    nodes = [noise, helper.make_node("Add", ["x", "r"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    return builders.save(builders.model(nodes, [builders.value("x")], [builders.value("y"), builders.value("z")]), path)


def test_a_random_node_is_named_and_refused(tiny: str, tmp_path: Path):
    model = random_model(tmp_path / "random.onnx")
    with pytest.raises(ModelError, match="output 'y' depends on random node RandomUniformLike 'noise'"):
        packager.build(model, targets=["tiny"], out=tmp_path / "dist")


def test_a_random_output_can_be_excluded_and_is_then_not_compared(tiny: str, tmp_path: Path):
    random_model(tmp_path / "random.onnx")
    path = tmp_path / "packager.toml"
    path.write_text('[model]\npath = "random.onnx"\n[golden]\nexclude = ["y"]\n[targets.tiny]\n')
    assert build(path, tmp_path / "dist").exit_code == 0
    verdict = json.loads((tmp_path / "dist/random-0.0.0-tiny/verdict.json").read_text())
    assert verdict["excluded"] == [{"name": "y", "reason": "excluded by the manifest"}]
    assert {output["name"] for case in verdict["cases"] for output in case["outputs"]} == {"z"}


def test_external_data_reaches_the_reference(tiny: str, tmp_path: Path):
    weight = helper.make_tensor("w", builders.FLOAT, [3], [1.0, 2.0, 3.0])
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    proto = builders.model([node], [builders.value("x")], [builders.value("y")], [weight])
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="sub.bin", size_threshold=0)
    planned = packager.plan(tmp_path / "m.onnx", targets=["tiny"])
    assert planned[0].plan is not None
    assert planned[0].plan.model_digest == packager.inspect(tmp_path / "m.onnx").digest


def test_an_output_folder_that_is_a_file_is_refused(tiny: str, write: Write, tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        build(write("[targets.tiny]"), tmp_path / "taken")


def test_goldens_of_no_fitting_size_are_refused(tiny: str, write: Write, tmp_path: Path):
    np.savez(tmp_path / "g.npz", x=np.zeros((1, 3), np.float32))
    path = write("[targets.tiny]\nshapes = { n = 4 }", before='[golden]\npath = "g.npz"\n')
    report = build(path, tmp_path / "dist")
    assert report.exit_code == 3 and "no golden case fits the pinned shapes" in report.targets[0].message


def test_a_refused_run_stops_its_own_children_and_no_later_ones(tiny: str, write: Write, tmp_path: Path):
    built = build(write("[targets.tiny]"), tmp_path / "good")
    np.savez(tmp_path / "g.npz", x=np.zeros((0, 3), np.float32))
    with pytest.raises(GoldenError, match="nothing can be compared"):
        build(write("[targets.tiny]", before='[golden]\npath = "g.npz"\n'), tmp_path / "dist")
    verdict, _ = verify_folder(open_bundle(tmp_path / "good" / str(built.targets[0].bundle)))
    assert verdict.status == "passed"


def test_wrong_goldens_leave_nothing_behind(tiny: str, write: Write, tmp_path: Path):
    np.savez(tmp_path / "g.npz", wrong=np.zeros((1, 3), np.float32))
    with pytest.raises(GoldenError, match="wrong"):
        build(write("[targets.tiny]", before='[golden]\npath = "g.npz"\n'), tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_two_runs_do_not_write_one_folder_at_once(tiny: str, write: Write, tmp_path: Path):
    import filelock

    from packager import placing

    out = tmp_path / "dist"
    with placing.output_folder(out), pytest.raises(UsageError, match="another packager run"):
        build(write("[targets.tiny]"), out)
    assert isinstance(filelock.Timeout("x"), TimeoutError)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_only_whole_bundles(tiny: str, write: Write, tmp_path: Path, how: signal.Signals):
    out = tmp_path / "dist"
    build(write("[targets.tiny]"), out)
    before = {name: (out / name).read_bytes() for name in files(out)}
    path = write("[targets.tiny]", '[targets.slow]\nkind = "tiny"\nfault = "hang"')
    code = f"import sys; sys.path[:0] = {sys.path!r}; from packager.cli import main; main()"
    command = [sys.executable, "-c", code, "build", "-m", str(path), "-o", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "slow: building" in line:
                break
        time.sleep(0.5)
        process.send_signal(how)
        rest = process.stderr.read()
        assert process.wait(20) == (-9 if how is signal.SIGKILL else 130)
    whole = {name: data for name, data in before.items() if name.startswith("relu-1.2.3-tiny")}
    left = {name: (out / name).read_bytes() for name in files(out) if not name.startswith(".staging-")}
    assert {name: data for name, data in left.items() if name in whole} == whole
    assert not any("slow" in name for name in left)
    if how is not signal.SIGKILL:
        assert "Traceback" not in rest
        assert not list(out.glob(".staging-*"))
    assert not _alive("packager.child")
    assert build(write("[targets.tiny]"), out).exit_code == 0
    assert not list(out.glob(".staging-*"))


def _alive(word: str) -> list[str]:
    """Command lines of processes that hold ``word`` and are children of nobody any more (or of us)."""
    time.sleep(1.0)
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_text().replace("\0", " ")
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if word in line and parent == "1":
            found.append(line)
    return found


def test_without_a_manifest_the_defaults_are_the_manifests(tmp_path: Path, tiny: str):
    builders.relu(tmp_path / "relu.onnx")
    made = manifests.default(tmp_path / "relu.onnx", [tiny])
    assert (made.model.name, made.model.version, made.golden.cases) == ("relu", "0.0.0", 3)


def test_goldens_that_fail_for_one_targets_shapes_are_that_targets_failure(tiny: str, tmp_path: Path):
    """Reshape to [2, 3] takes only a batch of 2, so nothing can be synthesised at a batch of 5."""
    shape = helper.make_tensor("s", builders.INT64, [2], [2, 3])
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    proto = builders.model([node], [builders.value("x")], [builders.value("y", shape=(2, 3))], [shape])
    builders.save(proto, tmp_path / "m.onnx")
    path = tmp_path / "packager.toml"
    path.write_text(
        '[model]\npath = "m.onnx"\n[targets.two]\nkind = "tiny"\nshapes = { n = 2 }\n'
        '[targets.five]\nkind = "tiny"\nshapes = { n = 5 }\n'
    )
    report = build(path, tmp_path / "dist")
    assert [result.status for result in report.targets] == ["passed", "refused"]
    assert report.exit_code == 3 and "Reshape" in report.targets[1].message
    assert report.reference is not None


def baked(path: Path) -> Path:
    """Declared with an open batch, written for a batch of one."""
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"], name="flat")]
    sizes = numpy_helper.from_array(np.array([1, 3], np.int64), "s")
    ends = [builders.value(name, shape=["batch", 3]) for name in ("x", "y")]
    return builders.save(builders.model(nodes, ends[:1], ends[1:], [sizes]), path)


def test_a_baked_batch_is_a_warning_a_refusal_or_pinned_away(tiny: str, tmp_path: Path):
    path = baked(tmp_path / "m.onnx")
    report = packager.build(path, out=tmp_path / "warned", targets=[tiny])
    assert report.exit_code == 0
    (hazard,) = report.hazards
    assert "node Reshape 'flat' takes the fixed sizes [1, 3] from 's'" in hazard.message
    manifest = tmp_path / "packager.toml"
    lines = f'[model]\npath = "m.onnx"\n[gates]\nhazards = "refuse"\n[targets.{tiny}]\n'
    manifest.write_text(lines, encoding="utf-8")
    with pytest.raises(ModelError, match=r"refuses models with hazards:\n  'batch' is declared open.*\[baked-size\]"):
        packager.build(manifest=manifest, out=tmp_path / "refused", cache=False)
    assert not (tmp_path / "refused").exists()
    manifest.write_text(lines + "shapes = { batch = 1 }\n", encoding="utf-8")
    assert packager.build(manifest=manifest, out=tmp_path / "pinned", cache=False).hazards == ()
