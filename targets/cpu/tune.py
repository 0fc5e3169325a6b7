"""Measure on this machine how many threads, runs and merged rows serve the model best.

    python tune.py [--seconds 0.5]

runs the first golden case, without a server, at settings that keep the cores busy, and prints a table with rows per
second and the time of one run. The last lines are settings for the service: put them into its environment
(``EnvironmentFile`` of the systemd unit, ``--env-file`` of a container). Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packager.feeds import Array
from packager.targets.cpu.infer import Session, read_settings

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Measured:
    """A setting and what it gave: rows per second, and milliseconds of a run in the middle and at the 95th percent."""

    threads: int
    runs: int
    batch: int
    rate: float
    middle: float
    slow: float


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def settings(count: int, largest: int) -> Iterator[tuple[int, int, int]]:
    """(threads, runs, batch) worth trying: powers of two whose product of threads and runs is near the cores."""
    batches = [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or size <= largest]
    for threads in [2**power for power in range(count.bit_length()) if 2**power <= count]:
        for runs in sorted({1, max(1, count // threads)}):
            yield from ((threads, runs, batch) for batch in batches)


def measure(model: Session, feeds: Mapping[str, Array], runs: int, seconds: float) -> list[float]:
    """Seconds of each run, with ``runs`` at the same time for ``seconds``; the first run isn't counted."""
    model.run_checked(feeds)
    end = time.perf_counter() + seconds
    taken: list[list[float]] = [[] for _ in range(runs)]

    def work(times: list[float]) -> None:
        while not times or time.perf_counter() < end:
            begun = time.perf_counter()
            model.run_checked(feeds)
            times.append(time.perf_counter() - begun)

    workers = [threading.Thread(target=work, args=(times,)) for times in taken]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [each for times in taken for each in times]


def first_case() -> dict[str, Array]:
    """Inputs of the first golden case."""
    sys.path.insert(0, str(FOLDER))
    parity: Any = __import__("parity")
    return dict(parity.read_golden(FOLDER / "golden").cases[0].inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the best settings for this machine.")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each setting")
    parser.add_argument("--largest", type=int, default=32, help="rows of the largest batch")
    asked = parser.parse_args(arguments)
    sys.dont_write_bytecode = True
    merged = bool(read_settings(FOLDER).get("rows_independent", False))
    case = first_case()
    rows = {name: array[:1] for name, array in case.items()} if merged else case
    found: list[Measured] = []
    print(f"{'threads':>8}{'runs':>6}{'batch':>7}{'rows/s':>10}{'p50 ms':>9}{'p95 ms':>9}")
    model, used = None, 0
    for threads, runs, batch in settings(cores(), asked.largest if merged else 1):
        if model is None or threads != used:
            model, used = Session(FOLDER, threads), threads
        feeds = {name: np.repeat(array, batch, 0) if merged else array for name, array in rows.items()}
        times = measure(model, model.check(feeds), runs, asked.seconds)
        rate = batch * runs / statistics.fmean(times)
        cuts = sorted(times)
        slow = cuts[min(len(cuts) - 1, int(len(cuts) * 0.95))]
        found.append(Measured(threads, runs, batch, rate, statistics.median(times) * 1e3, slow * 1e3))
        print(f"{threads:>8}{runs:>6}{batch:>7}{rate:>10.1f}{found[-1].middle:>9.2f}{found[-1].slow:>9.2f}", flush=True)
    best = max(found, key=lambda each: each.rate)
    print(f"\n# for most rows per second here ({best.rate:.1f})")
    print(f"SERVICE_THREADS={best.threads}\nSERVICE_RUNS={best.runs}\nSERVICE_MAX_BATCH={best.batch if merged else 0}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
