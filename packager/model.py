"""The model: one ONNX file with its external data, opened without loading weights and never modified.

Opening checks everything that can be known cheaply and would otherwise surface as a crash or a silent wrong answer
later: the bytes are whole, external data stays inside the model's folder and is as long as it must be, names are
unique where ONNX wants them unique. What isn't fatal but deserves a word is a :class:`Hazard`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from packager.errors import ModelError, UsageError
from packager.files import exists, is_file, is_link
from packager.graph import Dim, Structure, Tensor, Value, format_dims, read_structure
from packager.hazards import Hazard, find_hazards
from packager.wire import WireError

if TYPE_CHECKING:
    import numpy as np

QUANTIZED_OPERATORS = frozenset(
    {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
     "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QGemm", "QAttention", "MatMulIntegerToFloat"}
)  # fmt: skip
"""Operators whose integer arithmetic saturates on x86 CPUs without VNNI (see ``session.x64quantprecision``)."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the signature: its exact (wire) name, dtype and dims.

    ``dims`` is ``None`` where the rank isn't declared. ``kind`` is ``tensor`` unless the model gives a sequence, map
    or optional, whose ``dtype`` is then the printed type.
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None
    kind: str = "tensor"

    def __str__(self) -> str:
        shape = "" if self.kind != "tensor" else "[...]" if self.dims is None else format_dims(self.dims)
        return f"{self.name}: {self.dtype}{shape}"


@dataclass(frozen=True)
class Signature:
    """What goes in and what comes out, in the order of the file. Inputs with a default are not listed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def takes(self, feeds: Mapping[str, np.ndarray]) -> bool:
        """Whether arrays (by input name) have the ranks and fixed dims of the inputs; dtypes aren't looked at."""
        return all(
            spec.dims is None
            or (
                spec.name in feeds
                and len(spec.dims) == feeds[spec.name].ndim
                and all(
                    not isinstance(dim, int) or dim == size
                    for dim, size in zip(spec.dims, feeds[spec.name].shape, strict=True)
                )
            )
            for spec in self.inputs
        )

    def symbols(self) -> tuple[str, ...]:
        """Names of the symbolic dimensions of the inputs, in order of appearance."""
        seen: dict[str, None] = {}
        for spec in self.inputs:
            for dim in spec.dims or ():
                if isinstance(dim, str):
                    seen[dim] = None
        return tuple(seen)


@dataclass(frozen=True)
class ExternalFile:
    """A file that holds external tensor data: its location as written in the model, its size in bytes, its digest."""

    location: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """An opened model. ``digest`` covers the model file and all external data, as ``sha256:<hex>``."""

    path: Path
    bytes: int
    digest: str
    structure: Structure
    signature: Signature
    external: tuple[ExternalFile, ...]
    hazards: tuple[Hazard, ...]

    @property
    def opset(self) -> int:
        """The version of the default operator set (0 where the model imports none)."""
        return self.structure.opset() or 0

    @property
    def is_quantized(self) -> bool:
        """Whether integer arithmetic decides the outputs."""
        return any(node.op_type in QUANTIZED_OPERATORS for node in self.structure.walk())

    @property
    def multiplies_integers(self) -> bool:
        """Whether operators compute with integers, beyond quantising values and giving them back."""
        operators = QUANTIZED_OPERATORS - {"QuantizeLinear", "DynamicQuantizeLinear"}
        return any(node.op_type in operators for node in self.structure.walk())

    @property
    def precision(self) -> str:
        """The precision the model computes in: ``int8``, ``fp16``, ``bf16`` or ``fp32``.

        Integer arithmetic decides first, then the dtype that most constant elements have.
        """
        if self.is_quantized:
            return "int8"
        counts = {"float16": 0, "bfloat16": 0, "float32": 0, "float64": 0}
        for tensor in self.structure.tensors():
            if tensor.dtype in counts:
                counts[tensor.dtype] += tensor.elements
        most = max(counts, key=lambda dtype: counts[dtype])
        return {"float16": "fp16", "bfloat16": "bf16"}.get(most, "fp32") if counts[most] else "fp32"


def open_model(path: Path) -> Model:
    """Open and check an ONNX file.

    Memory stays flat as weights grow: tensor payloads are stepped over, and hashing streams.

    Raises:
        UsageError: the path doesn't exist or isn't a readable file.
        ModelError: the file is empty, cut, not ONNX, or breaks one of the rules above.
    """
    if not exists(path):
        raise UsageError(f"{path}: no such file", "give the path of an .onnx file")
    if not is_file(path):
        raise UsageError(f"{path}: not a file", "give the .onnx file itself, not its folder")
    structure, size = _read(path)
    _check_names(path, structure)
    external = _external_files(path, structure)
    digest = _model_digest(path, external)
    signature = _signature(structure)
    return Model(path, size, digest, structure, signature, external, tuple(find_hazards(structure)))


def _read(path: Path) -> tuple[Structure, int]:
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path}: the file is empty", "export the model again, or fetch it again")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
                if view[:20].startswith(b"version https://git"):
                    raise ModelError(f"{path}: a Git LFS pointer, not the model", "run `git lfs pull`")
                structure = read_structure(view, size)
    except PermissionError as error:
        raise UsageError(f"{path}: permission denied") from error
    except WireError as error:
        raise ModelError(
            f"{path}: not a whole ONNX model: {error}", "the file is cut or of another format; fetch or export it again"
        ) from error
    if structure.ir_version <= 0 or not structure.opsets:
        missing = "IR version" if structure.ir_version <= 0 else "operator set import"
        raise ModelError(f"{path}: not an ONNX model: it declares no {missing}", "export it again with onnx.save")
    if not structure.graph.outputs:
        raise ModelError(f"{path}: the graph has no outputs", "an inference model must give at least one tensor")
    return structure, size


def _check_names(path: Path, structure: Structure) -> None:
    graph = structure.graph
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        seen: set[str] = set()
        for value in values:
            if not value.name:
                raise ModelError(f"{path}: an {what} of the graph has no name", "name every graph input and output")
            if value.name in seen:
                makers = [f", and node {node.label} makes it" for node in graph.nodes if value.name in node.outputs]
                raise ModelError(
                    f"{path}: two graph {what}s are named '{value.name}'{''.join(makers)}",
                    f"give every {what} a name of its own",
                )
            seen.add(value.name)
    inputs = {value.name: value for value in graph.inputs}
    for value in graph.outputs:
        if value.name in inputs:
            raise ModelError(
                f"{path}: '{value.name}' is a graph input and a graph output at once",
                "put an Identity node between them, so that the output has a name of its own",
            )
    for tensor in graph.initializers:
        declared = inputs.get(tensor.name)
        if declared is not None:
            _check_overridable(path, tensor, declared)
    _check_producers(path, structure)
    for tensor in structure.tensors():
        _check_payload(path, tensor)


def _check_producers(path: Path, structure: Structure) -> None:
    """Every value of the main graph is made once, and before it is used."""
    graph = structure.graph
    made = {value.name for value in graph.inputs} | {tensor.name for tensor in graph.initializers}
    made_by_node: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.inputs:
            if name and name not in made:
                raise ModelError(
                    f"{path}: node {node.label} reads '{name}', which nothing before it makes",
                    "the graph is cut or not sorted; export it again",
                )
        for name in node.outputs:
            if name and name in made_by_node:
                raise ModelError(f"{path}: '{name}' is made twice, by {made_by_node[name]} and by {node.label}")
            if name:
                made_by_node[name] = node.label
                made.add(name)
    for value in graph.outputs:
        if value.name not in made:
            raise ModelError(f"{path}: nothing makes the graph output '{value.name}'")


def _check_overridable(path: Path, tensor: Tensor, declared: Value) -> None:
    dims = declared.type.dims
    differs = dims is not None and (
        len(dims) != len(tensor.dims)
        or any(isinstance(dim, int) and dim != size for dim, size in zip(dims, tensor.dims, strict=True))
    )
    if differs or (declared.type.dtype and declared.type.dtype != tensor.dtype):
        raise ModelError(
            f"{path}: initializer '{tensor.name}' is {tensor.dtype}{list(tensor.dims)} but the graph input of that "
            f"name is declared {declared.type}",
            "remove the stale graph input, or correct its type",
        )


def _check_payload(path: Path, tensor: Tensor) -> None:
    """An inline tensor holds what it declares. Typed fields hold at most four elements a byte: packed two-bit ones."""
    if tensor.external or tensor.nbytes is None:
        return
    lies = tensor.elements > 4 * tensor.inline_bytes if tensor.raw_bytes is None else tensor.raw_bytes != tensor.nbytes
    if lies:
        raise ModelError(
            f"{path}: tensor '{tensor.name}' is {tensor.dtype}{list(tensor.dims)}, {tensor.nbytes} bytes, but holds "
            f"{tensor.inline_bytes}",
            "the file is damaged; fetch or export it again",
        )


def _external_files(path: Path, structure: Structure) -> tuple[ExternalFile, ...]:
    """The files external tensors live in, each checked to stay inside the model's folder and to be long enough."""
    folder = path.parent
    needed: dict[str, int] = {}
    for tensor in structure.tensors():
        if not tensor.external:
            continue
        record = dict(tensor.external)
        location = record.get("location", "")
        try:
            offset, length = int(record.get("offset") or 0), int(record.get("length") or tensor.nbytes or 0)
        except ValueError as error:
            raise ModelError(f"{path}: external tensor '{tensor.name}' has a malformed offset or length") from error
        if offset < 0 or length < 0:
            raise ModelError(f"{path}: external tensor '{tensor.name}' has a negative offset or length")
        if tensor.nbytes is not None and length != tensor.nbytes:
            raise ModelError(
                f"{path}: external tensor '{tensor.name}' is {tensor.dtype}{list(tensor.dims)}, {tensor.nbytes} bytes, "
                f"but its record says {length}",
                "the model and its data don't belong together; fetch both again",
            )
        _check_location(path, location, tensor.name)
        file = folder / location
        _check_file(path, file, location, tensor.name)
        end = offset + length
        if end > file.stat().st_size:
            raise ModelError(
                f"{path}: external data file '{location}' has {file.stat().st_size} bytes, but tensor "
                f"'{tensor.name}' needs bytes {offset} to {end}",
                "the data file is cut; fetch it again",
            )
        needed[location] = max(needed.get(location, 0), end)
    return tuple(
        ExternalFile(location, folder / location, (folder / location).stat().st_size, sha256_file(folder / location))
        for location in sorted(needed)
    )


def _check_location(path: Path, location: str, tensor: str) -> None:
    pure = PurePosixPath(location)
    windows = PureWindowsPath(location)
    if not location or "\0" in location:
        raise ModelError(f"{path}: external tensor '{tensor}' names no file")
    if pure.is_absolute() or windows.drive or windows.root:
        raise ModelError(
            f"{path}: external data location '{location}' of tensor '{tensor}' is absolute",
            "external data must lie in the model's own folder; save the model again with a relative location",
        )
    if ".." in pure.parts or ".." in windows.parts:
        raise ModelError(
            f"{path}: external data location '{location}' of tensor '{tensor}' leaves the model's folder",
            "external data must lie in the model's own folder; save the model again beside its data",
        )


def _check_file(path: Path, file: Path, location: str, tensor: str) -> None:
    probe = path.parent
    for part in PurePosixPath(location).parts:
        probe = probe / part
        if is_link(probe):
            raise ModelError(
                f"{path}: external data '{location}' goes through a symbolic link ({probe})",
                "put a real copy of the data beside the model (`cp -L`)",
            )
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(
            f"{path}: external data file '{location}' is missing (tensor '{tensor}' lives in it)",
            f"put it at {file}",
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: external data '{location}' is not a regular file")
    if status.st_nlink > 1:
        raise ModelError(
            f"{path}: external data file '{location}' is a hard link ({status.st_nlink} names for one file)",
            "put a copy of the data beside the model, so that it can't be another file in disguise",
        )


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, streamed."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _model_digest(path: Path, external: tuple[ExternalFile, ...]) -> str:
    """The file's SHA-256; with external data, the SHA-256 of a listing of all files' digests."""
    own = sha256_file(path)
    if not external:
        return f"sha256:{own}"
    listing = f"{own}  model\n" + "".join(f"{file.sha256}  {file.location}\n" for file in external)
    return "sha256:" + hashlib.sha256(listing.encode()).hexdigest()


def _signature(structure: Structure) -> Signature:
    defaults = {tensor.name for tensor in structure.graph.initializers}

    def spec(value: Value) -> TensorSpec:
        kind = value.type.kind
        if kind == "tensor":
            return TensorSpec(value.name, value.type.dtype, value.type.dims)
        return TensorSpec(value.name, str(value.type), None, kind)

    inputs = tuple(spec(value) for value in structure.graph.inputs if value.name not in defaults)
    return Signature(inputs, tuple(spec(value) for value in structure.graph.outputs))
