"""Executing a bundle: its own loader and runtime in headless Chromium, twice, or in Node where there is no browser.

Node loads the same files first: a missing or broken one shows there in half a second, before a browser starts. Then
one page has no special headers and one thread, the other is cross-origin isolated and has two. Every golden case goes
to both; what the first answers is compared with the goldens by the engine, and the two are compared here, by the
bundle's own tolerances, since only one of them would be noticed otherwise.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packager import parity
from packager.bundle import Bundle, open_bundle
from packager.errors import ToolchainMissing, VerificationError
from packager.room import Runner, RuntimeInfo
from packager.supervise import Running, running
from packager.targets.web import node
from packager.targets.web.browser import HOW, browsing, find_browser, scratch
from packager.targets.web.conversation import NODE, Page, ProgramGone, greeted, heard, text_of, time_limit, who
from packager.targets.web.server import HARNESS, Channel, Site, serve
from packager.targets.web.webgpu import ON_WEBGPU, has_webgpu, smoke_run
from packager.targets.web.wire_format import decode, encode

if TYPE_CHECKING:
    import numpy as np

GOLDEN = "golden"
GATE_BYTES = 256 << 20
"""A larger bundle is left to the browser alone: Node would take as long to load it."""


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
    channels = (Channel("plain", 1, False), Channel("isolated", 2, True)) if browser else ()
    in_node, on_gpu = Channel(NODE, 1, False), Channel("webgpu", 1, False, ON_WEBGPU)
    files = frozenset(file.path for file in bundle.files)
    limit = time_limit(bundle)
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(serve(folder, files, module, (*channels, in_node, on_gpu)))
        gate = ""
        if browser is None:
            started = [(in_node, stack.enter_context(_node(node_command or [], site.base(in_node), folder)))]
        else:
            gate = _gate(node_command, site.base(in_node), in_node, bundle, limit)
            started = [(channel, stack.enter_context(browsing(browser, site.page(channel)))) for channel in channels]
        for _, program in started:
            stack.callback(program.stop)  # all at once, before each is waited for
        pages = tuple(greeted(channel, program, limit) for channel, program in started)
        more = [("gate", gate)] if gate else []
        if has_webgpu(bundle):
            more.append(("webgpu", smoke_run(browser, site, on_gpu, bundle)))
        yield _Runner(bundle, site, pages, tuple(more))


@contextlib.contextmanager
def _node(command: list[str], base: str, folder: Path) -> Iterator[Running]:
    with running([*command, str(HARNESS / "node.mjs"), base, str(folder.resolve())], scratch()) as program:
        yield program


def _gate(command: list[str] | None, base: str, channel: Channel, bundle: Bundle, limit: float) -> str:
    """Load the bundle in Node before a browser does; gives a line for the verdict, empty where Node had no part.

    Only loading: the pages run the cases, and a large model would take as long again.

    Raises:
        VerificationError: the loader refused there; its own message is given.
    """
    if command is None or bundle.total_bytes > GATE_BYTES:
        return ""
    with _node(command, base, bundle.folder) as program:
        try:
            host = greeted(channel, program, limit).host
        except ToolchainMissing:
            return ""  # this Node is too old or broken, which says nothing of the bundle
    return f"loaded in {host['engine']} {host['version']}"


def _module(bundle: Bundle) -> str:
    """The loader's file name: the one that ``package.json`` exports."""
    try:
        described = json.loads((bundle.folder / "package.json").read_text(encoding="utf-8"))
        return str(described["main"]).removeprefix("./")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"package.json is missing or malformed: {error!r}", "build the bundle again") from error


class _Runner:
    """The pages behind the engine's Protocol."""

    def __init__(self, bundle: Bundle, site: Site, pages: tuple[Page, ...], more: tuple[tuple[str, str], ...]) -> None:
        self._bundle, self._site, self._pages, self._more = bundle, site, pages, more
        self._in_browser = pages[0].channel.name != NODE
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
        details += self._more
        details += [
            (
                f"{page.channel.name} page" if self._in_browser else "page",
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
            said = heard(page.channel, page.program, None)
        except ProgramGone as gone:
            raise VerificationError(str(gone), "is there enough memory?") from gone
        if said.kind != "result":
            raise VerificationError(f"{who(page.channel)}: {text_of(said)}")
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
            raise VerificationError(f"{who(page.channel)} answers otherwise than the first: {'; '.join(found.reasons)}")


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tolist() == other.tolist() if one.dtype.kind == "O" else one.tobytes() == other.tobytes()
