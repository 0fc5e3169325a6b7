"""``make fuzz``: odd input and kills at random, for as long as there is time.

    python -m tests.fuzz.run [--minutes 10] [--seed N] [--targets openvino,cpu] [--out fuzz-findings]

Rounds go over every surface of :data:`tests.fuzz.cases.SURFACES` with a seed of their own each, and then kill a build.
Each finding is a folder below ``--out``: the files of the case, its command, its seed and what was wrong. Exit status 0
where there is none, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz import killing
from tests.fuzz.cases import SURFACES, Good, good
from tests.fuzz.oracle import Case, Worker, lay_out, run

EXAMPLES = 20


def main(arguments: Sequence[str]) -> int:
    """Fuzz until the time is up, and tell what was found."""
    parser = argparse.ArgumentParser(description="Odd input, and kills, at random.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="default: random")
    parser.add_argument("--targets", default="openvino,cpu", help="what the builds build that are killed")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    chosen = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * chosen.minutes
    sys.stderr.write(f"seed {chosen.seed}\n")
    os.environ.setdefault("PACKAGER_RUNTIME_DIR", str(Path(__file__).parents[2] / ".runtimes"))
    commands = stops = found = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, Worker() as worker:
        folder = Path(name)
        (folder / "good").mkdir()
        made = good(folder / "good")
        calm = killing.undisturbed(folder / "calm", tuple(chosen.targets.split(",")))
        kills = killing.campaign(folder, calm, chosen.seed)
        for seed in itertools.count(chosen.seed):
            for surface in SURFACES:
                if time.monotonic() > ends:
                    break
                for case, wrong in _hunt(worker, surface, made, seed, folder / "case"):
                    commands += 1
                    if wrong:
                        found += 1
                        _keep(chosen.out / f"{found}-{surface.replace(' ', '-')}", case, seed, wrong)
            if time.monotonic() > ends:
                break
            what, wrong = next(kills)
            stops += 1
            if wrong:
                found += 1
                _tell(f"{what} (seed {chosen.seed}, number {stops})", wrong)
    sys.stdout.write(f"{commands} commands, {stops} disturbed builds, {found} findings\n")
    return 1 if found else 0


def _hunt(worker: Worker, surface: str, made: Good, seed: int, folder: Path) -> Iterator[tuple[Case, list[str]]]:
    """Some cases of a surface, and what is wrong with how each ended. The same seed gives the same cases."""
    seen: list[tuple[Case, list[str]]] = []

    @seeded(seed)
    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SURFACES[surface](made))
    def once(case: Case) -> None:
        seen.append((case, run(worker, case, folder)[1]))

    once()
    yield from seen


def _keep(folder: Path, case: Case, seed: int, wrong: Sequence[str]) -> None:
    """Write a case down, so that it can be run again by hand in the folder ``work``."""
    shutil.rmtree(folder, ignore_errors=True)
    lay_out(case, folder)
    command = " ".join(["packager", *case.arguments])
    (folder / "finding.txt").write_text("\n".join([f"seed {seed}", command, *wrong, ""]), encoding="utf-8")
    _tell(f"{folder}: seed {seed}: {command}", wrong)


def _tell(what: str, wrong: Sequence[str]) -> None:
    sys.stderr.write(f"FOUND {what}\n" + "".join(f"  {line}\n" for line in wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
