"""Whose server answers: one that runs already, one that is installed, or our own, which leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import packager
from packager.errors import VerificationError
from packager.host import this_host
from packager.supervise import SHARED_MEMORY
from packager.targets.triton import kit
from packager.targets.triton.asking import remote_info
from packager.targets.triton.kit import STAND_IN, find_installed, find_kit, missing_parts
from packager.targets.triton.server import environment, serving
from tests.builders import relu
from tests.sealing import reseal
from tests.targets.test_triton_builds import passed

MISSING = missing_parts(this_host())
pytestmark = pytest.mark.skipif(bool(MISSING), reason="; ".join(f"{item.what}: {item.how}" for item in MISSING))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a ``Relu``."""
    folder = tmp_path_factory.mktemp("relu")
    return passed(relu(folder / "m.onnx"), folder / "dist")


def packager_says(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    command = [sys.executable, "-m", "packager.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_text_encoder_from_the_command_line_and_again_from_its_archive_alone(corpus: Path, tmp_path: Path):
    """Free batch and free sequence length; what is left of the build is one file in an empty folder."""
    done = packager_says("build", str(corpus / "text_encoder.onnx"), "-t", "triton", "-o", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "alone").mkdir()
    shutil.move(tmp_path / "dist/text_encoder-0.0.0-triton.tar.gz", tmp_path / "alone")
    shutil.rmtree(tmp_path / "dist")
    done = packager_says("verify", str(tmp_path / "alone/text_encoder-0.0.0-triton.tar.gz"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed at level emulated, 3 cases" in done.stdout
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["text_encoder-0.0.0-triton.tar.gz"]


def test_a_running_server_is_verified_by_its_address(bundle: Path, tmp_path: Path):
    copy = Path(shutil.copytree(bundle, tmp_path / "m"))
    with serving(copy / "model_repository") as server:
        done = packager_says("verify", str(copy), "--endpoint", server.http)
        assert done.returncode == 6 and "doesn't serve this bundle" in done.stdout, "the model isn't loaded yet"
        server.load("m")
        for url in (server.http, server.grpc):
            result = packager.verify(copy, endpoint=url)
            assert result.exit_code == 0 and result.verdict is not None, result.error
            verdict = result.verdict
            assert (verdict.level, verdict.device, verdict.cases) == ("emulated", url, 3)
            assert "says that it hosts packager's stand-in" in verdict.level_reason
    result = packager.verify(copy, endpoint=server.http)
    assert result.exit_code == 6 and result.error is not None and "doesn't serve this bundle" in result.error.message


def test_a_server_that_is_not_ours_is_named_by_itself(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    told = remote_info("triton", "2.60.0", "http://gpu.example:8000")
    assert (told.name, told.version, told.level, told.reason) == ("triton 2.60.0", "2.60.0", "runtime", "")
    assert remote_info(STAND_IN, "2.51.0", "http://x:1").level == "emulated"
    monkeypatch.setattr(kit, "STAND_IN", "triton-of-a-partner")  # what another server would call itself
    with serving(bundle / "model_repository") as server:
        server.load("m")
        result = packager.verify(bundle, endpoint=server.grpc)
        assert result.verdict is not None and result.exit_code == 0
        assert (result.verdict.level, result.verdict.runtime) == ("runtime", "triton-of-a-partner 2.51.0")


def test_another_model_at_the_address_fails(bundle: Path, tmp_path: Path):
    other = passed(relu(tmp_path / "m.onnx", shape=["n", 5]), tmp_path / "dist")
    with serving(other / "model_repository") as server:
        server.load("m")
        result = packager.verify(bundle, endpoint=server.http)
        assert result.exit_code == 6 and result.error is not None
        assert "[-1,5]" in result.error.message or "shape" in result.error.message


def test_an_address_that_is_none_is_bad_usage(bundle: Path):
    result = packager.verify(bundle, endpoint="localhost:8000")
    assert result.exit_code == 2 and result.error is not None and "is no Triton server" in result.error.message


PROXY = """#!/bin/sh
# What a tritonserver with the real backend is started like; the kit's server and stand-in answer.
for argument in "$@"; do
    case "$argument" in
        --backend-directory=*) test -f "${argument#*=}/onnxruntime/libtriton_onnxruntime.so" || exit 9 ;;
        *) set -- "$@" "$argument" ;;
    esac
    shift
done
exec "$SERVER" "$@" --backend-directory="$BACKENDS"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``tritonserver`` on PATH, laid out as in Triton's container. It isn't one: no real backend can be had here."""
    from packager.targets.triton.server import stand_in

    found = find_kit()
    assert found is not None
    home = tmp_path / "opt/tritonserver"
    (home / "bin").mkdir(parents=True)
    (home / "backends/onnxruntime").mkdir(parents=True)
    (home / "backends/onnxruntime/libtriton_onnxruntime.so").touch()
    program = home / "bin/tritonserver"
    program.write_text(PROXY)
    program.chmod(0o755)
    kits = tmp_path / "kit"
    kits.mkdir()
    surroundings = environment(kit.Program(found.server, found), kits)
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONNOUSERSITE"):
        monkeypatch.setenv(name, surroundings[name])
    monkeypatch.setenv("PATH", f"{program.parent}:{surroundings['PATH']}")
    monkeypatch.setenv("SERVER", str(found.server))
    monkeypatch.setenv("BACKENDS", str(stand_in(found, tmp_path / "backends")))
    yield program


def test_an_installed_server_is_used(installed: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKAGER_TRITON_KIT", str(installed.parent))  # no kit there, and none is needed
    program = find_installed()
    assert program is not None and program.server == installed
    assert missing_parts(this_host()) == []
    result = packager.verify(bundle)
    assert result.exit_code == 0 and result.verdict is not None, result.error
    assert (result.verdict.level, result.verdict.runtime) == ("runtime", "Triton core 2.51.0 + onnxruntime backend")


def test_an_installed_server_without_the_backend_is_not(installed: Path):
    (installed.parent.parent / "backends/onnxruntime/libtriton_onnxruntime.so").unlink()
    assert find_installed() is None


def test_the_log_of_a_failure_is_kept(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("PACKAGER_TRITON_KIT", str(find_kit().folder))
    monkeypatch.setenv("PACKAGER_CACHE_DIR", str(cache))
    copy = Path(shutil.copytree(bundle, tmp_path / "m"))
    config = copy / "model_repository/m/config.pbtxt"
    config.write_text(config.read_text().replace("TYPE_FP32", "TYPE_FP64", 1))
    reseal(copy)
    result = packager.verify(copy)
    assert result.exit_code == 6 and result.error is not None
    assert "configuration expects datatype TYPE_FP64 for input 'x'" in result.error.message
    log = cache / "logs/triton.log"
    assert f"Triton's log: {log}" in result.error.message
    assert "configuration expects datatype TYPE_FP64" in log.read_text()


def test_a_server_that_does_not_start_says_why(installed: Path, bundle: Path):
    installed.write_text("#!/bin/sh\necho no such device >&2\nexit 3\n")
    with (
        pytest.raises(VerificationError, match=r"doesn't start: it ended with status 3\n  \| no such device"),
        serving(bundle / "model_repository"),
    ):
        pass


def processes(folder: str) -> list[int]:
    """Those with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_an_interrupted_run_leaves_nothing(bundle: Path, tmp_path: Path, how: signal.Signals):
    """Neither a process nor shared memory, however packager ends while its server runs."""
    copy = Path(shutil.copytree(bundle, tmp_path / "m"))
    (tmp_path / "temp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "packager.cli", "verify", str(copy)],
        env={**os.environ, "TMPDIR": str(tmp_path / "temp")}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    regions: list[str] = []
    try:
        end = time.monotonic() + 120
        while not regions:
            assert process.poll() is None and time.monotonic() < end, "no server was seen"
            names = [path.name for path in (tmp_path / "temp").glob("packager-*/in/tmp/packager-triton-*")]
            regions = [name for name in names if list(SHARED_MEMORY.glob(f"{name}_*"))]
            time.sleep(0.01)
    finally:
        process.send_signal(how)
    process.wait(60)
    (name,) = regions
    end = time.monotonic() + 60
    while processes(name) or any(SHARED_MEMORY.glob(f"{name}*")):
        assert time.monotonic() < end, f"left: {processes(name)} {list(SHARED_MEMORY.glob(name + '*'))}"
        time.sleep(0.05)
    assert list((tmp_path / "temp").glob("packager-*/in/tmp/packager-triton-*")) == []
    assert how != signal.SIGINT or process.returncode == 130
