"""The CPU service's speed, as ratios taken in one run: ``python benchmarks/cpu_service.py [MODEL] [--threads 1]``.

Rows per second of the service, batching on, over loopback, from a second process, against those of a bare loop over
the same ONNX Runtime session with the same threads in a process of its own; bare and served take turns. On a machine
that does other things too, the second ratio says more: seconds of CPU that a row costs bare and served.
``--seconds 60 --rounds 1`` is the endurance run: a lost request, or a status other than 200, fails it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import packager
from packager.child import QUIET
from packager.targets.cpu.serving import running

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".corpus" / "orientation.onnx"

BARE = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from load import first_row
from pathlib import Path
from packager.targets.cpu.infer import Session

bundle, seconds = Path(sys.argv[3]), float(sys.argv[5])
model = Session(bundle, int(sys.argv[4]))
feeds = model.check(first_row(bundle, bool(model.settings["rows_independent"])))
for _ in range(5):
    model.run_checked(feeds)
count, begun, used = 0, time.perf_counter(), time.process_time()
while time.perf_counter() - begun < seconds:
    model.run_checked(feeds)
    count += 1
print(count / (time.perf_counter() - begun), count / (time.process_time() - used))
"""


def bare(bundle: Path, threads: int, seconds: float) -> list[float]:
    """Rows per second, and per second of CPU, of a loop over the session alone."""
    arguments = [str(ROOT), str(ROOT / "benchmarks"), str(bundle), str(threads), str(seconds)]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **QUIET},
    )
    return [float(text) for text in done.stdout.split()]


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def served(url: str, bundle: Path, connections: int, seconds: float) -> dict[str, object]:
    """What the load generator saw, in a process of its own.

    Raises:
        SystemExit: a request was lost or refused.
    """
    command = [sys.executable, str(ROOT / "benchmarks/load.py"), url, str(bundle)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--connections", str(connections)],
        check=False, capture_output=True, text=True, env={**os.environ, **QUIET},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"requests were lost or refused: {done.stdout}{done.stderr}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    """Build, start, measure, print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = packager.build(asked.model, targets=["cpu"], out=Path(name), verify=False)
        bundle = Path(name) / str(report.targets[0].bundle)
        ratios, costs = [], []
        for _ in range(asked.rounds):
            alone, alone_cpu = bare(bundle, asked.threads, asked.seconds)
            begun = time.perf_counter()
            with running(bundle, "--threads", str(asked.threads)) as service:
                ready = time.perf_counter() - begun
                used = cpu_seconds(service.process.pid)
                seen = served(service.http, bundle, asked.connections, asked.seconds)
                used = cpu_seconds(service.process.pid) - used
            statuses, seconds = seen["statuses"], seen["seconds"]
            assert isinstance(statuses, dict) and isinstance(seconds, float)
            rate = statuses["200"] / seconds
            ratios.append(rate / alone)
            costs.append(statuses["200"] / used / alone_cpu)
            print(
                f"bare {alone:8.1f} rows/s   served {rate:8.1f} rows/s   ready after {ready:.2f} s   {seen}", flush=True
            )
    what = f"{asked.threads} threads, median of {asked.rounds}"
    print(f"served / bare, rows per second, {what}: {statistics.median(ratios):.2f} (aim: 0.8)")
    print(f"served / bare, rows per second of CPU, {what}: {statistics.median(costs):.2f}")


if __name__ == "__main__":
    main()
