"""Golden cases from the formats people already have, each checked against the model before it is believed.

::

    case.npz                      arrays named as inputs and outputs, or in/NAME and out/NAME
    test_data_set_0/input_0.pb    ONNX's own test data
    inputs.json  outputs.json     what Polygraphy saves, one runner
    request.json response.json    KServe v2 (Open Inference Protocol); one document may hold both
    golden.json                   packager's own (see packager.golden_store)

A folder, and the folders in it, may hold any number and mix of them. Cases come in natural order (``case-2`` before
``case-10``) and are named by their place in the folder. JSON outputs find their inputs by name: ``input``, ``output``,
``request`` and ``response`` are taken out of both paths, and what is left must be the same; two files that are alone
in their folder belong together whatever they are called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packager.errors import GoldenError, UsageError
from packager.files import exists, is_folder
from packager.golden_check import check_case, stored_as
from packager.golden_files import Loose, read_data_set, read_npz
from packager.golden_json import read_json
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import Signature, TensorSpec

__all__ = ["check_case", "read_goldens"]

MAX_DEPTH = 8
"""Folders nested deeper than this are refused: they are a loop, or not goldens."""

_ACCEPTED = (
    "accepted are .npz files, ONNX test_data_set folders, Polygraphy's and KServe's JSON, and packager's golden.json"
)


@dataclass(frozen=True)
class _Found:
    """A loose case and where it was: its path relative to the goldens, and its number in a file of several."""

    source: str
    loose: Loose
    number: int | None = None
    stored: GoldenCase | None = None


def read_goldens(
    path: Path, signature: Signature, *, allow_nan: bool = False, exclude: frozenset[str] = frozenset()
) -> GoldenSet:
    """Read every golden case in a file or folder, each exactly fitting the signature (see :func:`check_case`).

    Args:
        path: a golden file, or a folder of them.
        signature: what the model takes and gives.
        allow_nan: accept NaN in the arrays.
        exclude: outputs that aren't compared; they may be absent, and are dropped where they are given.

    Returns:
        The cases in natural order of their paths; ``source`` is the path relative to ``path``.

    Raises:
        UsageError: the path doesn't exist or can't be read.
        GoldenError: a file is damaged, too large or of no known format, a case doesn't fit, or there is no case.
    """
    if not exists(path):
        raise UsageError(f"{path}: no such file or folder", "give the path of a golden file, or of a folder of them")
    root = path if is_folder(path) else path.parent
    try:
        found = [case for item in _items(path, 0) for case in _read(item, root, signature)]
    except PermissionError as error:
        raise UsageError(f"{error.filename or path}: permission denied") from error
    if not found:
        raise GoldenError(f"{path}: no golden case found", _ACCEPTED)
    paired = _pair(path, found, signature)
    names = _names(paired)
    cases: list[GoldenCase] = []
    for item, name in zip(paired, names, strict=True):
        where = _where(root, item)
        case = _case(where, item, name, signature)
        check_case(case, signature, where, allow_nan, exclude)
        kept = {output: array for output, array in case.outputs.items() if output not in exclude}
        cases.append(replace(case, outputs=kept, outputs_from=case.outputs_from if kept else ""))
    return GoldenSet(tuple(cases))


def _items(path: Path, depth: int) -> list[Path]:
    """Golden files and test data folders under ``path``, in natural order. Hidden and unrelated files are left out."""
    if not path.is_dir():
        return [path]
    if depth > MAX_DEPTH:
        raise GoldenError(f"{path}: folders nested more than {MAX_DEPTH} deep", "give the folder of the goldens itself")
    if any(re.fullmatch(r"(input|output)_\d+\.pb", file.name) for file in path.iterdir()):
        return [path]
    found: list[Path] = []
    for entry in sorted(path.iterdir(), key=lambda entry: natural(entry.name)):
        if entry.name.startswith((".", "__MACOSX")):
            continue
        if entry.is_dir():
            if entry.is_symlink():
                raise GoldenError(f"{entry}: a symbolic link to a folder", "put the folder itself there, or a copy")
            found.extend(_items(entry, depth + 1))
        elif entry.suffix in (".npz", ".json"):
            found.append(entry)
    return found


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key in which numbers count as numbers: ``case-2`` before ``case-10``."""
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    ]


def _read(item: Path, root: Path, signature: Signature) -> list[_Found]:
    source = item.relative_to(root).as_posix() if item != root else item.name
    if item.is_dir():
        return [_Found(source, read_data_set(item, signature))]
    if item.name == "golden.json":
        from packager import golden_store

        cases = golden_store.read(item.parent).cases
        return [_Found(source, Loose(case.inputs, case.outputs), None, case) for case in cases]
    if item.suffix == ".npz":
        return [_Found(source, read_npz(item, signature))]
    if item.suffix == ".json":
        loose = read_json(item)
        return [_Found(source, case, number if len(loose) > 1 else None) for number, case in enumerate(loose)]
    if item.suffix == ".npy":
        raise GoldenError(f"{item}: a single array, which has no name", "write the case with np.savez(file, NAME=x)")
    raise GoldenError(f"{item}: not a golden file", _ACCEPTED)


def _pair(path: Path, found: list[_Found], signature: Signature) -> list[_Found]:
    """Join cases that hold only outputs with the inputs they belong to."""
    answers: dict[str, list[_Found]] = {}
    questions: dict[str, list[_Found]] = {}
    for case in found:
        if case.loose.inputs is None and signature.inputs:
            answers.setdefault(case.source, []).append(case)
        elif case.source.endswith(".json") and not case.loose.outputs and case.stored is None:
            questions.setdefault(case.source, []).append(case)
    joined: dict[tuple[str, int | None], _Found] = {}
    for source, outputs in answers.items():
        partner = _partner(path, source, list(answers), list(questions))
        inputs = questions.pop(partner)
        if len(inputs) != len(outputs):
            raise GoldenError(
                f"{path}: {partner} holds {len(inputs)} cases of inputs, {source} {len(outputs)} of outputs",
                "save both from the same run",
            )
        for one, other in zip(inputs, outputs, strict=True):
            joined[partner, one.number] = replace(one, loose=Loose(one.loose.inputs, other.loose.outputs))
    kept = [case for case in found if case.source not in answers]
    return [joined.get((case.source, case.number), case) for case in kept]


def _partner(path: Path, source: str, answers: list[str], questions: list[str]) -> str:
    """The file of inputs that a file of outputs belongs to."""
    same = [other for other in questions if _stem(other) == _stem(source)]
    if len(same) == 1:
        return same[0]
    folder = source.rpartition("/")[0]
    alone = [other for other in questions if other.rpartition("/")[0] == folder]
    if not same and len(alone) == 1 and sum(other.rpartition("/")[0] == folder for other in answers) == 1:
        return alone[0]
    raise GoldenError(
        f"{path}: {source} holds outputs, and " + ("several files of inputs fit it" if same else "no inputs for them"),
        "put the inputs beside it under the same name, such as a.inputs.json and a.outputs.json",
    )


def _stem(source: str) -> str:
    """What is left of a path when the words that tell inputs from outputs are taken out."""
    words = re.split(r"[^A-Za-z0-9]+", source.removesuffix(".json").lower())
    kept = [word for word in words if word and not re.fullmatch(r"inputs?|outputs?|requests?|responses?", word)]
    return "/".join(kept)


def _names(found: list[_Found]) -> list[str]:
    """A unique name for each case: its path without suffix, its path, or its path and a number, whichever is enough."""

    def numbered(case: _Found, text: str) -> str:
        return text if case.number is None else f"{text}-{case.number}"

    short = [case.stored.name if case.stored else numbered(case, re.sub(r"\.\w+$", "", case.source)) for case in found]
    counts = Counter(short)
    full = [
        name if counts[name] == 1 else f"{case.source}-{name}" if case.stored else numbered(case, case.source)
        for name, case in zip(short, found, strict=True)
    ]
    return [name if full.count(name) == 1 else f"{name}-{place}" for place, name in enumerate(full)]


def _where(root: Path, found: _Found) -> str:
    """How messages name the case: its file, and its number in a file of several."""
    where = str(root / found.source) if root.name != found.source else str(root)
    return where if found.number is None else f"{where} (case {found.number})"


def _case(where: str, found: _Found, name: str, signature: Signature) -> GoldenCase:
    stored = found.stored
    return GoldenCase(
        name=name,
        inputs=_stored(where, found.loose.inputs or {}, signature.inputs),
        outputs=_stored(where, found.loose.outputs, signature.outputs),
        source=(stored.source if stored else "") or found.source,
        outputs_from=stored.outputs_from if stored else "source" if found.loose.outputs else "",
    )


def _stored(where: str, arrays: Mapping[str, Array], specs: tuple[TensorSpec, ...]) -> dict[str, Array]:
    """Arrays in the order of the signature (unknown names last, for the check to refuse), stored as packager does."""
    known = {spec.name: spec for spec in specs}
    order = [*(name for name in known if name in arrays), *(name for name in arrays if name not in known)]
    made: dict[str, Array] = {}
    for name in order:
        try:
            made[name] = stored_as(arrays[name], known.get(name, TensorSpec(name, "", None)))
        except UnicodeDecodeError as error:
            raise GoldenError(f"{where}: '{name}' holds bytes that aren't UTF-8 text: {error}") from error
    return made
