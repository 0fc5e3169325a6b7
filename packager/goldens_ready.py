"""Golden cases on their way into a build: read or synthesised at once, answered by the reference in the background.

Building needs only the inputs, so targets start on them while the reference works in a child process. Where
synthesised inputs don't run, the reference finds others (see :func:`packager.reference.golden_inputs`), and the
targets that started on the first guess start again.
"""

from __future__ import annotations

import importlib.metadata
import json
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from packager import child, golden_store
from packager.cache import Cache, Ingredients
from packager.errors import ModelError, PackagerError
from packager.files import clone_tree, exists, is_file, list_files, storage_errors, to_json
from packager.goldens import GoldenSet
from packager.host import this_host
from packager.model import Model, sha256_file
from packager.reference import Reference, ReferenceJob, answer, golden_inputs
from packager.strength import BUILD_BYTES, MUTANTS, Strength, StrengthJob, measure

REFERENCE_SECONDS = 1800.0
STRENGTH_SECONDS = 600.0
RECORD = "reference.json"
CASES = "golden"


@dataclass(frozen=True)
class Answered:
    """Golden cases with the reference's outputs, the record of the run that made them, and where they are stored."""

    reference: Reference
    goldens: GoldenSet
    folder: Path


@dataclass(frozen=True)
class Ready:
    """Golden cases in progress: ``inputs`` to start with, ``answered`` when the reference is done, then ``strength``.

    ``strength`` is ``None`` where the model is too large to be scored on the way.
    """

    inputs: GoldenSet
    ingredients: Ingredients
    answered: Future[Answered]
    strength: Future[Strength] | None


def prepare(model: Model, job: ReferenceJob, cache: Cache, code: str, pool: Executor) -> Ready:
    """Start the reference run, or take its answer from the cache.

    Args:
        model: the opened model.
        job: what to run; its ``out`` must not exist.
        cache: where answers are kept.
        code: digest of packager's own code.
        pool: runs the waiting.

    Raises:
        GoldenError: golden files don't fit the model, or nothing can be synthesised.
    """
    ingredients = _ingredients(model, job, code)
    entry = cache.find(ingredients)
    if entry is not None:
        done: Future[Answered] = Future()
        done.set_result(_read(entry))
        return Ready(done.result().goldens, ingredients, done, _scored(model, done, ingredients, cache, pool))
    inputs = next(golden_inputs(model, job))
    answered = pool.submit(_answer, job, ingredients, cache)
    return Ready(inputs, ingredients, answered, _scored(model, answered, ingredients, cache, pool))


def _scored(
    model: Model, answered: Future[Answered], reference: Ingredients, cache: Cache, pool: Executor
) -> Future[Strength] | None:
    """Let the golden cases be scored when they are answered, or take their score from the cache."""
    if model.bytes > BUILD_BYTES or model.external:
        return None
    ingredients = {**reference, "what": "golden strength", "mutants": str(MUTANTS)}
    entry = cache.find(ingredients)
    if entry is not None:
        known: Future[Strength] = Future()
        known.set_result(TypeAdapter(Strength).validate_json((entry / RECORD).read_text(encoding="utf-8")))
        return known
    return pool.submit(_score, answered, ingredients, cache, model)


def _score(answered: Future[Answered], ingredients: Ingredients, cache: Cache, model: Model) -> Strength:
    job = StrengthJob(model.path, answered.result().folder, MUTANTS)
    try:
        found = child.call(measure, job, seconds=STRENGTH_SECONDS, what="scoring the golden cases")
    except PackagerError as error:
        return Strength(0, 0, (), (), (), error.message)

    def fill(folder: Path) -> None:
        (folder / RECORD).write_text(to_json(asdict(found)), encoding="utf-8")

    cache.store(ingredients, fill)
    return found


def _answer(job: ReferenceJob, ingredients: Ingredients, cache: Cache) -> Answered:
    with storage_errors("running the reference", job.out):
        reference = child.call(answer, job, seconds=REFERENCE_SECONDS, what="running the reference")
    if reference.artifact is not None and not reference.artifact.passed:
        worst, bound = reference.artifact.max_abs, reference.artifact.tolerance
        numbers = f"max abs diff {worst:.3g}" if worst is not None else "not comparable"
        limit = f", tolerance {bound:g}" if bound is not None else ""
        reasons = "".join(f"\n  {reason}" for reason in reference.artifact.reasons[:5])
        raise ModelError(
            f"{job.model}: the artifact's answers are not its source's: {numbers}{limit}{reasons}",
            "the export changed the model or the goldens belong to another one; widen [tolerance] only if you must",
        )

    def fill(folder: Path) -> None:
        clone_tree(job.out, folder / CASES)
        (folder / RECORD).write_text(to_json(asdict(reference)), encoding="utf-8")

    cache.store(ingredients, fill)
    return Answered(reference, golden_store.read(job.out), job.out)


def _read(entry: Path) -> Answered:
    text = (entry / RECORD).read_text(encoding="utf-8")
    return Answered(TypeAdapter(Reference).validate_json(text), golden_store.read(entry / CASES), entry / CASES)


def _ingredients(model: Model, job: ReferenceJob, code: str) -> Ingredients:
    host = this_host()
    return {
        "what": "reference",
        "packager code": code,
        "model": model.digest,
        "goldens": files_digest(job.goldens),
        "golden settings": json.dumps(
            [
                asdict(job.synthesis),
                sorted(job.exclude),
                job.allow_nan,
                job.policy,
                job.precision,
                job.pinned,
            ],
            sort_keys=True,
        ),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "host": " ".join((host.system, host.machine, *host.features)),
    }


def files_digest(path: Path | None) -> str:
    """One digest over golden files: of the file, or of every file in the folder; empty where there is nothing."""
    if path is None or not exists(path):
        return ""
    if is_file(path):
        return sha256_file(path)
    return json.dumps([f"{sha256_file(path / name)} {name}" for name in list_files(path)])
