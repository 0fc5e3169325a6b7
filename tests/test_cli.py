"""The command line as a release engineer meets it: what he types, what he sees, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import packager
from packager.cli import _run
from tests import builders

ROOMS = Path(__file__).with_name("rooms")


def run(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A packager process that also knows the tiny room; nothing of it may be a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOMS), **variables}
    command = [sys.executable, "-m", "packager.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_version(tmp_path: Path):
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"packager {packager.__version__}\n")


def test_version_imports_nothing_heavy(tmp_path: Path):
    code = (
        "import sys\nfrom packager.cli import _run\n_run(['--version'])\n"
        "print(sorted({'numpy', 'pydantic', 'onnx', 'rich', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_build_prints_a_table_and_exits_with_zero(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    done = run("build", "relu.onnx", "-t", "tiny", cwd=tmp_path)
    assert done.returncode == 0
    header, row, place, worth = done.stdout.splitlines()
    assert worth == "golden cases: 1 of 1 small faults would be caught"
    assert header.split() == ["TARGET", "KIND", "PRECISION", "STATUS", "LEVEL", "PARITY", "SIZE", "TIME"]
    assert row.split()[:8] == ["tiny", "tiny", "fp32", "passed", "runtime", "max", "abs", "0"]
    assert place == "tiny: dist/relu-0.0.0-tiny.tar.gz"
    assert "building" in done.stderr and "\x1b" not in done.stderr + done.stdout


def test_build_as_json_is_the_report_file(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    done = run("build", "relu.onnx", "-t", "tiny", "-o", "out", "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "out/report.json").read_text())
    assert json.loads(done.stdout)["targets"][0]["verdict"]["level"] == "runtime"


def test_the_manifest_here_is_taken_without_a_model(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    (tmp_path / "packager.toml").write_text('[model]\npath = "relu.onnx"\n[targets.a]\nkind = "tiny"\n')
    done = run("build", "--targets", "a,tiny", cwd=tmp_path)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["a", "tiny"]


def test_five_mistakes_in_a_manifest_are_five_lines(tmp_path: Path):
    text = (
        '[model]\npath = "relu.onnx"\nnmae = "x"\n[golden]\ncases = "three"\n'
        '[targets.tiny]\nprecison = "fp32"\nshapes = { n = 0 }\n[targets.other]\nkind = "tiyn"\n'
    )
    (tmp_path / "packager.toml").write_text(text)
    done = run("build", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "dist").exists()
    for line, words in ((3, "did you mean `name`"), (5, "golden.cases"), (7, "did you mean `precision`"), (8, "shapes"),
                        (10, "tiny")):  # fmt: skip
        assert any(f"line {line}:" in said and words in said for said in done.stderr.splitlines()), (line, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("build", "absent.onnx", "-t", "tiny"), 2, "absent.onnx: no such file"),
        (("build",), 2, "no model given and no packager.toml here"),
        (("build", "relu.onnx", "-t", "tinny"), 2, "did you mean"),
        (("build", "relu.onnx", "-t", ""), 2, "target"),
        (("build", "relu.onnx", "-m", "x.toml"), 2, "not both"),
        (("build", "cut.onnx", "-t", "tiny"), 3, "cut.onnx: not a whole ONNX model"),
        (("build", "relu.onnx", "-t", "tiny", "--golden", "absent"), 2, "absent"),
        (("build", "relu.onnx", "-t", "tiny", "--golden", "object.npz"), 3, "object.npz"),
        (("build", "relu.onnx", "-t", "tiny", "--golden", "nan.npz"), 3, "NaN"),
        (("build", "relu.onnx", "-t", "tiny", "--golden", "shape.npz"), 3, "'x'"),
        (("build", "relu.onnx", "-t", "tiny", "--golden", "dtype.npz"), 3, "float32"),
        (("build", "relu.onnx", "-t", "tiny", "-o", "relu.onnx/dist"), 2, "can't write there"),
        (("build", "relu.onnx", "-j", "0"), 2, "-j"),
        (("verify", "absent"), 2, "absent: no such bundle"),
        (("verify", "."), 2, "not a bundle"),
        (("verify", "cut.onnx"), 6, "not a whole archive"),
        (("inspect", "cut.onnx"), 3, "not a whole ONNX model"),
        (("golden", "relu.onnx", "-o", "g", "--dim", "n=x"), 2, "--dim"),
        (("golden", "relu.onnx", "-o", "g", "--from", "nothing"), 2, "MODULE:CALLABLE"),
        (("golden", "relu.onnx", "-o", "g", "--from", "source:absent"), 2, "source:absent"),
        (("golden", "relu.onnx", "-o", "g", "--from", "source:wrong"), 3, "source:wrong"),
        (("golden", "relu.onnx", "-o", "g", "--from", "source:fails"), 3, "ZeroDivisionError"),
        (("frobnicate",), 2, "frobnicate"),
        (("doctor", "-t", "nokind"), 2, "nokind"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str):
    data = builders.relu(tmp_path / "relu.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: len(data) // 2])
    ones = np.ones((1, 3), np.float32)
    np.savez(tmp_path / "object.npz", x=np.array([{}], object))
    np.savez(tmp_path / "nan.npz", x=ones * np.nan)
    np.savez(tmp_path / "shape.npz", x=np.ones((1, 4), np.float32))
    np.savez(tmp_path / "dtype.npz", x=ones.astype(np.float64))
    (tmp_path / "source.py").write_text("def wrong(feeds): return {'z': feeds['x']}\ndef fails(feeds): return 1 / 0\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run(*arguments, cwd=tmp_path, PACKAGER_CACHE_DIR=str(tmp_path.parent / "other-cache"))
    assert done.returncode == code, done.stderr
    assert words in done.stderr + done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_goldens_of_the_source_framework_are_captured_and_judged(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    (tmp_path / "train.py").write_text("import numpy\ndef predict(feeds): return {'y': numpy.maximum(feeds['x'], 0)}\n")
    done = run("golden", "relu.onnx", "-o", "g", "--from", "train:predict", "--cases", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 cases" in done.stdout and "outputs from train:predict" in done.stdout
    assert "the artifact agrees with its source: max abs diff 0" in done.stdout
    built = run("build", "relu.onnx", "-t", "tiny", "--golden", "g", "--format", "json", cwd=tmp_path)
    assert json.loads(built.stdout)["reference"]["artifact"]["passed"] is True


def test_goldens_are_captured_from_the_reference_by_default(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    done = run("golden", "relu.onnx", "-o", "g", "--dim", "n=5", "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout)["outputs_from"] == "the reference run"
    document = json.loads((tmp_path / "g/golden.json").read_text())
    assert document["cases"][0]["inputs"][0]["shape"] == [5, 3]


def test_init_writes_a_manifest_that_builds(tmp_path: Path):
    builders.relu(tmp_path / "re lu.onnx")
    assert run("init", "re lu.onnx", "-t", "tiny", cwd=tmp_path).returncode == 0
    assert tomllib.loads((tmp_path / "packager.toml").read_text())["model"]["path"] == "re lu.onnx"
    again = run("init", "re lu.onnx", cwd=tmp_path)
    assert again.returncode == 2 and "already exists" in again.stderr
    assert run("build", cwd=tmp_path).returncode == 0


def test_plan_shows_the_steps_and_does_nothing(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    done = run("plan", "relu.onnx", "-t", "tiny", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "tiny (tiny), precision fp32, relu 0.0.0",
        "  in   x: float32[n, 3]",
        "  out  y: float32[n, 3]",
        "  1. Copying the model: note ",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "relu.onnx"]


def test_inspect_text_and_json(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    text = run("inspect", "relu.onnx", cwd=tmp_path).stdout
    assert "input     x: float32[n, 3]" in text and "Relu x1" in text
    document = json.loads(run("inspect", "relu.onnx", "--format", "json", cwd=tmp_path).stdout)
    assert document["opsets"] == {"ai.onnx": 17} and document["operators"] == {"Relu": 1}


def test_inspect_with_targets_in_three_forms(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx", name_in="<i>x</i>")
    text = run("inspect", "relu.onnx", "-t", "tiny", cwd=tmp_path).stdout
    assert "input     <i>x</i>: float32[n, 3]" in text
    assert text.splitlines()[-1].split() == ["tiny", "tiny", "fp32", "1", "0", "0", "0", "0", "builds"]
    (told,) = json.loads(run("inspect", "relu.onnx", "-t", "tiny", "--format", "json", cwd=tmp_path).stdout)["coverage"]
    assert told["nodes"] == [{"node": "Relu 'act'", "operator": "Relu", "state": "supported", "reason": "", "hint": ""}]
    page = run("inspect", "relu.onnx", "-t", "tiny", "--format", "html", cwd=tmp_path).stdout
    assert page.startswith("<!doctype html>") and "<i>" not in page
    made = run("inspect", "relu.onnx", "--format", "html", cwd=tmp_path)
    assert made.returncode == 2 and "hint: add --targets all" in made.stderr
    assert "no model given" in run("inspect", cwd=tmp_path).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "relu.onnx"]


def test_names_of_a_model_never_reach_the_terminal_raw(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx", name_in="x\x1b[31m\n", name_out="名前")
    text = run("inspect", "relu.onnx", cwd=tmp_path, PYTHONIOENCODING="utf-8").stdout
    assert "\x1b" not in text and "x\\x1b[31m\\n: float32" in text and "名前" in text
    assert run("inspect", "relu.onnx", cwd=tmp_path, PYTHONIOENCODING="ascii").returncode == 0


def test_doctor_targets_and_schema(tmp_path: Path):
    assert "tiny: ready" in run("doctor", cwd=tmp_path).stdout
    assert run("doctor", "-t", "tiny", cwd=tmp_path).returncode == 0
    kinds = json.loads(run("targets", "--format", "json", cwd=tmp_path).stdout)["kinds"]
    assert "tiny" in [kind["kind"] for kind in kinds]
    schema = json.loads(run("schema", cwd=tmp_path).stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_a_verdict_is_either_taken_or_made(capsys: pytest.CaptureFixture[str]):
    assert _run(["verify", "b", "--import", "v.json", "--endpoint", "http://x"]) == 2
    assert "--endpoint makes one" in capsys.readouterr().err


def test_verify_of_several_bundles_exits_with_the_worst(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    for out in ("good", "bad"):
        assert run("build", "relu.onnx", "-t", "tiny", "-o", out, cwd=tmp_path).returncode == 0
    (tmp_path / "bad/relu-0.0.0-tiny/model.onnx").unlink()
    done = run("verify", "good/relu-0.0.0-tiny", "bad/relu-0.0.0-tiny", cwd=tmp_path)
    assert done.returncode == 6
    assert "passed at level runtime" in done.stdout and "model.onnx (model) is missing" in done.stdout


def test_completion_offers_targets(tmp_path: Path):
    variables = {"_PACKAGER_COMPLETE": "bash_complete", "COMP_WORDS": "packager build -t ti", "COMP_CWORD": "3"}
    code = "import sys; sys.argv[0] = 'packager'; from packager.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOMS), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "plain,tiny"


def test_a_closed_pipe_is_no_error(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    line = f"{sys.executable} -m packager.cli inspect relu.onnx --format json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_fault_of_our_own_is_exit_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(*_: object) -> None:
        raise AssertionError("impossible")

    monkeypatch.setattr("packager.room.kinds", broken)
    assert _run(["targets"]) == 1
    assert "a fault in packager itself" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        done = run("build", "relu.onnx", "-t", "tiny", "-o", small / "dist", cwd=tmp_path)
        assert done.returncode == 5, done.stderr
        assert "no space left" in done.stderr + done.stdout
        left = [path for path in (small / "dist").rglob("*") if path.is_file()] if (small / "dist").exists() else []
        assert not [path for path in left if "relu" in str(path.relative_to(small)) or ".staging" in str(path)]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_standard_output_on_a_full_disk_is_told(tmp_path: Path):
    builders.relu(tmp_path / "relu.onnx")
    command = [sys.executable, "-m", "packager.cli", "inspect", "relu.onnx"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr == (
        "error: writing: no space left on the device (standard output)\nhint: free some space and run again\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "n" * 300), ("verify", "n" * 300), ("plan", "relu.onnx", "-t", "tiny", "--golden", "n" * 300),
     ("build", "relu.onnx", "-t", "tiny", "-o", "n" * 300), ("init", "relu.onnx", "-o", "n" * 300),
     ("explain", "n" * 300, "--model", "relu.onnx"), ("golden", "relu.onnx", "-o", "g", "--dim", f"n={'9' * 5000}")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_names_and_numbers_longer_than_any_can_be(tmp_path: Path, arguments: tuple[str, ...]):
    builders.relu(tmp_path / "relu.onnx")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "n" * 300 in done.stdout + done.stderr or "--dim n=999" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["relu.onnx"]
