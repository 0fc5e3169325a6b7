"""A local web server that serves a bundle as a partner's would, and hands golden cases to the pages that run it.

Everything lies under one sub-path with a token that nobody can guess. Each :class:`Channel` is one way of serving:
with or without the headers of cross-origin isolation, always under the strict CSP that the README recommends. Only
files that the seal names are served, and the digest of every byte sent is kept for the verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

HARNESS = Path(__file__).with_name("harness")
CSP = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src 'self'"
ISOLATION = (
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Embedder-Policy", "require-corp"),
)
TYPES = {
    ".js": "text/javascript", ".mjs": "text/javascript", ".html": "text/html; charset=utf-8",
    ".json": "application/json", ".wasm": "application/wasm",
}  # fmt: skip
POLL_SECONDS = 20.0
MAX_MESSAGE_BYTES = 4 << 30


@dataclass(frozen=True)
class Message:
    """What a page said: ``kind`` is ``hello``, ``result``, ``failure`` (of one case) or ``error`` (of the page)."""

    kind: str
    body: bytes


@dataclass
class Channel:
    """One way of serving the bundle, and the conversation with the one page that runs it.

    ``options`` are the loader's, beside the threads.
    """

    name: str
    threads: int
    isolated: bool
    options: tuple[tuple[str, object], ...] = ()
    cases: queue.Queue[bytes | None] = field(default_factory=queue.Queue)
    said: queue.Queue[Message] = field(default_factory=queue.Queue)
    closed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Site:
    """A bundle on the local server: where it is, which files were served with which SHA-256 (hex)."""

    origin: str
    token: str
    served: dict[str, str]

    def base(self, channel: Channel) -> str:
        """The channel's URL, with a slash at its end."""
        return f"{self.origin}/{self.token}/{channel.name}/"

    def page(self, channel: Channel) -> str:
        """The URL of its page."""
        return f"{self.base(channel)}page/index.html"


@contextlib.contextmanager
def serve(bundle: Path, files: frozenset[str], module: str, channels: tuple[Channel, ...]) -> Iterator[Site]:
    """Serve on a free port of the loopback interface until the block ends.

    Args:
        bundle: its folder.
        files: relative POSIX paths that may be served.
        module: the loader's file name.
        channels: each is served under its own name.
    """
    served: dict[str, str] = {}
    token = secrets.token_hex(8)
    by_name = {channel.name: channel for channel in channels}

    class Handler(_Handler):
        site = _Served(bundle, files, module, token, by_name, served)

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{server.server_address[1]}", token, served)
    finally:
        for channel in channels:
            channel.closed.set()
            channel.cases.put(None)
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that is closed breaks its connections: that is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Served:
    bundle: Path
    files: frozenset[str]
    module: str
    token: str
    channels: dict[str, Channel]
    served: dict[str, str]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: _Served

    def do_GET(self) -> None:
        """Files of the bundle and the harness, the settings, and the next case."""
        channel, what = self._place()
        if channel is None:
            return self._answer(404, b"no such page", "text/plain")
        if what == "settings":
            settings = {"module": self.site.module, "options": {"threads": channel.threads, **dict(channel.options)}}
            return self._answer(200, json.dumps(settings).encode(), "application/json", channel)
        if what == "next":
            return self._next(channel)
        if what == "alive":
            return self._alive(channel)
        folder, _, path = what.partition("/")
        if folder == "page" and "/" not in path and (HARNESS / path).is_file() and path:
            return self._file(HARNESS / path, channel)
        if folder == "bundle" and path in self.site.files and (self.site.bundle / path).is_file():
            return self._file(self.site.bundle / path, channel, path)
        return self._answer(404, b"no such file", "text/plain", channel)

    def do_POST(self) -> None:
        """What a page has to say."""
        channel, what = self._place()
        size = int(self.headers.get("Content-Length") or 0)
        if channel is None or what not in ("hello", "result", "failure", "error") or size > MAX_MESSAGE_BYTES:
            self.close_connection = True
            return self._answer(404, b"not expected", "text/plain")
        channel.said.put(Message(what, self.rfile.read(size)))
        return self._answer(204, b"", "", channel)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: errors reach the channel."""

    def _place(self) -> tuple[Channel | None, str]:
        """Which channel is asked, and for what."""
        parts = unquote(urlsplit(self.path).path).split("/", 3)
        if len(parts) < 4 or not secrets.compare_digest(parts[1].encode(), self.site.token.encode()):
            return None, ""
        return self.site.channels.get(parts[2]), parts[3]

    def _next(self, channel: Channel) -> None:
        try:
            case = channel.cases.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return self._answer(204, b"", "", channel)
        if case is None:
            return self._answer(410, b"", "", channel)
        return self._answer(200, case, "application/octet-stream", channel)

    def _alive(self, channel: Channel) -> None:
        """A response that lasts as long as the page: when nobody takes it any more, the page has crashed."""
        self.close_connection = True
        try:
            self._head(200, None, "text/plain", channel)
            while not channel.closed.wait(1.0):
                self.wfile.write(b".")
        except ConnectionError:
            if not channel.closed.is_set():
                channel.said.put(Message("error", b"the page is gone: its process crashed, or was out of memory"))

    def _file(self, path: Path, channel: Channel, name: str | None = None) -> None:
        state = hashlib.sha256()
        with path.open("rb") as stream:
            self._head(200, path.stat().st_size, TYPES.get(path.suffix, "application/octet-stream"), channel)
            with contextlib.suppress(ConnectionError):
                while block := stream.read(1 << 20):
                    state.update(block)
                    self.wfile.write(block)
        if name is not None:
            self.site.served[name] = state.hexdigest()

    def _answer(self, status: int, body: bytes, kind: str, channel: Channel | None = None) -> None:
        with contextlib.suppress(ConnectionError):
            self._head(status, len(body), kind, channel)
            self.wfile.write(body)

    def _head(self, status: int, size: int | None, kind: str, channel: Channel | None) -> None:
        self.send_response(status)
        if status != 204 and size is not None:
            self.send_header("Content-Length", str(size))
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", CSP)
        for name, value in ISOLATION if channel is not None and channel.isolated else ():
            self.send_header(name, value)
        self.end_headers()
