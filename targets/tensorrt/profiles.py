"""Optimisation profiles: between which sizes an engine works, from the manifest or from what golden cases show.

TensorRT compiles for a range of sizes (least, usual, greatest) of every free dim and refuses a run beyond it. A dim
that golden cases show at one size only has no range that could be told: that is an error with the lines to add, not a
guess. Sizes are kept per input, in the order of its dims, and reach TensorRT through its API, never as text: names with
``:`` and ``/`` are common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from packager.errors import Refused
from packager.goldens import GoldenSet
from packager.model import Signature, TensorSpec
from packager.names import nearest
from packager.targets.tensorrt.options import Options

Triple = tuple[int, int, int]
"""Least, usual and greatest size."""

Values = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and greatest of several numbers: of a shape's sizes, or of what a shape tensor holds."""

MAX_VALUES = 64
"""A shape tensor holds a size for each of a few dims; longer integer inputs are data."""


@dataclass(frozen=True)
class Profile:
    """One input's range. ``dims`` has the sizes of its dims, and the names of free ones (dims of one name are equal);
    ``shapes`` least, usual and greatest shape; ``values`` those of what the tensor holds.

    ``values`` is ``None`` where the input can't decide a shape, or no range of its values is known.
    """

    name: str
    dims: tuple[int | str, ...]
    shapes: Values
    values: Values | None = None


def profiles_for(target: str, signature: Signature, goldens: GoldenSet, options: Options) -> tuple[Profile, ...]:
    """The profile of every input.

    Args:
        target: the target's name, for the lines that are missing in the manifest.
        signature: shapes pinned.
        goldens: inputs that show what isn't in the manifest; cases that don't fit the signature are left out.
        options: the manifest's ranges.

    Raises:
        Refused: a range is missing (the hint has the lines to add), makes no sense, or names no free dim.
    """
    goldens = GoldenSet(tuple(case for case in goldens.cases if signature.takes(case.inputs)))
    _check_equal(signature, goldens)
    seen = _seen(signature, goldens)
    _check_named(seen, options)
    ranges = {key: options.profiles.get(key) or _range(sizes) for key, sizes in seen.items()}
    missing = {key: seen[key] for key, found in ranges.items() if found is None}
    if missing:
        raise Refused(
            f"no range is known for {', '.join(repr(key) for key in missing)}: the golden cases show one size of it",
            "add the sizes the engine is to take, least, usual and greatest:\n" + _lines(target, missing)
            + "\nor pin the dim with `shapes`",
        )  # fmt: skip
    known = {key: found for key, found in ranges.items() if found is not None}
    return tuple(_profile(spec, known, goldens, options) for spec in signature.inputs)


def dim_keys(spec: TensorSpec) -> dict[int, str]:
    """The manifest's names of an input's free dims, by axis."""
    return {
        axis: dim if isinstance(dim, str) else f"{spec.name}:{axis}"
        for axis, dim in enumerate(spec.dims or ())
        if not isinstance(dim, int)
    }


def _check_equal(signature: Signature, goldens: GoldenSet) -> None:
    """TensorRT takes dims of one name for one size. Other runtimes take such a name for a comment.

    Raises:
        Refused: a golden case has two sizes of one name.
    """
    wrong = []
    for case in goldens.cases:
        sizes: dict[str, set[int]] = {}
        for spec in signature.inputs:
            for axis, key in dim_keys(spec).items():
                sizes.setdefault(key, set()).add(int(np.shape(case.inputs[spec.name])[axis]))
        wrong += [
            f"'{key}' is {sorted(each)} in golden case '{case.name}'" for key, each in sizes.items() if len(each) > 1
        ]
    if wrong:
        raise Refused(
            "TensorRT takes dims of one name for one size:" + "".join(f"\n  {line}" for line in wrong),
            "give the dims names of their own in the model, or none",
        )


def _seen(signature: Signature, goldens: GoldenSet) -> dict[str, list[int]]:
    """Sizes of each free dim over all cases and places, in order."""
    found: dict[str, list[int]] = {}
    for spec in signature.inputs:
        if spec.dims is None:
            raise Refused(
                f"input '{spec.name}' has no declared rank, and TensorRT compiles for known ranks only",
                "export the model with shapes",
            )
        for axis, key in dim_keys(spec).items():
            sizes = found.setdefault(key, [])
            sizes += [int(np.shape(case.inputs[spec.name])[axis]) for case in goldens.cases if spec.name in case.inputs]
    return found


def _check_named(seen: Mapping[str, list[int]], options: Options) -> None:
    wrong = []
    for key, (least, usual, greatest) in options.profiles.items():
        if key not in seen:
            close = nearest(key, seen)
            listed = ", ".join(repr(each) for each in seen) or "none, every dim is fixed"
            wrong.append(
                f"'{key}' is no free dim of an input"
                + (f", did you mean '{close}'?" if close else f"; free dims: {listed}")
            )
        elif not least <= usual <= greatest:
            wrong.append(f"'{key}' = [{least}, {usual}, {greatest}] isn't least, usual and greatest")
        elif outside := sorted({size for size in seen[key] if not least <= size <= greatest}):
            wrong.append(f"'{key}' = [{least}, {usual}, {greatest}] leaves out golden cases of size {outside}")
    if wrong:
        raise Refused("profiles:" + "".join(f"\n  {line}" for line in wrong), "correct [targets.<name>.profiles]")


def _range(sizes: list[int]) -> Triple | None:
    """What cases show: their least and greatest size, and the one in the middle; ``None`` where there is but one."""
    known = sorted(size for size in sizes if size > 0)
    if not known or known[0] == known[-1]:
        return None
    return known[0], known[len(known) // 2], known[-1]


def _lines(target: str, missing: Mapping[str, list[int]]) -> str:
    """The manifest's lines, with the sizes that were seen."""
    lines = [f"  [targets.{toml_key(target)}.profiles]"]
    for key, sizes in missing.items():
        size = sizes[0] if sizes and sizes[0] else 1
        lines.append(f"  {toml_key(key)} = [{size}, {size}, {size}]")
    return "\n".join(lines)


def toml_key(text: str) -> str:
    """A TOML key: bare where it may be, else a basic string (JSON's escapes are TOML's)."""
    bare = bool(text) and all(char.isascii() and (char.isalnum() or char in "_-") for char in text)
    return text if bare else json.dumps(text)


def _profile(spec: TensorSpec, ranges: Mapping[str, Triple], goldens: GoldenSet, options: Options) -> Profile:
    keys = dim_keys(spec)

    def shape(which: int) -> tuple[int, ...]:
        return tuple(
            dim if isinstance(dim, int) else ranges[keys[axis]][which] for axis, dim in enumerate(spec.dims or ())
        )

    dims = tuple(dim if isinstance(dim, int) else keys[axis] for axis, dim in enumerate(spec.dims or ()))
    return Profile(spec.name, dims, (shape(0), shape(1), shape(2)), _values(spec, goldens, options))


def _values(spec: TensorSpec, goldens: GoldenSet, options: Options) -> Values | None:
    """What a small integer input holds: the manifest's range, or the least and greatest of the golden cases.

    Whether TensorRT needs it (the input decides a shape) is known when the graph is parsed.
    """
    if spec.name in options.values:
        named: Values = options.values[spec.name]
        return named
    if spec.dtype not in ("int32", "int64") or len(spec.dims or ()) > 1 or not goldens.cases:
        return None
    held = [np.ravel(case.inputs[spec.name]).tolist() for case in goldens.cases if spec.name in case.inputs]
    if not held or len({len(each) for each in held}) != 1 or len(held[0]) > MAX_VALUES:
        return None
    columns = [sorted(column) for column in zip(*held, strict=True)]
    if any(column[0] == column[-1] for column in columns):
        return None
    usual = tuple(int(column[len(column) // 2]) for column in columns)
    return tuple(int(column[0]) for column in columns), usual, tuple(int(column[-1]) for column in columns)
