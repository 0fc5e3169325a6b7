"""Which nodes the NPU takes, as QNN's own trace tells it.

With ``enable_framework_op_trace`` the compiler writes ``qnn_op_trace.json``: which ONNX nodes became which QNN
operators, and which it left to the CPU. The nodes are those of ONNX Runtime's optimised graph, so a name may have a
suffix of the optimiser's (``_token_3``); it is taken off to find the model's own node.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packager.coverage import Covered, document
from packager.errors import BuildError
from packager.graph import Structure

TRACE = "qnn_op_trace.json"
REFUSAL = re.compile(
    r"Validation FAILED for \d+ nodes in OrtNodeUnit \((?P<operator>\w+)\) :\n"
    r"(?P<nodes>(?:\tOperator type: .*\n)+)(?:\tREASON : (?P<reason>.*)\n)?"
)
"""How QNN's log of version 2.51 says that it can't take a group of nodes: one that computes, and its scales."""
MEMBER = re.compile(r"\tOperator type: (\w+) Node name: (.*) Node index: \d+\n")
HINT = "each such node costs a trip to the CPU and back; export the model without it"


@dataclass(frozen=True)
class Coverage:
    """What runs where, of ``nodes`` in the optimised graph.

    ``graphs`` counts the parts that the NPU takes, ``on_npu`` QNN's operators in them by type. ``on_cpu`` are the nodes
    left out, each with the compiler's reason.
    """

    nodes: int
    graphs: int
    on_npu: tuple[tuple[str, int], ...]
    on_cpu: tuple[Covered, ...]

    def document(self) -> dict[str, object]:
        """As ``coverage.json`` has it: as for every kind, with QNN's own operators."""
        return {**document(self.on_cpu, self.nodes, self.graphs), "npu": dict(self.on_npu)}


def read_trace(folder: Path, structure: Structure) -> Coverage:
    """Read the trace that QNN wrote into ``folder``.

    Args:
        folder: where it is.
        structure: of the model that was compiled; it knows the labels of nodes.

    Raises:
        BuildError: there is none, or it is of another form than QNN 2.51's.
    """
    try:
        trace = json.loads((folder / TRACE).read_text(encoding="utf-8"))
        left = [
            (str(entry["node_name"]), str(entry["op_type"]), str(entry["reason"]))
            for entry in trace["unsupported_nodes"]
        ]
        operators = Counter(
            str(made["dst_qnn_op_type"]) for graph in trace["subgraph_traces"] for made in graph["op_mappings"]
        )
        nodes, graphs = int(trace["summary"]["total_onnx_nodes"]), len(trace["subgraph_traces"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"QNN doesn't say which nodes it took: {type(error).__name__}: {error}", "install onnxruntime-qnn 2.7"
        ) from error
    return Coverage(nodes, graphs, tuple(sorted(operators.items())), _covered(left, structure))


def refused_in(log: str, structure: Structure) -> tuple[Covered, ...]:
    """The nodes that QNN refused, as its log tells it. Where QNN takes none at all, it writes no trace.

    Args:
        log: of a compilation, with everything that QNN says.
        structure: of the model that was compiled.
    """
    left = [
        (name, unit["operator"], unit["reason"] or "")
        for unit in REFUSAL.finditer(log)
        for operator, name in MEMBER.findall(unit["nodes"])
        if operator == unit["operator"]
    ]
    return _covered(left, structure)


def _covered(left: Sequence[tuple[str, str, str]], structure: Structure) -> tuple[Covered, ...]:
    """Nodes left out, given by name, operator and reason."""
    labels = {node.name: node.label for node in structure.walk() if node.name}
    unnamed = {node.op_type: node.label for node in structure.walk() if not node.name}
    told = [
        Covered(
            labels.get(plain(name, labels), f"{operator} '{name}'") if name else unnamed.get(operator, operator),
            operator, "fallback", plain_reason(reason), HINT,
        )
        for name, operator, reason in left
    ]  # fmt: skip
    return tuple({node.node: node for node in told}.values())  # the optimiser may have made several of one


def plain(name: str, known: dict[str, str]) -> str:
    """A node's own name without what ONNX Runtime's optimiser put behind it."""
    while name not in known and (shorter := re.sub(r"(_token_\d+|_\d+)$", "", name)) != name:
        name = shorter
    return name


def plain_reason(text: str) -> str:
    """QNN's reason without the sentence that says what follows from it, on one line."""
    reason = re.sub(r"\w+ node `.*` will not be assigned to QNN EP\.?", "", text, flags=re.DOTALL)
    return " ".join(reason.split()).rstrip(".") or "QNN gives no reason"
