"""How much golden cases are worth: the share of small wrong models that they, and the policy, would catch.

Goldens that can't fail prove nothing. Random input leaves a text detector's answer near zero everywhere; a layer behind
a dead ReLU may hold anything. So mutants of the model (:mod:`packager.mutants`) answer the same cases, by the same
comparator and tolerances that judge bundles. What no case catches is named.

Some mutants answer as the model does whatever the input (a bias before a normalisation, a scale before an argmax), so
a share below one is no fault by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packager import parity
from packager.goldens import Array
from packager.mutants import Mutant, find_mutants

if TYPE_CHECKING:
    import onnx

MAX_BYTES = 500_000_000
"""Larger models aren't scored: every mutant is a copy of the model in memory."""

WEAK = 0.6
"""Below this share a build warns. Thirteen real models reach 0.8 or more with synthesised goldens; two of them had 0.44
and 0.47 as long as no case took one of their branches."""

MUTANTS = 12
"""How many a build tries, of models up to :data:`BUILD_BYTES`; ``packager golden --score`` tries :data:`MANY`."""

MANY = 64
BUILD_BYTES = 64_000_000


@dataclass(frozen=True)
class StrengthJob:
    """Input of :func:`measure`: the model, golden cases with their rules, and how many mutants are tried."""

    model: Path
    goldens: Path
    mutants: int


@dataclass(frozen=True)
class Strength:
    """What :func:`measure` found. ``missed`` says which mutants no case caught, ``insensitive`` which outputs no
    mutant moved beyond the tolerance, ``idle`` which nodes no case exercises: none of their mutants was caught."""

    mutants: int
    caught: int
    missed: tuple[str, ...]
    insensitive: tuple[str, ...]
    idle: tuple[str, ...]
    reason: str = ""

    @property
    def share(self) -> float | None:
        """Caught mutants of all, 0 to 1; ``None`` where there was none to try (``reason`` says why)."""
        return self.caught / self.mutants if self.mutants else None

    @property
    def text(self) -> str:
        """``11 of 12 small faults would be caught``, or why that isn't known."""
        return f"{self.caught} of {self.mutants} small faults would be caught" if self.mutants else self.reason


def measure(job: StrengthJob) -> Strength:
    """Let mutants of the model answer the golden cases, and say which were caught. Meant for a process of its own."""
    import onnx

    size = job.model.stat().st_size
    if size > MAX_BYTES:
        return Strength(0, 0, (), (), (), f"the model takes {size} bytes, more than {MAX_BYTES}")
    model = onnx.load(job.model, load_external_data=False)
    if any(tensor.external_data for tensor in model.graph.initializer):
        return Strength(0, 0, (), (), (), "its weights are in files of their own")
    golden = parity.read_golden(job.goldens)
    names = list(golden.rules)
    moved: set[str] = set()
    caught: list[tuple[Mutant, bool]] = []
    for mutant in sampled(find_mutants(model), job.mutants):
        wrong = wrong_outputs(model, mutant, golden, moved)
        if wrong is not None:
            moved |= wrong
            caught.append((mutant, bool(wrong)))
    if not caught:
        return Strength(0, 0, (), (), (), "it has no weights or operators that can be changed a little")
    missed = tuple(mutant.text for mutant, told in caught if not told)
    seen = {mutant.node for mutant, told in caught if told}
    idle = tuple(dict.fromkeys(mutant.node for mutant, told in caught if mutant.node not in seen))
    insensitive = tuple(name for name in names if name not in moved)
    return Strength(len(caught), len(caught) - len(missed), missed, insensitive, idle)


def sampled(mutants: Sequence[Mutant], most: int) -> list[Mutant]:
    """At most ``most`` of them, spread evenly over the graph; the same ones in every run."""
    if len(mutants) <= most:
        return list(mutants)
    return [mutants[int(place)] for place in np.linspace(0, len(mutants) - 1, most)]


def wrong_outputs(model: onnx.ModelProto, mutant: Mutant, golden: parity.Golden, moved: set[str]) -> set[str] | None:
    """Outputs that the comparator refuses; ``None`` where no runtime takes the mutant, which tells nothing of goldens.

    Cases are tried one after another until one catches the mutant and every output is known to move.
    """
    import onnx
    import onnxruntime as ort

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    mutant.apply(changed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    names = list(golden.rules)
    wrong: set[str] = set()
    try:
        session = ort.InferenceSession(changed.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for case in golden.cases:
            values = session.run(names, dict(case.inputs))
            answers: dict[str, Array] = dict(zip(names, map(np.asarray, values), strict=True))
            expected = {name: case.outputs[name] for name in names}
            result = parity.compare_case(case.name, expected, answers, golden.rules)
            wrong |= {each.name for each in result.outputs if not each.passed}
            if wrong and moved | wrong == set(names):
                break
    except Exception:  # noqa: BLE001 -- ORT's exception types are not public
        return None
    return wrong
