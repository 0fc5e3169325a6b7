"""Running requests: on threads of their own, merged into one run where rows are known to be independent.

Whatever waits while a run is on goes into the next one together, so a service that is idle answers at once and a busy
one fills its batches. Requests that fail together are run again alone, so that a stranger's input can't fail another's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Run = Callable[[Arrays], dict[str, Array]]


@dataclass
class Job:
    """A request that waits: its arrays, the future of its outputs, how many rows it has, since when it waits.

    ``key`` is what requests that may be merged have in common.
    """

    arrays: Arrays
    future: asyncio.Future[dict[str, Array]]
    rows: int
    key: tuple[tuple[int, ...], ...]
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """Threads that run what is handed in.

    Args:
        run: named arrays in, named arrays out; called from several threads where ``runs`` is more than 1.
        loop: where the futures live.
        max_batch: rows that may be merged; 0 or 1 merges nothing.
        delay: seconds the first request of a batch may wait for others.
        runs: how many runs may be on at the same time.
        observe: is told the rows of each run, the seconds its oldest request waited, and the seconds it took.
    """

    def __init__(
        self,
        run: Run,
        loop: asyncio.AbstractEventLoop,
        max_batch: int,
        delay: float,
        runs: int,
        observe: Callable[[int, float, float], None],
    ) -> None:
        self._run, self._loop, self._observe = run, loop, observe
        self._max_batch, self._delay = max_batch, delay
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"run-{index}", daemon=True) for index in range(runs)]
        for thread in self._threads:
            thread.start()

    def submit(self, arrays: Arrays) -> asyncio.Future[dict[str, Array]]:
        """Hand in a request (from the loop's thread); the future gives its outputs, or what ``run`` raised."""
        future: asyncio.Future[dict[str, Array]] = self._loop.create_future()
        rows, key = 1, tuple[tuple[int, ...], ...]()
        if self._max_batch > 1:
            rows = len(next(iter(arrays.values())))
            key = tuple(array.shape[1:] for array in arrays.values())
        with self._changed:
            self._waiting.append(Job(arrays, future, rows, key))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Run what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while jobs := self._next():
            begun = time.perf_counter()
            answers = self._answers(jobs)
            self._observe(sum(job.rows for job in jobs), begun - jobs[0].since, time.perf_counter() - begun)
            self._loop.call_soon_threadsafe(_deliver, jobs, answers)

    def _next(self) -> list[Job]:
        """The jobs of the next run; none where there is nothing more to do."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0].future.cancelled():
                    self._waiting.popleft()
                if self._waiting:
                    break
                if self._closed:
                    return []
                self._changed.wait()
            first = self._waiting.popleft()
            jobs, rows = [first], first.rows
            until = first.since + self._delay
            while rows < self._max_batch:
                rows += self._take(jobs, rows)
                left = until - time.perf_counter()
                if rows >= self._max_batch or left <= 0 or self._closed:
                    break
                self._changed.wait(left)
            return jobs

    def _take(self, jobs: list[Job], rows: int) -> int:
        """Move the jobs that fit from those that wait; how many rows they have."""
        taken, rest = 0, deque[Job]()
        for job in self._waiting:
            fits = job.key == jobs[0].key and job.rows > 0 and rows + taken + job.rows <= self._max_batch
            if fits and not job.future.cancelled():
                jobs.append(job)
                taken += job.rows
            else:
                rest.append(job)
        self._waiting = rest
        return taken

    def _answers(self, jobs: Sequence[Job]) -> list[dict[str, Array] | Exception]:
        if len(jobs) > 1:
            merged = {name: np.concatenate([job.arrays[name] for job in jobs]) for name in jobs[0].arrays}
            parts = _parts(self._tried(merged), [job.rows for job in jobs])
            if parts is not None:
                return list(parts)
        return [self._tried(job.arrays) for job in jobs]

    def _tried(self, arrays: Arrays) -> dict[str, Array] | Exception:
        try:
            return self._run(arrays)
        except Exception as error:  # noqa: BLE001 - it is raised again where the request is answered
            return error


def _parts(outputs: dict[str, Array] | Exception, sizes: Sequence[int]) -> list[dict[str, Array]] | None:
    """Each request's rows of the outputs; ``None`` where the run failed or an output hasn't a row for each."""
    if isinstance(outputs, Exception) or any(not a.ndim or len(a) != sum(sizes) for a in outputs.values()):
        return None
    ends = np.cumsum(sizes).tolist()
    return [
        {name: array[end - size : end] for name, array in outputs.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


def _deliver(jobs: Sequence[Job], answers: Sequence[dict[str, Array] | Exception]) -> None:
    for job, answer in zip(jobs, answers, strict=True):
        if job.future.done():
            continue
        if isinstance(answer, Exception):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)
