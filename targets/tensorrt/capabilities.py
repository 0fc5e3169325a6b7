"""Which GPUs an engine is for: what the manifest names, as far as they compute in the model's dtypes.

TensorRT for RTX refuses to build for a named GPU that lacks a dtype ("HW-specific datatypes"). Where none is named it
builds for all that have it, without a word, so the least is told here.
"""

from __future__ import annotations

from packager.errors import Refused
from packager.graph import Structure
from packager.targets.tensorrt.library import Chosen
from packager.targets.tensorrt.options import Options

ALL = ("8.0", "8.6", "8.9", "12.0")
"""What an engine of TensorRT for RTX is for where none is named, and later ones (CPU-only AOT, its documentation)."""

LEAST = {"float8e4m3fn": "8.9", "bfloat16": "8.0"}
"""By dtype: the first compute capability that has it. Found by naming each GPU to TensorRT for RTX 1.7.1."""
FLOAT8 = 17
"""float8e4m3fn among ONNX's data types, as ``output_dtype`` of QuantizeLinear names it."""


def capabilities(options: Options, structure: Structure, chosen: Chosen) -> tuple[tuple[str, ...], bool]:
    """Compute capabilities that the engine is for, and whether it is for all later ones too.

    For TensorRT proper that is the GPU that is here; none is known for a recipe.

    Raises:
        Refused: a GPU that is named, or the one that is here, lacks a dtype of the model.
    """
    dtype, least = least_capability(structure)
    asked: tuple[str, ...] = options.compute_capabilities
    if chosen.builder != "rtx":
        asked = (chosen.capability,) if chosen.capability else ()
    lacking = [each for each in asked if float(each) < float(least)]
    if lacking:
        raise Refused(
            f"GPUs of compute capability {', '.join(lacking)} have no {dtype}; they have it from {least} on",
            f"name {least} or later under compute_capabilities, or choose another precision",
        )
    if asked or chosen.builder != "rtx":
        return tuple(asked), False
    return tuple(each for each in ALL if float(each) >= float(least)), True


def least_capability(structure: Structure) -> tuple[str, str]:
    """The model's dtype that asks most of a GPU, and the first compute capability with it; ``0`` for any."""
    found = {tensor.dtype for tensor in structure.tensors()}
    if any(node.integer("output_dtype", 0) == FLOAT8 for node in structure.walk()):
        found.add("float8e4m3fn")
    ranked = sorted((float(least), dtype) for dtype, least in LEAST.items() if dtype in found)
    return (ranked[-1][1], LEAST[ranked[-1][1]]) if ranked else ("", "0")
