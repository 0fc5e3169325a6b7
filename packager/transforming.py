"""Running passes: load the source, run each, hold it to the signature it promised, save, and check what was saved.

This is the one place where a model is changed. It runs in a child process: onnx-ir, shape inference and ONNX Runtime
are native code that a hostile or unlucky model can crash.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packager.checking import is_known, objection
from packager.errors import BuildError, InternalError, ModelError, PackagerError
from packager.files import clone_file
from packager.float16_rounding import runnable
from packager.goldens import GoldenSet
from packager.model import Model, Signature, TensorSpec, open_model
from packager.transform import Context, Pass
from packager.transform_files import Loaded, load, save, signature_of
from packager.transform_registry import AnyPass

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime as ort

MAX_INLINE_BYTES = 500_000_000
"""Constants up to this many bytes stay inside the file. More could (protobuf ends at 2 GiB), but whoever opens such a
file holds it in memory twice; data files are mapped."""

MAX_FILE_BYTES = 1 << 30
"""Largest data file: small enough for stores and file systems that stop at 2 GiB."""


@dataclass(frozen=True)
class Applied:
    """What :func:`apply` made. ``digest`` and ``bytes`` cover the model and its data files (in file-name order).

    ``passes`` are the names of those that ran; ``opsets`` maps each imported domain to its version.
    """

    path: Path
    files: tuple[Path, ...]
    digest: str
    bytes: int
    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    signature: Signature
    passes: tuple[str, ...]
    notes: tuple[str, ...]


def apply(
    passes: Sequence[Pass],
    context: Context,
    out: Path,
    *,
    max_inline_bytes: int = MAX_INLINE_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    check_runtime: bool = True,
) -> Applied:
    """Run ``passes`` in order over ``context.source`` and write the result to ``out``.

    ``out`` is an .onnx path in an empty folder. The source is only read. Data files beside ``out`` have
    names of our own. ``check_runtime=False`` leaves out loading in ONNX Runtime, for dialects its CPU provider can't
    take.

    Raises:
        Refused: a pass can't transform the model; nodes or tensors are named.
        InternalError: a pass broke the signature it promised; pass and tensor are named.
        BuildError: the result doesn't load, or the onnx checker refuses it.
    """
    loaded = load(context.source)
    model, notes = loaded.model, list(loaded.notes)
    signature = signature_of(model, loaded.foreign)
    for each in passes:
        promised = each.signature(signature)
        outcome = each.run(model, context)
        model = outcome.model
        signature = _held(each, promised, model, loaded)
        notes.extend(note for note in outcome.notes if note not in notes)
    try:
        changed = Loaded(model, loaded.foreign)
        save(changed, out, max_inline_bytes=max_inline_bytes, max_file_bytes=max_file_bytes)
    except OSError as error:
        raise BuildError(f"{out}: the transformed model can't be written: {error}") from error
    opened = _checked(context.source, out, signature, check_runtime)
    files = (out, *(file.path for file in opened.external))
    return Applied(
        path=out,
        files=files,
        digest=opened.digest,
        bytes=sum(file.stat().st_size for file in files),
        ir_version=opened.structure.ir_version,
        opsets=opened.structure.opsets,
        signature=opened.signature,
        passes=tuple(each.name for each in passes),
        notes=tuple(notes),
    )


def place_model(source: Path, goldens: GoldenSet, target: Path) -> None:
    """A model's file as it is; with external data, written anew so that data files have names of our own.

    Args:
        source: the model, only read.
        goldens: of the target; no pass looks at them.
        target: an .onnx path in a folder that holds nothing else of its name.

    Raises:
        BuildError: it can't be written.
    """
    if not open_model(source).external:
        clone_file(source, target)
        return
    with tempfile.TemporaryDirectory(prefix="packager-placing-") as name:
        apply((), Context(source, Path(name), goldens), target)


def _held(each: Pass, promised: Signature, model: ir.Model, loaded: Loaded) -> Signature:
    found = signature_of(model, loaded.foreign)
    differences = signature_differences(promised, found)
    if differences:
        raise InternalError(f"pass '{each.name}' broke the signature it promised: {'; '.join(differences)}")
    return found


def signature_differences(promised: Signature, found: Signature) -> list[str]:
    """What differs, one phrase per tensor: names, order, dtypes and dims."""
    differences: list[str] = []
    for what, left, right in (("input", promised.inputs, found.inputs), ("output", promised.outputs, found.outputs)):
        names, others = [spec.name for spec in left], [spec.name for spec in right]
        if names != others:
            differences.append(f"{what}s are {_listed(right)}, not {_listed(left)}")
            continue
        differences.extend(
            f"{what} '{one.name}' is {other}, not {one}" for one, other in zip(left, right, strict=True) if one != other
        )
    return differences


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"'{spec.name}'" for spec in specs) or "none"


def _checked(source: Path, out: Path, signature: Signature, check_runtime: bool) -> Model:
    """Open what was saved as any model is opened, let the onnx checker and ONNX Runtime look at it."""
    try:
        opened = open_model(out)
    except PackagerError as error:
        raise BuildError(f"the transformed model doesn't open: {error.message}", error.hint) from error
    differences = signature_differences(signature, opened.signature)
    if differences:
        raise InternalError(f"{out}: saving changed the signature: {'; '.join(differences)}")
    _check_onnx(source, out, opened)
    if check_runtime:
        try:
            with tempfile.TemporaryDirectory(prefix="packager-loading-") as name:
                loaded_in_runtime(runnable(opened, Path(name)))
        except ModelError as error:
            raise BuildError(f"the transformed model doesn't load: {error.message}", error.hint) from error
    return opened


def _check_onnx(source: Path, out: Path, opened: Model) -> None:
    """The onnx checker, by path: it reads the graph, and of external data only whether it is there.

    It knows no IR version or operator set newer than the installed onnx; such a model isn't checked. It is stricter
    than any runtime in places (an output of unknown rank), so what it says of the source too isn't held against us.
    """
    if not is_known(opened):
        return
    reason = objection(out)
    if reason and reason != objection(source):
        raise BuildError(f"{out}: the onnx checker refuses the transformed model: {reason[:600]}")


def loaded_in_runtime(path: Path) -> ort.InferenceSession:
    """A session of ONNX Runtime on a model as it is, without optimising it or packing copies of its weights.

    Raises:
        ModelError: ONNX Runtime refuses the model; the message is its own.
    """
    import onnxruntime as ort

    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exception types are not public
        reason = " ".join(str(error).split())[:600]
        raise ModelError(f"{path}: ONNX Runtime can't load the model: {reason}") from error


__all__ = ["AnyPass", "Applied", "apply", "loaded_in_runtime", "place_model", "signature_differences"]
