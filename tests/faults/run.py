"""``make faults``: break bundles of every kind that this machine can build, and write what was caught to the docs.

    python -m tests.faults.run [--kinds a,b] [--out docs/faults.md] [--seeds 100]

Exit status 0 where every fault was caught and nothing honest raised an alarm, else 1. What a kind's tolerance allows
whatever computes it is no fault there; it is counted apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from packager.host import this_host
from packager.room import kinds, missing_requirements
from tests.faults.harness import Outcome, all_faults, subject
from tests.faults.honest import Threshold, honest, thresholds

BEGIN, END = "<!-- written by make faults -->\n", "<!-- end -->\n"


def main(arguments: Sequence[str]) -> int:
    """Run everything and print the totals."""
    parser = argparse.ArgumentParser(description="Break bundles on purpose.")
    parser.add_argument("--kinds", default="", help="default: all that this machine can build and verify")
    parser.add_argument("--out", type=Path, help="the page that gets the table")
    parser.add_argument("--seeds", type=int, default=100, help="honest variants")
    chosen = parser.parse_args(arguments)
    ready = [kind.name for kind in kinds().values() if not missing_requirements(kind, this_host())]
    wanted = chosen.kinds.split(",") if chosen.kinds else ready
    # A process for each: a changed model that the reference refuses ends the run, and every child of its process.
    apart = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory(prefix="packager-faults-") as name, apart as pool:
        folder = Path(name)
        found = [outcome for some in pool.map(_kind, wanted, [folder / kind for kind in wanted]) for outcome in some]
        alarms = [words for _, passed, words in honest(folder, chosen.seeds) if not passed]
        measured = thresholds(folder)
    faults = [outcome for outcome in found if not outcome.allowed]
    missed = [outcome for outcome in faults if not outcome.caught]
    total = f"caught {len(faults) - len(missed)}/{len(faults)}, false alarms {len(alarms)}/{3 * chosen.seeds}"
    if len(faults) < len(found):
        total += f"; {len(found) - len(faults)} more are within the tolerance of their kind's precision"
    for outcome in missed:
        sys.stderr.write(f"MISSED {outcome.kind}: {outcome.fault}\n")
    sys.stdout.write(f"{total}\n")
    if chosen.out is not None:
        _write(chosen.out, found, total, measured)
    return 1 if missed or alarms else 0


def _kind(kind: str, folder: Path) -> list[Outcome]:
    found = list(all_faults(subject(kind, folder / "good"), folder))
    sys.stderr.write(f"{kind}: caught {sum(outcome.caught for outcome in found)} of {len(found)}\n")
    return found


def _write(page: Path, found: Sequence[Outcome], total: str, measured: Sequence[Threshold]) -> None:
    columns = list(dict.fromkeys(outcome.kind for outcome in found))
    by = {(outcome.fault, outcome.kind): outcome for outcome in found}
    lines = [f"`{total}`\n", f"| fault | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for fault in dict.fromkeys(outcome.fault for outcome in found):
        cells = [_cell(by.get((fault, kind))) for kind in columns]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    lines += ["", "| rule | smallest error of a layer's weights that it sees |", "|---|---|"]
    lines += [
        f"| {each.rule} | {'none' if each.smallest is None else f'{each.smallest:.1e}'} |" for each in measured
    ]  # fmt: skip
    text = page.read_text(encoding="utf-8")
    start, rest = text.split(BEGIN)
    _, end = rest.split(END)
    page.write_text(start + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + end, encoding="utf-8")


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if not outcome.caught:
        return "within tolerance" if outcome.allowed else "**missed**"
    return "at build" if outcome.words.startswith("not built") else "yes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
