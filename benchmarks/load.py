"""A load generator for HTTP: some connections, each asking again as soon as it was answered, in one process.

Requests are made once and sent as they are, and answers are read no further than to their end, so that on a small
machine most of the CPU is left to the server.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np

ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    """What came back: answers by status, connections that failed, seconds of each request, and of the whole."""

    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class _Link:
    socket: socket.socket
    request: bytes
    sent: int = 0
    begun: float = 0.0
    answer: bytearray = field(default_factory=bytearray)
    wanted: int = 0  # bytes of the whole answer, 0 while its head isn't there


def request_bytes(host: str, path: str, head: bytes, rest: bytes) -> bytes:
    """A whole request in the binary extension."""
    lines = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(head) + len(rest)}\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
    )
    return lines.encode("latin-1") + head + rest


def load(url: str, request: bytes, connections: int, seconds: float) -> Result:
    """Ask for ``seconds`` over ``connections``; every request that was begun is waited for."""
    address = urlsplit(url)
    result, chosen = Result(), selectors.DefaultSelector()
    for _ in range(connections):
        link = socket.create_connection((address.hostname or "", address.port or 80), timeout=60)
        link.setblocking(False)
        chosen.register(link, selectors.EVENT_WRITE, _Link(link, request, begun=time.perf_counter()))
    start = time.perf_counter()
    while chosen.get_map():
        ready = chosen.select(60.0)
        if not ready:
            result.lost += len(chosen.get_map())
            break
        for key, _ in ready:
            link = key.data
            try:
                done = _step(link, chosen, result)
            except OSError:
                result.lost += 1
                done = True
            if done and (link.sent == -1 or time.perf_counter() - start >= seconds):
                chosen.unregister(link.socket)
                link.socket.close()
            elif done:
                link.sent, link.wanted, link.begun = 0, 0, time.perf_counter()
                link.answer.clear()
                chosen.modify(link.socket, selectors.EVENT_WRITE, link)
    result.seconds = time.perf_counter() - start
    return result


def _step(link: _Link, chosen: selectors.BaseSelector, result: Result) -> bool:
    """Send or read what is there. Whether the request is answered."""
    if link.sent < len(link.request):
        link.sent += link.socket.send(memoryview(link.request)[link.sent :])
        if link.sent == len(link.request):
            chosen.modify(link.socket, selectors.EVENT_READ, link)
        return False
    data = link.socket.recv(1 << 18)
    if not data:
        link.sent = -1
        raise ConnectionError("hung up before the answer's end")
    link.answer += data
    if not link.wanted:
        head, found, _ = link.answer.partition(b"\r\n\r\n")
        if not found:
            return False
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        link.wanted = len(head) + 4 + int(length.split(b":")[1])
    if len(link.answer) < link.wanted:
        return False
    result.statuses[int(link.answer[9:12])] += 1
    result.times.append(time.perf_counter() - link.begun)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Load a bundle's running service with rows of its first golden case; what came back as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=8)
    asked = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    from packager.targets.cpu.abuse import binary_request
    from packager.targets.cpu.infer import Session

    model = Session(asked.bundle)
    head, rest = binary_request(model, first_row(asked.bundle, bool(model.settings["rows_independent"])))
    path = f"/v2/models/{quote(model.name, safe='')}/infer"
    request = request_bytes(urlsplit(asked.url).netloc, path, head, rest)
    del model
    result = load(asked.url, request, asked.connections, asked.seconds)
    slow = np.percentile(result.times, [50, 95, 99]).tolist() if result.times else []
    told = {"statuses": result.statuses, "lost": result.lost, "seconds": result.seconds, "p50_p95_p99": slow}
    print(json.dumps(told))
    return 0 if set(result.statuses) == {200} and not result.lost else 1


def first_row(bundle: Path, rows: bool) -> dict[str, np.ndarray]:
    """Inputs of a bundle's first golden case, or the first row of them."""
    from packager import parity

    inputs = parity.read_golden(bundle / "golden").cases[0].inputs
    return {name: array[:1] if rows else array for name, array in inputs.items()}


if __name__ == "__main__":
    sys.exit(main())
