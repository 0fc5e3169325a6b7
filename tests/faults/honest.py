"""What is honest must raise no alarm: the same model computed in another order, and how small a fault is seen.

The comparator is asked directly, with ONNX Runtime computing both sides: what it tells apart doesn't depend on the kind
of bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from packager import parity
from packager.golden_synth import synthesise
from packager.model import open_model
from packager.policy import rules_for
from tests.faults.models import witness

Array = npt.NDArray[Any]
Answers = Mapping[str, Array]

SMALLEST, STEPS = 1e-8, 28
"""Where the search for the smallest fault seen begins, and how many halvings it takes (of the exponent's range)."""


def session(proto: onnx.ModelProto, *, optimised: bool, threads: int = 1) -> Callable[[Answers], Answers]:
    """A function that answers with ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    made = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in made.get_outputs()]
    return lambda feeds: dict(zip(names, made.run(names, dict(feeds)), strict=True))


def reordered(seed: int) -> onnx.ModelProto:
    """The witness with the inner dimension of its linear layers permuted: equal on paper, summed in another order."""
    rng = np.random.default_rng(seed)
    proto = witness()
    order = rng.permutation(10)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.name in ("w3", "b3"):
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array[..., order]), tensor.name))
        elif tensor.name in ("w4", "w5"):
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array[order]), tensor.name))
    return proto


def honest(folder: Path, seeds: int) -> Iterator[tuple[str, bool, str]]:
    """Per seed: the witness optimised, on two threads and summed in another order, each with whether it passes."""
    path = folder / "witness.onnx"
    onnx.save(witness(), path)
    model = open_model(path)
    rules = rules_for("default-1", "fp32", model)
    reference = session(witness(), optimised=False)
    others = {
        "optimised": session(witness(), optimised=True),
        "two threads": session(witness(), optimised=True, threads=2),
    }
    for seed in range(seeds):
        feeds = synthesise(model, cases=1, seed=seed).cases[0].inputs
        expected = reference(feeds)
        answers = {**others, "summed in another order": session(reordered(seed), optimised=False)}
        for name, answer in answers.items():
            result = parity.compare_case(f"seed {seed}", expected, answer(feeds), rules)
            yield f"{name}, seed {seed}", result.passed, "; ".join(result.reasons)


@dataclass(frozen=True)
class Threshold:
    """The smallest relative error of one layer's weights that a rule sees; ``None`` where it sees none up to 1."""

    rule: str
    smallest: float | None


def thresholds(folder: Path) -> list[Threshold]:
    """For each of our precisions, and rules that are usual elsewhere: the smallest fault seen.

    The fault is ``w2 * (1 + e)`` in the witness; ``e`` is searched between 1e-8 and 1.
    """
    path = folder / "witness.onnx"
    onnx.save(witness(), path)
    model = open_model(path)
    feeds = synthesise(model, cases=1, seed=0).cases[0].inputs
    expected = session(witness(), optimised=False)(feeds)

    def policy(precision: str) -> Callable[[Answers], bool]:
        rules = rules_for("default-1", precision, model)
        return lambda answers: not parity.compare_case("", expected, answers, rules).passed

    def each(test: Callable[[Array, Array], bool]) -> Callable[[Answers], bool]:
        return lambda answers: not all(test(answers[name], expected[name]) for name in expected)

    tests = {
        **{f"packager, {precision}": policy(precision) for precision in ("fp32", "fp16", "int8", "int4")},
        "numpy.allclose (rtol 1e-5, atol 1e-8)": each(lambda one, other: bool(np.allclose(one, other))),
        "max abs 1e-3": each(lambda one, other: bool(np.max(np.abs(one - other)) <= 1e-3)),
        "PSNR 30 dB": each(lambda one, other: _psnr(one, other) >= 30),
    }  # fmt: skip
    return [Threshold(name, _smallest(sees, feeds)) for name, sees in tests.items()]


def _psnr(one: Array, other: Array) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    peak = float(np.max(np.abs(other)))
    return float("inf") if error == 0 else 10 * float(np.log10(peak**2 / error))


def _smallest(sees: Callable[[Answers], bool], feeds: Answers) -> float | None:
    def seen(error: float) -> bool:
        proto = witness()
        tensor = next(each for each in proto.graph.initializer if each.name == "w2")
        made = (numpy_helper.to_array(tensor).astype(np.float64) * (1 + error)).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(made, "w2"))
        return sees(session(proto, optimised=False)(feeds))

    low, high = np.log10(SMALLEST), 0.0
    if not seen(1.0):
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(10**middle) else (middle, high)
    return float(10**high)
