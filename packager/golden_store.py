"""Goldens as bundles carry them: ``golden.json`` for names and rules, ``golden.safetensors`` for numbers.

Layout of ``golden.json`` (schema ``packager.golden/1``)::

    {"schema": ..., "policy": "default-1", "precision": "fp32",
     "outputs": [{"name", "tolerance": {"max_abs", "scaled", "cosine", "top1"}, "score_axis", "rounding"}],
     "excluded": [{"name", "reason"}],
     "cases": [{"name", "source", "outputs_from",
                "inputs": [{"name", "dtype", "shape", "tensor": "0.in.0"} | {..., "dtype": "string", "strings": [...]}],
                "outputs": [...]}]}

Where a target was given a quantised form of the model, its answers go along: ``transformed`` at the top is like
``outputs``, with the bounds of how near the bundle must be to them, and ``transformed`` in a case is like its
``outputs``. Both are left out otherwise.

Names appear only as JSON texts, never as keys: a tensor may be called anything. The payload's keys count instead:
case, ``in`` or ``out``, position. What safetensors can't hold is stored as :data:`packager.parity.STORED` says. The
same goldens always give the same bytes. Reading is :func:`packager.parity.read_golden`, which bundles carry too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packager.errors import GoldenError
from packager.files import storage_error
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.parity import (
    GOLDEN_SCHEMA,
    MAX_JSON_BYTES,
    STORED,
    TAGS,
    GoldenFileError,
    Json,
    OutputRule,
    dtype_name,
    read_golden,
)

JSON_FILE, PAYLOAD_FILE = "golden.json", "golden.safetensors"


@dataclass(frozen=True)
class Transformed:
    """Answers of the model that was given to a target, and how near to them the target must come, by output name."""

    goldens: GoldenSet
    rules: Mapping[str, OutputRule]

    def of(self, case: GoldenCase) -> GoldenCase:
        """The answers to a case.

        Raises:
            GoldenError: there are none.
        """
        for each in self.goldens.cases:
            if each.name == case.name:
                return each
        raise GoldenError(f"golden case '{case.name}': the transformed model was not asked")


def write(
    folder: Path,
    goldens: GoldenSet,
    rules: Mapping[str, OutputRule],
    *,
    policy: str,
    precision: str,
    excluded: Mapping[str, str],
    transformed: Transformed | None = None,
) -> None:
    """Write both files into ``folder``, which is made if need be.

    Args:
        folder: where to.
        goldens: at least one case. Excluded outputs are left out: what isn't compared may differ from run to run.
        rules: one for each output to compare, none where the cases have no outputs yet.
        policy: which policy judged, in words.
        precision: of the target, such as ``fp32``.
        excluded: output name to why it isn't compared.
        transformed: what the model that was given to the target answers in each case, where that is judged too.

    Raises:
        GoldenError: a case lacks an output or has one without a rule, a value is of a dtype that no ONNX tensor has,
            or a text isn't valid Unicode.
        StorageError: the files can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if not goldens.cases:
        raise GoldenError("there are no golden cases to store")
    payload: dict[str, Array] = {}
    document: Json = {
        "schema": GOLDEN_SCHEMA,
        "policy": policy,
        "precision": precision,
        "outputs": _rules(rules, excluded),
        **({} if transformed is None else {"transformed": _rules(transformed.rules, excluded)}),
        "excluded": [{"name": name, "reason": why} for name, why in excluded.items()],
        "cases": [
            _case(number, case, rules, excluded, payload) | _transformed(number, case, transformed, excluded, payload)
            for number, case in enumerate(goldens.cases)
        ],
    }
    text = _encoded(document)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_FILE).write_bytes(text)
        save_file(payload, folder / PAYLOAD_FILE)
    except OSError as error:
        raise storage_error("writing goldens", error, folder) from error
    except SafetensorError as error:  # its I/O errors are texts that end in "(os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        failed = OSError(int(number[1]) if number else 0, str(error))
        raise storage_error("writing goldens", failed, folder) from error


def read(folder: Path) -> GoldenSet:
    """Read the cases back.

    Raises:
        GoldenError: the files are missing, malformed or don't fit together.
    """
    try:
        found = read_golden(folder)
    except GoldenFileError as error:
        raise GoldenError(str(error), "the golden files are damaged; make or fetch them again") from error
    return GoldenSet(
        tuple(GoldenCase(case.name, case.inputs, case.outputs, case.source, case.outputs_from) for case in found.cases)
    )


def _encoded(document: Json) -> bytes:
    try:
        text = (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError as error:
        broken = error.object[max(0, error.start - 20) : error.end]
        raise GoldenError(
            f"a name or a string of the goldens isn't valid Unicode: {broken!a}",
            "it holds half of a surrogate pair, which no UTF-8 file can; correct the golden's text",
        ) from error
    if len(text) > MAX_JSON_BYTES:
        raise GoldenError(f"the goldens' names and strings take more than {MAX_JSON_BYTES} bytes", "give fewer strings")
    return text


def _case(
    number: int,
    case: GoldenCase,
    rules: Mapping[str, OutputRule],
    excluded: Mapping[str, str],
    payload: dict[str, Array],
) -> Json:
    where = f"golden case '{case.name}'"
    return {
        "name": case.name,
        "source": case.source,
        "outputs_from": case.outputs_from,
        "inputs": [_tensor(f"{number}.in.{at}", name, array, payload, where)
                   for at, (name, array) in enumerate(case.inputs.items())],
        "outputs": _outputs(number, "out", case, rules, excluded, payload),
    }  # fmt: skip


def _transformed(
    number: int,
    case: GoldenCase,
    transformed: Transformed | None,
    excluded: Mapping[str, str],
    payload: dict[str, Array],
) -> Json:
    if transformed is None:
        return {}
    return {"transformed": _outputs(number, "run", transformed.of(case), transformed.rules, excluded, payload)}


def _rules(rules: Mapping[str, OutputRule], excluded: Mapping[str, str]) -> list[Json]:
    return [
        {"name": name, "tolerance": rule.tolerance.to_dict(), "score_axis": rule.score_axis, "rounding": rule.rounding}
        for name, rule in rules.items()
        if name not in excluded
    ]


def _outputs(
    number: int,
    key: str,
    case: GoldenCase,
    rules: Mapping[str, OutputRule],
    excluded: Mapping[str, str],
    payload: dict[str, Array],
) -> list[Json]:
    """A case's outputs, each of which must have a rule; their numbers go to the payload as ``<number>.<key>.<at>``."""
    where = f"golden case '{case.name}'"
    outputs = {name: array for name, array in case.outputs.items() if name not in excluded}
    for name in outputs:
        if name not in rules:
            raise GoldenError(f"{where}: no tolerance is given for output '{name}'")
    for name in rules:
        if name not in outputs and name not in excluded:
            raise GoldenError(f"{where}: nothing is expected of output '{name}'")
    return [
        _tensor(f"{number}.{key}.{at}", name, array, payload, where) for at, (name, array) in enumerate(outputs.items())
    ]


def _tensor(key: str, name: str, array: Array, payload: dict[str, Array], where: str) -> Json:
    kind = dtype_name(array)
    entry: Json = {"name": name, "dtype": kind, "shape": list(array.shape)}
    if kind == "string":
        return entry | {"strings": [_text(value, name, where) for value in array.ravel().tolist()]}
    if STORED.get(kind, kind) not in TAGS:
        raise GoldenError(f"{where}: tensor '{name}' is of dtype {kind}, which ONNX doesn't have")
    payload[key] = _stored(array, kind)
    return entry | {"tensor": key}


def _text(value: object, name: str, where: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GoldenError(f"{where}: a string of tensor '{name}' isn't UTF-8: {value!r:.80}") from error
    if not isinstance(value, str):
        raise GoldenError(f"{where}: tensor '{name}' holds {type(value).__name__} where strings belong: {value!r:.80}")
    return value


def _stored(array: Array, kind: str) -> Array:
    """The array as the payload keeps it: C order, native byte order, bits or values of a dtype the format has."""
    whole = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if kind not in STORED:
        return whole
    if kind == "complex128":
        return whole.reshape(*whole.shape, 1).view(np.uint64)
    return whole.astype(STORED[kind]) if "int" in kind else whole.view(STORED[kind])
