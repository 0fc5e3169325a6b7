"""The judge: how far outputs are from their goldens, and whether that is near enough.

This file is copied as it is into every bundle, so that a partner's self-check judges exactly as the build did. It
needs Python's standard library and numpy; reading goldens also needs safetensors, and ml_dtypes for bfloat16 and
smaller types. It imports nothing else of its surroundings and raises only :class:`GoldenFileError`.

What may never pass, whatever the tolerance: another rank, shape or dtype, a missing or an extra output, a NaN or an
infinity on one side only, and a case in which no value was compared at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Json = dict[str, object]

GOLDEN_SCHEMA, VERDICT_SCHEMA = "packager.golden/1", "packager.verdict/1"
MAX_JSON_BYTES = 64 * 2**20
"""A larger golden.json is refused: names and strings only, numbers are in golden.safetensors."""
STEPS = 64
"""An absolute bound is never tighter than this many float steps at the output's magnitude: no honest sum of a few
thousand float32 products is."""
ROUNDING_SQNR = 20.0
"""dB. Differences excused as rounding must still leave the signal ten times larger than they are."""
OUTSIZED, GAP = 1e6, 2.0**16
"""Values from 1e6 up that lie this factor above all others are masks (-1e9, FLT_MAX): judged apart from the others."""
TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. A difference up to it is no difference: runtimes may flush subnormals to zero."""
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float8e4m3fn": 2.0**-3, "float8e4m3fnuz": 2.0**-3,
       "float8e5m2": 2.0**-2, "float8e5m2fnuz": 2.0**-2, "float4e2m1": 0.5, "float8e8m0": 1.0}  # fmt: skip
FLOAT32_EPS = 2.0**-23
"""Step at 1.0 of float32, also used for float64 and complex outputs: few runtimes compute wider than float32."""
SPELLED = {"float8_e4m3fn": "float8e4m3fn", "float8_e4m3fnuz": "float8e4m3fnuz", "float8_e5m2": "float8e5m2",
           "float8_e5m2fnuz": "float8e5m2fnuz", "float4_e2m1fn": "float4e2m1",
           "float8_e8m0fnu": "float8e8m0"}  # fmt: skip
STORED = {"bfloat16": "uint16", "float8e4m3fn": "uint8", "float8e4m3fnuz": "uint8", "float8e5m2": "uint8",
          "float8e5m2fnuz": "uint8", "float8e8m0": "uint8", "float4e2m1": "uint8", "int4": "int8", "uint4": "uint8",
          "int2": "int8", "uint2": "uint8", "complex64": "uint64", "complex128": "uint64"}  # fmt: skip
"""How golden.safetensors keeps what it can't hold: floats and complex as raw bits (complex128 as pairs), small
integers as values. Every other numeric dtype is kept as it is."""
TAGS = {"bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
        "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64"}  # fmt: skip
"""numpy's names to those of the safetensors format."""


class GoldenFileError(ValueError):
    """golden.json or golden.safetensors is missing, damaged or not of this format; the message names file and place."""


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be off; ``None`` means not judged. All finite; none negative but a cosine.
    Cosine and top1 are at most 1.

    ``max_abs``: largest absolute difference. ``scaled``: that difference over the output's largest magnitude.
    ``cosine``: least cosine similarity. ``top1``: least share of rows whose highest score is at the same place.

    Raises:
        ValueError: a bound is no such number.
    """

    max_abs: float | None = None
    scaled: float | None = None
    cosine: float | None = None
    top1: float | None = None

    def __post_init__(self) -> None:
        for name, bound in asdict(self).items():
            if bound is not None:
                check_bound(name, bound, -1.0 if name == "cosine" else 0.0, 1.0 if name in ("cosine", "top1") else None)

    @classmethod
    def from_dict(cls, bounds: Mapping[str, object]) -> Tolerance:
        """From plain JSON. Raises ValueError for an unknown bound or a value out of range."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(bounds) - known):
            raise ValueError(f"unknown bound {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(
            **{name: None if bound is None else check_bound(name, bound, -1.0) for name, bound in bounds.items()}
        )

    def to_dict(self) -> dict[str, float | None]:
        """As plain JSON, all four bounds."""
        return asdict(self)


def check_bound(name: str, bound: object, least: float = 0.0, most: float | None = None) -> float:
    """The bound as a float. Raises ValueError unless it is a finite number from ``least`` to ``most``."""
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        raise ValueError(f"{name} must be a number, not {bound!r}")
    bound = bound if abs(bound) < 1e300 else math.inf
    if not (math.isfinite(bound) and bound >= least and (most is None or bound <= most)):
        wanted = f"{least:g} or more" if most is None else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} must be {wanted}, not {bound!r}")
    return float(bound)


@dataclass(frozen=True)
class OutputRule:
    """How one output is judged. ``score_axis`` is the axis of classes where the output is score-like.

    ``rounding`` is what counts as rounding in an output that a Sigmoid or Softmax made: it comes from arithmetic in
    [0, 1], so its steps are those of 1.0 however small its largest value is. 0 for all others.
    """

    tolerance: Tolerance
    score_axis: int | None = None
    rounding: float = 0.0


@dataclass(frozen=True)
class Metrics:
    """What was measured on one output. Numbers that don't apply are ``None``.

    ``compared`` counts compared values: of floats only the finite ones, of complex numbers each part.
    ``mismatches`` counts unequal values of exact dtypes (integers, bools, strings). ``sqnr_db`` is
    10 log10(sum expected^2 / sum difference^2). ``worst_index`` is where the largest difference is.
    """

    expected_shape: tuple[int, ...]
    actual_shape: tuple[int, ...]
    expected_dtype: str
    actual_dtype: str
    elements: int
    compared: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    scaled: float | None = None
    rmse: float | None = None
    cosine: float | None = None
    sqnr_db: float | None = None
    top1: float | None = None
    nan_expected: int = 0
    nan_actual: int = 0
    inf_expected: int = 0
    inf_actual: int = 0
    mismatches: int | None = None
    worst_index: tuple[int, ...] | None = None

    def to_dict(self) -> Json:
        """As strict JSON: infinities become the strings ``inf`` and ``-inf``, NaN becomes ``nan``, tuples lists."""
        return {each.name: json_safe(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True)
class OutputResult:
    """The judgement of one output; ``reasons`` says why it failed. No metrics where one side is missing."""

    name: str
    passed: bool
    reasons: tuple[str, ...]
    metrics: Metrics | None


@dataclass(frozen=True)
class CaseResult:
    """The judgement of one golden case: passed if every output did and something was compared."""

    name: str
    passed: bool
    reasons: tuple[str, ...]
    outputs: tuple[OutputResult, ...] = ()


def failed_case(name: str, reason: str) -> CaseResult:
    """The judgement of a case that couldn't be run: failed, with nothing compared."""
    return CaseResult(name, False, (reason,))


@dataclass(frozen=True)
class Extreme:
    """The worst value of one metric, and where it was."""

    case: str
    output: str
    value: float


@dataclass(frozen=True)
class Overall:
    """The judgement of all cases, with the worst of each metric (``None`` where none was measured)."""

    passed: bool
    reasons: tuple[str, ...]
    max_abs: Extreme | None
    scaled: Extreme | None
    cosine: Extreme | None
    top1: Extreme | None


def json_safe(value: object) -> object:
    """Numbers JSON lacks become ``inf``, ``-inf`` and ``nan``; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def dtype_name(array: Array) -> str:
    """The ONNX-style name of an array's dtype: ``string`` for object, unicode and bytes arrays."""
    return "string" if array.dtype.kind in "OUS" else SPELLED.get(array.dtype.name, array.dtype.name)


def compare_output(
    name: str,
    expected: Array,
    actual: Array,
    tolerance: Tolerance,
    score_axis: int | None = None,
    *,
    rounding: float = 0.0,
) -> OutputResult:
    """Judge one output: rank, shape and dtype first, then values; any shape, any dtype of ONNX.

    Floats are compared in float64. A float output passes if NaN and signed infinities are at the same places and
    - ``max|d| <= max(max_abs, 64 eps M)``, M the largest expected magnitude, eps the dtype's step (at least
      float32's): a tighter absolute bound than the dtype can hold at that magnitude would be a false alarm;
    - ``max|d| / M <= scaled``, so that outputs of 1e-6 aren't passed by the absolute bound; where M is 0, any
      difference above the smallest normal float32 fails;
    - cosine and top-1 agreement are high enough. A row whose other choice is within ``scaled * M`` of the highest
      expected score is a tie, not a disagreement.
    ``scaled`` and ``cosine`` are excused where ``max|d| <= rounding`` and the SQNR is 20 dB or more.
    """
    expected, actual = np.asarray(expected), np.asarray(actual)
    kinds = dtype_name(expected), dtype_name(actual)
    metrics: Json = {"expected_shape": expected.shape, "actual_shape": actual.shape, "expected_dtype": kinds[0],
                     "actual_dtype": kinds[1], "elements": expected.size}  # fmt: skip
    reasons: list[str] = []
    if expected.shape != actual.shape:
        what = "rank" if expected.ndim != actual.ndim else "shape"
        reasons.append(f"{what} differs: expected {list(expected.shape)}, got {list(actual.shape)}")
    if kinds[0] != kinds[1]:
        reasons.append(f"dtype differs: expected {kinds[0]}, got {kinds[1]}")
    if not reasons and expected.size:
        if kinds[0] == "string" or expected.dtype.kind in "biu" or kinds[0] in ("int4", "uint4", "int2", "uint2"):
            reasons = _judge_exact(expected, actual, kinds[0], metrics)
        elif expected.dtype.kind in "fc" or kinds[0] in EPS:
            reasons = _judge_floats(expected, actual, OutputRule(tolerance, score_axis, rounding), metrics)
        else:
            reasons.append(f"values of dtype {kinds[0]} can't be compared")
    return OutputResult(name, not reasons, tuple(reasons), Metrics(**metrics))  # type: ignore[arg-type]


def _judge_exact(expected: Array, actual: Array, kind: str, metrics: Json) -> list[str]:
    if kind == "string":
        pairs = zip(expected.ravel().tolist(), actual.ravel().tolist(), strict=True)
        unequal = np.array([_text(one) != _text(other) for one, other in pairs]).reshape(expected.shape)
    else:
        unequal = np.asarray(expected != actual)
    wrong = int(np.count_nonzero(unequal))
    metrics |= {"compared": expected.size, "mismatches": wrong}
    if not wrong:
        return []
    place = tuple(int(axis) for axis in np.argwhere(unequal)[0])
    metrics["worst_index"] = place
    if kind not in ("string", "bool"):
        metrics["max_abs"] = float(np.abs(expected[unequal].astype(np.float64) - actual[unequal].astype(float)).max())
    return [f"{wrong} of {expected.size} {kind} values differ, first at {list(place)}: "
            f"expected {expected[place]!s:.80}, got {actual[place]!s:.80}"]  # fmt: skip


def _text(value: object) -> object:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _parts(array: Array) -> Floats:
    """As float64; complex numbers as pairs on a new last axis."""
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1).astype(np.float64)
    return array.astype(np.float64)


def _judge_floats(expected: Array, actual: Array, rule: OutputRule, metrics: Json) -> list[str]:
    one, other = _parts(expected), _parts(actual)
    for key, test in (("nan", np.isnan), ("inf", np.isinf)):
        metrics[f"{key}_expected"] = int(test(one).sum())
        metrics[f"{key}_actual"] = int(test(other).sum())
    reasons = _nonfinite(one, other)
    finite = np.isfinite(one) & np.isfinite(other)
    metrics["compared"] = int(finite.sum())
    if not finite.any():
        return [*reasons, "nothing compared: no position is finite on both sides"]
    tolerance = rule.tolerance
    judged = [tolerance.max_abs, tolerance.scaled, tolerance.cosine]
    if all(bound is None for bound in judged) and (tolerance.top1 is None or rule.score_axis is None):
        reasons.append("nothing judged: the tolerance of this output sets no bound that applies to it")
    with np.errstate(all="ignore"):
        difference = np.where(finite, np.abs(one - other), 0.0)
        e, a, d = one[finite], other[finite], difference[finite]
        eps = max(FLOAT32_EPS, EPS.get(dtype_name(expected), 0.0))
        groups = [_Group.of(e[mask], a[mask], d[mask]) for mask in _groups(e)]
        relative = np.divide(d, np.abs(e), out=np.where(d > 0, np.inf, 0.0), where=e != 0)
        worst = np.unravel_index(int(difference.argmax()), difference.shape)[: expected.ndim]
        metrics |= {"max_abs": float(d.max()), "max_rel": float(relative.max()), "rmse": float(np.sqrt(np.mean(d**2))),
                    "scaled": max(group.scaled for group in groups), "cosine": min(group.cosine for group in groups),
                    "sqnr_db": min(group.sqnr for group in groups),
                    "worst_index": tuple(int(axis) for axis in worst)}  # fmt: skip
    for group in groups:
        reasons += [reason for reason in _judge_group(group, rule, eps) if reason not in reasons]
    if rule.score_axis is not None and expected.dtype.kind != "c":
        tie = (tolerance.scaled or 0.0) * groups[0].magnitude
        reasons += _judge_top1(one, other, rule, tie, metrics)
    return reasons


def _nonfinite(one: Floats, other: Floats) -> list[str]:
    reasons = []
    tests: tuple[tuple[str, Callable[[Floats], npt.NDArray[np.bool_]]], ...] = (
        ("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf),
    )  # fmt: skip
    for what, test in tests:
        sided = test(one) != test(other)
        if sided.any():
            place = [int(axis) for axis in np.argwhere(sided)[0]]
            reasons.append(f"{what} on one side only at {int(sided.sum())} positions, first at {place}")
    return reasons


def _groups(expected: Floats) -> list[npt.NDArray[np.bool_]]:
    """Masks of the values to be judged by one magnitude: all, or ordinary ones first and outsized ones apart.

    Logits masked with -1e9 would otherwise be compared on the scale of 1e9, which passes anything.
    """
    size = np.abs(expected)
    if size.max() >= OUTSIZED:
        ordered = np.sort(size[size > 0])
        jumps = np.flatnonzero((ordered[1:] >= OUTSIZED) & (ordered[1:] / GAP >= ordered[:-1]))
        if jumps.size:
            return [size < ordered[jumps[0] + 1], size >= ordered[jumps[0] + 1]]
    return [np.ones(size.shape, np.bool_)]


@dataclass(frozen=True)
class _Group:
    """Metrics of the values judged by one magnitude."""

    magnitude: float
    max_abs: float
    scaled: float
    cosine: float
    sqnr: float

    @classmethod
    def of(cls, expected: Floats, actual: Floats, difference: Floats) -> _Group:
        magnitude, most = float(np.abs(expected).max()), float(difference.max())
        if most == 0:
            return cls(magnitude, 0.0, 0.0, 1.0, math.inf)
        scaled = most / magnitude if magnitude else math.inf
        other = float(np.abs(actual).max())
        if not magnitude or not other:
            return cls(magnitude, most, scaled, 0.0, 0.0 if magnitude else -math.inf)
        e, a, d = expected / magnitude, actual / other, difference / magnitude
        cosine = float(np.clip(e @ a / np.sqrt((e @ e) * (a @ a)), -1.0, 1.0))
        noise = float(d @ d)
        if not noise or noise == math.inf:
            return cls(magnitude, most, scaled, cosine, -math.inf if noise else math.inf)
        return cls(magnitude, most, scaled, cosine, 10 * math.log10(float(e @ e) / noise))


def _judge_group(group: _Group, rule: OutputRule, eps: float) -> list[str]:
    if group.max_abs <= TINY:
        return []
    reasons, tolerance = [], rule.tolerance
    if tolerance.max_abs is not None:
        bound = max(tolerance.max_abs, STEPS * eps * group.magnitude)
        if not group.max_abs <= bound:
            reasons.append(f"max abs {group.max_abs:.3g} is over {bound:.3g}")
    if group.max_abs <= rule.rounding and group.sqnr >= ROUNDING_SQNR:
        return reasons
    if tolerance.scaled is not None and not group.scaled <= tolerance.scaled:
        reasons.append(f"scaled error {group.scaled:.3g} is over {tolerance.scaled:.3g}")
    if tolerance.cosine is not None and not group.cosine >= tolerance.cosine:
        reasons.append(f"cosine {group.cosine:.6f} is under {tolerance.cosine:.6g}")
    return reasons


def _judge_top1(one: Floats, other: Floats, rule: OutputRule, tie: float, metrics: Json) -> list[str]:
    axis = rule.score_axis
    if axis is None or not -one.ndim <= axis < one.ndim:
        return [f"score axis {axis} doesn't exist in an output of rank {one.ndim}"]
    scores = np.moveaxis(np.where(np.isnan(one), -np.inf, one), axis, -1)
    chosen = np.moveaxis(np.where(np.isnan(other), -np.inf, other), axis, -1).argmax(axis=-1)[..., None]
    best, got = scores.max(axis=-1), np.take_along_axis(scores, chosen, axis=-1)[..., 0]
    agreement = float((got >= best - tie).mean())
    metrics["top1"] = agreement
    least = rule.tolerance.top1
    return [] if least is None or agreement >= least else [f"top-1 agreement {agreement:.4f} is under {least:.6g}"]


def compare_case(
    name: str, expected: Mapping[str, Array], actual: Mapping[str, Array], rules: Mapping[str, OutputRule],
    excluded: frozenset[str] = frozenset(),
) -> CaseResult:  # fmt: skip
    """Judge one case. ``excluded`` outputs are neither compared nor missed; any other must be on both sides."""
    results: list[OutputResult] = []
    for output in [key for key in expected if key not in excluded]:
        if output not in actual:
            results.append(OutputResult(output, False, ("the output is missing",), None))
        elif output not in rules:
            results.append(OutputResult(output, False, ("no tolerance is given for the output",), None))
        else:
            rule = rules[output]
            found = compare_output(
                output, expected[output], actual[output], rule.tolerance, rule.score_axis, rounding=rule.rounding
            )
            results.append(found)
    for output in [key for key in actual if key not in excluded and key not in expected]:
        results.append(OutputResult(output, False, ("the output is not expected",), None))
    reasons = [f"output {result.name!r}: {reason}" for result in results for reason in result.reasons]
    if not any(result.metrics is not None and result.metrics.compared for result in results):
        reasons.append("nothing compared")
    return CaseResult(name, not reasons, tuple(reasons), tuple(results))


def judge(cases: Sequence[CaseResult]) -> Overall:
    """Judge all cases together: every one must pass, and there must be one. Order doesn't matter to the result."""
    reasons = [f"case {case.name!r}: {reason}" for case in cases for reason in case.reasons]
    if not any(output.metrics is not None and output.metrics.compared for case in cases for output in case.outputs):
        reasons.append("nothing compared in any case" if cases else "there are no cases")
    passed = not reasons and all(case.passed for case in cases)
    worst = (_worst(cases, "max_abs", 1), _worst(cases, "scaled", 1), _worst(cases, "cosine", -1))
    return Overall(passed, tuple(reasons), *worst, _worst(cases, "top1", -1))


def _worst(cases: Sequence[CaseResult], metric: str, sign: int) -> Extreme | None:
    found = [(sign * value, case.name, output.name, value) for case in cases for output in case.outputs
             if (value := getattr(output.metrics, metric, None)) is not None]  # fmt: skip
    worst = max(found, default=None)
    return None if worst is None else Extreme(worst[1], worst[2], worst[3])


def verdict_cases(results: Sequence[CaseResult]) -> list[Json]:
    """Cases, outputs and metrics as strict JSON."""
    return [
        {
            "name": case.name,
            "passed": case.passed,
            "reasons": list(case.reasons),
            "outputs": [
                {
                    "name": output.name,
                    "passed": output.passed,
                    "reasons": list(output.reasons),
                    "metrics": None if output.metrics is None else output.metrics.to_dict(),
                }
                for output in case.outputs
            ],
        }
        for case in results
    ]


def verdict_document(
    results: Sequence[CaseResult], *, level: str, level_reason: str = "", runtime: Mapping[str, object],
    host: Mapping[str, object], policy: Mapping[str, object], excluded: Mapping[str, str] | None = None,
    failures: Sequence[str] = (), **identity: str,
) -> Json:  # fmt: skip
    """The verdict, as strict JSON: what was executed, where, and how far each output was from its golden.

    ``failures`` are reasons beside the comparison (a damaged file, a level too low): any of them fails the verdict.
    ``identity`` adds fields such as ``target``, ``kind``, ``name``, ``version`` and ``bundle_digest``.
    """
    overall = judge(results)
    worst = {
        metric: None if extreme is None else {key: json_safe(value) for key, value in asdict(extreme).items()}
        for metric, extreme in (("max_abs", overall.max_abs), ("scaled", overall.scaled),
                                ("cosine", overall.cosine), ("top1", overall.top1))
    }  # fmt: skip
    return {
        "schema": VERDICT_SCHEMA,
        "status": "passed" if overall.passed and not failures else "failed",
        **identity,
        "level": level,
        "level_reason": level_reason,
        "runtime": dict(runtime),
        "host": {key: json_safe(value) for key, value in host.items()},
        "policy": dict(policy),
        "excluded": [{"name": name, "reason": why} for name, why in (excluded or {}).items()],
        "cases": verdict_cases(results),
        "worst": worst,
        "failures": [*failures, *overall.reasons],
    }


def verdict_text(document: Mapping[str, object]) -> str:
    """The verdict as it is written: indented, LF, ending in a newline."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class StoredCase:
    """One case as stored: where the inputs came from, what made the outputs, and both by name.

    ``transformed`` are the answers of the model that was given to the target, empty where those of the reference say
    enough.
    """

    name: str
    source: str
    outputs_from: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    transformed: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Golden:
    """All that golden.json and golden.safetensors say. Excluded outputs have a reason, no rule and no values.

    ``transformed_rules`` say how near a bundle must be to the transformed model; no case has answers without them.
    """

    policy: str
    precision: str
    rules: Mapping[str, OutputRule]
    excluded: Mapping[str, str]
    cases: tuple[StoredCase, ...]
    transformed_rules: Mapping[str, OutputRule] = field(default_factory=dict)

    @property
    def excluded_names(self) -> frozenset[str]:
        """The outputs that aren't judged."""
        return frozenset(self.excluded)

    def judge(self, case: StoredCase, actual: Mapping[str, Array]) -> CaseResult:
        """Judge a bundle's outputs of one case against the reference's, and against the transformed model's where the
        goldens hold them: what quantisation may cost is no room for a runtime's mistakes.

        The metrics are those against the reference.
        """
        found = compare_case(case.name, case.outputs, actual, self.rules, self.excluded_names)
        if not case.transformed:
            return found
        near = compare_case(case.name, case.transformed, actual, self.transformed_rules, self.excluded_names)
        reasons = (*found.reasons, *(f"against the transformed model: {reason}" for reason in near.reasons))
        return replace(found, passed=not reasons, reasons=reasons)


def read_golden(folder: Path) -> Golden:
    """Read ``golden.json`` and ``golden.safetensors`` of a folder, trusting neither.

    Sizes are checked against the payload's header before anything is allocated. Every case must hold exactly the
    outputs that have a rule, and every tensor of the payload must be named.

    Raises:
        GoldenFileError: anything is missing, malformed or doesn't fit; the message names the file and the place.
    """
    file = folder / "golden.json"
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise GoldenFileError(f"{file}: larger than {MAX_JSON_BYTES} bytes")
        document = json.loads(file.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise GoldenFileError(f"{file}: can't be read: {error.strerror}") from error
    except GoldenFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise GoldenFileError(f"{file}: not JSON: {error}") from error
    top = _Place(file, "the document", document)
    if (schema := top.text("schema")) != GOLDEN_SCHEMA:
        raise top.error(f"schema is {schema!r}, this version reads {GOLDEN_SCHEMA!r}")
    rules, near = _rules(top, "outputs"), _rules(top, "transformed", optional=True)
    excluded = {item.text("name"): item.text("reason") for item in top.items("excluded")}
    if len(excluded) != len(top.items("excluded")) or set(rules) & set(excluded):
        raise top.error("an output is listed twice")
    cases = _read_cases(top, folder / "golden.safetensors")
    if not cases:
        raise top.error("there are no cases")
    for number, case in enumerate(cases):
        for values, judged in ((case.outputs, rules), (case.transformed, near)):
            if odd := sorted(set(values) ^ set(judged)):
                what = "has no rule" if odd[0] in values else "has no expected values"
                raise top.error(f"cases[{number}]: output {odd[0]!r} {what}")
    return Golden(top.text("policy"), top.text("precision"), rules, excluded, cases, near)


def _rules(top: _Place, key: str, *, optional: bool = False) -> dict[str, OutputRule]:
    items = top.items(key, optional=optional)
    rules = {item.text("name"): _rule(item) for item in items}
    if len(rules) != len(items):
        raise top.error("an output is listed twice")
    return rules


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


@dataclass(frozen=True)
class _Place:
    """A JSON value and where it is, to take typed members from."""

    file: Path
    where: str
    value: object

    def error(self, message: str) -> GoldenFileError:
        return GoldenFileError(f"{self.file}: {self.where}: {message}")

    def get(self, key: str) -> object:
        if not isinstance(self.value, dict):
            raise self.error("must be an object")
        if key not in self.value:
            raise self.error(f"key {key!r} is missing")
        return self.value[key]

    def text(self, key: str) -> str:
        if not isinstance(found := self.get(key), str):
            raise self.error(f"{key!r} must be a text, not {found!r:.60}")
        return found

    def items(self, key: str, *, optional: bool = False) -> list[_Place]:
        if optional and isinstance(self.value, dict) and key not in self.value:
            return []
        if not isinstance(found := self.get(key), list):
            raise self.error(f"{key!r} must be a list")
        prefix = "" if self.where == "the document" else f"{self.where}."
        return [_Place(self.file, f"{prefix}{key}[{number}]", item) for number, item in enumerate(found)]


def _rule(place: _Place) -> OutputRule:
    bounds, axis = place.get("tolerance"), place.get("score_axis")
    if not isinstance(bounds, dict):
        raise place.error("'tolerance' must be an object")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise place.error("'score_axis' must be a whole number or null")
    try:
        return OutputRule(Tolerance.from_dict(bounds), axis, check_bound("rounding", place.get("rounding")))
    except ValueError as error:
        raise place.error(str(error)) from error


class _Header(Protocol):
    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _Store(Protocol):
    """What is used of an opened safetensors file."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Header: ...

    def get_tensor(self, name: str) -> Array: ...


def _read_cases(top: _Place, payload: Path) -> tuple[StoredCase, ...]:
    from safetensors import SafetensorError, safe_open

    used: set[str] = set()
    try:
        with safe_open(payload, framework="numpy") as store:
            cases = tuple(
                StoredCase(
                    case.text("name"), case.text("source"), case.text("outputs_from"),
                    _read_tensors(case, "inputs", store, payload, used),
                    _read_tensors(case, "outputs", store, payload, used),
                    _read_tensors(case, "transformed", store, payload, used, optional=True),
                )
                for case in top.items("cases")
            )  # fmt: skip
            if unnamed := sorted(set(store.keys()) - used):
                raise GoldenFileError(f"{payload}: tensor {unnamed[0]!r} is named nowhere in golden.json")
    except (OSError, SafetensorError) as error:
        raise GoldenFileError(f"{payload}: can't be read: {error}") from error
    return cases


def _read_tensors(
    case: _Place, key: str, store: _Store, payload: Path, used: set[str], *, optional: bool = False
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for place in case.items(key, optional=optional):
        name = place.text("name")
        if name in found:
            raise place.error(f"{name!r} is listed twice")
        found[name] = _read_tensor(place, store, payload, used)
    return found


def _read_tensor(place: _Place, store: _Store, payload: Path, used: set[str]) -> Array:
    kind, dims = place.text("dtype"), place.get("shape")
    if not isinstance(dims, list) or len(dims) > 32 or not all(type(dim) is int and 0 <= dim < 2**48 for dim in dims):
        raise place.error("'shape' must be a list of at most 32 sizes")
    shape = tuple(dims)
    if kind == "string":
        return _read_strings(place, shape)
    key, stored = place.text("tensor"), STORED.get(kind, kind)
    if stored not in TAGS:
        raise place.error(f"unknown dtype {kind!r}")
    if key not in store.keys():  # noqa: SIM118 - the handle is no mapping
        raise GoldenFileError(f"{payload}: tensor {key!r} is missing ({place.where} of golden.json)")
    used.add(key)
    header = store.get_slice(key)
    wanted = [*shape, 2] if kind == "complex128" else list(shape)
    if header.get_dtype() != TAGS[stored] or list(header.get_shape()) != wanted:
        raise GoldenFileError(
            f"{payload}: tensor {key!r} is {header.get_dtype()}{header.get_shape()}, but {place.where} of golden.json "
            f"makes it {TAGS[stored]}{wanted}"
        )
    return _unstored(place, store.get_tensor(key), kind, shape)


def _read_strings(place: _Place, shape: tuple[int, ...]) -> Array:
    texts = place.get("strings")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise place.error("'strings' must be a list of texts")
    if len(texts) != math.prod(shape):
        raise place.error(f"shape {list(shape)} needs {math.prod(shape)} strings, there are {len(texts)}")
    made = np.empty(len(texts), dtype=object)
    made[:] = texts
    return made.reshape(shape)


def _unstored(place: _Place, array: Array, kind: str, shape: tuple[int, ...]) -> Array:
    """The array of dtype ``kind`` from what the payload holds for it (see :data:`STORED`)."""
    if kind not in STORED:
        return array
    if kind.startswith("complex"):
        return array.view(kind).reshape(shape)
    try:
        import ml_dtypes
    except ImportError as error:
        raise place.error(f"dtype {kind} needs the Python package ml_dtypes (pip install ml_dtypes)") from error
    spelled = {onnx: numpy for numpy, onnx in SPELLED.items()}.get(kind, kind)
    dtype = np.dtype(getattr(ml_dtypes, spelled))
    if "int" not in kind:
        return array.view(dtype)
    made: Array = array.astype(dtype)
    if not np.array_equal(made.astype(array.dtype), array):
        raise place.error(f"a value doesn't fit {kind}")
    return made
