"""Coverage for people and programs: a table and what isn't simply supported, JSON of every node, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from packager.coverage import STATES, Coverage, Covered, Group, State, grouped, plural
from packager.covering import Inspected
from packager.report import columns, lines_of, model_document, model_text

SHOWN = 3
"""Nodes named of a group, in text; JSON has all."""

OPERATORS = 8
"""Operators counted of a group, in text."""

HEADINGS = ("SUPPORTED", "REWRITTEN", "FALLBACK", "REFUSED", "UNJUDGED")
WORDS: dict[State, str] = {
    "supported": "supported",
    "rewritten": "rewritten",
    "fallback": "falls back",
    "refused": "refused",
    "unjudged": "not judged",
}


def coverage_text(found: Inspected) -> str:
    """The model, a table of counts with a verdict for each target, then what isn't simply supported and what to do."""
    rows: list[tuple[str, ...]] = [("TARGET", "KIND", "PRECISION", *HEADINGS, "VERDICT")]
    for each in found.targets:
        counts = (str(count) for count in each.counts().values())
        rows.append((each.target, each.kind, each.precision, *counts, each.verdict))
    lines = columns(rows)
    for each in found.targets:
        lines += _details(each)
    return model_text(found.model) + "\n" + lines_of("\n".join(lines))


def _details(found: Coverage) -> list[str]:
    """The paragraph of one target; none where there is nothing to say."""
    groups = grouped(found.nodes)
    lines = [line for group in groups for line in _group(group)]
    refused_nodes = any(group.state == "refused" for group in groups)
    if found.refusal and not refused_nodes:
        lines += [f"  {line}" for line in found.refusal.split("\n")]
        lines += [f"    do: {line}" for line in found.hint.split("\n") if line]
    lines += [f"  not asked: {what} is missing\n    get it: {how}" for what, how in found.missing]
    return ["", f"{found.target}, by {' and '.join(found.judges)}:", *lines] if lines else []


def _group(group: Group) -> list[str]:
    operators = _some([f"{count} {name}" for name, count in group.operators], OPERATORS)
    alike = ", and the like" if group.alike else ""
    lines = [f"  {WORDS[group.state]}: {operators}: {group.reason}{alike}"]
    lines.append(f"    {plural(len(group.nodes), 'node')}: {_some(group.nodes, SHOWN)}")
    return lines + [f"    do: {line}" for line in group.hint.split("\n") if line]


def _some(texts: Sequence[str], most: int) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def coverage_document(found: Inspected) -> dict[str, object]:
    """``inspect --format json`` with what targets do with every node, and the counts and the verdict that follow."""
    listed = [{**asdict(each), "counts": each.counts(), "verdict": each.verdict} for each in found.targets]
    return {**model_document(found.model), "coverage": listed}


@dataclass(frozen=True)
class Cell:
    """What a target does with the nodes of one operator: the worst state, how many there are in each, and why."""

    state: State
    counts: tuple[tuple[str, int], ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Line:
    """One operator: a cell for each target, and the states that occur in them."""

    operator: str
    nodes: int
    cells: tuple[Cell | None, ...]
    states: tuple[State, ...]


def matrix(found: Sequence[Coverage]) -> tuple[Line, ...]:
    """Operators down, targets across; operators in the order of their frequency."""
    by_operator = [_by_operator(each.nodes) for each in found]
    operators = {name: 0 for nodes in by_operator for name in nodes}
    for name in operators:
        operators[name] = max(len(nodes.get(name, ())) for nodes in by_operator)
    lines = []
    for name in sorted(operators, key=lambda name: (-operators[name], name)):
        cells = tuple(_cell(nodes[name]) if name in nodes else None for nodes in by_operator)
        seen = {state for nodes in by_operator for state in (node.state for node in nodes.get(name, ()))}
        lines.append(Line(name, operators[name], cells, tuple(state for state in STATES if state in seen)))
    return tuple(lines)


def _by_operator(nodes: Sequence[Covered]) -> dict[str, list[Covered]]:
    found: dict[str, list[Covered]] = {}
    for node in nodes:
        found.setdefault(node.operator, []).append(node)
    return found


def _cell(nodes: Sequence[Covered]) -> Cell:
    counts = {state: sum(node.state == state for node in nodes) for state in STATES}
    order: tuple[State, ...] = ("refused", "fallback", "rewritten", "unjudged", "supported")
    worst = next(state for state in order if counts[state])
    return Cell(worst, tuple((WORDS[state], count) for state, count in counts.items() if count), grouped(nodes))


def coverage_html(found: Inspected) -> str:
    """One page for a browser: no script, nothing from elsewhere; every name in it is escaped."""
    from packager.render import render_common

    return render_common(
        "coverage.html.j2", model=found.model, found=found.targets, lines=matrix(found.targets), words=WORDS
    )


__all__ = ["Cell", "Line", "coverage_document", "coverage_html", "coverage_text", "matrix"]
