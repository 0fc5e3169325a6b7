"""Pinned shapes: what a manifest's ``shapes = { batch = 1 }`` makes of a signature. Shared by all rooms."""

from __future__ import annotations

from dataclasses import replace

from packager.errors import Refused
from packager.graph import Dim
from packager.model import Signature, TensorSpec
from packager.names import nearest


def pin_shapes(signature: Signature, shapes: tuple[tuple[str, int], ...]) -> Signature:
    """The signature with symbolic dims replaced. Keys are symbols, or ``input:axis`` for a dim without a name.

    Raises:
        Refused: a key names no free dim of the inputs, or a size is below 1.
    """
    symbols: dict[str, int] = {}
    places: dict[tuple[str, int], int] = {}
    known = pinnable(signature)
    for key, size in shapes:
        if size < 1:
            raise Refused(f"shapes: '{key}' is pinned to {size}", "a size is at least 1")
        place = known.get(key)
        if key not in known:
            close = nearest(key, known)
            listed = ", ".join(known) or "none, every dim is fixed"
            raise Refused(
                f"shapes: no input has a free dim '{key}'",
                (f"did you mean '{close}'? " if close else "") + f"free dims: {listed}",
            )
        if place is None:
            symbols[key] = size
        else:
            places[place] = size

    def pinned(spec: TensorSpec, is_input: bool) -> TensorSpec:
        def dim_of(axis: int, dim: Dim) -> Dim:
            found = places.get((spec.name, axis)) if is_input else None
            return found if found is not None else symbols.get(dim, dim) if isinstance(dim, str) else dim

        if spec.dims is None:
            return spec
        return replace(spec, dims=tuple(dim_of(axis, dim) for axis, dim in enumerate(spec.dims)))

    return Signature(
        tuple(pinned(spec, True) for spec in signature.inputs),
        tuple(pinned(spec, False) for spec in signature.outputs),
    )


def pinnable(signature: Signature) -> dict[str, tuple[str, int] | None]:
    """Keys ``shapes`` may use: symbols (with ``None``) and ``input:axis`` of unnamed dims (with the place)."""
    found: dict[str, tuple[str, int] | None] = dict.fromkeys(signature.symbols())
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.dims or ()):
            if dim is None:
                found.setdefault(f"{spec.name}:{axis}", (spec.name, axis))
    return found
