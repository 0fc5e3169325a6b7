"""Whether a model's rows are independent: a server merges requests of strangers, and nobody may see another's data.

A free first dim is no proof: it may be a length, or the model may mix rows (a mean over the batch, per-tensor
quantisation). So golden rows are run alone and together, in ONNX Runtime, and must answer alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from packager import parity
from packager.errors import ModelError
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import Signature, open_model
from packager.policy import judged_precision, rules_for

DYNAMIC = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"})
"""Operators that quantise by the values of a whole tensor."""

CASES = 2
"""Golden cases that are tried."""


def fixed_batch(signature: Signature) -> str:
    """Why the signature alone rules batching out, in one line; empty where every first dim is free."""
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if not spec.dims:
                return f"{side} '{spec.name}' is a scalar" if spec.dims == () else f"{side} '{spec.name}' has no rank"
            if isinstance(spec.dims[0], int):
                return f"the first dim of {side} '{spec.name}' is fixed at {spec.dims[0]}"
    return ""


def objection(path: Path, goldens: GoldenSet, precision: str) -> str:
    """Why rows of ``path`` can't be batched, in one line; empty where batches of 2 and 3 answer as single rows do."""
    from packager.reference import OrtSession

    model = open_model(path)
    session = OrtSession(path, quantized=model.is_quantized)
    names = [spec.name for spec in model.signature.outputs]
    # Quantised by the range of the whole batch, a row would depend on its neighbours: no rounding excuses that.
    dynamic = any(node.op_type in DYNAMIC for node in model.structure.walk())
    rules = rules_for("default-1", "fp32" if dynamic else judged_precision(model, precision), model)
    for case in goldens.cases[:CASES]:
        rows = rows_of(case, goldens)
        if isinstance(rows, str):
            return rows
        try:
            singles = [session.run(row, names, case.name) for row in rows]
        except ModelError as error:
            return f"a single row of golden case '{case.name}' doesn't run: {error.message}"
        for count in (2, 3):
            try:
                whole = session.run(joined(rows[:count]), names, case.name)
            except ModelError as error:
                return f"{count} rows together don't run: {error.message}"
            told = _difference(singles[:count], whole, rules)
            if told:
                return told
    return ""


def rows_of(case: GoldenCase, goldens: GoldenSet) -> list[Mapping[str, Array]] | str:
    """Three rows that aren't all alike, from a case and its neighbours, or why there are none."""
    sizes = {len(array) if array.ndim else 0 for array in case.inputs.values()}
    if len(sizes) != 1 or sizes == {0}:
        return f"the inputs of golden case '{case.name}' have {sorted(sizes)} rows"
    (size,) = sizes
    rows: list[Mapping[str, Array]] = [_row(case.inputs, index) for index in range(min(size, 3))]
    shapes = {name: array.shape for name, array in rows[0].items()}
    for other in goldens.cases:
        row = _row(other.inputs, 0)
        if len(rows) < 3 and other.name != case.name and {name: array.shape for name, array in row.items()} == shapes:
            rows.append(row)
    if len(rows) == 1:  # the same values in another order: as legal as they were, and another row
        rows.append({name: array.ravel()[::-1].reshape(array.shape) for name, array in rows[0].items()})
    return [*rows, rows[0]][:3]


def _row(inputs: Mapping[str, Array], index: int) -> Mapping[str, Array]:
    return {name: array[index : index + 1] for name, array in inputs.items()}


def joined(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Rows as one batch."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _difference(
    singles: Sequence[Mapping[str, Array]], whole: Mapping[str, Array], rules: Mapping[str, parity.OutputRule]
) -> str:
    count = len(singles)
    for name, array in whole.items():
        alone = [len(single[name]) if single[name].ndim else 0 for single in singles]
        if array.ndim == 0 or len(array) != count or alone != [1] * count:
            return f"output '{name}' has {len(array) if array.ndim else 'no'} rows for a batch of {count}"
    for index, single in enumerate(singles):
        part = {name: array[index : index + 1] for name, array in whole.items()}
        result = parity.compare_case(f"row {index}", single, part, rules)
        if not result.passed:
            return f"a row answers differently in a batch of {count} than alone: {'; '.join(result.reasons)[:300]}"
    return ""
