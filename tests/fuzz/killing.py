"""Builds that are killed, or run out of disk, at any moment: what is left, and what the next run makes of it.

A real ``packager build`` of several targets runs in a sandbox that holds its output, its cache and its temporary files.
Afterwards everything in ``dist/`` must be whole and verify, no process may be left, and the next run, from the same
cache, must end well, give the very bundles of an undisturbed build, and leave nothing else. POSIX only.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from packager.archives import unpacked
from packager.bundle import damage, open_bundle, strangers
from packager.dist import INDEXES
from packager.errors import PackagerError
from packager.model import sha256_file
from packager.placing import REJECTED
from tests import builders
from tests.fuzz.oracle import environment

SECONDS = 300.0
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE = 30.0
"""Seconds that processes may take to notice that their parent is gone."""

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@dataclass(frozen=True)
class Undisturbed:
    """A build that nothing happened to: its seconds, its folder, and the SHA-256 of each file that never differs."""

    seconds: float
    folder: Path
    digests: Mapping[str, str]


def prepare(folder: Path, targets: tuple[str, ...]) -> Path:
    """A sandbox with a model of a few hundred kilobytes and a manifest for it."""
    for name in ("work", "home", "tmp", "cache"):
        (folder / name).mkdir(parents=True)
    weights = np.random.default_rng(7).standard_normal((256, 256)).astype(np.float32) / 16
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")
    shape = ("n", 256)
    proto = builders.model(
        [node],
        [builders.value("x", TensorProto.FLOAT, shape)],
        [builders.value("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weights, "w")],
    )
    builders.save(proto, folder / "work/m.onnx")
    listed = "".join(f"[targets.{name}]\n" for name in targets)
    (folder / "work/packager.toml").write_text(f'[model]\npath = "m.onnx"\nversion = "1.0"\n{listed}')
    return folder


def undisturbed(folder: Path, targets: tuple[str, ...]) -> Undisturbed:
    """Build once, in peace."""
    prepare(folder, targets)
    begun = time.monotonic()
    ended = _start(folder).wait(SECONDS)
    assert ended == 0, _said(folder)
    return Undisturbed(time.monotonic() - begun, folder, _digests(folder / "work/dist"))


def killed(folder: Path, good: Undisturbed, how: signal.Signals, after: float) -> list[str]:
    """Kill a build after some seconds, over the output of an earlier one; gives what is wrong then."""
    targets = tuple(_targets(good.folder))
    prepare(folder, targets)
    shutil.copytree(good.folder / "work/dist", folder / "work/dist")
    process = _start(folder)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
    status = process.wait(SECONDS)
    expected = {0, -how, 130 if how is not signal.SIGKILL else -how}
    wrong = [] if status in expected else [f"it ended with status {status} on {how.name}"]
    if "Traceback" in _said(folder):
        wrong.append("it showed a traceback")
    wrong += _survivors(folder)
    return [*wrong, *_left(folder / "work/dist", good), *_next_run(folder, good)]


def starved(folder: Path, good: Undisturbed, kilobytes: int, starve: tuple[str, ...]) -> list[str]:
    """Build where some of the sandbox's folders lie on a small disk of their own; gives what is wrong then.

    The disk is seen by the build alone (a mount namespace), so what was on it is copied out for a look.
    """
    prepare(folder, tuple(_targets(good.folder)))
    disk, copy = folder / "disk", folder / "copy"
    disk.mkdir()
    moved = {"work/dist": "dist", "tmp": "tmp", "cache": "cache"}
    script = 'mount -t tmpfs -o "size=$1k" none "$2" || exit 125\n'
    for name in starve:
        script += f'mkdir "$2/{moved[name]}"\n'
        script += f'rm -rf "$3/{name}"; ln -s "$2/{moved[name]}" "$3/{name}"\n'
    script += 'disk=$2; root=$3; shift 3; "$@"; status=$?\ncp -a "$disk" "$root/copy"; exit $status\n'
    command = [*NAMESPACE, "sh", "-c", script, "sh", str(kilobytes), str(disk), str(folder), *_command()]
    process = _start(folder, command)
    status = process.wait(SECONDS)
    said, wrong = _said(folder), []
    if status not in (0, 5):
        wrong.append(f"it ended with status {status}: {said[-500:]}")
    if "Traceback" in said or "a fault in packager" in said:
        wrong.append("it showed a traceback")
    if status == 5 and not ("no space left" in said and "free some space" in said):
        wrong.append(f"it didn't say that the disk is full: {said[-500:]}")
    for name in starve:
        (folder / name).unlink()
        shutil.move(copy / moved[name], folder / name)
    return [*wrong, *_left(folder / "work/dist", good), *_next_run(folder, good)]


def can_starve(folder: Path) -> str:
    """Why no small disk can be made here, or nothing."""
    if shutil.which(NAMESPACE[0]) is None:
        return "there is no unshare(1)"
    folder.mkdir()
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=100k", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def campaign(folder: Path, good: Undisturbed, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Kills and small disks at random, without end: what was done, and what is wrong with what came of it."""
    dice, number = random.Random(seed), 0
    hungry = can_starve(folder / "probe")
    while True:
        number += 1
        place = folder / f"{number}"
        if number % 3 or hungry:
            how, after = dice.choice(SIGNALS), dice.uniform(0.3, good.seconds)
            yield f"{how.name} after {after:.2f} s", killed(place, good, how, after)
        else:
            size = int(2 ** dice.uniform(4, 11))
            starve = dice.choice((("work/dist",), ("tmp",), ("cache",), ("work/dist", "tmp", "cache")))
            yield f"a disk of {size} kB for {', '.join(starve)}", starved(place, good, size, starve)
        shutil.rmtree(place, ignore_errors=True)


def _command() -> list[str]:
    return [sys.executable, "-m", "packager.cli", "build", "-o", "dist", "-j", "2"]


def _start(folder: Path, command: list[str] | None = None) -> subprocess.Popen[bytes]:
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command or _command(), cwd=folder / "work", env=environment(folder), stdout=said, stderr=said
        )


def _said(folder: Path) -> str:
    return (folder / "said").read_text(encoding="utf-8", errors="replace")


def _targets(folder: Path) -> list[str]:
    lines = (folder / "work/packager.toml").read_text().splitlines()
    return [line.removeprefix("[targets.").removesuffix("]") for line in lines if line.startswith("[targets.")]


def _digests(dist: Path) -> dict[str, str]:
    """Of every file that is the same whenever it is built: verdicts and reports tell times."""
    changing = {"verdict.json", *INDEXES} - {"artifacts.json", "checksums.txt"}
    return {
        path.relative_to(dist).as_posix(): sha256_file(path)
        for path in sorted(dist.rglob("*"))
        if path.is_file() and path.name not in changing and not path.name.endswith(".gz")
    }


def _survivors(folder: Path) -> list[str]:
    """Processes of the sandbox that are still there after a while, by the environment they were given."""
    mark = f"PACKAGER_CACHE_DIR={folder / 'cache'}".encode()
    alive: list[str] = []
    for _ in range(int(GRACE / 0.2)):
        alive = [command for given, command in map(_process, Path("/proc").iterdir()) if mark in given]
        if not alive:
            return []
        time.sleep(0.2)
    return [f"it left a process: {line[:200]}" for line in alive]


def _process(entry: Path) -> tuple[bytes, str]:
    """Environment and command line of a process; nothing where there is none, or it has ended."""
    with contextlib.suppress(OSError, IndexError):
        if entry.name.isdigit() and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            return (entry / "environ").read_bytes(), (entry / "cmdline").read_text().replace("\0", " ")
    return b"", ""


def _left(dist: Path, good: Undisturbed) -> list[str]:
    """What is wrong with an output folder that a build didn't finish: bundles and archives are whole, or not there."""
    wrong = []
    for path in sorted(dist.iterdir()) if dist.is_dir() else []:
        if path.name.startswith(".") or path.name in (REJECTED, *INDEXES):
            continue
        try:
            if path.is_dir():
                wrong += _harm(path, path.name)
            else:
                with unpacked(path) as folder:
                    wrong += _harm(folder, path.name)
        except PackagerError as error:
            wrong.append(f"dist/{path.name}: {error.message}")
    return wrong + _unchecked(dist)


def _harm(bundle: Path, name: str) -> list[str]:
    opened = open_bundle(bundle)
    return [f"dist/{name}: {what}" for what in (*damage(opened), *strangers(opened))]


def _unchecked(dist: Path) -> list[str]:
    """Lines of ``checksums.txt`` that don't hold, as ``sha256sum -c`` would tell them."""
    listed = dist / "checksums.txt"
    lines = [line.split("  ", 1) for line in listed.read_text().splitlines()] if listed.exists() else []
    return [
        f"dist/checksums.txt: {name.strip()} is not what it says"
        for digest, name in lines
        if not (dist / name).is_file() or sha256_file(dist / name) != digest
    ]


def _next_run(folder: Path, good: Undisturbed) -> list[str]:
    """What is wrong with the run after, from the same cache, over the same output."""
    status = _start(folder).wait(SECONDS)
    if status:
        return [f"the next run ended with status {status}: {_said(folder)[-500:]}"]
    dist, wrong = folder / "work/dist", []
    found = _digests(dist)
    wrong += [f"the next run's dist/{name} differs" for name in sorted(found.keys() | good.digests.keys())
              if found.get(name) != good.digests.get(name)]  # fmt: skip
    wrong += [f"after the next run there is dist/{path.name}" for path in dist.iterdir() if path.name.startswith(".")]
    stray = [path for path in (folder / "tmp").iterdir() if path.is_dir()]
    stray += [path for path in (folder / "cache").iterdir() if path.name not in ("entries", "last")]
    return wrong + [f"after the next run there is {path.relative_to(folder)}" for path in stray] + _unchecked(dist)
