"""A bundle's README: how to deploy it, its parity number and its level."""

from __future__ import annotations

from pathlib import Path

from packager import __version__
from packager.bundle import Bundle
from packager.files import write_text
from packager.graph import format_dims
from packager.model import TensorSpec
from packager.render import render
from packager.room import Kind, Plan, RuntimeInfo
from packager.verdict import Verdict


def write_readme(folder: Path, kind: Kind, plan: Plan, verdict: Verdict, bundle: Bundle) -> None:
    """Render ``README.md`` into the bundle: the common page with the room's ``README.md.j2`` in it."""
    common = {
        "name": plan.name,
        "version": plan.version,
        "target": plan.target,
        "kind": plan.kind,
        "precision": plan.precision,
        "signature": plan.signature,
        "plan": plan,
        "verdict": verdict,
        "runtime": _runtime(verdict),
    }
    own = ""
    if kind.templates is not None and (kind.templates / "README.md.j2").exists():
        own = render(kind, f"{kind.name}/README.md.j2", **common)
    text = render(
        kind,
        "common/README.md.j2",
        **common,
        title=kind.facts.title,
        packager=__version__,
        shape=_shape,
        room_readme=own,
        files=[(file.path, file.role) for file in bundle.files if file.path != "README.md"] + [("README.md", "this")],
        has_selfcheck=(folder / "verify.py").exists(),
    )
    write_text(folder / "README.md", text)


def _runtime(verdict: Verdict) -> RuntimeInfo | None:
    """What executed the bundle; ``None`` where nothing did."""
    if not verdict.executed:
        return None
    return RuntimeInfo(verdict.runtime, verdict.version, verdict.device, verdict.level, verdict.level_reason)


def _shape(spec: TensorSpec) -> str:
    return "any rank" if spec.dims is None else format_dims(spec.dims)
