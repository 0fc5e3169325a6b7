"""The self-check in a bundle: what a partner sees, without packager, for a good, a wrong and a damaged bundle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packager import golden_store, parity
from packager.errors import InternalError
from packager.goldens import GoldenCase, GoldenSet
from packager.parity import OutputRule, Tolerance
from packager.selfcheck import ship_loader

ROOT = Path(parity.__file__).parent.parent

INFER = """
import numpy as np

class Model:
    def __init__(self, folder):
        self.factor = np.float32((folder / "weights.txt").read_text())
        self.info = {"name": "fake", "version": "1.0", "device": "CPU"}

    def run(self, feeds):
        return {"y": feeds["x"] * self.factor}
"""

ALONE = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("packager", *BLOCKED):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = sys.argv[2].split()
sys.meta_path.insert(0, Blocker())
sys.argv = sys.argv[1:2] + sys.argv[3:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not [name for name in sys.modules if name.split(".")[0] == "packager"]
"""


def seal(bundle: Path) -> None:
    files = [path for path in sorted(bundle.rglob("*")) if path.is_file() and path.name != "bundle.json"]
    listed = [
        {
            "path": path.relative_to(bundle).as_posix(),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "role": "file",
        }
        for path in files
    ]
    document = {"name": "double", "version": "1.0", "target": "t", "kind": "k", "files": listed}
    (bundle / "bundle.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose model doubles its input."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    cases = []
    for name in ("first", "second\nline"):
        x = np.array([[1.0, 2.0, len(name)]], np.float32)
        cases.append(GoldenCase(name, {"x": x}, {"y": x * 2}, "seed 0", "reference"))
    rules = {"y": OutputRule(Tolerance(1e-3, 1e-4), 1)}
    golden_store.write(
        folder / "golden", GoldenSet(tuple(cases)), rules, policy="default-1", precision="fp32", excluded={}
    )
    shutil.copy(ROOT / "packager" / "parity.py", folder)
    shutil.copy(ROOT / "templates" / "common" / "verify.py", folder)
    (folder / "infer.py").write_text(INFER, encoding="utf-8")
    (folder / "weights.txt").write_text("2.0", encoding="utf-8")
    seal(folder)
    return folder


def check(bundle: Path, *arguments: str, blocked: str = "") -> tuple[int, str, Any]:
    """Run verify.py alone, outside of this repository. Returns exit status, all it said, and the verdict."""
    out = bundle.parent / "selfcheck.json"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", ALONE, str(bundle / "verify.py"), blocked, *arguments],
        cwd=bundle.parent, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text("utf-8")) if out.exists() else None


def test_a_good_bundle_passes_without_packager(bundle):
    before = sorted(bundle.rglob("*"))
    code, said, verdict = check(bundle)
    assert code == 0, said
    assert "passed: 2 cases on fake 1.0 CPU" in said
    assert "second\\nline" in said
    assert (verdict["schema"], verdict["status"], verdict["level"]) == ("packager.verdict/1", "passed", "runtime")
    assert verdict["worst"]["max_abs"]["value"] == 0.0
    assert verdict["bundle_digest"] == "sha256:" + hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    assert verdict["policy"] == {"name": "default-1", "precision": "fp32"}
    assert set(verdict["host"]) == {"system", "machine", "cpu", "features", "cores", "python"}
    assert sorted(bundle.rglob("*")) == before


def test_the_verdict_is_the_one_packager_would_write(bundle):
    verdict = check(bundle)[2]
    golden = parity.read_golden(bundle / "golden")
    results = [
        parity.compare_case(
            case.name, case.outputs, {"y": np.multiply(case.inputs["x"], np.float32(2), dtype=np.float32)}, golden.rules
        )
        for case in golden.cases
    ]
    assert verdict["cases"] == json.loads(json.dumps(parity.verdict_cases(results)))


def test_a_wrong_answer_fails_and_is_in_the_verdict(bundle):
    (bundle / "weights.txt").write_text("2.1", encoding="utf-8")
    seal(bundle)
    code, said, verdict = check(bundle)
    assert code == 6
    assert "FAILED: case 'first': output 'y': max abs 0.5 is over 0.001" in said
    assert verdict["status"] == "failed"
    assert verdict["worst"]["max_abs"]["value"] == pytest.approx(1.1, abs=1e-5)


@pytest.mark.parametrize("name", ["weights.txt", "parity.py", "infer.py", "golden/golden.safetensors"])
def test_a_flipped_byte_fails_before_anything_is_run(bundle, name):
    data = bytearray((bundle / name).read_bytes())
    data[-1] ^= 1
    (bundle / name).write_bytes(data)
    code, said, verdict = check(bundle, blocked="numpy parity infer")
    assert code == 6
    assert f"{name} was changed since it was sealed" in said
    assert (verdict["status"], verdict["cases"]) == ("failed", [])


@pytest.mark.parametrize("name", ["weights.txt", "parity.py", "golden/golden.json"])
def test_a_missing_file_fails(bundle, name):
    (bundle / name).unlink()
    code, said, verdict = check(bundle)
    assert code == 6
    assert f"{name} is missing" in said
    assert verdict["failures"] == [f"{name} is missing, or is a link"]


def test_a_seal_that_forgets_the_goldens_fails(bundle):
    document = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    document["files"] = [file for file in document["files"] if not file["path"].startswith("golden/")]
    (bundle / "bundle.json").write_text(json.dumps(document), encoding="utf-8")
    code, said, _ = check(bundle)
    assert code == 6
    assert "bundle.json doesn't list golden/golden.json" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": [{"path": "a"}]}'])
def test_a_malformed_seal_fails(bundle, text):
    (bundle / "bundle.json").write_text(text, encoding="utf-8")
    code, said, _ = check(bundle)
    assert code == 6
    assert "bundle.json is malformed" in said


def test_a_seal_may_not_point_outside(bundle):
    document = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    document["files"].append({"path": "../secret", "sha256": "", "bytes": 0, "role": ""})
    (bundle / "bundle.json").write_text(json.dumps(document), encoding="utf-8")
    code, said, _ = check(bundle)
    assert code == 6
    assert "../secret lies outside of the bundle" in said


def test_a_runtime_that_fails_on_a_case_fails_that_case(bundle):
    source = INFER.replace("return {", "assert feeds['x'][0, 2] != 5, 'no fives'\n        return {")
    (bundle / "infer.py").write_text(source, encoding="utf-8")
    seal(bundle)
    code, said, verdict = check(bundle)
    assert code == 6
    assert "case 'first': the runtime failed: AssertionError: no fives" in said
    assert [case["passed"] for case in verdict["cases"]] == [False, True]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_runtime_nobody_has\n", "needs something that isn't installed here"),
        ("raise OSError('wrong driver')\n", "infer.py can't be loaded: OSError: wrong driver"),
        ("class Model:\n    def __init__(self, folder):\n        raise RuntimeError('no device')\n", "no device"),
    ],
)
def test_a_runtime_that_is_not_there_makes_it_not_runnable(bundle, source, said):
    (bundle.parent / "selfcheck.json").write_text('{"status": "passed"}', encoding="utf-8")
    (bundle / "infer.py").write_text(source, encoding="utf-8")
    seal(bundle)
    code, all_said, verdict = check(bundle)
    assert code == 2
    assert all_said.startswith("not checked: ")
    assert said in all_said
    assert verdict is None


def test_a_runtime_that_only_stands_in_says_so(bundle):
    """The level is the runtime's own, where the loader knows that it is none; else it is what the partner has."""
    assert check(bundle)[2]["level"] == "runtime"
    told = '"device": "CPU", "level": "emulated", "reason": "no chip here"'
    (bundle / "infer.py").write_text(INFER.replace('"device": "CPU"', told), encoding="utf-8")
    seal(bundle)
    code, _, verdict = check(bundle)
    assert code == 0
    assert (verdict["level"], verdict["level_reason"]) == ("emulated", "no chip here")
    assert verdict["runtime"] == {"name": "fake", "version": "1.0", "device": "CPU"}


@pytest.mark.parametrize("package", ["numpy", "safetensors"])
def test_a_missing_package_is_named(bundle, package):
    code, said, _ = check(bundle, blocked=package)
    assert code == 2
    assert package in said


def test_a_folder_without_a_seal_is_no_bundle(bundle):
    (bundle / "bundle.json").unlink()
    code, said, verdict = check(bundle)
    assert (code, verdict) == (2, None)
    assert "is not a bundle" in said


def test_the_verdict_goes_where_it_is_asked_for_and_never_over_the_bundle(bundle):
    assert check(bundle, "--out", str(bundle.parent / "here.json"))[0] == 0
    assert json.loads((bundle.parent / "here.json").read_text(encoding="utf-8"))["status"] == "passed"
    code, said, _ = check(bundle, "--out", str(bundle / "weights.txt"))
    assert code == 2
    assert "give --out another place" in said
    assert (bundle / "weights.txt").exists()
    assert check(bundle, "--out", str(bundle.parent / "no" / "such" / "folder.json"))[0] == 2


def test_a_loader_that_stands_in_says_its_level(bundle):
    text = INFER.replace('"device": "CPU"', '"device": "CPU", "level": "proxy", "reason": "a stand-in"')
    (bundle / "infer.py").write_text(text, encoding="utf-8")
    seal(bundle)
    code, _, verdict = check(bundle)
    assert code == 0
    assert (verdict["level"], verdict["level_reason"]) == ("proxy", "a stand-in")
    assert verdict["runtime"] == {"name": "fake", "version": "1.0", "device": "CPU"}


def test_a_loader_ships_with_what_it_uses_and_nothing_else_of_packager(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("from packager.feeds import Array\n", encoding="utf-8")
    ship_loader(source, tmp_path)
    assert (tmp_path / "infer.py").read_text("utf-8") == "from feeds import Array\n"
    assert (tmp_path / "feeds.py").read_bytes() == (ROOT / "packager" / "feeds.py").read_bytes()
    plain = tmp_path / "plain"
    plain.mkdir()
    source.write_text("import numpy\n", encoding="utf-8")
    ship_loader(source, plain)
    assert [file.name for file in plain.iterdir()] == ["infer.py"]
    source.write_text("from packager.targets.any.near import here\n", encoding="utf-8")
    near = tmp_path / "near.py"
    near.write_text("from packager.feeds import Array\n", encoding="utf-8")
    ship_loader(source, plain, {"near.py": near}, package="packager.targets.any")
    assert (plain / "infer.py").read_text("utf-8") == "from near import here\n"
    assert (plain / "near.py").read_text("utf-8") == "from feeds import Array\n" and (plain / "feeds.py").exists()
    source.write_text("from packager.model import Model\n", encoding="utf-8")
    with pytest.raises(InternalError, match=r"may import nothing of packager but packager\.feeds"):
        ship_loader(source, plain)


def test_a_loader_of_several_modules_keeps_its_places(tmp_path: Path):
    room, folder = tmp_path / "room", tmp_path / "bundle"
    (room / "inner").mkdir(parents=True)
    folder.mkdir()
    (room / "infer.py").write_text("from a.room.inner.wire import X\nfrom packager.feeds import checked\n")
    (room / "inner/wire.py").write_text("from .more import X\n")
    ship_loader(room / "infer.py", folder, {"inner/wire.py": room / "inner/wire.py"}, package="a.room")
    assert (folder / "infer.py").read_text() == "from inner.wire import X\nfrom feeds import checked\n"
    assert (folder / "inner/wire.py").read_text() == "from .more import X\n"
    (room / "inner/wire.py").write_text("from packager.model import Model\n")
    with pytest.raises(InternalError, match=r"wire\.py ships in bundles"):
        ship_loader(room / "infer.py", folder, {"inner/wire.py": room / "inner/wire.py"}, package="a.room")
