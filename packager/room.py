"""What a target kind is: a room of the house, found by its ``target.toml``, that implements a small Protocol.

A room is a Python package: ``targets/<kind>/`` here, or anything a third party names under the entry-point group
``packager.targets``. Its ``target.toml`` holds facts (versions, limits, tolerances, requirements) and its module the
four functions of :class:`Room`. The engine knows rooms only through this page.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from packager.coverage import Covered
from packager.errors import InternalError, UsageError
from packager.goldens import GoldenCase, GoldenSet
from packager.host import Host
from packager.levels import LEVELS, Level
from packager.model import Model, Signature
from packager.precisions import AUTO

if TYPE_CHECKING:
    import numpy as np

ENTRY_POINTS = "packager.targets"


class RoomOptions(BaseModel):
    """Base of a room's own manifest options: unknown keys are mistakes, values aren't converted silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def files(self) -> tuple[str, ...]:
        """Files that these options name, as written: relative to the manifest's folder. What is in them decides the
        result, as the model does."""
        return ()


class PythonPackage(BaseModel):
    """A Python distribution a room needs: its version range and the extra of packager that installs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: str = Field(description="PEP 440 range, such as '>=2026.4,<2027'")
    extra: str | None = Field(None, description="packager's extra that brings it")


class Requirements(BaseModel):
    """What a room needs on the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    python: dict[str, PythonPackage] = {}
    programs: dict[str, str] = Field({}, description="program name to how to get it")


class Limits(BaseModel):
    """Facts about what the target's runtime takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    opset: dict[str, int] = Field({}, description="highest operator set per domain ('ai.onnx' is the default one)")
    ir: int | None = Field(None, description="highest ONNX IR version")
    domains: list[str] = Field([], description="operator domains the runtime has operators of; empty: any")
    refused_domains: list[str] = Field([], description="operator domains no operator of which converts")
    refused_operators: dict[str, str] = Field({}, description="operators that never convert, with the reason")
    refused_attributes: dict[str, str] = Field({}, description="the same of `Operator.attribute`, where a node has it")
    dtypes: list[str] = Field([], description="dtypes allowed in the signature; empty: all")
    fixed_shapes: bool = Field(False, description="every dim of the inputs must be a number, or pinned by `shapes`")


class Dialect(BaseModel):
    """Which shared transforms a room wants before it plans. What isn't named, the room does itself or doesn't need."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    pin: bool = Field(False, description="pin `shapes` in the ONNX itself and fold what becomes constant")
    lower: bool = Field(False, description="lower operator sets and IR version to [limits] where that is exact")
    inline: bool = Field(False, description="inline local functions")
    clean: bool = Field(False, description="drop what inference doesn't need")
    strip_zipmap: bool = Field(False, description="give probabilities as a tensor instead of a sequence of maps")
    exact_int8: Literal["no", "set", "unset"] = Field(
        "no",
        description="int8 kept exact on CPUs without VNNI, for an ONNX Runtime with session.x64quantprecision `set` "
        "(which leaves a little to rewrite) or `unset` (signed weights become unsigned)",
    )
    precisions: dict[str, list[dict[str, JsonValue]]] = Field(
        {}, description="by precision: passes with their settings; a precision not named here is the room's own work"
    )
    minimum_opset: dict[str, int] = Field(
        {}, description="by precision: the operator set of ai.onnx its passes need; older models are raised to it"
    )
    maximum_opset: dict[str, int] = Field({}, description="by precision: highest ai.onnx, where lower than [limits]")
    settled_goldens: bool = Field(
        False, description="wait for golden inputs that the reference has run: their sizes decide what is built"
    )
    ladder: list[str] = Field([], description="precisions that `auto` tries, the smallest bundle first")
    own: dict[str, str] = Field(
        {},
        description="passes of the room's own, before those of the precision: `<kind>/<name>` to `module:class` in it",
    )


class TimeLimits(BaseModel):
    """Seconds a child process may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    build: float = 1800.0
    verify: float = 1800.0


class TargetFacts(BaseModel):
    """The whole of a ``target.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    title: str
    summary: str
    level: Level = Field(description="the highest level verification can reach")
    endpoint: str | None = Field(None, description="how to address a running service that can be verified against")
    precisions: list[str] = Field(min_length=1, description="allowed values of `precision`, the default first")
    tools: list[str] = Field([], description="Python distributions whose versions decide the result")
    requires: Requirements = Requirements()
    limits: Limits = Limits()
    dialect: Dialect = Dialect()
    pins: dict[str, str] = {}
    roles: dict[str, str] = Field({}, description="glob of the bundle's files to what they are for")
    tolerance: dict[str, dict[str, float]] = Field({}, description="by precision: what differs from the policy")
    run_tolerance: dict[str, dict[str, float]] = Field(
        {},
        description="by precision as manifests spell it: how near the transformed model the runtime is known to be",
    )
    time_limits: TimeLimits = TimeLimits()

    @property
    def choices(self) -> list[str]:
        """What a manifest may say under ``precision``."""
        return [*self.precisions, AUTO] if self.dialect.ladder else self.precisions


@dataclass(frozen=True)
class Missing:
    """Something a room needs and this machine lacks: what, why it matters, and the command that gets it."""

    what: str
    how: str


@dataclass(frozen=True)
class Step:
    """One line of a plan: a gerund title and the settings that decide its result, as printable pairs."""

    title: str
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ExtraFile:
    """A file that a target's options name: as written, where it is, and its digest."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan may depend on. ``shapes`` pins symbolic dims by name (or ``input:axis`` for unnamed ones)."""

    target: str
    kind: str
    name: str
    version: str
    model: Model
    goldens: GoldenSet
    precision: str
    shapes: tuple[tuple[str, int], ...]
    options: RoomOptions
    facts: TargetFacts
    files: tuple[ExtraFile, ...] = ()

    def plan(
        self,
        signature: Signature,
        steps: tuple[Step, ...],
        notes: tuple[str, ...] = (),
        options: RoomOptions | None = None,
    ) -> Plan:
        """The plan for this request: what the room decided, with what was asked.

        Args:
            signature: what the bundle will take and give, shapes pinned.
            steps: what building will do.
            notes: what the user should know.
            options: the room's, where they aren't simply those of the request.
        """
        return Plan(
            target=self.target,
            kind=self.kind,
            name=self.name,
            version=self.version,
            model_digest=self.model.digest,
            opset=self.model.opset,
            precision=self.precision,
            shapes=self.shapes,
            signature=signature,
            steps=steps,
            options=(options or self.options).model_dump_json(),
            notes=notes,
            files=tuple((file.name, file.sha256) for file in self.files),
        )


@dataclass(frozen=True)
class Plan:
    """What will be done for one target, decided before anything is done. Plain data: it prints and it travels.

    ``signature`` is what the bundle will take and give, shapes pinned. ``options`` are the room's, as JSON.
    ``notes`` are things the user should know (something lowered, something that costs). ``transforms`` are the passes
    that ran before the room planned, as JSON (see :func:`packager.transform_registry.load_pass`). ``files`` are those
    that the options name, with their digests. ``local`` says where things are on this machine: it reaches ``build``,
    decides no byte of the result, and is neither sealed nor part of cache keys.
    """

    target: str
    kind: str
    name: str
    version: str
    model_digest: str
    opset: int
    precision: str
    shapes: tuple[tuple[str, int], ...]
    signature: Signature
    steps: tuple[Step, ...]
    options: str = "{}"
    notes: tuple[str, ...] = ()
    transforms: str = "[]"
    files: tuple[tuple[str, str], ...] = ()
    local: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Stage:
    """Where a build happens: an empty ``folder`` to fill, the ``model`` file (read only) and the golden cases.

    ``files`` are where the files lie that the options name, by name as written.
    """

    folder: Path
    model: Path
    goldens: GoldenSet
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class RuntimeInfo:
    """What executed the bundle: runtime, exact version, device, and the level that makes.

    ``reason`` says why the level isn't ``runtime``; empty when it is. Level ``none`` says that the bundle is a recipe:
    another machine has to finish it, nothing can be run before, and it is never counted as verified.
    """

    name: str
    version: str
    device: str
    level: Level
    reason: str = ""
    details: tuple[tuple[str, str], ...] = ()


class Runner(Protocol):
    """A loaded bundle that can be run."""

    info: RuntimeInfo

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once: named input arrays in, named output arrays out, exact wire names, dtypes as in the signature."""
        ...


class Room(Protocol):
    """A target kind. A module with these names is a room.

    ``missing`` and ``plan`` run in packager's own process and must not import an SDK; ``build`` and ``runner`` run in
    a child process of their own.
    """

    @property
    def Options(self) -> type[RoomOptions]:
        """The room's manifest options."""
        ...

    def missing(self, host: Host) -> list[Missing]:
        """Toolchain that is absent on this machine beyond what ``target.toml`` already requires."""
        ...

    def plan(self, request: PlanRequest) -> Plan:
        """Decide everything. Pure.

        Raises:
            Refused: the target can't take this model; the message names every node and the reason.
        """
        ...

    def build(self, plan: Plan, stage: Stage) -> None:
        """Fill ``stage.folder`` with the target's files (all but what the engine adds: goldens, seals, self-check).

        Raises:
            BuildError: the toolchain refused; the message names the node where it is known.
        """
        ...

    def runner(self, bundle: Path) -> AbstractContextManager[Runner]:
        """Load the bundle's own files in the target's runtime."""
        ...


@dataclass(frozen=True)
class Reach:
    """The strongest evidence that verification can reach on one machine, and what more would need; empty where it is
    the kind's highest."""

    level: Level
    reason: str = ""


class ReachingRoom(Room, Protocol):
    """A room whose level depends on the machine. Others reach the level of their ``target.toml`` wherever nothing is
    missing."""

    def reach(self, host: Host) -> Reach:
        """What verification of a bundle with default options reaches on this machine. Imports no SDK."""
        ...


@dataclass(frozen=True)
class Answer:
    """What a target's toolchain says of a model: who it is, with its version, and the nodes not simply supported."""

    judge: str
    nodes: tuple[Covered, ...] = ()


class JudgingRoom(Room, Protocol):
    """A room that knows more of single nodes than what it refuses. Both functions are optional, one without the other;
    what they leave out is judged by ``plan`` alone."""

    def remarks(self, request: PlanRequest) -> tuple[Covered, ...]:
        """Nodes that will be rewritten or fall back, from the graph alone, by the rules that ``build`` follows. Pure.

        Asked only where ``plan`` doesn't refuse the model, or refuses it for single nodes.
        """
        ...

    def query(self, plan: Plan, stage: Stage) -> Answer:
        """Ask the toolchain itself for every node, as ``build`` would, in a child process; whatever lands in
        ``stage.folder`` is thrown away.

        Raises:
            PackagerError: the toolchain refuses the model; its ``nodes`` are those refused, where they are known.
        """
        ...


class RemoteRoom(Room, Protocol):
    """A room whose ``target.toml`` has ``endpoint``."""

    def remote(self, bundle: Path, endpoint: str) -> AbstractContextManager[Runner]:
        """Ask the service at ``endpoint``, to which somebody deployed the bundle, in a child process.

        Its level is ``runtime`` only where what answers is the target's own runtime, as far as it tells.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """A discovered room: its facts, where its files are, and the module to import when it is needed."""

    name: str
    facts: TargetFacts
    folder: Path
    module: str
    templates: Path | None

    def load(self) -> Room:
        """Import the room."""
        return cast(Room, importlib.import_module(self.module))

    def load_remote(self) -> RemoteRoom:
        """Import a room whose bundles can be verified against a running service; :class:`UsageError` for others."""
        if self.facts.endpoint is None:
            raise UsageError(f"a bundle of kind '{self.name}' can't be verified against a service", "omit --endpoint")
        return cast(RemoteRoom, importlib.import_module(self.module))


@cache
def kinds() -> Mapping[str, Kind]:
    """Every room on this machine, by kind, sorted.

    Raises:
        InternalError: a ``target.toml`` is malformed (every mistake of it is listed), or two rooms share a kind.
    """
    found: dict[str, Kind] = {}
    own, templates = package_folder("packager.targets"), package_folder("packager.templates")
    for file in sorted(own.glob("*/target.toml")):
        kind = file.parent.name
        found[kind] = _read_kind(file, f"packager.targets.{kind}", templates / kind)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        folder = package_folder(entry.value)
        third = _read_kind(folder / "target.toml", entry.value, folder / "templates")
        if third.name in found:
            raise InternalError(f"two rooms are of kind '{third.name}': {found[third.name].folder} and {folder}")
        found[third.name] = third
    return dict(sorted(found.items()))


def package_folder(package: str) -> Path:
    """Where a package's files are, without importing it.

    Raises:
        InternalError: there is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InternalError(f"no Python package '{package}' (entry points of {ENTRY_POINTS} must name packages)")
    return Path(next(iter(spec.submodule_search_locations)))


def kind_named(name: str) -> Kind:
    """The room of that kind.

    Raises:
        UsageError: there is none; the hint lists what there is.
    """
    try:
        return kinds()[name]
    except KeyError:
        raise UsageError(f"no target kind '{name}'", f"known kinds: {', '.join(kinds())}") from None


def _read_kind(file: Path, module: str, templates: Path) -> Kind:
    try:
        facts = TargetFacts.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise InternalError(f"{file}: a room needs a target.toml") from error
    except (ValidationError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InternalError(f"{file}: {error}") from error
    if module.startswith("packager.targets.") and facts.kind != file.parent.name:
        raise InternalError(f"{file}: kind '{facts.kind}' doesn't match its folder")
    return Kind(facts.kind, facts, file.parent, module, templates if templates.is_dir() else None)


def missing_requirements(kind: Kind, host: Host) -> list[Missing]:
    """What ``target.toml`` requires and this machine lacks, then what the room itself finds missing."""
    return missing_tools(kind) + kind.load().missing(host)


def reach_of(kind: Kind, host: Host) -> Reach:
    """The level that verification reaches on this machine, if nothing is missing."""
    room = kind.load()
    return cast(ReachingRoom, room).reach(host) if hasattr(room, "reach") else Reach(kind.facts.level)


@dataclass(frozen=True)
class Readiness:
    """What this machine is to a kind: what it lacks to build, and how far verification goes where it lacks nothing."""

    kind: Kind
    missing: tuple[Missing, ...]
    reach: Reach


def readiness(kind: Kind, host: Host) -> Readiness:
    """What this machine is to a kind."""
    return Readiness(kind, tuple(missing_requirements(kind, host)), reach_of(kind, host))


def missing_tools(kind: Kind) -> list[Missing]:
    """What ``target.toml`` requires and this machine lacks. Distributions are looked up by metadata, not imported."""
    import shutil

    from packaging.specifiers import SpecifierSet

    found: list[Missing] = []
    for name, package in kind.facts.requires.python.items():
        wanted = f"{name}{package.version}"
        how = f"pip install 'packager[{package.extra}]'" if package.extra else f"pip install '{wanted}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(Missing(f"Python package {wanted}", how))
            continue
        if not SpecifierSet(package.version).contains(version, prereleases=True):
            found.append(Missing(f"Python package {wanted} ({version} is installed)", how))
    for program, how in kind.facts.requires.programs.items():
        if shutil.which(program) is None:
            found.append(Missing(f"program {program}", how))
    return found


__all__ = [
    "LEVELS", "Answer", "Covered", "ExtraFile", "GoldenCase", "GoldenSet", "Host", "JudgingRoom", "Kind", "Level",
    "Limits", "Missing", "Plan", "PlanRequest", "Reach", "ReachingRoom", "Readiness", "RemoteRoom", "Room",
    "RoomOptions", "Runner", "RuntimeInfo", "Signature", "Stage", "Step", "TargetFacts", "kind_named", "kinds",
    "missing_requirements", "missing_tools", "package_folder", "reach_of", "readiness",
]  # fmt: skip
