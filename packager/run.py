"""One run of packager: the manifest, the opened model, the folders, and the golden cases that targets share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from packager.cache import Cache
from packager.child import Group
from packager.dialect import Dialected
from packager.errors import GoldenError, ModelError, PackagerError
from packager.goldens_ready import Answered, Ready, prepare
from packager.hazards import Hazard
from packager.manifest import Manifest, Target
from packager.model import Model
from packager.reference import ReferenceJob, SynthesisSettings
from packager.report import Listener

Shapes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """What all targets of a run share. ``children`` are the processes it starts. ``started`` holds the reference runs
    by the shapes they were made for, ``warned`` the hazards that were told, ``transformed`` the models in dialects, or
    why there is none, by what decides them."""

    manifest: Manifest
    model: Model
    out: Path
    work: Path
    cache: Cache
    code: str
    verify: bool
    listener: Listener
    pool: Executor
    children: Group
    started: dict[Shapes, Ready] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)
    warned: set[Hazard] = field(default_factory=set)
    transformed: dict[str, Future[Dialected]] = field(default_factory=dict)

    def key(self, shapes: Shapes) -> Shapes:
        """What the golden cases of a target depend on; empty for those that the whole run shares."""
        return () if self.manifest.golden.path is not None else tuple(sorted(shapes))

    def _pinned(self) -> tuple[str, ...]:
        """Open dimensions that every target pins: what the model does at other sizes of them concerns nobody."""
        pins = [{name for name, _ in target.shapes} for target in self.manifest.targets]
        return tuple(sorted(set.intersection(*pins))) if pins else ()

    def goldens(self, shapes: Shapes) -> Ready:
        """The golden cases for a target with these pinned shapes.

        Cases from files serve every target; synthesised ones are made anew for each set of shapes.
        """
        section = self.manifest.golden
        key = self.key(shapes)
        with self.guard:
            if key not in self.started:
                self.listener.step(self.manifest.model.name, "running the reference")
                dims = {**dict(section.dims), **dict(key)}
                synthesis = SynthesisSettings(section.cases, section.seed, tuple(sorted(dims.items())), section.ranges)
                job = ReferenceJob(
                    model=self.model.path,
                    goldens=section.path,
                    synthesis=synthesis,
                    exclude=section.exclude,
                    allow_nan=section.allow_nan,
                    policy=self.manifest.policy,
                    precision=self.model.precision,
                    pinned=self._pinned(),
                    out=self.work / f"reference-{len(self.started)}",
                )
                self.started[key] = prepare(self.model, job, self.cache, self.code, self.pool)
            return self.started[key]

    def transform_once(self, key: str, make: Callable[[], Dialected]) -> Dialected:
        """What ``make`` gives, or raises, for the first target that asks; the others wait for it and get the same."""
        with self.guard:
            known = self.transformed.get(key)
            future = self.transformed.setdefault(key, Future())
        if known is None:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - it is raised for everyone who asks
                future.set_exception(error)
        return future.result()


class ReferenceRefused(Exception):
    """Carries a refusal of the goldens past the handling of a target's own errors."""

    def __init__(self, cause: PackagerError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def answered(run: Run, target: Target) -> Answered:
    """The target's golden cases with the reference's answers, once those the whole run shares are there too.

    A refusal of the shared ones ends the run before anything is placed; one of cases made for a target's own shapes
    is that target's failure.
    """
    try:
        if () in run.started:
            heed(run, run.started[()].answered.result().reference.hazards)
            _demand(run, run.started[()])
    except PackagerError as error:
        raise ReferenceRefused(error) from error
    ready = run.goldens(target.shapes)
    heed(run, ready.answered.result().reference.hazards)
    _demand(run, ready)
    return ready.answered.result()


def _demand(run: Run, ready: Ready) -> None:
    """Wait for the score of golden cases, where the manifest demands one.

    Raises:
        GoldenError: it is below what the manifest demands, or there is none.
    """
    least = run.manifest.min_golden_strength
    if not least:
        return
    if ready.strength is None:
        raise GoldenError(
            "the manifest demands min_golden_strength, and this model is too large to be scored in a build",
            "score its goldens with `packager golden --score`, and take the line out of the manifest",
        )
    found = ready.strength.result()
    if found.share is None or found.share < least:
        listed = "".join(f"\n  {text}" for text in found.missed)
        raise GoldenError(
            f"the golden cases are too weak, the manifest demands {least:g}: {found.text}; missed:{listed}",
            "give cases that exercise those nodes, or lower [gates] min_golden_strength",
        )


def heed(run: Run, hazards: Sequence[Hazard]) -> None:
    """Warn of each hazard once, or refuse the model for them where the manifest says so.

    Raises:
        ModelError: ``[gates] hazards = "refuse"`` and there are any; every one is listed.
    """
    if hazards and run.manifest.hazards == "refuse":
        listed = "".join(
            f"\n  {hazard.message} [{hazard.code}]" + (f"; {hazard.hint}" if hazard.hint else "") for hazard in hazards
        )
        raise ModelError(
            f"{run.model.path}: the manifest refuses models with hazards:{listed}",
            'correct them, or set hazards = "warn" under [gates]',
        )
    for hazard in hazards:
        with run.guard:
            known = hazard in run.warned
            run.warned.add(hazard)
        if not known:
            run.listener.warn(hazard.message + (f"; {hazard.hint}" if hazard.hint else ""))
