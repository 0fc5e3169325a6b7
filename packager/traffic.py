"""Asking a served model as the world will: alone, together and at the same time, and the same answers each time.

Rooms whose runtime is a server share this, and how such a server's process is ended.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from packager import parity
from packager.goldens import Array

Ask = Callable[[Mapping[str, Array]], dict[str, Array]]


def requests_of(golden: parity.Golden, batching: bool, wanted: int) -> list[Mapping[str, Array]]:
    """Requests of one shape, so that they may be merged: rows where the server batches, else whole cases.

    Args:
        golden: the bundle's.
        batching: whether the first dim of every input is a number of rows.
        wanted: how many; cases or rows come again where there are fewer.
    """
    if not batching:
        return [golden.cases[index % len(golden.cases)].inputs for index in range(wanted)]
    first = golden.cases[0].inputs
    shapes = {name: array.shape[1:] for name, array in first.items()}
    rows: list[Mapping[str, Array]] = []
    for case in golden.cases:
        if {name: array.shape[1:] for name, array in case.inputs.items()} == shapes:
            count = min(len(array) for array in case.inputs.values())
            rows += [{name: array[i : i + 1] for name, array in case.inputs.items()} for i in range(count)]
    return [rows[index % len(rows)] for index in range(wanted)]


def in_parallel(ask: Ask, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Ask all of them at the same time, each from a thread of its own; answers in the order of the requests."""
    start = Barrier(len(requests))

    def one(feeds: Mapping[str, Array]) -> dict[str, Array]:
        start.wait()
        return ask(feeds)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


def difference(one: Mapping[str, Array], other: Mapping[str, Array], golden: parity.Golden) -> str:
    """What differs, by the tolerances the bundle is judged by; outputs without elements differ in shape only."""
    for name, array in one.items():
        if name not in golden.excluded_names and array.shape != other[name].shape:
            return f"output '{name}' has shape {list(array.shape)} and {list(other[name].shape)}"
    full = [name for name, array in one.items() if array.size and name in golden.rules]
    if not full:
        return ""
    result = parity.compare_case(
        "", {name: one[name] for name in full}, {name: other[name] for name in full}, golden.rules
    )
    return "; ".join(result.reasons)[:500]


def die_with_parent() -> Callable[[], object] | None:
    """For ``preexec_fn``: ask the kernel to end a server when we end, however that happens.

    (``prctl``: PR_SET_PDEATHSIG is 1, SIGKILL 9.) ``None`` where the system isn't Linux: there a server ends with the
    process group that the engine kills.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, 9)


def stop(process: subprocess.Popen[bytes], seconds: float) -> int:
    """End a server: politely, and after ``seconds`` by force. Its exit status, negative where a signal ended it."""
    process.terminate()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
