"""A supervised program: seen while it runs, explained when it ends, and gone with its folder and shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packager.supervise import SHARED_MEMORY, running

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and shared memory of POSIX")


def gone(path: Path) -> bool:
    """Whether it goes, within a minute."""
    end = time.monotonic() + 60
    while path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not path.exists()


def test_a_program_that_ends_says_how_and_its_log_can_be_read_until_the_block_ends(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    code = "import sys; print('first'); print('the reason', file=sys.stderr); sys.exit(3)"
    with running([sys.executable, "-c", code], folder) as program:
        end = time.monotonic() + 60
        while (told := program.ended()) is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert told.startswith("it ended with status 3") and "| the reason" in told
        assert "first" in (folder / "log").read_text()
    assert not folder.exists()


def test_a_program_runs_in_the_environment_it_is_given_with_its_files_in_the_folder(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    code = "import os; print(os.environ['MINE'], os.environ['TMPDIR'])"
    with running([sys.executable, "-c", code], folder, {**os.environ, "MINE": "yes"}) as program:
        while program.ended() is None:
            time.sleep(0.01)
        assert (folder / "log").read_text().split() == ["yes", str(folder)]


@posix
def test_a_running_program_and_its_children_are_killed_at_the_end_of_the_block(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with running([sys.executable, "-c", code], folder) as program:
        while not (folder / "log").exists() or not (folder / "log").read_text().endswith("\n"):
            assert program.ended() is None
            time.sleep(0.01)
        pid = int((folder / "log").read_text())
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PARENT = """
import os, sys, time
from pathlib import Path
from packager.supervise import running
folder = Path(sys.argv[1])
folder.mkdir()
(Path(sys.argv[2]) / (folder.name + "_region")).touch()
with running([sys.executable, "-c", "import time; time.sleep(600)"], folder) as program:
    print("ready", flush=True)
    time.sleep(600)
"""


@posix
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no POSIX shared memory that can be listed")
def test_a_killed_parent_takes_the_program_its_folder_and_its_shared_memory_along(tmp_path: Path):
    folder = tmp_path / f"packager-test-{os.getpid()}"
    command = [sys.executable, "-c", PARENT, str(folder), str(SHARED_MEMORY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        region = SHARED_MEMORY / f"{folder.name}_region"
        assert region.exists() and folder.exists()
        os.killpg(parent.pid, signal.SIGKILL)
    assert gone(folder) and gone(region)
