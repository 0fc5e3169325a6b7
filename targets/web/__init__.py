"""The web room: a static folder for browsers, executed here by a headless Chromium.

``plan`` (:mod:`.planning`) decides from the graph alone what onnxruntime-web can't take; ``build`` (:mod:`.building`)
puts the model, three files of the runtime (:mod:`.runtime`), a loader with types, a demo and a self-check page into a
folder that any static server can serve. ``runner`` (:mod:`.running`) serves that folder from a sub-path under a strict
CSP and lets a browser run every golden case through the bundle's own loader, on one thread and on two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packager.host import Host
from packager.room import Missing, Plan, PlanRequest, Reach, Runner, Stage
from packager.targets.web.options import Options
from packager.targets.web.planning import plan_for

__all__ = ["Options", "build", "missing", "plan", "reach", "runner"]


def missing(host: Host) -> list[Missing]:
    """What runs the bundle: a browser, or Node as a stand-in. npm is wanted only where the runtime isn't cached yet."""
    from packager.targets.web.browser import HOW, find_browser
    from packager.targets.web.node import find_node

    if find_browser() is None and find_node() is None:
        return [Missing("a Chromium browser, or Node", HOW)]
    return []


def reach(host: Host) -> Reach:
    """A browser's own runtime where there is one, else Node's."""
    from packager.targets.web.browser import HOW, find_browser

    return Reach("runtime") if find_browser() is not None else Reach("emulated", f"Node stands in for a browser; {HOW}")


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph alone.

    Raises:
        Refused: onnxruntime-web can't take the model; the message names every node, input and output.
    """
    made: Plan = plan_for(request)
    return made


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``. Meant for a process of its own.

    Raises:
        ToolchainMissing: the runtime isn't cached and can't be fetched.
        BuildError: the runtime's files aren't the pinned ones.
        StorageError: a file could not be written.
    """
    from packager.targets.web.building import build_bundle

    build_bundle(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Load ``bundle`` in headless Chromium, or in Node where there is none. Meant for a process of its own.

    Raises:
        ToolchainMissing: there is neither a browser nor Node.
        VerificationError: the bundle can't be loaded; the browser's or the loader's own message is given.
    """
    from packager.targets.web.running import run_bundle

    with run_bundle(bundle) as made:
        yield made
