"""What a bundle's model takes and gives, and whether arrays fit it: checked before anything reaches a runtime.

A bundle's ``infer.py`` uses this file, which ships beside it, so it needs numpy and nothing else of packager. Names,
dtypes and shapes come from ``bundle.json``. Where a message is raised, it says what was expected and what was given.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """One input or output: exact name, dtype name and dims (a size, the name of a free one, or ``None``).

    ``dims`` is ``None`` where not even the rank is known.
    """

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        dims = "..." if self.dims is None else ", ".join("?" if dim is None else str(dim) for dim in self.dims)
        return f"{self.dtype}[{dims}]"


@dataclass(frozen=True)
class Description:
    """What ``bundle.json`` says of the model. ``options`` are the target's, as it was built."""

    name: str
    version: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    options: Mapping[str, Any]


def read_description(folder: str | Path) -> Description:
    """Read ``bundle.json`` of a bundle.

    Raises:
        ValueError: it is missing or malformed.
    """
    file = Path(folder) / "bundle.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        inputs, outputs = (
            tuple(
                Tensor(entry["name"], entry["dtype"], None if entry["dims"] is None else tuple(entry["dims"]))
                for entry in data["signature"][part]
            )
            for part in ("inputs", "outputs")
        )
        options = dict(json.loads(data["plan"]["options"]))
        return Description(str(data["name"]), str(data["version"]), inputs, outputs, options)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing; keep the files of the bundle together") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is malformed: {error!r}; unpack the bundle again") from error


def checked(inputs: tuple[Tensor, ...], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The feeds as native, contiguous arrays in the order of the inputs.

    Args:
        inputs: what the model takes.
        feeds: one array per input, by exact name, of the input's dtype and shape. bfloat16 and smaller floats are
            those of the package ml_dtypes; strings are object arrays or numpy's own.

    Raises:
        ValueError: a name, dtype, rank or size is not the model's.
    """
    wanted = [tensor.name for tensor in inputs]
    missing = [name for name in wanted if name not in feeds]
    unknown = [name for name in feeds if name not in wanted]
    if missing:
        raise ValueError(f"no array is given for input {', '.join(map(repr, missing))}")
    if unknown:
        raise ValueError(f"the model has no input {', '.join(map(repr, unknown))}; its inputs are {wanted}")
    return {tensor.name: checked_array(tensor, feeds[tensor.name]) for tensor in inputs}


def checked_array(tensor: Tensor, value: Array) -> Array:
    """One array, native and contiguous.

    Raises:
        ValueError: its dtype, rank or a size is not the tensor's.
    """
    array = np.asarray(value, order="C")
    kind = _kind(array.dtype)
    if kind != tensor.dtype:
        raise ValueError(f"input '{tensor.name}' takes {tensor}, but the array is {kind}")
    if tensor.dims is not None:
        wrong = len(array.shape) != len(tensor.dims) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(tensor.dims, array.shape, strict=True)
        )
        if wrong:
            raise ValueError(f"input '{tensor.name}' takes {tensor}, but the array has shape {list(array.shape)}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@functools.lru_cache(64)
def _kind(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind in "OUS" else dtype.name  # numpy makes the name anew each time


def run_file(arguments: list[str], run: Callable[[dict[str, Array]], Mapping[str, Array]], usage: str) -> int:
    """The command line of an ``infer.py``: one ``.npz`` file in, the outputs' dtypes and shapes out.

    Args:
        arguments: of the command, without its name.
        run: named arrays in, named arrays out.
        usage: what is said where there isn't exactly one argument.

    Returns:
        The exit status: 0, 1 with a message on stderr where it can't be run, 2 with the usage.
    """
    if len(arguments) != 1:
        print(f"usage: {usage}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        with np.load(arguments[0], allow_pickle=False) as arrays:
            outputs = run({name: arrays[name] for name in arrays.files})
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    for name, array in outputs.items():
        print(f"{name}: {array.dtype.name}{list(array.shape)}")  # noqa: T201
    return 0
