"""Golden inputs from a seed, for models that come without any.

Inputs are made from the signature and from what the graph does with each input (:mod:`packager.golden_uses`), never
from weights: token ids stay within their embedding tables, masks begin with ones, lengths fit, images look like
images, and sizes of open dimensions vary from case to case (:mod:`packager.golden_shapes`). What a graph can't say,
such as the frame length a model was trained for, is found by running it: :func:`candidates` lists other sizes to try.

The same seed gives the same arrays in every process and on every machine with the same numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from packager.errors import GoldenError, UsageError
from packager.golden_check import did_you_mean, quoted
from packager.golden_roles import Use
from packager.golden_shapes import alternatives, assign, shape_of
from packager.golden_uses import find_uses
from packager.golden_values import Wanted, dtype_range, generator, values
from packager.goldens import GoldenCase, GoldenSet, numpy_dtype
from packager.model import Model, Signature, TensorSpec

MAX_INPUT_ELEMENTS = 1 << 28
"""An input larger than this (1 GiB of float32) isn't synthesised: the shape is a mistake, or goldens are needed."""

_NO_DIMS: Mapping[str, int] = MappingProxyType({})
_NO_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType({})


def synthesise(
    model: Model,
    *,
    cases: int = 3,
    seed: int = 0,
    dims: Mapping[str, int] = _NO_DIMS,
    ranges: Mapping[str, tuple[float, float]] = _NO_RANGES,
) -> GoldenSet:
    """Make golden inputs; outputs stay empty until the reference answers.

    Args:
        model: the opened model.
        cases: how many, at least 1.
        seed: decides every value.
        dims: sizes of open dimensions, by symbol or by ``input:axis`` where they have no name.
        ranges: lowest and highest value by input, both included, instead of what the graph suggests.

    Returns:
        ``cases`` cases named ``synthesised-0``, ... that fit the model's signature.

    Raises:
        UsageError: ``cases``, ``dims`` or ``ranges`` don't make sense for this model.
        GoldenError: an input's type or rank is one that can't be synthesised; goldens must be given.
    """
    if cases < 1:
        raise UsageError(f"cannot synthesise {cases} golden cases", "ask for at least one")
    signature = model.signature
    for spec in signature.inputs:
        _check_possible(model, spec)
    _check_ranges(signature, ranges)
    uses = find_uses(model)
    made: list[GoldenCase] = []
    for number in range(cases):
        wanted = _wanted(model, uses, number, assign(signature, number, dims), ranges)
        inputs = {one.spec.name: values(one, generator(seed, number, one.spec.name)) for one in wanted}
        made.append(GoldenCase(f"synthesised-{number}", inputs, source=f"synthesised, seed {seed}"))
    return GoldenSet(tuple(made))


def candidates(model: Model, *, dims: Mapping[str, int] = _NO_DIMS) -> Iterator[dict[str, int]]:
    """Other ``dims`` for :func:`synthesise` to try in a reference run, best first, when the default ones don't run.

    ``dims`` are the user's own, which every candidate repeats. Finite (at most about sixty); empty where the model
    leaves nothing open.
    """
    yield from alternatives(model.signature, dims)


def _wanted(
    model: Model,
    uses: Mapping[str, tuple[Use, ...]],
    number: int,
    sizes: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
) -> list[Wanted]:
    """What each input of one case must be, sizes bounded before anything is allocated."""
    shapes = {spec.name: shape_of(spec, sizes) for spec in model.signature.inputs}
    found: list[Wanted] = []
    for spec in model.signature.inputs:
        shape = shapes[spec.name]
        if math.prod(shape) > MAX_INPUT_ELEMENTS:
            raise GoldenError(
                f"{model.path}: input '{spec.name}' would have {math.prod(shape)} elements as {list(shape)}",
                "pin smaller sizes, or give golden cases",
            )
        others = [other for name, other in shapes.items() if name != spec.name]
        found.append(Wanted(spec, shape, uses[spec.name], number, sizes, _span(others), ranges.get(spec.name)))
    return found


def _span(shapes: list[tuple[int, ...]]) -> int:
    """A length that no sequence among these tensors is shorter than: the smallest of their axes but the first."""
    return max(1, min((size for shape in shapes if len(shape) > 1 for size in shape[1:]), default=4))


def _check_possible(model: Model, spec: TensorSpec) -> None:
    where = f"{model.path}: input '{spec.name}'"
    hint = "give golden cases: packager.toml [golden] path, or --golden"
    if spec.kind != "tensor":
        raise GoldenError(f"{where} is a {spec.dtype}, which can't be synthesised", hint)
    if spec.dims is None:
        raise GoldenError(f"{where} has no declared rank, so its shape can't be guessed", hint)
    try:
        numpy_dtype(spec.dtype)
    except (KeyError, AttributeError):
        raise GoldenError(f"{where} is {spec.dtype}, which can't be synthesised", hint) from None


def _check_ranges(signature: Signature, ranges: Mapping[str, tuple[float, float]]) -> None:
    known = {spec.name: spec for spec in signature.inputs}
    for name, (low, high) in ranges.items():
        if name not in known:
            raise UsageError(
                f"ranges: the model has no input '{name}'{did_you_mean(name, known)}", f"inputs are {quoted(known)}"
            )
        dtype = known[name].dtype
        if dtype in ("string", "bool") or dtype.startswith("complex"):
            raise UsageError(f"ranges: input '{name}' is {dtype}, which has no range")
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise UsageError(f"ranges: '{name}' = [{low}, {high}] is not a range", "give [lowest, highest]")
        if dtype.lstrip("u").startswith("int"):
            lowest, highest = dtype_range(dtype)
            if max(math.ceil(low), lowest) > min(math.floor(high), highest) or low < lowest or high > highest:
                raise UsageError(
                    f"ranges: '{name}' = [{low}, {high}] is not a range of {dtype} ({lowest} to {highest})",
                    "give whole numbers that the input's dtype holds",
                )
