"""Covering one target: which of the model's nodes it takes, told by the very steps that plan it, then by its toolchain.

Nothing here judges a node. The dialect's transforms, the room's plan and, where it is installed, the toolchain do, as
in a build; what they refuse names its nodes (:attr:`packager.errors.PackagerError.nodes`), and what they rewrite is
found by comparing the graphs and by asking the room. So coverage can't say other than the build will.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from packager import child
from packager.building import BuildJob, prepared, stage_of
from packager.coverage import Coverage, Covered, State, changes, laid_over, relabelled, rows_of
from packager.errors import PackagerError, ToolchainMissing
from packager.graph import printable
from packager.host import this_host
from packager.manifest import Target
from packager.model import Model
from packager.planning import Source, open_source, plan_target, request_for
from packager.room import Answer, JudgingRoom, Missing, kind_named, missing_requirements
from packager.run import ReferenceRefused, Run

RULES = "packager's rules"


@dataclass(frozen=True)
class Inspected:
    """A model, and what each target does with its nodes."""

    model: Model
    targets: tuple[Coverage, ...]


@dataclass(frozen=True)
class _Told:
    """What is known so far: remarks on nodes, who made them, and the error that ended it."""

    remarks: tuple[Covered, ...] = ()
    judges: tuple[str, ...] = (RULES,)
    error: PackagerError | None = None
    missing: tuple[Missing, ...] = ()
    base: State = "supported"


def cover_target(run: Run, target: Target) -> Coverage:
    """What a target does with each node of the model.

    Raises:
        Refused: the model or its goldens are refused, which ends the whole run.
    """
    try:
        told = _asked(run, target)
    except ReferenceRefused as refused:
        raise refused.cause from None
    error = told.error
    return Coverage(
        target=target.name,
        kind=target.kind,
        precision=target.precision,
        nodes=laid_over(rows_of(run.model.structure, told.base), told.remarks),
        judges=told.judges,
        refusal="" if error is None else error.message,
        hint="" if error is None else error.hint or "",
        missing=tuple((item.what, item.how) for item in told.missing),
    )


def _asked(run: Run, target: Target) -> _Told:
    """Dialect, plan, room and toolchain, until one refuses."""
    try:
        source = open_source(run, target)
    except PackagerError as error:
        return _refused(_Told(base="unjudged"), error)
    before, after = run.model.structure, source.model.structure
    titles = ", ".join(dict.fromkeys(each.step().title for each in source.passes))
    told = _planned(run, target, source)
    return replace(told, remarks=(*changes(before, after, titles), *relabelled(told.remarks, before, after)))


def _planned(run: Run, target: Target, source: Source) -> _Told:
    room = kind_named(target.kind).load()
    try:
        plan = plan_target(run, target, source)
    except PackagerError as error:
        base: State = "supported" if error.nodes else "unjudged"
        remarks = _remarks(run, target, source) if error.nodes else ()
        return _refused(_Told(remarks, base=base), error)
    told = _Told(_remarks(run, target, source))
    if not hasattr(room, "query"):
        return told
    absent = missing_requirements(source.kind, this_host())
    if absent:
        return replace(told, missing=tuple(absent))
    run.listener.step(target.name, "asking the toolchain")
    judge = source.kind.facts.title
    try:
        job = prepared(run, target, source, plan, source.work / "query")
        answer = child.call(query_stage, job, seconds=target.build_timeout, what="asking the toolchain")
    except ToolchainMissing as error:
        return replace(told, missing=(Missing(error.message, error.hint or ""),))
    except PackagerError as error:
        return _refused(replace(told, judges=(RULES, judge)), error)
    return replace(told, remarks=(*told.remarks, *answer.nodes), judges=(RULES, answer.judge))


def _remarks(run: Run, target: Target, source: Source) -> tuple[Covered, ...]:
    """What the room says of single nodes beyond refusing them."""
    room = kind_named(target.kind).load()
    if not hasattr(room, "remarks"):
        return ()
    return cast(JudgingRoom, room).remarks(request_for(run, target, source))


def query_stage(job: BuildJob) -> Answer:
    """Child side: let the room ask its toolchain.

    Raises:
        PackagerError: the toolchain refuses the model.
    """
    return cast(JudgingRoom, kind_named(job.kind).load()).query(job.plan, stage_of(job))


def _refused(told: _Told, error: PackagerError) -> _Told:
    """What is known, with the nodes that the error names as refused."""
    hint = error.hint or ""
    named = [
        Covered(printable(each.node), printable(each.node).partition(" ")[0], "refused", printable(each.reason), hint)
        for each in error.nodes
    ]
    return replace(told, remarks=(*told.remarks, *named), error=error)


__all__ = ["RULES", "Inspected", "cover_target", "query_stage"]
