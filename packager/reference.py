"""The reference run: what the original model answers, as far as anybody can say.

ONNX Runtime's CPU provider without graph optimisation runs the untouched file, in a child process, twice. A model
whose integer arithmetic would saturate on x86 without VNNI runs with ``session.x64quantprecision=1``, which takes
effect only from the EXTENDED optimisation level up (in bodies of If and Loop: :mod:`packager.transform_exact_int8`).
Outputs that differ between the two runs, or that a random operator reaches, can't be golden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packager import golden_formats, golden_store, ort_arrays, parity
from packager.checking import static_hazards
from packager.errors import GoldenError, ModelError
from packager.golden_choice import Draw, further, has_choices
from packager.golden_synth import candidates, synthesise
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.hazards import Hazard, constant_tensors, draws
from packager.model import Model, Signature, open_model
from packager.parity import OutputRule
from packager.policy import rules_for
from packager.probing import check_declared, probe
from packager.transform_exact_int8 import exact_form
from packager.witness import disputes

if TYPE_CHECKING:
    import onnxruntime as ort

LARGE_BYTES = 1 << 29
PROBED_SECONDS = 10.0
"""A model whose run takes longer isn't run at other sizes than those of its goldens."""


@dataclass(frozen=True)
class SynthesisSettings:
    """How inputs are made where none are given (see :func:`packager.golden_synth.synthesise`)."""

    cases: int = 3
    seed: int = 0
    dims: tuple[tuple[str, int], ...] = ()
    ranges: tuple[tuple[str, tuple[float, float]], ...] = ()


@dataclass(frozen=True)
class ReferenceJob:
    """Input of :func:`answer`: the model, golden files (or ``None`` to synthesise), where the result goes.

    ``exclude`` names outputs that are not compared; ``policy`` and ``precision`` judge the artifact against outputs
    that the goldens bring along. ``pinned`` names open dimensions that no target leaves open. ``thorough`` scores
    synthesised cases by mutants and looks for better ones even where the model has nothing to choose.
    """

    model: Path
    goldens: Path | None
    synthesis: SynthesisSettings
    exclude: tuple[str, ...]
    allow_nan: bool
    policy: str
    precision: str
    out: Path
    pinned: tuple[str, ...] = ()
    thorough: bool = False


@dataclass(frozen=True)
class ArtifactParity:
    """The reference run against the source framework's own outputs: the worst over all outputs and cases."""

    passed: bool
    max_abs: float | None
    tolerance: float | None
    cases: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """Result of :func:`answer`; the goldens with the reference's outputs lie in the job's ``out`` folder.

    ``hazards`` are what onnx itself says of the model, and what only running it shows.
    """

    runtime: str
    version: str
    settings: str
    cases: int
    source: str
    artifact: ArtifactParity | None
    excluded: tuple[tuple[str, str], ...]
    hazards: tuple[Hazard, ...] = ()


def golden_inputs(model: Model, job: ReferenceJob) -> Iterator[GoldenSet]:
    """The golden inputs to try, best first: one set where files are given, else a set per candidate of dim sizes.

    Raises:
        GoldenError: the files don't fit the model, or nothing can be synthesised for it.
    """
    if job.goldens is not None:
        exclude = frozenset(job.exclude)
        yield golden_formats.read_goldens(job.goldens, model.signature, allow_nan=job.allow_nan, exclude=exclude)
        return
    settings = job.synthesis
    ranges = dict(settings.ranges)
    yield synthesise(model, cases=settings.cases, seed=settings.seed, dims=dict(settings.dims), ranges=ranges)
    for dims in candidates(model, dims=dict(settings.dims)):
        yield synthesise(model, cases=settings.cases, seed=settings.seed, dims=dims, ranges=ranges)


def answer(job: ReferenceJob) -> Reference:
    """Run the reference (in the process that calls this) and write the completed goldens to ``job.out``.

    Raises:
        ModelError: ONNX Runtime can't load or run the model, or an output is not deterministic.
        GoldenError: the goldens don't fit the model, or hold NaN.
    """
    model = open_model(job.model)
    tensors = [spec.name for spec in model.signature.outputs if spec.kind == "tensor"]
    excluded = dict.fromkeys(job.exclude, "excluded by the manifest")
    for name in job.exclude:
        if name not in {spec.name for spec in model.signature.outputs}:
            raise GoldenError(f"excluded output '{name}' is no output of the model", f"outputs: {', '.join(tensors)}")
    for spec in model.signature.outputs:
        if spec.kind != "tensor":
            excluded.setdefault(spec.name, f"a {spec.dtype}, not a tensor")
    wanted = [name for name in tensors if name not in excluded]
    if not wanted:
        raise ModelError(f"{job.model}: no output is left to compare", "exclude fewer outputs, or export tensors")
    session = OrtSession(job.model, quantized=model.is_quantized, mapped=is_large(model))
    begun = time.monotonic()
    given = _run_first(golden_inputs(model, job), session, wanted, job.model)
    first, second = given
    seconds = (time.monotonic() - begun) / (2 * len(first))
    unstable = _unstable(first, second, model)
    if unstable:
        raise ModelError(
            f"{job.model}: not deterministic: " + "; ".join(unstable),
            'make it deterministic, or leave those outputs out: [golden] exclude = ["..."]',
        )
    _check_nan(first, job)
    for _, outputs in first:
        check_declared(model, outputs)
    _check_comparable(first)
    rules = rules_for(job.policy, job.precision, model, excluded=frozenset(excluded))
    if job.goldens is None and seconds < PROBED_SECONDS and (job.thorough or has_choices(model)):
        first += _further(model, session, first, rules, job)
    hazards = [*static_hazards(model), *(_probe(model, session, first, job) if seconds < PROBED_SECONDS else [])]
    hazards += disputes(model, job.model, first, rules, seconds)
    artifact = _artifact_parity(first, rules, frozenset(excluded))
    completed = GoldenSet(
        tuple(GoldenCase(case.name, case.inputs, outputs, case.source, "reference") for case, outputs in first)
    )
    golden_store.write(job.out, completed, rules, policy=job.policy, precision=job.precision, excluded=excluded)
    return Reference(
        runtime="ONNX Runtime",
        version=session.version,
        settings=session.settings,
        cases=len(first),
        source=first[0][0].source,
        artifact=artifact,
        excluded=tuple(sorted(excluded.items())),
        hazards=tuple(hazards),
    )


def _further(
    model: Model, session: OrtSession, answered: Answered, rules: Mapping[str, OutputRule], job: ReferenceJob
) -> Answered:
    """Cases that catch what those so far don't."""
    names = list(answered[0][1])

    def ask(case: GoldenCase) -> dict[str, Array]:
        outputs, again = (session.run(case.inputs, names, case.name) for _ in range(2))
        if unstable := _unstable([(case, outputs)], [(case, again)], model):
            raise ModelError(f"{job.model}: not deterministic: {'; '.join(unstable)}")
        _check_nan([(case, outputs)], job)
        return outputs

    settings = job.synthesis
    draw = Draw(settings.cases, settings.seed, dict(settings.dims), dict(settings.ranges))
    return further(model, job.model, answered, rules, draw, ask)


def _probe(model: Model, session: OrtSession, answered: Answered, job: ReferenceJob) -> list[Hazard]:
    names = list(answered[0][1])
    pinned = frozenset(job.pinned) | {key for key, _ in job.synthesis.dims}
    cases = [(case.inputs, outputs) for case, outputs in answered]
    return probe(model, lambda feeds: session.run(feeds, names, "of another size"), cases, pinned)


def is_large(model: Model) -> bool:
    """Whether a model's external data is better left in its files."""
    return sum(file.bytes for file in model.external) > LARGE_BYTES


Answered = list[tuple[GoldenCase, dict[str, Array]]]


def _run_first(
    sets: Iterator[GoldenSet], session: OrtSession, wanted: list[str], path: Path
) -> tuple[Answered, Answered]:
    """Run the first set that the model takes, twice."""
    failure: ModelError | None = None
    for goldens in sets:
        try:
            first = [(case, session.run(case.inputs, wanted, case.name)) for case in goldens.cases]
            second = [(case, session.run(case.inputs, wanted, case.name)) for case in goldens.cases]
            return first, second
        except ModelError as error:
            failure = failure or error
    if failure is None:
        raise GoldenError(f"{path}: no golden cases")
    raise failure


class OrtSession:
    """ONNX Runtime on the CPU, set for fidelity rather than speed. ``settings`` says how, for the record."""

    def __init__(self, path: Path, *, quantized: bool, mapped: bool = False) -> None:
        """Load the model.

        Args:
            path: the ONNX file.
            quantized: whether integer arithmetic decides the outputs (see the module's docstring).
            mapped: leave external data in the file, mapped, instead of packing copies of it for speed: for models
                that are large beside the machine's memory.

        Raises:
            ModelError: ONNX Runtime refuses it; the message is its own first line.
        """
        import onnxruntime as ort

        ort.disable_telemetry_events()
        self.version: str = ort.__version__
        self._path = path
        try:
            with exact_form(path, quantized=quantized) as exact:
                self._session = self._loaded(exact, quantized=quantized, mapped=mapped)
        except Exception as error:  # ORT's exception types are not public
            # Its optimiser fails on some models of symmetric int8. Without it, QuantizeLinear and DequantizeLinear run
            # as they are defined, in float; integer products would saturate.
            if not quantized or open_model(path).multiplies_integers:
                raise _unloadable(path, error) from error
            try:
                self._session = self._loaded(path, quantized=False, mapped=mapped)
            except Exception as again:
                raise _unloadable(path, again) from again

    def _loaded(self, path: Path, *, quantized: bool, mapped: bool) -> ort.InferenceSession:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        if quantized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.add_session_config_entry("session.x64quantprecision", "1")
            self.settings = "extended optimisation, session.x64quantprecision=1"
        else:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            self.settings = "no graph optimisation"
        if mapped:
            # Half-precision weights become float32 by a Cast each. By default all of those run first and their results
            # are kept; by priority each runs when it is needed, and without an arena its memory goes back at once.
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, Array], outputs: list[str], case: str) -> dict[str, Array]:
        """Run once; named arrays in, the named outputs out.

        Raises:
            ModelError: the run failed; names the case and gives the runtime's reason.
        """
        try:
            values = ort_arrays.run(self._session, outputs, feeds)
        except Exception as error:  # ORT's exception types are not public
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise ModelError(
                f"{self._path}: ONNX Runtime failed on golden case '{case}' ({shapes}): {_one_line(error)}",
                "give goldens the model takes ([golden] path), or sizes for its dims ([golden] dims)",
            ) from error
        return {name: np.asarray(value) for name, value in zip(outputs, values, strict=True)}

    def run_any(self, feeds: Mapping[str, Array], outputs: list[str]) -> dict[str, Array]:
        """Run once and give those of ``outputs`` that are tensors (sequences are left out)."""
        values = ort_arrays.run(self._session, outputs, feeds)
        return {
            name: np.asarray(value)
            for name, value in zip(outputs, values, strict=True)
            if isinstance(value, (np.ndarray, np.generic))
        }


def _unloadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path}: ONNX Runtime can't load the model: {_one_line(error)}",
        "the reference run needs a model that ONNX Runtime's CPU provider takes",
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else text[:600] + " ..."


def _unstable(first: Answered, second: Answered, model: Model) -> list[str]:
    """Outputs that can't be golden, one phrase each."""
    found: dict[str, str] = {}
    for (case, once), (_, again) in zip(first, second, strict=True):
        random = _random_sources(model, case.inputs)
        for name, value in once.items():
            nodes = random.get(name)
            if nodes:
                found.setdefault(name, f"output '{name}' depends on random node {', '.join(nodes)}")
            elif not _same(value, again[name]):
                found.setdefault(name, f"output '{name}' differed between two runs of case '{case.name}'")
    return list(found.values())


def _same(left: Array, right: Array) -> bool:
    if left.dtype == object:
        return left.shape == right.shape and left.ravel().tolist() == right.ravel().tolist()
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def _random_sources(model: Model, feeds: Mapping[str, Array]) -> dict[str, list[str]]:
    """For each value of the main graph that a random operator reaches: labels of those operators.

    A node that looks only at shapes (Shape, Size) passes nothing on. A subgraph counts as part of its node.
    """
    constants = constant_tensors(model.structure.graph)
    known = {name: numbers for name, tensor in constants.items() if (numbers := tensor.numbers())}
    known |= {name: tuple(array.ravel().tolist()) for name, array in feeds.items() if array.size == 1}
    tainted: dict[str, list[str]] = {}
    for node in model.structure.graph.nodes:
        if node.op_type in ("Shape", "Size"):
            continue
        inside = [inner for graph in node.subgraphs() for inner in graph.walk()]
        labels = {label: None for name in node.inputs for label in tainted.get(name, ())}
        for each in (node, *inside):
            labels.update({label: None for name in each.inputs for label in tainted.get(name, ())})
            if draws(each, known):
                labels[each.label] = None
        for name in node.outputs:
            if labels:
                tainted[name] = list(labels)
    return tainted


def _check_nan(answered: Answered, job: ReferenceJob) -> None:
    if job.allow_nan:
        return
    for case, outputs in answered:
        for name, array in outputs.items():
            if array.dtype.kind == "f" and bool(np.isnan(array).any()):
                raise GoldenError(
                    f"golden case '{case.name}': the reference answers NaN in output '{name}'",
                    "give inputs the model is made for, or set [golden] allow_nan = true",
                )


def _check_comparable(answered: Answered) -> None:
    """A verdict compares finite values; where the reference has none, no target could ever pass, nor be told wrong."""
    for case, outputs in answered:
        hint = "give inputs the model answers with values, or leave the output out: [golden] exclude"
        if not any(array.size for array in outputs.values()):
            raise GoldenError(f"golden case '{case.name}': every output is empty, so nothing can be compared", hint)
        for name, array in outputs.items():
            if array.size and array.dtype.kind == "f" and not bool(np.isfinite(array).any()):
                raise GoldenError(
                    f"golden case '{case.name}': output '{name}' has no finite value, so nothing can be compared", hint
                )


def _artifact_parity(
    answered: Answered, rules: Mapping[str, parity.OutputRule], excluded: frozenset[str]
) -> ArtifactParity | None:
    """Reference against the outputs that came with the goldens; ``None`` where none came."""
    results = [
        parity.compare_case(case.name, case.outputs, outputs, rules, excluded)
        for case, outputs in answered
        if case.outputs_from == "source"
    ]
    if not results:
        return None
    overall = parity.judge(results)
    worst = None if overall.max_abs is None else overall.max_abs.value
    bounds = [rule.tolerance.max_abs for rule in rules.values() if rule.tolerance.max_abs is not None]
    return ArtifactParity(overall.passed, worst, min(bounds, default=None), len(results), overall.reasons[:20])


__all__ = ["ArtifactParity", "OrtSession", "Reference", "ReferenceJob", "Signature", "SynthesisSettings", "answer"]
