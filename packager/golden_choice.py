"""Further synthesised golden cases, chosen by what they catch, for models of which the first ones leave much idle.

A branch that no case takes may hold anything. Where mutants of the model (:mod:`packager.mutants`) get past the cases
too often, other inputs are proposed, one idea after another: the other codes that the graph knows for an input, with
sizes to match; inputs a good deal larger; another draw. A proposal that the model takes, and that catches a mutant
which none has caught before, becomes a golden case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from packager import parity
from packager.errors import GoldenError, ModelError
from packager.golden_synth import candidates, synthesise
from packager.golden_uses import find_uses
from packager.goldens import Array, GoldenCase
from packager.model import Model
from packager.mutants import Mutant, find_mutants
from packager.parity import OutputRule
from packager.strength import BUILD_BYTES, MUTANTS, WEAK, sampled, wrong_outputs

MOST = 2
"""Cases that are added at most."""

SIZES = 30
"""Sizes of open dimensions that are tried for one idea."""

LARGER = 8.0
"""Float inputs times this: past where a sigmoid saturates, not past what float16 holds."""

Answers = dict[str, Array]
Ask = Callable[[GoldenCase], Answers]
"""Asks the reference for the outputs of a case.

Raises ModelError or GoldenError where the model doesn't take it."""


@dataclass(frozen=True)
class Draw:
    """How the first cases were synthesised: the arguments of :func:`packager.golden_synth.synthesise`."""

    cases: int
    seed: int
    dims: Mapping[str, int]
    ranges: Mapping[str, tuple[float, float]]


def has_choices(model: Model) -> bool:
    """Whether a model has branches, or inputs that choose one of several ways: what cases easily leave out."""
    if any(node.op_type == "If" and not node.domain for node in model.structure.walk()):
        return True
    return bool(_codes(model))


def further(
    model: Model, path: Path, answered: list[tuple[GoldenCase, Answers]], rules: Mapping[str, OutputRule], draw: Draw,
    ask: Ask,
) -> list[tuple[GoldenCase, Answers]]:  # fmt: skip
    """Cases to add, with the reference's answers; none where the first catch enough, or nothing better was found.

    Args:
        model: the opened model; larger ones than a build scores get none.
        path: its file.
        answered: the cases so far, synthesised, with the reference's outputs.
        rules: by which mutants are told apart, for every output that is judged.
        draw: how ``answered`` was made.
        ask: the reference.
    """
    import onnx

    if model.bytes > BUILD_BYTES or model.external:
        return []
    proto = onnx.load(path)

    def missed(mutants: list[Mutant], cases: list[tuple[GoldenCase, Answers]]) -> list[Mutant]:
        golden = _golden(cases, rules)
        return [each for each in mutants if wrong_outputs(proto, each, golden, set(rules)) == set()]

    tried = sampled(find_mutants(proto), MUTANTS)
    left = missed(tried, answered)
    if not tried or 1 - len(left) / len(tried) >= WEAK:
        return []
    added: list[tuple[GoldenCase, Answers]] = []
    for idea in _ideas(model, answered, draw):
        made = _first_taken(idea, ask)
        if made is None or len(still := missed(left, [made])) == len(left):
            continue
        case, outputs = made
        added.append((replace(case, name=f"synthesised-{draw.cases + len(added)}"), outputs))
        left = still
        if not left or len(added) == MOST:
            break
    return added


def _ideas(model: Model, answered: list[tuple[GoldenCase, Answers]], draw: Draw) -> Iterator[Iterator[GoldenCase]]:
    """Proposals, each in the forms in which the model may take it, the likeliest first."""
    for name, codes in _codes(model).items():
        used = {float(case.inputs[name].reshape(-1)[0]) for case, _ in answered}
        for code in codes:
            if code not in used and name not in draw.ranges:
                yield _drawn(model, draw, f"'{name}' = {code:g}", {name: (code, code)})
    free = [
        name
        for name, uses in find_uses(model).items()
        if name not in draw.ranges and all(use.kind == "arithmetic" for use in uses)
    ]
    if larger := [_larger(case, frozenset(free)) for case, _ in answered]:
        yield iter([case for case in larger if case is not None])
    yield _drawn(model, replace(draw, seed=draw.seed + 1), "another draw", {})


def _drawn(
    model: Model, draw: Draw, why: str, ranges: Mapping[str, tuple[float, float]]
) -> Iterator[GoldenCase]:  # fmt: skip
    """One case, at the sizes of the first draw and then at others."""
    sizes = chain([dict(draw.dims)], islice(candidates(model, dims=draw.dims), SIZES))
    for dims in sizes:
        made = synthesise(model, cases=1, seed=draw.seed, dims=dims, ranges={**draw.ranges, **ranges}).cases[0]
        yield replace(made, source=f"{made.source}, chosen: {why}")


def _larger(case: GoldenCase, free: frozenset[str]) -> GoldenCase | None:
    """A case with the float inputs of which the graph says nothing :data:`LARGER`; ``None`` where there are none."""
    grown = {
        name: np.asarray(array * np.asarray(LARGER, array.dtype))
        for name, array in case.inputs.items()
        if name in free and array.dtype in (np.float32, np.float64, np.float16)
    }
    if not grown:
        return None
    return replace(case, inputs={**case.inputs, **grown}, source=f"{case.source}, chosen: {LARGER:g} times as large")


def _first_taken(forms: Iterator[GoldenCase], ask: Ask) -> tuple[GoldenCase, Answers] | None:
    for case in forms:
        try:
            return case, ask(case)
        except (ModelError, GoldenError):
            continue
    return None


def _codes(model: Model) -> dict[str, list[float]]:
    """What an input of one element may choose a way by: the numbers that the graph compares it with, in its order.

    Where it is compared with a single one, the other way is open to all others: half of it, its double and the next
    are tried (sample rates, versions, counts).
    """
    found: dict[str, list[float]] = {}
    uses = find_uses(model)
    for spec in model.signature.inputs:
        if spec.kind != "tensor" or any(dim != 1 for dim in spec.dims or ()):
            continue
        values = [
            float(value)
            for use in uses.get(spec.name, ())
            if use.kind == "choice"
            for value in use.values
            if not isinstance(value, str)
        ]
        if len(set(values)) == 1:
            values += [values[0] // 2, values[0] * 2, values[0] + 1]
        if values:
            found[spec.name] = list(dict.fromkeys(values))
    return found


def _golden(cases: list[tuple[GoldenCase, Answers]], rules: Mapping[str, OutputRule]) -> parity.Golden:
    stored = tuple(parity.StoredCase(case.name, case.source, "", case.inputs, outputs) for case, outputs in cases)
    return parity.Golden("", "", rules, {}, stored)
