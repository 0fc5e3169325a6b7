"""Golden cases: named inputs and the outputs expected for them, with where they came from.

Arrays are C-contiguous numpy arrays with the dtypes of :data:`packager.graph.DTYPES`; string tensors are object
arrays of ``str``. Readers of foreign formats are in :mod:`packager.golden_formats`, synthesis from a seed in
:mod:`packager.golden_synth`, and the format bundles carry in :mod:`packager.golden_store`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class GoldenCase:
    """One case. ``outputs`` is empty until the reference, or the source framework, has answered.

    ``source`` says where the inputs came from (``file.npz``, ``synthesised, seed 0``), ``outputs_from`` what made the
    outputs (``source`` for the framework's own, ``reference`` for the reference run, empty for none yet).
    """

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array] = field(default_factory=dict)
    source: str = ""
    outputs_from: str = ""


@dataclass(frozen=True)
class GoldenSet:
    """All cases of a build, in order."""

    cases: tuple[GoldenCase, ...]

    def digest(self) -> str:
        """``sha256:<hex>`` over names, dtypes, shapes and values of all cases, inputs and outputs."""
        state = hashlib.sha256()
        for case in self.cases:
            state.update(f"case {case.name!r} {case.outputs_from!r}\n".encode())
            for kind, arrays in (("in", case.inputs), ("out", case.outputs)):
                for name in sorted(arrays):
                    array = arrays[name]
                    state.update(f"{kind} {name!r} {dtype_name(array)} {array.shape}\n".encode())
                    if array.dtype == object:
                        state.update(repr(array.ravel().tolist()).encode())
                    else:
                        state.update(np.ascontiguousarray(array).tobytes())
        return "sha256:" + state.hexdigest()


def dtype_name(array: Array) -> str:
    """The dtype's name as in :data:`packager.graph.DTYPES`; ``string`` for object and unicode arrays."""
    if array.dtype == object or array.dtype.kind in "US":
        return "string"
    return {"float8_e4m3fn": "float8e4m3fn", "float8_e4m3fnuz": "float8e4m3fnuz", "float8_e5m2": "float8e5m2",
            "float8_e5m2fnuz": "float8e5m2fnuz", "float4_e2m1fn": "float4e2m1",
            "float8_e8m0fnu": "float8e8m0"}.get(array.dtype.name, array.dtype.name)  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of a dtype name; ``string`` gives ``object``.

    Raises:
        KeyError: no array can hold it.
    """
    if name == "string":
        return np.dtype(object)
    if name in ("bfloat16", "int4", "uint4", "int2", "uint2") or name.startswith(("float8", "float4")):
        import ml_dtypes

        spelled = {"float8e4m3fn": "float8_e4m3fn", "float8e4m3fnuz": "float8_e4m3fnuz", "float8e5m2": "float8_e5m2",
                   "float8e5m2fnuz": "float8_e5m2fnuz", "float4e2m1": "float4_e2m1fn",
                   "float8e8m0": "float8_e8m0fnu"}.get(name, name)  # fmt: skip
        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, spelled))
        return found
    try:
        return np.dtype(name)
    except TypeError:
        raise KeyError(name) from None
