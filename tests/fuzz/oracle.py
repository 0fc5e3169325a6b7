"""What must hold of every command on any input, and the sandbox in which that is seen.

A command ends by itself in time, with a documented status other than 1, without a traceback, with words that name the
file it is about; it stays within a bound of memory, writes nothing outside the folders it was given, and leaves nothing
behind in the temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.fuzz.worker import Answer, Request

STATUSES = frozenset({0, 2, 3, 4, 5, 6})
"""The exit statuses of README.md that input may lead to. 1 would be a fault in packager itself."""

MEMORY = 1 << 30
"""Bytes that a command may take beyond an idle one: the inputs are a few kilobytes, whatever they declare."""

SECONDS = 60.0
OUT = "out"
SECRET = "a secret beside the folder\n"  # noqa: S105 - what a hostile path may be after

_TRACES = re.compile(r"Traceback \(most recent call last\)|a fault in packager itself")


@dataclass(frozen=True)
class Case:
    """A command and the files it gets.

    ``arguments`` are those of ``packager``, relative to the folder of ``files``; ``links`` maps symbolic links to where
    they lead. ``names`` are the words of which the command's message must hold one, where it refuses; ``writes`` are
    files that it may write beside its output folder.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes]
    links: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class Worker:
    """The warm process of :mod:`tests.fuzz.worker`. Use as a context manager."""

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def ask(self, request: Request) -> Answer:
        """Run one command."""
        asked, told = _pipes(self._process)
        asked.write(json.dumps(asdict(request)) + "\n")
        asked.flush()
        return Answer(**json.loads(told.readline()))


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def lay_out(case: Case, folder: Path) -> Path:
    """Write a case's files; gives the folder that the command runs in."""
    work = folder / "work"
    for name in ("work", "home", "tmp", "cache"):
        (folder / name).mkdir(parents=True)
    (folder / "secret").write_text(SECRET)
    for name, data in case.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name, goal in case.links.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(goal)
    return work


def environment(folder: Path) -> dict[str, str]:
    """Everything that a command may write to, moved into the sandbox."""
    given = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG") or key.startswith("PACKAGER_")}
    return given | {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PACKAGER_CACHE_DIR": str(folder / "cache"),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def run(worker: Worker, case: Case, folder: Path) -> tuple[Answer, list[str]]:
    """Run a case in a fresh sandbox ``folder``, which is removed again; gives how it ended, and what is wrong then."""
    work = lay_out(case, folder)
    before = snapshot(folder)
    answer = worker.ask(Request(case.arguments, str(work), environment(folder), SECONDS))
    wrong = [*complaints(case, answer), *_written(case, before, snapshot(folder))]
    shutil.rmtree(folder)
    return answer, wrong


def complaints(case: Case, answer: Answer) -> list[str]:
    """What is wrong with how a command ended."""
    wrong = []
    if answer.timed_out:
        wrong.append(f"it ran longer than {SECONDS:g} s")
    elif answer.status not in STATUSES:
        wrong.append(f"it ended with status {answer.status}")
    if _TRACES.search(answer.out) or _TRACES.search(answer.err):
        wrong.append("it showed a traceback")
    if answer.peak > MEMORY:
        wrong.append(f"it took {answer.peak >> 20} MiB of memory")
    if answer.status and not any(name in answer.out + answer.err for name in case.names):
        wrong.append(f"its words name none of {', '.join(case.names)}")
    if SECRET.strip() in answer.out + answer.err:
        wrong.append("it gave away a file that it wasn't given")
    return wrong


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below ``folder`` with a digest of what is there; links are not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = str(path.readlink()) if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else ""
        if stat.S_ISREG(mode):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.relative_to(folder).as_posix()] = what
    return found


def _written(case: Case, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What changed where nothing may: the output folder and the cache may, and a lock file may stay in ``tmp``."""
    wrong = []
    free = (f"work/{OUT}", "cache/", *(f"work/{name}" for name in case.writes))
    for path in sorted(before.keys() | after.keys()):
        allowed = path.startswith(free) or re.fullmatch(r"tmp/packager-\w+\.lock", path)
        if before.get(path) != after.get(path) and not allowed:
            what = "wrote" if path not in before else "removed" if path not in after else "changed"
            wrong.append(f"it {what} {path}")
    return wrong
