"""``make conformance``: every node case of onnx through every kind, and how each ended into the docs.

    python -m tests.conformance.run [--kinds a,b] [--jobs 2] [--state FILE] [--out docs/conformance.md] [--refresh]

Interrupted, it goes on where it was: a line of the state file is the end of one kind on one case, and holds as long as
packager, the room and the runtimes are what they were. Exit status 1 where a case crashed, hung, was passed with a
wrong answer, or no longer ends as well as ``expected.json`` says; 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from packager.host import this_host
from packager.room import Missing, kind_named, missing_requirements
from tests.conformance import baseline, table
from tests.conformance.baseline import Ends
from tests.conformance.cases import Case, all_cases
from tests.conformance.pool import do_all
from tests.conformance.state import State
from tests.conformance.worker import BAD, REFERENCE, Ending, Request

KINDS = "openvino,web,triton"
CASES = Path(__file__).parents[2] / ".runtimes/conformance"
IN_BROWSER = 40
"""Of so many cases, one is run in a browser, in order of their names."""


def main(arguments: Sequence[str]) -> int:
    """Run what the state file lacks, and print the totals."""
    parser = argparse.ArgumentParser(description="Run onnx's node cases through packager.")
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path, default=CASES / "state.jsonl")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--every", type=int, default=1, help="only every so many cases")
    parser.add_argument("--keep", action="store_true", help="keep what earlier code ended with")
    parser.add_argument("--out", type=Path, help="the page that gets the totals")
    parser.add_argument("--refresh", action="store_true", help="make what was found the expected")
    chosen = parser.parse_args(arguments)
    kinds = tuple(chosen.kinds.split(","))
    missing = [f"{kind}: {each.what} is missing; {each.how}" for kind in kinds for each in lacking(kind)]
    if missing:
        sys.stderr.write("\n".join([*missing, ""]))
        return 4
    cases = [case for case in all_cases(CASES) if chosen.only in case.name]
    state = State(chosen.state, (REFERENCE, *kinds), keep=chosen.keep)
    requests = [
        Request(case.name, str(case.folder.resolve()), due, number % IN_BROWSER == 0)
        for number, case in enumerate(cases)
        if number % chosen.every == 0 and (due := tuple(kind for kind in kinds if not state.has(case.name, kind)))
    ]
    try:
        do_all(requests, chosen.jobs, Progress(state, len(requests)).told)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return 130
    asked = {case.name for case in cases[:: chosen.every]}
    ends = {key: ending for key, ending in state.ends.items() if key[0] in asked}
    return _conclude(chosen, cases, ends, (REFERENCE, *kinds))


def _conclude(chosen: argparse.Namespace, cases: Sequence[Case], ends: Ends, kinds: Sequence[str]) -> int:
    """Write what was asked for, and say what must not be."""
    if chosen.refresh:
        baseline.write(ends, kinds)
    sys.stdout.write("\n".join(table.totals(ends, kinds)) + "\n")
    if chosen.out is not None:
        whole = chosen.every == 1 and not chosen.only  # a sample is no news of the reference
        table.write(chosen.out, cases, ends, kinds if whole else kinds[1:])
    better = baseline.improvements(ends)
    if better:
        sys.stderr.write("\n".join(["better than expected.json says (--refresh takes it over):", *better]) + "\n")
    failed = list(baseline.failures(ends))
    sys.stderr.write("".join(f"{line}\n" for line in failed))
    return 1 if failed else 0


def lacking(kind: str) -> list[Missing]:
    """What this machine lacks to build and verify a kind."""
    return missing_requirements(kind_named(kind), this_host())


class Progress:
    """Books what ends, and says how far it is."""

    def __init__(self, state: State, total: int) -> None:
        self._state, self._total, self._done = state, total, 0
        self._guard, self._begun, self._cpu = threading.Lock(), time.monotonic(), 0.0

    def told(self, request: Request, ends: dict[str, Ending], cpu: float) -> None:
        """A case ended."""
        with self._guard:
            self._state.add(request.name, ends)
            self._done += 1
            self._cpu += cpu
            for kind, ending in ends.items():
                if ending.end in BAD:
                    sys.stderr.write(f"{ending.end.upper()} {request.name} {kind}: {ending.why[:300]}\n")
            if self._done % 20 == 0 or self._done == self._total:
                seconds = time.monotonic() - self._begun
                sys.stderr.write(f"{self._done}/{self._total}, {seconds:.0f} s, {self._cpu:.0f} s of CPU\n")
            sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
