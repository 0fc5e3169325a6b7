"""The verbs: what ``packager build``, ``plan``, ``verify``, ``inspect`` and ``golden`` do, as typed functions.

``model + manifest -> gates -> goldens -> plan (per target) -> build in staging -> verify -> seal -> dist -> report``.
This page holds the flow of a run; what happens to one target is in :mod:`packager.targeting`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packager import __version__, child, explaining
from packager.archives import unpacked
from packager.bundle import open_bundle
from packager.cache import Cache, default_cache, tree_digest
from packager.capture import Captured, capture
from packager.choosing import buildable, read_manifest, rungs
from packager.covering import Inspected, cover_target
from packager.errors import PackagerError
from packager.explaining import Explanation
from packager.files import is_file, storage_errors
from packager.importing import import_verdict
from packager.manifest import Manifest, Target
from packager.model import Model, open_model
from packager.placing import STAGING, output_folder
from packager.planning import open_source, plan_target
from packager.reference import Reference, SynthesisSettings
from packager.report import Listener, Silent
from packager.results import Report
from packager.room import Plan, package_folder
from packager.run import ReferenceRefused, Run, heed
from packager.scratch import scratch
from packager.strength import WEAK, Strength
from packager.targeting import run_target
from packager.verdict import Verdict
from packager.verifying import verify_folder

R = TypeVar("R")

ALL = "all"
"""In place of names of targets: every one of the manifest, or, without one, every kind."""


def inspect(model: str | os.PathLike[str]) -> Model:
    """Open a model: signature, opsets, digest, hazards; weights stay on disk.

    Raises:
        UsageError: there is no such file.
        ModelError: it isn't a whole, safe ONNX model.
    """
    return open_model(Path(model))


@dataclass(frozen=True)
class Planned:
    """What ``packager plan`` says of one target: its plan, or why there is none."""

    target: str
    kind: str
    plan: Plan | None
    error: PackagerError | None


def plan(
    model: str | os.PathLike[str] | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    targets: Sequence[str] | None = None,
    golden: str | os.PathLike[str] | None = None,
    cache: bool = True,
    listener: Listener | None = None,
) -> tuple[Planned, ...]:
    """Decide, for every target, what a build would do, and do nothing. Arguments as for :func:`build`.

    Raises:
        PackagerError: the manifest, the model or the goldens are refused.
    """
    chosen = read_manifest(_path(model), _path(manifest), targets, _path(golden))
    with _running(chosen, None, cache, verify=False, listener=listener or Silent()) as run:
        planned: list[Planned] = []
        for target in rungs(chosen):
            try:
                decided = plan_target(run, target, open_source(run, target))
                planned.append(Planned(target.name, target.kind, decided, None))
            except ReferenceRefused as error:
                raise error.cause from None
            except PackagerError as error:
                planned.append(Planned(target.name, target.kind, None, error))
        return tuple(planned)


def cover(
    model: str | os.PathLike[str] | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    targets: Sequence[str] | None = None,
    golden: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    cache: bool = True,
    listener: Listener | None = None,
) -> Inspected:
    """Say what every target does with each node of the model: by its plan, then by its toolchain where that is here.

    Arguments as for :func:`build`; ``targets`` may be ``["all"]``. A refusal by a target is in the result, not raised.

    Raises:
        PackagerError: the manifest, the model or the goldens are refused.
    """
    named = None if targets is not None and list(targets) == [ALL] else targets
    chosen = read_manifest(_path(model), _path(manifest), named, _path(golden))
    with _running(chosen, None, cache, verify=False, listener=listener or Silent()) as run:
        return Inspected(run.model, tuple(_each(run, list(rungs(chosen)), jobs, cover_target)))


def build(
    model: str | os.PathLike[str] | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    targets: Sequence[str] | None = None,
    out: str | os.PathLike[str] = "dist",
    golden: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    cache: bool = True,
    verify: bool = True,
    listener: Listener | None = None,
) -> Report:
    """Build and verify a bundle per target.

    Args:
        model: the ONNX file; ``None`` takes it from the manifest.
        manifest: a ``packager.toml``; ``None`` takes ``./packager.toml`` where no model is given.
        targets: names of targets or kinds; ``None`` takes all of the manifest (without one: every kind that this
            machine has the toolchain of).
        out: output folder.
        golden: golden files, in place of the manifest's.
        jobs: targets at work at once; ``None`` for the number of cores.
        cache: whether finished work may be taken from, and put into, the cache.
        verify: whether bundles are executed; without, they are marked unverified and not archived.
        listener: is told what goes on.

    Returns:
        What happened to each target. A target that failed is in the report, not raised.

    Raises:
        PackagerError: nothing could be started: the manifest, the model or the goldens are refused, or the output
            folder can't be written.
    """
    from packager.dist import write_indexes

    chosen = read_manifest(_path(model), _path(manifest), targets, _path(golden))
    if targets is None and manifest is None and model is not None:
        chosen = buildable(chosen, listener or Silent())
    begun = time.monotonic()
    with _running(chosen, Path(out), cache, verify=verify, listener=listener or Silent()) as run:
        _start_references(run)
        results = _each(run, chosen.targets, jobs, run_target)
        reference = _reference(run)
        report = Report(
            packager=__version__,
            model=str(chosen.model.path),
            name=chosen.model.name,
            version=chosen.model.version,
            digest=run.model.digest,
            opset=run.model.opset,
            out=str(out),
            hazards=(*run.model.hazards, *(reference.hazards if reference is not None else ())),
            reference=reference,
            strength=_strength(run),
            targets=tuple(results),
            seconds=time.monotonic() - begun,
        )
        with storage_errors("writing the reports", run.out):
            write_indexes(run.out, report)
        return report


def _path(value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else Path(value)


@contextlib.contextmanager
def _running(chosen: Manifest, out: Path | None, cache: bool, *, verify: bool, listener: Listener) -> Iterator[Run]:
    """Open the model, take the output folder, and clean up whatever happens."""
    listener.step(chosen.model.name, "reading the model")
    model = open_model(chosen.model.path)
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(child.group())
        if out is None:
            with storage_errors("preparing the plan"):
                folder = stack.enter_context(scratch())
        else:
            folder = stack.enter_context(output_folder(out))
        with storage_errors("preparing the build", folder):
            work = Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=STAGING, ignore_cleanup_errors=True))
            )
        pool = stack.enter_context(child.Pool(max_workers=4, thread_name_prefix="reference"))
        code = tree_digest(package_folder("packager"))
        kept = default_cache() if cache else Cache(None)
        run = Run(chosen, model, folder, work, kept, code, verify, listener, pool, children)
        heed(run, model.hazards)
        try:
            yield run
        except BaseException:
            children.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _each(run: Run, targets: Sequence[Target], jobs: int | None, work: Callable[[Run, Target], R]) -> list[R]:
    """All targets, ``jobs`` at a time, in the manifest's order. A refused reference ends the run at once."""
    width = max(1, min(jobs or os.cpu_count() or 1, len(targets)))
    with child.Pool(max_workers=width, thread_name_prefix="target") as pool:
        futures: list[Future[R]] = [pool.submit(work, run, target) for target in targets]
        try:
            return [future.result() for future in futures]
        except BaseException:
            run.children.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _start_references(run: Run) -> None:
    """Start the reference run that targets share, so that its refusal comes before anything is placed.

    Raises:
        GoldenError: the goldens don't fit the model.
    """
    if any(not run.key(target.shapes) for target in run.manifest.targets):
        run.goldens(())


def _reference(run: Run) -> Reference | None:
    """The record of the shared reference run, or of the first that answered.

    Raises:
        Refused: the shared one refused the model or its goldens.
    """
    if () in run.started:
        return run.started[()].answered.result().reference
    answered = [ready.answered for ready in run.started.values()]
    return next((future.result().reference for future in answered if future.exception() is None), None)


def _strength(run: Run) -> Strength | None:
    """How much the golden cases are worth, with a warning where it is little."""
    scored = [ready.strength for ready in run.started.values() if ready.strength is not None]
    found = next((future.result() for future in scored if future.exception() is None), None)
    if found is not None and found.share is not None and found.share < WEAK:
        idle = f"; no case exercises node {', '.join(found.idle[:3])}" if found.idle else ""
        run.listener.warn(f"the golden cases are weak: {found.text}{idle}; give cases that are like real inputs")
    return found


def golden(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    source: str | None = None,
    inputs: str | os.PathLike[str] | None = None,
    cases: int = 3,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    score: bool = False,
    listener: Listener | None = None,
) -> Captured:
    """Write golden cases for a model into the folder ``out``.

    Args:
        model: the ONNX file.
        out: folder for ``golden.json`` and ``golden.safetensors``.
        source: ``module:callable`` of the source framework's function; ``None`` takes the reference run's outputs.
        inputs: golden files that give the inputs; ``None`` synthesises ``cases`` of them from ``seed``.
        cases: how many to synthesise.
        seed: of the synthesis.
        dims: sizes of symbolic dimensions for the synthesis.
        score: whether small mutants of the model are tried on the cases, to say how much they are worth.
        listener: is told what goes on.

    Raises:
        PackagerError: the model, the inputs or the source's outputs are refused, or ``out`` can't be written.
    """
    (listener or Silent()).step(Path(model).name, "capturing golden cases")
    synthesis = SynthesisSettings(cases, seed, tuple(sorted((dims or {}).items())))
    return capture(Path(model), Path(out), source=source, inputs=_path(inputs), synthesis=synthesis, score=score)


@dataclass(frozen=True)
class Verified:
    """What ``packager verify`` says of one bundle."""

    bundle: str
    name: str
    target: str
    kind: str
    verdict: Verdict | None
    error: PackagerError | None
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 for a pass, 6 for a failed verification, else the error's own status."""
        if self.error is not None:
            return self.error.exit_code
        return 0 if self.verdict is not None and self.verdict.status == "passed" else 6


def verify(
    bundle: str | os.PathLike[str],
    *,
    imported: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    listener: Listener | None = None,
) -> Verified:
    """Check a bundle (folder or archive) against its seal and run it against its goldens.

    The bundle isn't changed, except that a folder gets a fresh ``verdict.json``. With ``imported``, a verdict that the
    bundle's self-check wrote on another machine is checked and taken, and nothing is run here. With ``endpoint``, the
    service that runs at that address, and to which the bundle was deployed, is what the goldens are run against.
    Errors are in the result, not raised.
    """
    path = Path(bundle)
    speak = listener or Silent()
    try:
        if imported is not None:
            opened = open_bundle(path)
            verdict = import_verdict(opened, Path(imported))
            return Verified(str(path), opened.name, opened.target, opened.kind, verdict, None)
        if is_file(path):
            with unpacked(path) as folder:
                return _verify(path, folder, endpoint, speak)
        return _verify(path, path, endpoint, speak)
    except PackagerError as error:
        return Verified(str(path), "", "", "", None, error)


def _verify(path: Path, folder: Path, endpoint: str | None, listener: Listener) -> Verified:
    opened = open_bundle(folder)
    listener.step(path.name, "checking files")
    try:
        verdict, warnings = verify_folder(opened, endpoint)
    except PackagerError as error:
        return Verified(str(path), opened.name, opened.target, opened.kind, None, error)
    return Verified(str(path), opened.name, opened.target, opened.kind, verdict, None, warnings)


def explain(
    bundle: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    case: str | None = None,
    most: int = 20,
    listener: Listener | None = None,
) -> Explanation:
    """Say where a bundle (a folder) drifts from the model it was built from, node by node.

    Raises:
        PackagerError: the bundle or the model can't be opened, don't belong together, or there is no such case.
    """
    (listener or Silent()).step(Path(bundle).name, "explaining")
    return explaining.explain(Path(bundle), Path(model), case, most)


__all__ = ["Planned", "Verified", "build", "cover", "explain", "golden", "inspect", "plan", "verify"]
