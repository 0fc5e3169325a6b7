"""Temporary folders: gone at the end, and gone after a kill as soon as somebody makes the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from packager.scratch import scratch


def test_a_folder_is_there_while_it_is_needed(tmp_path: Path):
    with scratch(tmp_path) as folder:
        (folder / "file").write_text("x")
        assert list(folder.iterdir()) == [folder / "file"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), scratch(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(tmp_path: Path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\nfrom packager.scratch import scratch\n"
        f"with scratch(Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'big').write_text('x'); print(folder, flush=True); sys.stdin.read()\n"
    )
    with scratch(tmp_path) as mine:
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            with scratch(tmp_path):
                assert (theirs / "big").exists() and mine.exists()
            other.kill()
        assert (theirs / "big").exists()
        with scratch(tmp_path):
            assert not theirs.parent.exists() and mine.exists()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_other_names_and_without_a_lock_are_left_alone(tmp_path: Path):
    for name in ("packager-of-somebody", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere/lock").write_text("")
    with scratch(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} >= {"packager-of-somebody", "elsewhere"}
