"""Starting and stopping: one process, one event loop, HTTP and gRPC side by side, the model on threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from . import rpc
from .batching import Batcher
from .core import Core, Limits, Served
from .metrics import Metrics
from .web import application

MEGABYTE = 1 << 20
SWITCH_SECONDS = 1e-4
"""How long a thread keeps Python's lock while another wants it. A run that ends wants it at once, to hand its answers
on and begin the next; Python's own 5 ms are several runs of a small model, and cost a third of what can be served."""


@dataclass(frozen=True)
class Settings:
    """How a model is served.

    ``max_batch`` rows are merged at most (0 or 1: none), a request waits ``delay_us`` microseconds for others, ``runs``
    may be on at the same time. A body has ``max_body_mb`` megabytes at most, ``max_in_flight`` requests are answered at
    the same time. On SIGTERM readiness goes first, after ``drain_seconds`` nothing new is taken, and what is being
    answered has ``stop_seconds`` to end. Port 0 takes a free one; a gRPC port below 0 leaves gRPC out.
    """

    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    max_batch: int = 0
    delay_us: int = 0
    runs: int = 1
    max_body_mb: int = 64
    max_in_flight: int = 256
    drain_seconds: float = 0.0
    stop_seconds: float = 30.0


class _Server(uvicorn.Server):  # type: ignore[misc]  # its types are only there where it is installed
    """uvicorn without its own signal handlers, which would end the process by the signal it had."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(model: Served, settings: Settings) -> int:
    """Serve until a signal says stop. The exit status: 0 where all that was begun was answered.

    A line of JSON on standard output, with the addresses, says that requests are taken.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        from uvloop import new_event_loop
    except ImportError:  # Windows, and where nobody installed it
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        status: int = runner.run(_serve(model, settings))
    return status


async def _serve(model: Served, settings: Settings) -> int:
    try:
        listening = _listen(settings.host, settings.http_port)
    except OSError as error:
        print(f"error: {settings.host}:{settings.http_port} can't be listened on: {error}", file=sys.stderr)
        return 1
    metrics = Metrics(model.name, model.version, f"{model.info['name']} {model.info['version']}")
    loop = asyncio.get_running_loop()
    batcher = Batcher(
        model.run_checked, loop, settings.max_batch, settings.delay_us / 1e6, settings.runs, metrics.observe_run
    )
    core = Core(model, batcher, Limits(settings.max_body_mb * MEGABYTE, settings.max_in_flight), metrics)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        _on_signal(loop, number, stopping)
    grpc_server, grpc_port = None, -1
    try:
        if settings.grpc_port >= 0:
            grpc_server, grpc_port = await rpc.start(core, f"{_bracketed(settings.host)}:{settings.grpc_port}")
    except RuntimeError as error:
        print(f"error: {settings.host}:{settings.grpc_port} can't be listened on: {error}", file=sys.stderr)
        return 1
    server = _Server(
        uvicorn.Config(
            application(core), log_level="warning", access_log=False, lifespan="off", server_header=False,
            backlog=1024, timeout_keep_alive=75, timeout_graceful_shutdown=int(settings.stop_seconds),
        )
    )  # fmt: skip
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    _tell(settings.host, listening.getsockname()[1], grpc_port)
    await asyncio.wait([serving, asyncio.ensure_future(stopping.wait())], return_when=asyncio.FIRST_COMPLETED)
    core.ready = False
    await asyncio.sleep(settings.drain_seconds)
    server.should_exit = True
    if grpc_server is not None:
        await grpc_server.stop(settings.stop_seconds)
    await serving
    await asyncio.to_thread(batcher.close)
    return 0


def _on_signal(loop: asyncio.AbstractEventLoop, number: int, stopping: asyncio.Event) -> None:
    try:
        loop.add_signal_handler(number, stopping.set)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopping.set))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tell(host: str, http_port: int, grpc_port: int) -> None:
    addresses = {"http": f"http://{_bracketed(host)}:{http_port}"}
    if grpc_port >= 0:
        addresses["grpc"] = f"grpc://{_bracketed(host)}:{grpc_port}"
    print(json.dumps(addresses), flush=True)
