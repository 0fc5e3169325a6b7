"""Operator coverage: what a target does with each node of a model, as one notion for every kind.

A node is *supported* as it is, *rewritten* into an exact equivalent before the target's runtime sees it, *falling back*
to another device of the same machine, or *refused*, which refuses the model. It is *unjudged* where the model is
refused for something else before anybody looked at its nodes. Whoever judges a node says why, and what to do about it.

The same record is shown by ``packager inspect --targets`` and kept in the ``coverage.json`` of bundles that have one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from packager.errors import Objection
from packager.graph import Node, Structure, printable

State = Literal["supported", "rewritten", "fallback", "refused", "unjudged"]
STATES: tuple[State, ...] = get_args(State)

RANK: Mapping[State, int] = {"unjudged": 0, "supported": 1, "rewritten": 2, "fallback": 3, "refused": 4}
"""Of two judgements of one node the later counts: a node that was rewritten may still fall back."""

SCHEMA = "packager.coverage/1"


@dataclass(frozen=True)
class Covered:
    """One node: its label (:attr:`packager.graph.Node.label`), its operator, and what becomes of it, why, and what to
    do about it. ``reason`` and ``hint`` are empty for nodes that are supported."""

    node: str
    operator: str
    state: State = "supported"
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Coverage:
    """What one target does with every node of the model, in file order.

    ``refusal`` says why no bundle is made, empty where one is; ``hint`` what to do. ``judges`` are those who were
    asked, packager's rules first; ``missing`` is what this machine lacks to ask the others, each with how to get it.
    """

    target: str
    kind: str
    precision: str
    nodes: tuple[Covered, ...]
    judges: tuple[str, ...]
    refusal: str = ""
    hint: str = ""
    missing: tuple[tuple[str, str], ...] = ()

    def counts(self) -> dict[State, int]:
        """How many nodes are in each state."""
        found = Counter(node.state for node in self.nodes)
        return {state: found[state] for state in STATES}

    @property
    def verdict(self) -> str:
        """``builds``, ``refused: 2 nodes``, and the like, on one line."""
        counts = self.counts()
        if counts["refused"]:
            return f"refused: {plural(counts['refused'], 'node')}"
        if self.refusal:
            return printable(f"refused: {self.refusal.splitlines()[0].rstrip(':')}")
        end = f", {plural(counts['fallback'], 'node')} not on the accelerator" if counts["fallback"] else ""
        return ("plans; its toolchain isn't here to be asked" if self.missing else "builds") + end


@dataclass(frozen=True)
class Group:
    """Nodes of which the same is said but for names and sizes: how many of each operator, and the labels.

    ``reason`` is that of the first; ``alike`` says that those of others name other tensors or sizes.
    """

    state: State
    reason: str
    hint: str
    alike: bool
    operators: tuple[tuple[str, int], ...]
    nodes: tuple[str, ...]


def plural(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def grouped(nodes: Iterable[Covered]) -> tuple[Group, ...]:
    """Nodes that aren't simply supported, by what is said of them: the worst first, then the most frequent."""
    found: dict[tuple[State, str, str], list[Covered]] = {}
    for node in nodes:
        if node.state not in ("supported", "unjudged"):
            general = re.sub(r"'[^']*'|\[[^\]]*\]", "", node.reason)  # a node's own tensors and sizes
            found.setdefault((node.state, general, node.hint), []).append(node)
    groups = [
        Group(
            state,
            said[0].reason,
            hint,
            len({node.reason for node in said}) > 1,
            tuple(Counter(node.operator for node in said).most_common()),
            tuple(node.node for node in said),
        )
        for (state, _, hint), said in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-RANK[group.state], -len(group.nodes), group.nodes)))


def objections(nodes: Iterable[Covered], state: State) -> list[Objection]:
    """The nodes in a state, as errors name them."""
    return [Objection(node.node, node.reason) for node in nodes if node.state == state]


def document(nodes: Sequence[Covered], total: int, parts: int) -> dict[str, object]:
    """As ``coverage.json`` of a bundle has it: how many nodes there are, in how many parts the device runs those it
    takes, and every node that isn't simply supported.

    Args:
        nodes: at least those that aren't supported.
        total: how many nodes there are.
        parts: pieces of the graph that run on the device in one go.
    """
    left = [asdict(node) for node in nodes if node.state != "supported"]
    states: Counter[State] = Counter(node.state for node in nodes if node.state != "supported")
    return {
        "schema": SCHEMA,
        "nodes": total,
        "parts": parts,
        "states": {"supported": total - len(left), **{state: states[state] for state in STATES if states[state]}},
        "left": left,
    }


def laid_over(rows: Sequence[Covered], remarks: Iterable[Covered]) -> tuple[Covered, ...]:
    """Every node with what is said of it: of several remarks the weightiest, the first of equals.

    A remark on a node that isn't there, made by a rewrite, is a row of its own at the end.
    """
    said: dict[str, Covered] = {}
    for remark in remarks:
        known = said.get(remark.node)
        if known is None or RANK[remark.state] > RANK[known.state]:
            said[remark.node] = remark
    labels = {row.node for row in rows}
    made = [remark for label, remark in said.items() if label not in labels]
    laid = [
        replace(said[row.node], operator=row.operator)
        if row.node in said and RANK[said[row.node].state] >= RANK[row.state]
        else row
        for row in rows
    ]
    return (*laid, *made)


def rows_of(structure: Structure, state: State) -> tuple[Covered, ...]:
    """Every node of a model, subgraphs and functions included, in one state; constants compute nothing and are none."""
    return tuple(Covered(node.label, printable(node.operator), state) for node in _nodes(structure))


def _nodes(structure: Structure) -> Iterator[Node]:
    return (node for node in structure.walk() if node.operator != "Constant")


def changes(before: Structure, after: Structure, how: str) -> tuple[Covered, ...]:
    """Nodes of a model that transforms replaced or took away, found by comparing the graphs.

    Args:
        before: the user's model.
        after: the transformed one.
        how: the transforms, for the reason.
    """
    return tuple(
        Covered(node.label, printable(node.operator), "rewritten", f"{reason} ({how})")
        for node, same in _matched(before, after)
        if (reason := _changed(node, same))
    )


def relabelled(remarks: Iterable[Covered], before: Structure, after: Structure) -> tuple[Covered, ...]:
    """Remarks on the transformed model's nodes as remarks on those of the user's model that they stand for.

    The label of a node holds its operator, so a node that became another operator is called otherwise in the two.
    """
    theirs = {same.label: node.label for node, same in _matched(before, after) if same is not None}
    return tuple(replace(remark, node=theirs.get(remark.node, remark.node)) for remark in remarks)


def _matched(before: Structure, after: Structure) -> Iterator[tuple[Node, Node | None]]:
    """Every node of a model with the one that stands for it after transforms: of the same name, else with one of its
    outputs."""
    by_name = {node.name: node for node in after.walk() if node.name}
    by_output = {name: node for node in after.walk() for name in node.outputs if name}
    named = {node.name for node in before.walk() if node.name}
    for node in _nodes(before):
        makers = (by_output[name] for name in node.outputs if name in by_output)
        # One that has a namesake of its own merely took over this node's output.
        heir = next((maker for maker in makers if maker.name not in named), None)
        yield node, by_name.get(node.name) or heir


def _changed(node: Node, after: Node | None) -> str:
    """What became of a node, as the start of a reason; empty where it is still the same operator."""
    if after is None:
        return "computed ahead, merged into another node or left out"
    if (node.domain, node.op_type) != (after.domain, after.op_type):
        return printable(f"becomes {after.operator}")
    names = [{attribute.name for attribute in each.attributes} for each in (node, after)]
    if len(node.inputs) != len(after.inputs) or names[0] != names[1]:
        return "takes the form of another operator set"
    return ""


__all__ = [
    "SCHEMA", "STATES", "Coverage", "Covered", "Group", "State", "changes", "document", "grouped", "laid_over",
    "objections", "plural", "relabelled", "rows_of",
]  # fmt: skip
