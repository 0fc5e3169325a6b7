"""Which nodes the CoreML provider will take, in how many pieces, and why the others run on the CPU.

Pure: a function of the graph and the types known in it. The provider decides node by node (:mod:`.operators`, and the
limits below for every node), then ONNX Runtime joins neighbours it takes into partitions, each one Core ML model; data
crosses between Core ML and the CPU at every border. Nodes inside branches and loops stay on the CPU with the node that
holds them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packager.coverage import Covered, document
from packager.graph import Graph, Node, Structure, ValueType, format_dims, printable
from packager.targets.ios.operators import FLOATS, TAKEN, WHOLE_NUMBERS, Given

MAX_RANK = 5
MAX_SIZE = 16384
"""Core ML fails to load a model with a longer dim, so the provider leaves such nodes (coremltools issue 1003)."""

PIN = "fix the free dims with `shapes`: Core ML takes fixed shapes here"
LEAVE = "nothing needs to be done: ONNX Runtime computes it on the CPU; min_coverage sets how much of that is allowed"

Cause = Literal["operator", "settings", "rank", "dynamic shape", "dimension", "empty", "dtype", "external", "subgraph"]


@dataclass(frozen=True)
class Reason:
    """Why a node runs on the CPU: the kind of cause, and it in words."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class Judged:
    """One node: how it is called, its operator, and why it isn't taken (no reasons: it is)."""

    label: str
    operator: str
    reasons: tuple[Reason, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether Core ML computes it."""
        return not self.reasons

    @property
    def why(self) -> str:
        """All reasons in one line."""
        return "; ".join(reason.text for reason in self.reasons)

    def covered(self) -> Covered:
        """As every kind tells it."""
        if self.taken:
            return Covered(self.label, self.operator)
        first = {reason.cause: reason.text for reason in reversed(self.reasons)}
        hint = PIN if "dynamic shape" in first else LEAVE
        return Covered(self.label, self.operator, "fallback", "; ".join(reversed(first.values())), hint)


@dataclass(frozen=True)
class Coverage:
    """All nodes of the main graph in file order, constants aside, and the number of Core ML models they make.

    ``pinned`` counts the nodes that would be taken if every shape were fixed.
    """

    nodes: tuple[Judged, ...]
    partitions: int
    pinned: int

    @property
    def taken(self) -> int:
        """How many nodes Core ML computes."""
        return sum(node.taken for node in self.nodes)

    @property
    def share(self) -> float:
        """Taken nodes as a part of all; 1 where there are none."""
        return self.taken / len(self.nodes) if self.nodes else 1.0

    def text(self) -> str:
        """``36 of 37 nodes in 1 partition``."""
        plural = "" if self.partitions == 1 else "s"
        return f"{self.taken} of {len(self.nodes)} nodes in {self.partitions} partition{plural}"

    def left(self) -> list[str]:
        """Operators left to the CPU with the first reason each, the most frequent first; tensors aren't named."""
        first = [(node.operator, node.reasons[0]) for node in self.nodes if not node.taken]
        counted = Counter(
            (name, why.text if why.cause in ("operator", "settings", "dtype") else why.cause) for name, why in first
        )
        return [f"{count} {operator}: {why}" for (operator, why), count in counted.most_common()]

    def document(self) -> dict[str, object]:
        """As ``coverage.json`` has it."""
        return document([node.covered() for node in self.nodes], len(self.nodes), self.partitions)


def types_of(structure: Structure) -> dict[str, ValueType]:
    """The types that the file itself tells, by value name: inputs, outputs, annotations and constants."""
    graph = structure.graph
    found = {value.name: value.type for value in (*graph.values, *graph.outputs, *graph.inputs)}
    for tensor in graph.initializers:
        found[tensor.name] = ValueType("tensor", tensor.dtype, tensor.dims)
    for node in graph.nodes:
        for attribute in node.attributes:
            if node.operator == "Constant" and attribute.tensors:
                tensor = attribute.tensors[0]
                found[node.outputs[0]] = ValueType("tensor", tensor.dtype, tensor.dims)
    return found


def coverage_of(structure: Structure, types: Mapping[str, ValueType], *, static: bool = True) -> Coverage:
    """Judge every node.

    Args:
        structure: the model.
        types: what is known of its values by name; unknown shapes count as free.
        static: whether the provider may take only nodes of fixed shapes.
    """
    graph = structure.graph
    constants = frozenset(
        [tensor.name for tensor in graph.initializers]
        + [name for node in graph.nodes if node.operator == "Constant" for name in node.outputs]
    )
    external = frozenset(tensor.name for tensor in graph.initializers if tensor.external)
    nodes = [node for node in graph.nodes if node.operator != "Constant"]
    judged: list[Judged] = []
    pinned = 0
    for node in nodes:
        reasons = tuple(_reasons(Given(node, types, constants), external))
        pinned += all(reason.cause == "dynamic shape" for reason in reasons)
        kept = tuple(reason for reason in reasons if static or reason.cause != "dynamic shape")
        judged.append(Judged(node.label, printable(node.operator), kept))
    return Coverage(tuple(judged), _partitions(nodes, [each.taken for each in judged]), pinned)


def inside(structure: Structure) -> Iterator[Covered]:
    """Nodes of branches and bodies: they stay on the CPU with the node that holds them, and aren't counted."""
    for holder in structure.graph.nodes:
        for graph in holder.subgraphs():
            for node in graph.walk():
                reason = f"it is inside {holder.label}, which stays on the CPU"
                yield Covered(node.label, printable(node.operator), "fallback", reason, LEAVE)


def _reasons(given: Given, external: frozenset[str]) -> Iterator[Reason]:
    node = given.node
    check = TAKEN.get(node.operator)
    if check is None:
        yield Reason("operator", f"the provider has no {printable(node.operator)}")
        return
    if any(True for _ in node.subgraphs()):
        yield Reason("subgraph", "it holds a subgraph")
        return
    why = check(given)
    if why is not None:
        yield Reason("settings", why)
    dtype = given.dtype(0)
    if dtype and dtype not in (*FLOATS, *WHOLE_NUMBERS.get(node.operator, ())):
        yield Reason("dtype", f"it computes in {dtype}; float32 and float16 are taken")
    for name in dict.fromkeys(name for name in (*node.inputs, *node.outputs) if name):
        kind = given.types.get(name)
        yield from _shape_reasons(name, kind, is_input=name in node.inputs)
        if name in external:
            yield Reason("external", f"'{printable(name)}' lies outside the model file")


def _shape_reasons(name: str, kind: ValueType | None, *, is_input: bool) -> Iterator[Reason]:
    shown = printable(name)
    if kind is None or kind.dims is None:
        if is_input:
            yield Reason("dynamic shape", f"the rank of '{shown}' isn't known")
        return
    sizes = format_dims(kind.dims)
    if len(kind.dims) > MAX_RANK:
        yield Reason("rank", f"'{shown}' is of rank {len(kind.dims)}, above {MAX_RANK}")
    if not is_input:
        return
    if any(not isinstance(dim, int) for dim in kind.dims):
        yield Reason("dynamic shape", f"'{shown}' has free dims {printable(sizes)}")
    if any(isinstance(dim, int) and dim > MAX_SIZE for dim in kind.dims):
        yield Reason("dimension", f"'{shown}' has a dim above {MAX_SIZE}: {printable(sizes)}")
    if 0 in kind.dims:
        yield Reason("empty", f"'{shown}' is empty")


def _partitions(nodes: list[Node], taken: list[bool]) -> int:
    """How many groups ONNX Runtime makes of the nodes that are taken.

    Nodes are met in an order in which their inputs are there. A node that isn't taken and reads from the group at hand
    waits until that group is closed; one that doesn't is passed by at once (``partitioning_utils.cc``).
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    needs = [{makers[name] for name in _reads(node) if name in makers} for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for index, before in enumerate(needs):
        for maker in before:
            users[maker].append(index)
    waiting = [len(before) for before in needs]
    ready = deque(index for index, count in enumerate(waiting) if not count)
    later: deque[int] = deque()
    group: set[int] = set()
    count = 0
    while ready or later:
        if not ready:
            count += bool(group)
            group, ready, later = set(), later, deque()
        index = ready.popleft()
        if taken[index]:
            group.add(index)
        elif needs[index] & group:
            later.append(index)
            continue
        for user in users[index]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return count + bool(group)


def _reads(node: Node) -> set[str]:
    """Names a node needs, those its subgraphs take from around them included."""
    found = set(node.inputs)
    for inner in node.subgraphs():
        found |= _outside(inner)
    return found


def _outside(graph: Graph) -> set[str]:
    own = {value.name for value in graph.inputs} | {tensor.name for tensor in graph.initializers}
    own |= {name for node in graph.nodes for name in node.outputs}
    return {name for node in graph.nodes for name in _reads(node)} - own
