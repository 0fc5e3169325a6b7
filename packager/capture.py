"""Golden cases on request: ``packager golden`` writes them, with the reference's answers or the source framework's.

The source's function is any callable ``module:name`` that takes a mapping of named input arrays and gives a mapping
of named output arrays; arrays of other frameworks are taken through ``numpy.asarray``. It runs in a child process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from packager import child, golden_store
from packager.errors import GoldenError, UsageError
from packager.files import storage_errors, writable_folder
from packager.golden_check import check_case
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import Signature, open_model
from packager.policy import rules_for
from packager.reference import ArtifactParity, ReferenceJob, SynthesisSettings, answer
from packager.scratch import scratch
from packager.strength import MANY, Strength, StrengthJob, measure

SOURCE_SECONDS = 3600.0
POLICY = "default-1"


@dataclass(frozen=True)
class Captured:
    """What was written: where, how many cases, where inputs and outputs come from, the artifact's parity, and, where
    it was asked for, how much the cases are worth."""

    folder: Path
    cases: int
    source: str
    outputs_from: str
    artifact: ArtifactParity | None
    strength: Strength | None = None


@dataclass(frozen=True)
class SourceJob:
    """Input of :func:`run_source`: the function, the model it is the source of, the cases, where they go."""

    function: str
    model: Path
    goldens: Path
    out: Path
    folder: Path


@dataclass(frozen=True)
class Ran:
    """How many cases the source answered."""

    cases: int


def capture(
    model: Path,
    out: Path,
    *,
    source: str | None,
    inputs: Path | None,
    synthesis: SynthesisSettings,
    score: bool = False,
) -> Captured:
    """Write golden cases into ``out``.

    With ``source``, its outputs are the golden ones and the artifact's parity with them is measured; it is reported
    here and judged when the goldens are used. With ``score``, mutants of the model are tried on the cases.

    Raises:
        UsageError: ``out`` can't be written or ``source`` isn't ``module:callable``.
        ModelError, GoldenError: the model or the inputs are refused, or the source's outputs don't fit the model.
    """
    opened = open_model(model)
    with scratch() as work:
        job = ReferenceJob(
            model, inputs, synthesis, (), allow_nan=False, policy=POLICY, precision=opened.precision,
            out=work / "reference", thorough=score,
        )  # fmt: skip
        reference = child.call(answer, job, seconds=SOURCE_SECONDS, what="running the reference")
        ready, artifact, origin = job.out, reference.artifact, "the reference run"
        if source is not None:
            _check_function_name(source)
            ready, origin = work / "source", source
            source_job = SourceJob(source, model, job.out, ready, Path.cwd())
            child.call(run_source, source_job, seconds=SOURCE_SECONDS, what=f"running {source}")
            again = replace(job, goldens=ready, out=work / "check")
            artifact = child.call(answer, again, seconds=SOURCE_SECONDS, what="running the reference").artifact
        strength = None
        if score:
            task = StrengthJob(model, ready, MANY)
            strength = child.call(measure, task, seconds=SOURCE_SECONDS, what="scoring the golden cases")
        folder = writable_folder(out)
        with storage_errors("writing goldens", folder):
            for file in ready.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        return Captured(folder, reference.cases, reference.source, origin, artifact, strength)


def _check_function_name(text: str) -> None:
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"--from {text}: not MODULE:CALLABLE", "for example --from train:predict")


def run_source(job: SourceJob) -> Ran:
    """Child side: call the source's function on every case and write the goldens with its outputs.

    Raises:
        UsageError: there is no such function.
        GoldenError: it fails, or its outputs aren't the model's.
    """
    module, _, name = job.function.partition(":")
    sys.path.insert(0, str(job.folder))
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{job.function}: {error}", "give an importable MODULE:CALLABLE") from error
    model = open_model(job.model)
    signature = model.signature
    cases = []
    for case in golden_store.read(job.goldens).cases:
        try:
            answered = cast(object, function(dict(case.inputs)))  # type: ignore[operator]
        except Exception as error:  # somebody else's code
            raise GoldenError(
                f"{job.function} failed on case '{case.name}': {type(error).__name__}: {error}"
            ) from error
        outputs = _arrays(answered, job.function)
        made = GoldenCase(case.name, case.inputs, outputs, case.source, "source")
        check_case(made, signature, f"{job.function}, case '{case.name}'", allow_nan=False, exclude=_others(signature))
        cases.append(made)
    rules = rules_for(POLICY, model.precision, model, excluded=_others(signature))
    write = golden_store.write
    write(job.out, GoldenSet(tuple(cases)), rules, policy=POLICY, precision=model.precision, excluded={})
    return Ran(len(cases))


def _others(signature: Signature) -> frozenset[str]:
    return frozenset(spec.name for spec in signature.outputs if spec.kind != "tensor")


def _arrays(answered: object, function: str) -> dict[str, Array]:
    if not isinstance(answered, Mapping):
        raise GoldenError(
            f"{function} returned {type(answered).__name__}, not a mapping of output names to arrays",
            "return a dict with one array per output of the model",
        )
    return {str(name): _array(value) for name, value in answered.items()}


def _array(value: object) -> Array:
    """A numpy array of anything that is one; tensors that carry gradients are detached first."""
    detach = getattr(value, "detach", None)
    return np.asarray(detach().cpu().numpy() if callable(detach) else value, order="C")
