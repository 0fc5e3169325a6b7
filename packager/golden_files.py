"""Golden cases in binary files: numpy's ``.npz`` and ONNX's own test data sets.

Files come from anywhere, so sizes are checked before anything is unpacked and nothing is ever unpickled.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packager.archives import is_bomb
from packager.errors import GoldenError
from packager.golden_check import did_you_mean, quoted
from packager.goldens import Array
from packager.model import Signature, TensorSpec

MAX_NPZ_BYTES = 8 << 30
"""An ``.npz`` that declares more than this once unpacked is refused: goldens of a deployment check aren't that big."""

MAX_PB_BYTES = (2 << 30) - 1
"""Protobuf's own limit for one message."""

IN, OUT = "in/", "out/"
"""The prefixes that tell inputs from outputs in an ``.npz`` where plain names don't."""


@dataclass(frozen=True)
class Loose:
    """A case as a file has it, before it meets the signature.

    ``inputs`` is ``None`` where the file holds outputs only, whose inputs must come from another file.
    """

    inputs: Mapping[str, Array] | None
    outputs: Mapping[str, Array]


def read_npz(file: Path, signature: Signature) -> Loose:
    """One case from an ``.npz``: arrays named as the model's inputs and outputs, or ``in/NAME`` and ``out/NAME``.

    Raises:
        GoldenError: the archive is cut, too large, holds pickled objects, or names what the model doesn't have.
    """
    arrays = _npz_arrays(file)
    inputs = {spec.name for spec in signature.inputs}
    outputs = {spec.name for spec in signature.outputs}
    if all(name in inputs | outputs for name in arrays):
        both = [name for name in arrays if name in inputs & outputs]
        if both:
            raise GoldenError(
                f"{file}: '{both[0]}' is an input and an output of the model, so the name alone doesn't say which",
                f"name the arrays '{IN}{both[0]}' and '{OUT}{both[0]}'",
            )
        return Loose(
            {name: array for name, array in arrays.items() if name in inputs},
            {name: array for name, array in arrays.items() if name in outputs},
        )
    if all(name.startswith((IN, OUT)) for name in arrays):
        return Loose(
            {name.removeprefix(IN): array for name, array in arrays.items() if name.startswith(IN)},
            {name.removeprefix(OUT): array for name, array in arrays.items() if name.startswith(OUT)},
        )
    unknown = next(name for name in arrays if name not in inputs | outputs)
    raise GoldenError(
        f"{file}: the model has no input or output '{unknown}'{did_you_mean(unknown, inputs | outputs)}",
        f"inputs are {quoted(spec.name for spec in signature.inputs)}, "
        f"outputs {quoted(spec.name for spec in signature.outputs)}; name the arrays so, or '{IN}NAME' and '{OUT}NAME'",
    )


def _npz_arrays(file: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            declared = sum(member.file_size for member in members)
            if declared > MAX_NPZ_BYTES:
                raise GoldenError(
                    f"{file}: declares {declared} bytes once unpacked, more than the {MAX_NPZ_BYTES} allowed",
                    "split it into smaller cases",
                )
            if is_bomb(file.stat().st_size, declared):
                raise GoldenError(
                    f"{file}: its {file.stat().st_size} bytes unpack to {declared}, an archive bomb", "don't use it"
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise GoldenError(f"{file}: '{name}' is not a .npy array", "write the file with np.savez")
                if name in found:
                    raise GoldenError(f"{file}: two arrays are named '{name}'", "write the file again with np.savez")
                found[name] = npy_array(archive.read(member), f"{file}: array '{name}'")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise GoldenError(
            f"{file}: not a whole .npz archive: {error}", "the file is cut or of another format; write it again"
        ) from error
    if not found:
        raise GoldenError(f"{file}: the archive holds no arrays", "write the case again with np.savez")
    return found


def npy_array(data: bytes, where: str) -> Array:
    """The array in the bytes of a ``.npy`` file. Its header is checked against the bytes there are before allocating.

    Raises:
        GoldenError: pickled objects, a cut or malformed payload.
    """
    # ml_dtypes' float8_e5m2 calls itself '<f1', which numpy then refuses to read; raw bytes of the same size do.
    odd = b"'<f1'" in data[:128]
    stream = io.BytesIO(data[:128].replace(b"'<f1'", b"'|V1'") + data[128:] if odd else data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        if dtype.hasobject:
            raise GoldenError(
                f"{where} is an object array, which would have to be unpickled, and that runs code",
                "save numbers, or strings as a numpy unicode array: `x.astype(str)`",
            )
        count = 1
        for size in shape:
            count *= int(size)
        left = len(data) - stream.tell()
        if count and not dtype.itemsize:
            raise GoldenError(f"{where} says {count} elements of no size ({dtype})", "write it again with np.save")
        if min(shape, default=0) < 0 or count * dtype.itemsize != left:
            raise GoldenError(
                f"{where} says {dtype}{list(shape)}, {count * dtype.itemsize} bytes, but has {left}",
                "the file is damaged; write it again",
            )
        stream.seek(0)
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    except (ValueError, TypeError, EOFError, SyntaxError, OverflowError) as error:
        raise GoldenError(f"{where} is not a .npy array: {error}", "write it again with np.save") from error


def read_data_set(folder: Path, signature: Signature) -> Loose:
    """One case from an ONNX test data set: ``input_0.pb``, ``output_0.pb``, ... as serialized ``TensorProto``.

    A tensor is known by its own name; one without a name by the number in its file's name, as the position in the
    signature. Files of outputs that aren't tensors are passed over.

    Raises:
        GoldenError: a file is cut, isn't a TensorProto, or doesn't belong to the model; or an input is no tensor.
    """
    inputs: dict[str, Array] = {}
    outputs: dict[str, Array] = {}
    numbered = sorted(
        (match[1], int(match[2]), file)
        for file in folder.iterdir()
        if (match := re.fullmatch(r"(input|output)_(\d+)\.pb", file.name))
    )
    for kind, position, file in numbered:
        specs = signature.inputs if kind == "input" else signature.outputs
        into = inputs if kind == "input" else outputs
        spec = specs[position] if position < len(specs) else None
        if spec is not None and spec.kind != "tensor":
            if kind == "output":
                continue
            raise GoldenError(
                f"{file}: input '{spec.name}' is of type {spec.dtype}, and golden cases hold tensors",
                "export the model with tensors as inputs",
            )
        name, array = _proto_array(file, kind, spec)
        if name in into:
            raise GoldenError(f"{file}: {kind} '{name}' was given by another file already")
        into[name] = array
    return Loose(inputs, outputs)


def _proto_array(file: Path, kind: str, spec: TensorSpec | None) -> tuple[str, Array]:
    from onnx import TensorProto, numpy_helper

    size = file.stat().st_size
    if size == 0:
        raise GoldenError(f"{file}: the file is empty", "write the test data again")
    if size > MAX_PB_BYTES:
        raise GoldenError(f"{file}: {size} bytes, more than protobuf's limit of {MAX_PB_BYTES}", "use .npz instead")
    proto = TensorProto()
    try:
        proto.ParseFromString(file.read_bytes())
        if proto.data_location == TensorProto.EXTERNAL:
            raise GoldenError(f"{file}: the tensor's data is in another file", "save the data inside the .pb file")
        array = np.asarray(numpy_helper.to_array(proto))
    except GoldenError:
        raise
    except Exception as error:
        raise GoldenError(
            f"{file}: not a whole TensorProto: {error}", "the file is cut or of another type; write it again"
        ) from error
    if proto.name:
        return proto.name, array
    if spec is None:
        raise GoldenError(
            f"{file}: the tensor has no name, and the model has no {kind} of that number",
            f"name the tensor, or number the files as the model's {kind}s",
        )
    return spec.name, array
