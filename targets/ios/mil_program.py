"""Reading a saved ML Program: its operations, constants and features, out of the files of an ``.mlpackage``.

The layout is that of coremltools' ``MIL.proto`` and of its weight files, version 2: a record of 64 bytes says where
the bytes are (``MILBlob/Blob/StorageFormat.hpp``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packager.goldens import Array

SPEC = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
SENTINEL = 0xDEADBEEF
RECORD = struct.Struct("<IIQQ")
"""Of a weight record: sentinel, dtype, bytes, offset of the bytes."""

DTYPES = {
    "FLOAT32": "float32", "FLOAT16": "float16", "INT8": "int8", "UINT8": "uint8", "INT16": "int16",
    "UINT16": "uint16", "INT32": "int32", "UINT32": "uint32", "INT64": "int64", "BOOL": "bool", "STRING": "string",
}  # fmt: skip
"""Names of MIL's dtypes to packager's."""


class MalformedProgram(Exception):
    """The package can't be read; the text says where."""


@dataclass(frozen=True)
class Feature:
    """An input or output as the package describes it; ``dims`` is empty where the description has no shape."""

    name: str
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One operation: its type, its arguments as names of values, and names, dtypes and dims of what it makes."""

    type: str
    arguments: Mapping[str, tuple[str, ...]]
    outputs: tuple[Feature, ...]


@dataclass(frozen=True)
class Program:
    """A whole ML Program. ``constants`` holds every constant by name: arrays, texts as arrays of objects."""

    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    operations: tuple[Operation, ...]
    constants: Mapping[str, Array]


def read_program(package: Path) -> Program:
    """Read the program of a package.

    Raises:
        MalformedProgram: it isn't one function of one block, or its weights aren't where it says.
    """
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError

    spec = Model_pb2.Model()
    try:
        spec.ParseFromString((package / SPEC).read_bytes())
    except (OSError, DecodeError) as error:
        raise MalformedProgram(f"{package / SPEC}: {error}") from error
    functions = list(spec.mlProgram.functions.values())
    blocks = [block for function in functions for block in function.block_specializations.values()]
    if len(blocks) != 1:
        raise MalformedProgram(f"{package / SPEC}: {len(blocks)} blocks where one is expected")
    reader = _Reader(package / WEIGHTS)
    constants: dict[str, Array] = {}
    operations = []
    for operation in blocks[0].operations:
        if operation.type == "const":
            constants[operation.outputs[0].name] = reader.value(operation.attributes["val"])
        else:
            operations.append(_operation(operation, constants, reader))
    inputs = tuple(_described(each) for each in spec.description.input)
    outputs = tuple(_described(each) for each in spec.description.output)
    if [each.name for each in outputs] != list(blocks[0].outputs):
        raise MalformedProgram(f"{package / SPEC}: its description and its program name different outputs")
    return Program(inputs, outputs, tuple(operations), constants)


def _operation(proto: Any, constants: dict[str, Array], reader: _Reader) -> Operation:  # noqa: ANN401
    arguments: dict[str, tuple[str, ...]] = {}
    outputs = tuple(_typed(each.name, each.type.tensorType) for each in proto.outputs)
    for key, argument in proto.inputs.items():
        names = []
        for place, binding in enumerate(argument.arguments):
            if binding.WhichOneof("binding") == "name":
                names.append(binding.name)
                continue
            name = f"{outputs[0].name} {key} {place}"  # a space: no name of the program has one
            constants[name] = reader.value(binding.value)
            names.append(name)
        arguments[key] = tuple(names)
    if proto.blocks:
        raise MalformedProgram(f"operation {proto.type} holds blocks of its own")
    return Operation(proto.type, arguments, outputs)


def _typed(name: str, kind: Any) -> Feature:  # noqa: ANN401
    from coremltools.proto import MIL_pb2

    dims = tuple(int(dim.constant.size) for dim in kind.dimensions)
    return Feature(name, DTYPES.get(MIL_pb2.DataType.Name(kind.dataType), "unknown"), dims)


def _described(proto: Any) -> Feature:  # noqa: ANN401
    from coremltools.proto import FeatureTypes_pb2

    array = proto.type.multiArrayType
    dtype = FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name(array.dataType)
    return Feature(proto.name, DTYPES.get(dtype, dtype.lower()), tuple(int(size) for size in array.shape))


class _Reader:
    """Gives the arrays of constants, those in the program itself and those in the weight file."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def value(self, proto: Any) -> Array:  # noqa: ANN401
        """A constant's array.

        Raises:
            MalformedProgram: its bytes aren't where they should be.
        """
        feature = _typed("", proto.type.tensorType)
        if proto.WhichOneof("value") == "blobFileValue":
            return self._blob(int(proto.blobFileValue.offset), feature)
        tensor = proto.immediateValue.tensor
        field = tensor.WhichOneof("value")
        values: Any = getattr(tensor, field).values if field else ()
        if feature.dtype == "string":
            return np.array(list(values), dtype=object).reshape(feature.dims)
        if field == "bytes":
            return np.frombuffer(values, dtype=feature.dtype).reshape(feature.dims)
        return np.array(list(values), dtype=feature.dtype).reshape(feature.dims)

    def _blob(self, offset: int, feature: Feature) -> Array:
        dtype = np.dtype(feature.dtype)
        wanted = int(np.prod(feature.dims, dtype=np.int64)) * dtype.itemsize
        try:
            with self._weights.open("rb") as stream:
                stream.seek(offset)
                sentinel, _, size, start = RECORD.unpack(stream.read(RECORD.size))
                if sentinel != SENTINEL or size != wanted:
                    raise MalformedProgram(f"{self._weights}: no record of {wanted} bytes at {offset}")
                stream.seek(start)
                data = stream.read(size)
        except (OSError, struct.error) as error:
            raise MalformedProgram(f"{self._weights}: {error}") from error
        if len(data) != wanted:
            raise MalformedProgram(f"{self._weights}: cut at {start}")
        return np.frombuffer(data, dtype=dtype).reshape(feature.dims)
