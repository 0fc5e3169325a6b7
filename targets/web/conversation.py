"""The conversation with a page: it greets once the bundle is loaded, then answers one golden case after another."""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass

from packager.bundle import Bundle
from packager.errors import ToolchainMissing, VerificationError
from packager.supervise import Running
from packager.targets.web.browser import CHOSEN, HOW
from packager.targets.web.server import Channel, Message

GREETING_SECONDS = 120.0
"""How long a page may take to load the runtime and a small model; :data:`SLOWEST` bytes of model add a second each."""

SLOWEST = 10e6
"""Bytes per second."""

TICK = 0.05
NODE = "node"


class ProgramGone(Exception):
    """The browser or Node ended by itself. Never leaves the room."""


@dataclass(frozen=True)
class Page:
    """One page that has loaded the bundle."""

    channel: Channel
    program: Running
    host: Mapping[str, object]


def time_limit(bundle: Bundle) -> float:
    """Seconds that a page may take to load the bundle."""
    return GREETING_SECONDS + bundle.total_bytes / SLOWEST


def greeted(channel: Channel, program: Running, limit: float) -> Page:
    """The page once it has loaded the bundle.

    Raises:
        ToolchainMissing: its program ended.
        VerificationError: it can't load the bundle, or said nothing for too long.
    """
    try:
        message = heard(channel, program, limit)
    except ProgramGone as gone:
        hint = f"{HOW}; {CHOSEN}= (empty) lets Node stand in"
        raise ToolchainMissing(f"what runs the bundle doesn't run here: {gone}", hint) from gone
    if message.kind != "hello":
        raise VerificationError(f"{who(channel)} can't load the bundle: {text_of(message)}", "build the bundle again")
    host = json.loads(message.body)
    if (host["isolated"], host["threads"]) != (channel.isolated, channel.threads):
        raise VerificationError(
            f"the page was to run {channel.threads} threads, isolated {channel.isolated}; it says "
            f"{host['threads']} and {host['isolated']}",
            "a machine with one core can't run two threads",
        )
    return Page(channel, program, host)


def heard(channel: Channel, program: Running, limit: float | None) -> Message:
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
            raise ProgramGone(f"the program of {who(channel)} is gone: {ended}")
        if limit is not None and time.monotonic() - started > limit:
            raise VerificationError(f"{who(channel)} said nothing for {limit:.0f} s", "is the machine busy?")


def who(channel: Channel) -> str:
    """What messages call it."""
    return "Node" if channel.name == NODE else f"the {channel.name} page"


def text_of(message: Message) -> str:
    """What it says, on one line."""
    return " ".join(message.body.decode("utf-8", errors="replace").split())[:1000]
