"""Values for synthesised inputs: in range for what the graph does with them, varied enough to show mistakes.

Where nothing is known of an input it gets: floats from the standard normal distribution; images a page of digits, in
[0, 1] and [-1, 1] by turns (uint8: 0 to 255); signals low-pass noise, loud and soft by turns; text from a small
vocabulary with an empty and a non-ASCII string; bools both values; integers, where only elementwise arithmetic reads
them, mostly -8 to 8 with every fifth as large as the operators bear, because runtimes that compute integers in floats
go wrong only on large ones: a quarter of the dtype's range where the result is an output or a comparison, half its
square root where more arithmetic may follow, 1000 where they become floats, 8 where they meet anything else.
Everything is drawn from a generator seeded by the seed, the case and the input's name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packager.golden_roles import Use
from packager.golden_shapes import image_axes
from packager.goldens import Array, numpy_dtype
from packager.model import TensorSpec

VOCABULARY = ("", "a", "hello", "Hello, world", "42", "naïve café", "日本語", "a b\tc")
"""Strings for text inputs: empty, ASCII, digits, accents, a script without spaces, white space."""

DIGITS = tuple(
    tuple(tuple(int(dot) for dot in row) for row in digit.split())
    for digit in (
        "111 101 101 101 111", "010 110 010 010 111", "111 001 111 100 111", "111 001 111 001 111",
        "101 101 111 001 001", "111 100 111 001 111", "111 100 111 101 111", "111 001 010 010 010",
        "111 101 111 101 111", "111 101 111 001 111",
    )
)  # fmt: skip
"""The ten digits, five dots high and three wide; 1 is ink."""

SAMPLE_RATE = 16000
"""Hz; taken for an integer named as a sample rate that the graph compares with nothing."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wanted:
    """One input of one case: its spec and concrete shape, what the graph does with it, and the case around it.

    ``sizes`` are the case's open dimensions by key; ``span`` is a length no sequence of the case is shorter than;
    ``limits`` are the user's own lowest and highest value.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    uses: tuple[Use, ...]
    case: int
    sizes: Mapping[str, int]
    span: int
    limits: tuple[float, float] | None = None

    def of(self, *kinds: str) -> tuple[Use, ...]:
        """The uses of these kinds."""
        return tuple(use for use in self.uses if use.kind in kinds)

    def bound(self, use: Use) -> int | None:
        """The smallest of a use's sizes in this case; ``None`` where one is unknown."""
        found = [self.sizes.get(size) if isinstance(size, str) else size for size in use.sizes]
        known = [size for size in found if size is not None]
        return min(known) if known and len(known) == len(found) else None


def generator(seed: int, case: int, name: str) -> np.random.Generator:
    """A generator of its own for each input of each case, the same in every process."""
    digest = hashlib.sha256(f"{seed}/{case}/{name}".encode("utf-8", "surrogatepass")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def values(wanted: Wanted, rng: np.random.Generator) -> Array:
    """An array of the wanted shape and dtype, C-contiguous.

    Raises:
        KeyError: no array can hold the dtype.
    """
    dtype = numpy_dtype(wanted.spec.dtype)
    if wanted.spec.dtype == "string":
        return _strings(wanted, rng)
    if wanted.spec.dtype == "bool":
        return _bools(wanted, rng)
    if dtype.kind == "c":
        pair = rng.standard_normal((2, *wanted.shape))
        return np.asarray(pair[0] + 1j * pair[1]).astype(dtype)
    whole = wanted.spec.dtype.lstrip("u").startswith("int")
    made: Floats | Ints = _integers(wanted, rng) if whole else _floats(wanted, rng)
    return np.asarray(np.asarray(made).reshape(wanted.shape).astype(dtype), order="C")


def _strings(wanted: Wanted, rng: np.random.Generator) -> Array:
    known = [value for use in wanted.of("choice") for value in use.values if isinstance(value, str)]
    closed = any(use.closed for use in wanted.of("choice"))
    words = known if known and closed else [*known, *VOCABULARY]
    made: Array = np.empty(wanted.shape, dtype=object)
    count = int(made.size)
    # The first places take the words one after another, so that a small input still sees an empty one.
    start = wanted.case * count
    picked = [words[(start + place) % len(words)] for place in range(count)]
    made.reshape(-1)[:] = np.array([picked[place] for place in rng.permutation(count)], dtype=object)
    return made


def _bools(wanted: Wanted, rng: np.random.Generator) -> Array:
    count = math.prod(wanted.shape)
    if any(use.low == use.high == 1 for use in wanted.of("range")):
        return np.ones(wanted.shape, dtype=np.bool_)
    if _named_mask(wanted):
        return _mask(wanted, rng).astype(np.bool_)
    made = (np.arange(count) + wanted.case) % 2 == 0
    return np.asarray(rng.permutation(made).reshape(wanted.shape), dtype=np.bool_)


def _integers(wanted: Wanted, rng: np.random.Generator) -> Ints:
    info_low, info_high = dtype_range(wanted.spec.dtype)
    if wanted.limits is not None:
        low, high = math.ceil(wanted.limits[0]), math.floor(wanted.limits[1])
        return np.asarray(rng.integers(low, high, wanted.shape, endpoint=True))
    indexed = _indices(wanted, rng)
    if indexed is not None:
        return np.clip(indexed, info_low, info_high)
    if _named_mask(wanted):
        return _mask(wanted, rng)
    for special in (_target_shape, _axes_or_parts, _lengths, _ranged, _codes):
        made = special(wanted, rng)
        if made is not None:
            return np.clip(made, info_low, info_high)
    if wanted.spec.dtype == "uint8" and image_axes(wanted.spec) is not None:
        return np.rint(_picture(wanted, rng) * 255).astype(np.int64)
    if wanted.of("mask"):
        return _mask(wanted, rng)
    return _mixed(wanted, rng, info_low, info_high)


def _indices(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    """Values that select along axes: within every table reached, and never twice to one place when scattering."""
    uses = wanted.of("index", "scatter")
    if not uses:
        return None
    # An axis of unknown size has a first element, if any; a constant added on the way moves both ends.
    low = max(0, *(math.ceil(use.low) for use in uses))
    high = min((wanted.bound(use) or 1) - 1 + math.ceil(use.low) for use in uses)
    high = max(low, high)
    if _named_mask(wanted) and low == 0 and high >= 1:
        return _mask(wanted, rng)
    scatter = next((use for use in uses if use.kind == "scatter"), None)
    if scatter is None or not wanted.shape:
        return np.asarray(rng.integers(low, high, wanted.shape, endpoint=True))
    if scatter.axis is None:
        rows = np.arange(math.prod(wanted.shape[:-1])).reshape(*wanted.shape[:-1], 1)
        return np.asarray(low + np.broadcast_to(rows, wanted.shape) % (high - low + 1))
    axis = scatter.axis % len(wanted.shape)
    return np.asarray(low + np.indices(wanted.shape)[axis] % (high - low + 1))


def _target_shape(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    """A whole target shape of Reshape: everything along the first axis, which fits whatever is reshaped."""
    del rng
    if not wanted.of("reshape"):
        return None
    made = np.ones(wanted.shape, dtype=np.int64)
    made.reshape(-1)[:1] = -1
    return made


def _axes_or_parts(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    """Axes from the first on, or sizes of equal parts with what is left in the last one."""
    del rng
    count = math.prod(wanted.shape)
    if wanted.of("axes"):
        return np.arange(count).reshape(wanted.shape)
    for use in wanted.of("parts"):
        size = wanted.bound(use)
        if size is not None and count:
            parts = np.full(count, size // count, dtype=np.int64)
            parts[-1] += size % count
            return parts.reshape(wanted.shape)
    return None


def _lengths(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    """Lengths of sequences: the first as long as can be, the others shorter."""
    uses = wanted.of("length")
    named = re.search(r"(^|_)(len|length|lengths|lens)$", wanted.spec.name.lower()) is not None
    if not uses and not (named and not wanted.of("choice", "range")):
        return None
    high = min([wanted.bound(use) or wanted.span for use in uses] or [wanted.span])
    made = rng.integers(1, max(high, 1), wanted.shape, endpoint=True)
    made.reshape(-1)[:1] = max(high, 1)
    return made


def _ranged(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    uses = wanted.of("range")
    if not uses:
        return None
    exact = tuple(use for use in uses if use.closed) or uses
    low, high = _common(exact)
    first, last = math.ceil(low), math.floor(high)
    made = rng.integers(first, max(first, last), wanted.shape, endpoint=True)
    # Divisors and bases may be negative, but dividing by zero is undefined.
    return np.where((made == 0) & (low < 0 < high), 1, made) if any(use.closed for use in uses) else made


def _codes(wanted: Wanted, rng: np.random.Generator) -> Ints | None:
    """One of the values the graph knows. A single code is the first it compares with, in every case."""
    known = [value for use in wanted.of("choice") for value in use.values if not isinstance(value, str)]
    scalar = math.prod(wanted.shape) == 1 and all(isinstance(dim, int) for dim in wanted.spec.dims or ())
    if re.search(r"(^|_)(sr|sample_?rate|sampling_?rate)$", wanted.spec.name.lower()) and not known:
        return np.full(wanted.shape, SAMPLE_RATE, dtype=np.int64)
    if not known:
        return None
    if scalar:
        return np.full(wanted.shape, int(known[0]), dtype=np.int64)
    if len(known) < 2 and not any(use.closed for use in wanted.of("choice")):
        return None
    picked = rng.integers(0, len(known), wanted.shape)
    return np.array([int(value) for value in known], dtype=np.int64)[picked]


def _mask(wanted: Wanted, rng: np.random.Generator) -> Ints:
    """Rows (along the last axis) that begin with ones and go on with zeros; the first row is all ones."""
    if not wanted.shape:
        return np.ones((), dtype=np.int64)
    length = wanted.shape[-1]
    runs = np.asarray(rng.integers(min(1, length), length, wanted.shape[:-1], endpoint=True))
    runs.reshape(-1)[:1] = length
    return (np.arange(length) < runs[..., np.newaxis]).astype(np.int64)


def _mixed(wanted: Wanted, rng: np.random.Generator, low: int, high: int) -> Ints:
    """Small integers with large ones among them, as large as the operators that read them bear.

    Every fifth place is large, and the last one from the second case on, so that small tensors see one too.
    """
    amounts = {use.amount for use in wanted.of("arithmetic")}
    large = 8 if "small" in amounts else high // 4
    if "product" in amounts:
        large = min(large, math.isqrt(high) // 2)
    if "feature" in amounts:
        large = min(large, 1000)
    floor = 0 if low == 0 or "small" in amounts else -1
    small = min(8, max(large, 1))
    made = rng.integers(floor * small, small, wanted.shape, endpoint=True)
    extreme = rng.integers(floor * max(large, 1), max(large, 1), wanted.shape, endpoint=True)
    places = np.arange(math.prod(wanted.shape)).reshape(wanted.shape) % 5 == 4
    if wanted.case:
        places.reshape(-1)[-1:] = True
    return np.clip(np.where(places, extreme, made), low, high)


def _floats(wanted: Wanted, rng: np.random.Generator) -> Floats | Ints:
    if wanted.limits is not None:
        return rng.uniform(*wanted.limits, wanted.shape)
    # Indices and lengths may come as floats, which the graph casts.
    indexed = _indices(wanted, rng) if wanted.of("index", "scatter") else None
    if indexed is None and wanted.of("length"):
        indexed = _lengths(wanted, rng)
    if indexed is not None:
        return indexed
    if wanted.of("mask") or _named_mask(wanted):
        return _mask(wanted, rng)
    known = [float(value) for use in wanted.of("choice") for value in use.values if not isinstance(value, str)]
    if len(known) > 1:
        return np.asarray(rng.choice(np.array(known), wanted.shape))
    ranges = tuple(use for use in wanted.of("range") if not use.closed)
    if ranges:
        low, high = _common(ranges)
        return rng.uniform(low, max(low, high), wanted.shape)
    if re.search(r"(^|_)(scale|scales|temperature)$", wanted.spec.name.lower()):
        return rng.uniform(0.5, 1.0, wanted.shape)
    if wanted.of("scaled", "thresholds"):
        return _features(wanted, rng)
    if image_axes(wanted.spec) is not None:
        picture = _picture(wanted, rng)
        return picture if wanted.case % 2 == 0 else 2 * picture - 1
    if wanted.of("waveform"):
        return _signal(wanted, rng)
    if wanted.spec.dtype == "float8e8m0":
        return np.exp2(rng.integers(-2, 2, wanted.shape, endpoint=True).astype(np.float64))
    return rng.standard_normal(wanted.shape)


def _features(wanted: Wanted, rng: np.random.Generator) -> Floats:
    """Features about what the model was fitted to: its scaler's mean and spread, or its trees' thresholds."""
    made: Floats = rng.standard_normal(wanted.shape)
    if not wanted.shape:
        return made
    width = wanted.shape[-1]
    for use in wanted.of("scaled"):
        offsets = np.array([float(value) for value in use.values])
        scales = np.array(use.scales)
        if {offsets.size, scales.size} <= {1, width} and np.all(scales != 0):
            return np.asarray(offsets + made / scales)
    for use in wanted.of("thresholds"):
        features = np.array([int(value) for value in use.values])
        thresholds = np.array(use.scales)
        for feature in range(width):
            known = thresholds[features == feature]
            if known.size:
                # Between thresholds and a little beyond: on one exactly, rounding would decide the branch.
                spread = float(np.ptp(known)) * 0.1 or max(1.0, abs(float(known[0])) * 0.1)
                picked = rng.choice(known, wanted.shape[:-1])
                made[..., feature] = picked + spread * rng.standard_normal(wanted.shape[:-1])
    return made


def _picture(wanted: Wanted, rng: np.random.Generator) -> Floats:
    """Pictures in [0, 1]: dark digits on a bright page, unevenly lit.

    Digits, because a detector answers noise or a smooth picture with zeros, which any runtime gets right.
    """
    axes = image_axes(wanted.spec) or (-2, -1)
    height, width = (wanted.shape[axis] for axis in axes)
    others = tuple(size for axis, size in enumerate(wanted.shape) if axis not in axes)
    made: Floats = np.full((*others, height, width), 0.85)
    scale = 2 + wanted.case % 2
    for top in range(4, height - 5 * scale, 7 * scale):
        for left in range(4, width - 3 * scale, 4 * scale):
            digit = np.array(DIGITS[int(rng.integers(len(DIGITS)))], dtype=np.float64)
            made[..., top : top + 5 * scale, left : left + 3 * scale] -= 0.7 * np.kron(digit, np.ones((scale, scale)))
    rows, columns = np.linspace(0, 1, height)[:, np.newaxis], np.linspace(0, 1, width)[np.newaxis, :]
    down, across, phase = rng.uniform(-3, 3, (3, *others, 1, 1))
    made += 0.1 * np.sin(down * rows + across * columns + phase)
    return np.asarray(np.moveaxis(np.clip(made, 0, 1), (-2, -1), axes))


def _signal(wanted: Wanted, rng: np.random.Generator) -> Floats:
    """Signals in about [-1, 1] along the last axis: noise without its highest frequencies, each row softer by half.

    White noise drives a model trained on sound into saturation, where its answer no longer depends on its input.
    """
    if not wanted.shape:
        return np.asarray(rng.uniform(-0.5, 0.5, ()))
    length = wanted.shape[-1]
    white = rng.standard_normal((*wanted.shape[:-1], length + 15))
    total = np.cumsum(np.concatenate([np.zeros((*wanted.shape[:-1], 1)), white], axis=-1), axis=-1)
    smooth = (total[..., 16:] - total[..., :-16]) / 4
    loudness = 0.3 * 0.5 ** (np.arange(math.prod(wanted.shape[:-1])) % 4 + wanted.case % 2)
    return np.asarray(smooth * loudness.reshape(*wanted.shape[:-1], 1))


def _common(uses: tuple[Use, ...]) -> tuple[float, float]:
    """Where all ranges meet; the first where they don't."""
    low, high = max(use.low for use in uses), min(use.high for use in uses)
    return (low, high) if low <= high else (uses[0].low, uses[0].high)


def _named_mask(wanted: Wanted) -> bool:
    return "mask" in wanted.spec.name.lower()


def dtype_range(dtype: str) -> tuple[int, int]:
    """The lowest and highest value to draw for an integer dtype."""
    bits = int(dtype.lstrip("uint"))
    high = 2 ** (bits if dtype.startswith("u") else bits - 1) - 1
    # Generators draw int64; half of uint64's range is out of reach and not missed.
    return (0 if dtype.startswith("u") else -high - 1), min(high, 2**63 - 1)
