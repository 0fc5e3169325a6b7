"""Executing a bundle: its own loader and runtime in headless Chromium, twice, or in Node where there is no browser.

One page has no special headers and one thread, the other is cross-origin isolated and has two. Every golden case goes
to both; what the first answers is compared with the goldens by the engine, and the two are compared here, by the
bundle's own tolerances, since only one of them would be noticed otherwise.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packager import parity
from packager.bundle import Bundle, open_bundle
from packager.errors import ToolchainMissing, VerificationError
from packager.room import Runner, RuntimeInfo
from packager.supervise import Running, running
from packager.targets.web import node
from packager.targets.web.browser import CHOSEN, HOW, browser_command, find_browser, scratch
from packager.targets.web.server import HARNESS, Channel, Message, Site, serve
from packager.targets.web.wire_format import decode, encode

if TYPE_CHECKING:
    import numpy as np

GREETING_SECONDS = 120.0
"""How long a page may take to load the runtime and a small model; :data:`SLOWEST` bytes of model add a second each."""

SLOWEST = 10e6
"""Bytes per second."""

TICK = 0.05
GOLDEN = "golden"


class ProgramGone(Exception):
    """The browser or Node ended by itself. Never leaves this module."""


@dataclass(frozen=True)
class Page:
    """One page that has loaded the bundle."""

    channel: Channel
    program: Running
    host: Mapping[str, object]


@contextlib.contextmanager
def run_bundle(folder: Path) -> Iterator[Runner]:
    """Load the bundle and give what runs it.

    Raises:
        ToolchainMissing: there is neither a browser nor Node, or it ends before it has loaded the page.
        VerificationError: a page can't load it; the browser's or the loader's own message is given.
    """
    bundle = open_bundle(folder)
    module = _module(bundle)
    browser, node_command = find_browser(), node.find_node()
    if browser is None and node_command is None:
        raise ToolchainMissing("there is neither a browser nor Node to run the bundle", f"{HOW}; or {node.HOW}")
    channels: tuple[Channel, ...] = (Channel("plain", 1, False), Channel("isolated", 2, True))
    files = frozenset(file.path for file in bundle.files)
    with contextlib.ExitStack() as stack:
        if browser is None:
            channels = channels[:1]
        site = stack.enter_context(serve(folder, files, module, channels))
        programs: list[Running] = []
        for channel in channels:
            own = scratch()
            if browser is None:
                command = [*(node_command or []), str(HARNESS / "node.mjs"), site.base(channel), str(folder.resolve())]
            else:
                command = browser_command(browser, str(own / "profile"), f"{site.base(channel)}page/index.html")
            programs.append(stack.enter_context(running(command, own)))
        for program in programs:
            stack.callback(program.stop)  # all at once, before each is waited for
        limit = GREETING_SECONDS + bundle.total_bytes / SLOWEST
        pages = [_greeted(channel, program, limit) for channel, program in zip(channels, programs, strict=True)]
        yield _Runner(bundle, site, tuple(pages), browser is not None)


def _module(bundle: Bundle) -> str:
    """The loader's file name: the one that ``package.json`` exports."""
    try:
        described = json.loads((bundle.folder / "package.json").read_text(encoding="utf-8"))
        return str(described["main"]).removeprefix("./")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"package.json is missing or malformed: {error!r}", "build the bundle again") from error


def _greeted(channel: Channel, program: Running, limit: float) -> Page:
    try:
        message = _heard(channel, program, limit)
    except ProgramGone as gone:
        hint = f"{HOW}; {CHOSEN}= (empty) lets Node stand in"
        raise ToolchainMissing(f"what runs the bundle doesn't run here: {gone}", hint) from gone
    if message.kind != "hello":
        raise VerificationError(f"the page can't load the bundle: {_text(message)}", "build the bundle again")
    host = json.loads(message.body)
    if (host["isolated"], host["threads"]) != (channel.isolated, channel.threads):
        raise VerificationError(
            f"the page was to run {channel.threads} threads, isolated {channel.isolated}; it says "
            f"{host['threads']} and {host['isolated']}",
            "a machine with one core can't run two threads",
        )
    return Page(channel, program, host)


def _heard(channel: Channel, program: Running, limit: float | None) -> Message:
    """What the page says next; without a limit, the engine's own holds.

    Raises:
        ProgramGone: its program ended.
        VerificationError: it said nothing for too long.
    """
    started = time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            return channel.said.get(timeout=TICK)
        ended = program.ended()
        if ended is not None and channel.said.empty():
            raise ProgramGone(f"the {channel.name} page's program is gone: {ended}")
        if limit is not None and time.monotonic() - started > limit:
            raise VerificationError(f"the {channel.name} page said nothing for {limit:.0f} s", "is the machine busy?")


def _text(message: Message) -> str:
    return " ".join(message.body.decode("utf-8", errors="replace").split())[:1000]


class _Runner:
    """The pages behind the engine's Protocol."""

    def __init__(self, bundle: Bundle, site: Site, pages: tuple[Page, ...], in_browser: bool) -> None:
        self._bundle, self._site, self._pages, self._in_browser = bundle, site, pages, in_browser
        self._apart = 0.0
        self._same = True
        self.info = self._info()

    def _info(self) -> RuntimeInfo:
        """What ran: runtime, program and versions, both modes, and the SHA-256 of every file that was served."""
        host = self._pages[0].host
        version = json.loads((self._bundle.folder / "package.json").read_text(encoding="utf-8"))["config"][
            "onnxruntime-web"
        ]
        modes = " and ".join(str(page.host["threads"]) for page in self._pages)
        details = [(str(host["engine"]).lower(), str(host["version"]))]
        details += [
            (
                f"{page.channel.name} page",
                f"threads {page.host['threads']}, isolated {'yes' if page.host['isolated'] else 'no'}",
            )
            for page in self._pages
        ]
        if len(self._pages) > 1:
            details.append(("pages agree", "bit for bit" if self._same else f"within {self._apart:.3g}"))
        details += [(f"served {name}", f"sha256:{digest}") for name, digest in sorted(self._site.served.items())]
        return RuntimeInfo(
            name=f"onnxruntime-web {version} in {host['engine']}",
            version=str(host["version"]),
            device=f"{modes} thread{'s' if len(self._pages) > 1 else ''}",
            level="runtime" if self._in_browser else "emulated",
            reason="" if self._in_browser else f"there is no browser here, Node ran the bundle's files; {HOW}",
            details=tuple(details),
        )

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once on every page.

        Raises:
            VerificationError: a page refused or failed, or two of them differ by more than the bundle's tolerance.
        """
        message = encode(feeds)
        for page in self._pages:
            page.channel.cases.put(message)
        answers = [self._answer(page) for page in self._pages]
        for page, other in zip(self._pages[1:], answers[1:], strict=True):
            self._compare(page, answers[0], other)
        self.info = self._info()
        return answers[0]

    def _answer(self, page: Page) -> dict[str, np.ndarray]:
        try:
            said = _heard(page.channel, page.program, None)
        except ProgramGone as gone:
            raise VerificationError(str(gone), "is there enough memory?") from gone
        if said.kind != "result":
            raise VerificationError(f"the {page.channel.name} page: {_text(said)}")
        outputs: dict[str, np.ndarray] = decode(said.body, self._bundle.signature)
        return outputs

    def _compare(self, page: Page, first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
        if all(_same_bits(first[name], other[name]) for name in first):
            return
        golden = parity.read_golden(self._bundle.folder / GOLDEN)
        judged = {name: array for name, array in first.items() if name not in golden.excluded}
        found = parity.compare_case("", judged, other, golden.rules, golden.excluded_names)
        self._same = False
        self._apart = max([self._apart, *(output.metrics.max_abs or 0.0 for output in found.outputs if output.metrics)])
        if not found.passed:
            raise VerificationError(
                f"the {page.channel.name} page answers otherwise than the first: {'; '.join(found.reasons)}"
            )


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tolist() == other.tolist() if one.dtype.kind == "O" else one.tobytes() == other.tobytes()
