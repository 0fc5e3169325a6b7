"""Sizes for the dimensions a model leaves open, so that synthesised inputs fit together and tell axes apart.

Every open dimension has a key: its symbol, or ``input:axis`` where it has no name. Within a case a key has one size.

* Batch dimensions are those whose symbol says so, and unnamed first dimensions; where no symbol says so, symbolic
  first dimensions too. The middle dimension of an unnamed recurrent state (``[layers, ?, hidden]``) is one as well.
  They are 1, 2 and 3 over the cases: a batch of one hides mistakes.
* Height and width of images are multiples of 32, the total stride of most detectors.
* A symbol such as ``past_sequence_length + 1`` is computed from its terms.
* Other lengths vary by case. Named ones differ from each other, so that swapped axes show; unnamed ones are equal,
  because exporters that lose names lose them on axes that belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from packager.errors import UsageError
from packager.golden_check import did_you_mean, quoted, symbol
from packager.graph import Dim
from packager.model import Signature, TensorSpec

Role = Literal["batch", "height", "width", "length", "sum"]

BATCHES = (1, 2, 3)
LENGTHS = (8, 12, 16)
HEIGHTS, WIDTHS = (64, 96, 128), (96, 64, 160)

CANDIDATE_LENGTHS = (
    16, 32, 64, 128, 256, 512, 1024, 48, 80, 96, 100, 160, 192, 224, 320, 384, 400, 480, 576, 640, 800, 1600, 2048,
    3000, 4096, 8000, 16000,
)  # fmt: skip
"""Lengths worth trying: powers of two first, then common audio frames at 8 and 16 kHz (20 to 100 ms), Whisper's 3000
frames, a second of audio."""

CANDIDATE_IMAGES = (
    (48, 320), (32, 320), (48, 192), (32, 128), (32, 32), (64, 64), (224, 224), (112, 112), (128, 128), (160, 160),
    (256, 256), (299, 299), (320, 320), (384, 384), (416, 416), (512, 512), (640, 640),
)  # fmt: skip
"""Heights and widths worth trying: text recognisers (48 or 32 high), small images, classifiers, detectors."""


@dataclass(frozen=True)
class OpenDim:
    """An open dimension of the inputs: its key, what it is, and its number among the named lengths (0 unnamed)."""

    key: str
    role: Role
    order: int = 0


def dim_key(spec: TensorSpec, axis: int, dim: Dim) -> str | None:
    """The key of an open dimension; ``None`` for a fixed one. Negative sizes are how some exporters write unknown."""
    if isinstance(dim, int) and dim >= 0:
        return None
    return symbol(dim) or f"{spec.name}:{axis}"


def image_axes(spec: TensorSpec) -> tuple[int, int] | None:
    """The axes of height and width where the tensor looks like images: 1, 3 or 4 channels first or last."""
    dims = spec.dims or ()
    channels = (1, 3, 4)
    is_float = spec.dtype in ("float32", "float16", "float64", "bfloat16")
    if len(dims) == 4 and (is_float or spec.dtype == "uint8"):
        if dims[1] in channels:
            return 2, 3
        return (1, 2) if dims[3] in channels else None
    if len(dims) == 3 and spec.dtype == "uint8":
        if dims[2] in channels:
            return 0, 1
        return (1, 2) if dims[0] in channels else None
    return None


def open_dims(signature: Signature) -> dict[str, OpenDim]:
    """Every open dimension of the inputs by key, in order of appearance. Inputs of unknown rank have none."""
    places = [
        (spec, axis, key, symbol(dim) is not None)
        for spec in signature.inputs
        for axis, dim in enumerate(spec.dims or ())
        if (key := dim_key(spec, axis, dim)) is not None
    ]
    symbols = {key for _, _, key, named in places if named}
    batches = {key for key in symbols if _says_batch(key)}
    found: dict[str, OpenDim] = {}
    order = 0
    for spec, axis, key, named in places:
        if key in found:
            continue
        role: Role = "length"
        images = image_axes(spec)
        if named and _terms(key, symbols) is not None:
            role = "sum"
        elif images is not None and axis in images:
            role = "height" if axis == images[0] else "width"
        elif key in batches or (axis == 0 and not (named and batches)) or (not named and _is_state(spec, axis)):
            role = "batch"
        found[key] = OpenDim(key, role, order if named and role == "length" else 0)
        order += named and role == "length"
    return found


def assign(signature: Signature, case: int, dims: Mapping[str, int]) -> dict[str, int]:
    """The size of every open dimension in case number ``case`` (from 0), by key.

    ``dims`` pins sizes by key. A pinned batch dimension decides the others, which aren't pinned.

    Raises:
        UsageError: ``dims`` names no open dimension, or gives a size below 1.
    """
    known = open_dims(signature)
    for key, size in dims.items():
        if key not in known:
            raise UsageError(
                f"dims: the model's inputs have no open dimension '{key}'{did_you_mean(key, known)}",
                f"open dimensions are {quoted(known)}",
            )
        if size < 1:
            raise UsageError(f"dims: '{key}' = {size}, but a size is at least 1")
    pinned = [dims[key] for key, dim in known.items() if dim.role == "batch" and key in dims]
    turn, step = case % 3, 4 * (case // 3)
    defaults: dict[Role, int] = {
        "batch": pinned[0] if pinned else BATCHES[turn],
        "height": HEIGHTS[turn],
        "width": WIDTHS[turn],
        "length": LENGTHS[turn] + step,
    }
    sizes = {key: dims.get(key, defaults[dim.role] + 4 * dim.order) for key, dim in known.items() if dim.role != "sum"}
    for key, dim in known.items():
        if dim.role == "sum":
            terms = _terms(key, set(known)) or []
            sizes[key] = dims.get(key, sum(term if isinstance(term, int) else sizes[term] for term in terms))
    return sizes


def alternatives(signature: Signature, dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Other assignments of the dimensions that ``dims`` leaves open, the likeliest first; each repeats ``dims``.

    First a batch of one with the usual lengths (many models are traced with one and only say they take more), then
    one length after another for all open lengths, with any batch; then the same with a batch of one.
    """
    known = [dim for dim in open_dims(signature).values() if dim.key not in dims]
    batches = [dim.key for dim in open_dims(signature).values() if dim.role == "batch"]
    single = {} if any(key in dims for key in batches) else dict.fromkeys(batches, 1)
    roles = {dim.role for dim in known}
    images = CANDIDATE_IMAGES if roles & {"height", "width"} else ()
    lengths = CANDIDATE_LENGTHS if "length" in roles else ()
    if single:
        yield {**dims, **single}
    steps: list[dict[str, int]] = []
    for image, length in zip_longest(images, lengths):
        height, width = image or (images[-1] if images else (0, 0))
        size = {"height": height, "width": width, "length": length or (lengths[-1] if lengths else 0)}
        steps.append({dim.key: size[dim.role] for dim in known if dim.role in size})
    for step in steps:
        yield {**dims, **step}
    for step in steps if single else ():
        yield {**dims, **step, **single}


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The concrete shape of an input of known rank."""
    made: list[int] = []
    for axis, dim in enumerate(spec.dims or ()):
        key = dim_key(spec, axis, dim)
        made.append(sizes[key] if key is not None else int(dim or 0))
    return tuple(made)


def _says_batch(name: str) -> bool:
    return "batch" in name.lower() or name.lower() in ("n", "b", "bs", "bsz")


def _is_state(spec: TensorSpec, axis: int) -> bool:
    dims = spec.dims or ()
    return axis == 1 and len(dims) == 3 and all(isinstance(dims[other], int) for other in (0, 2))


def _terms(name: str, symbols: set[str]) -> list[str | int] | None:
    """The terms of ``a + b + 1`` where every term is a number or another plain symbol of the model, else ``None``."""
    parts = [part.strip() for part in name.split("+")]
    if len(parts) < 2 or not all(re.fullmatch(r"\d{1,9}", part) or part in symbols for part in parts):
        return None
    return [int(part) if part.isdigit() else part for part in parts]
