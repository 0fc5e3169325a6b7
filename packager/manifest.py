"""The manifest: ``packager.toml``, read whole, checked whole, and turned into plain frozen data.

Whatever is wrong is said at once, each mistake with its place, its line and what to do. A target's own options stand
beside the common keys in its table and are checked by its room, so a misspelt key is compared with both. Without a
manifest, :func:`default` gives the same defaults; :func:`select` narrows either to the targets asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packager import names, room
from packager.errors import Problem, UsageError
from packager.manifest_schema import json_schema
from packager.manifest_tables import (
    DEFAULT_VERSION,
    MAX_TARGETS,
    Archive,
    Bounds,
    File,
    GatesTable,
    OnHazards,
    TargetTable,
    ToleranceTable,
    check,
    room_options,
)  # fmt: skip
from packager.manifest_text import FILE_NAME, MAX_PROBLEMS, Lines, Place, dotted, mistakes, parse, read_text
from packager.precisions import AS_IS, Conversion, policy_precision
from packager.room import Kind, Level, RoomOptions

__all__ = [
    "FILE_NAME", "Archive", "Bounds", "GoldenSection", "Manifest", "ModelSection", "Target", "Tolerance", "default",
    "json_schema", "load", "select", "with_golden",
]  # fmt: skip

MAX_BUNDLE_NAME = 240
"""Longest ``<name>-<version>-<target>``, in characters: with an extension it must stay within 255 bytes."""


@dataclass(frozen=True)
class Tolerance:
    """What a manifest says on how far outputs may be from their goldens. What it leaves open is the policy's."""

    bounds: Bounds = field(default_factory=Bounds)
    outputs: tuple[tuple[str, Bounds], ...] = ()

    def for_output(self, name: str) -> Bounds:
        """The bounds of one output: its own over the general ones."""
        return _over(dict(self.outputs).get(name, Bounds()), self.bounds)

    def over(self, base: Tolerance) -> Tolerance:
        """This one where it says something, else ``base``. What is said of one output beats what is said of all."""
        mine, theirs = dict(self.outputs), dict(base.outputs)
        outputs = {
            name: _over(mine.get(name, Bounds()), theirs.get(name, Bounds()))
            for name in dict.fromkeys([*theirs, *mine])
        }
        return Tolerance(_over(self.bounds, base.bounds), tuple(outputs.items()))


@dataclass(frozen=True)
class ModelSection:
    """The model: its file (absolute), and the name and version bundles carry."""

    path: Path
    name: str
    version: str = DEFAULT_VERSION


@dataclass(frozen=True)
class GoldenSection:
    """Where golden cases come from. ``path`` is absolute, or ``None`` to synthesise ``cases`` of them from ``seed``.

    ``exclude`` names outputs that aren't compared. ``dims`` gives sizes of symbolic dimensions and ``ranges`` the
    lowest and highest value by input, both for synthesis.
    """

    path: Path | None = None
    cases: int = 3
    seed: int = 0
    allow_nan: bool = False
    exclude: tuple[str, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    ranges: tuple[tuple[str, tuple[float, float]], ...] = ()


@dataclass(frozen=True)
class Target:
    """One target, defaults filled in. Timeouts are seconds; ``tolerance`` has that of its precision merged in.

    ``conversion`` is what the manifest asks of the passes that make its precision.
    """

    name: str
    kind: str
    precision: str
    shapes: tuple[tuple[str, int], ...]
    tolerance: Tolerance
    min_level: Level
    archive: Archive
    build_timeout: float
    verify_timeout: float
    options: RoomOptions
    conversion: Conversion = AS_IS


@dataclass(frozen=True)
class Manifest:
    """A whole manifest. ``root`` is the folder its paths are relative to; ``path`` is ``None`` where there is no file.

    ``tolerances`` (by precision) and ``min_level`` are already in each target; they are kept for targets added later.
    """

    root: Path
    path: Path | None
    model: ModelSection
    golden: GoldenSection
    targets: tuple[Target, ...]
    policy: str = "default-1"
    tolerances: tuple[tuple[str, Tolerance], ...] = ()
    min_level: Level = "none"
    hazards: OnHazards = "warn"
    min_golden_strength: float = 0.0


def load(path: Path) -> Manifest:
    """Read a manifest. A manifest without ``[targets]`` is one for every known kind, as without a manifest.

    Raises:
        UsageError: there is no such file, or it can't be read.
        ManifestError: it has mistakes; ``problems`` lists every one, in file order.
    """
    text = read_text(path)
    values, lines, problems = parse(path, text)
    file = check(File, values, (), lines)
    shared = _Shared()
    if isinstance(file, File):
        tolerances = {precision: _tolerance(table) for precision, table in (file.tolerance.__pydantic_extra__).items()}
        shared = _Shared(tuple(tolerances.items()), file.gates.min_level, path.parent.resolve())
    else:
        odd = {problem.place for problem in problems}
        problems += [problem for problem in file if problem.place not in odd]
    problems += _unknown_precisions(values.get("tolerance"), lines)
    targets, wrong = _targets(values.get("targets"), shared, lines)
    problems += wrong
    root = path.parent.resolve()
    if isinstance(file, File):
        problems += _too_long(_model(root, file.model.path, file.model.name, file.model.version), targets, lines)
    if problems or not isinstance(file, File):
        raise mistakes(path, problems)
    return Manifest(
        root=root,
        path=root / path.name,
        model=_model(root, file.model.path, file.model.name, file.model.version),
        golden=GoldenSection(
            path=None if file.golden.path is None else _absolute(root, file.golden.path),
            cases=file.golden.cases,
            seed=file.golden.seed,
            allow_nan=file.golden.allow_nan,
            exclude=tuple(dict.fromkeys(file.golden.exclude)),
            dims=tuple(file.golden.dims.items()),
            ranges=tuple(file.golden.ranges.items()),
        ),
        targets=targets,
        policy=file.tolerance.policy,
        tolerances=shared.tolerances,
        min_level=shared.min_level,
        hazards=file.gates.hazards,
        min_golden_strength=file.gates.min_golden_strength,
    )


def default(model: Path, targets: Sequence[str] | None, golden: Path | None = None) -> Manifest:
    """The manifest of somebody who has none: sensible defaults for ``model``, paths relative to the current folder.

    Args:
        model: the ONNX file; need not exist yet.
        targets: kinds to package for, in order; ``None`` for every known one.
        golden: file or folder with golden cases; ``None`` to synthesise them.

    Raises:
        UsageError: no such kind, or no target at all.
    """
    root = Path.cwd()
    made = Manifest(
        root=root,
        path=None,
        model=_model(root, str(model)),
        golden=GoldenSection(),
        targets=(),
    )
    made = made if golden is None else with_golden(made, golden)
    return select(made, list(room.kinds()) if targets is None else targets)


def select(manifest: Manifest, wanted: Sequence[str]) -> Manifest:
    """The manifest with only the ``wanted`` targets, in that order, each once.

    A name that is no target of the manifest but a known kind is added with that kind's defaults.

    Raises:
        UsageError: nothing is wanted, or something that is neither a target nor a kind.
    """
    have = {target.name: target for target in manifest.targets}
    choices = ", ".join(dict.fromkeys([*have, *room.kinds()]))
    if not wanted or not all(wanted):
        raise UsageError("an empty target name" if wanted else "no target is named", f"known targets: {choices}")
    chosen = []
    for name in dict.fromkeys(wanted):
        if name not in have and name not in room.kinds():
            hint = names.suggestion(name, [*have, *room.kinds()], "known targets")
            raise UsageError(f"unknown target or kind '{name}'", hint)
        chosen.append(have[name] if name in have else _plain(name, _Shared(manifest.tolerances, manifest.min_level)))
    folded: dict[str, str] = {}
    for target in chosen:
        other = folded.setdefault(target.name.casefold(), target.name)
        if other != target.name:
            raise UsageError(
                f"targets '{other}' and '{target.name}' differ only in letter case", "build them one at a time"
            )
    return replace(manifest, targets=tuple(chosen))


def at_precision(manifest: Manifest, target: Target, precision: str) -> Target:
    """A target of precision ``auto`` at one precision, with the manifest's tolerance for it."""
    shared = dict(manifest.tolerances).get(policy_precision(precision), Tolerance())
    return replace(target, precision=precision, tolerance=target.tolerance.over(shared))


def with_golden(manifest: Manifest, golden: Path) -> Manifest:
    """The manifest with golden cases from this file or folder, in place of its own or of synthesised ones."""
    return replace(manifest, golden=replace(manifest.golden, path=_absolute(Path.cwd(), str(golden))))


@dataclass(frozen=True)
class _Shared:
    """What a target takes from the rest of the manifest."""

    tolerances: tuple[tuple[str, Tolerance], ...] = ()
    min_level: Level = GatesTable().min_level
    root: Path = Path()


def _unknown_precisions(table: object, lines: Lines) -> list[Problem]:
    """A tolerance for a precision that no kind has would silently do nothing."""
    known = {policy_precision(precision) for kind in room.kinds().values() for precision in kind.facts.precisions}
    named = [key for key in (table if isinstance(table, dict) else ()) if key not in known and key != "policy"]
    return [_unknown("precision", key, ("tolerance", key), lines, known) for key in named[:MAX_PROBLEMS]]


def _unknown(what: str, word: str, place: Place, lines: Lines, known: Iterable[str]) -> Problem:
    hint = names.suggestion(word, known, f"known {what}s")
    return Problem(dotted(place), f"unknown {what} `{dotted((word,))}`", lines.of(place), hint)


def _targets(tables: object, shared: _Shared, lines: Lines) -> tuple[tuple[Target, ...], list[Problem]]:
    if tables is None:
        tables = {kind: {} for kind in room.kinds()}
    elif tables == {}:
        hint = f"name some, or remove it to get all: {', '.join(room.kinds())}"
        return (), [Problem("targets", "no target", lines.of(("targets",)), hint)]
    if not isinstance(tables, dict):
        return (), []  # said already, with the shape of the whole file
    if len(tables) > MAX_TARGETS:
        return (), [Problem("targets", f"{len(tables)} targets, {MAX_TARGETS} are allowed", lines.of(("targets",)))]
    found: list[Target] = []
    problems: list[Problem] = []
    folded: dict[str, str] = {}
    for name, table in tables.items():
        place = ("targets", name)
        wrong = names.check_name(name)
        other = folded.setdefault(name.casefold(), name)
        if wrong is None and other != name:
            wrong = f"differs from '{other}' only in letter case, so their files would collide"
        if wrong is not None:
            problems.append(Problem(dotted(place), wrong, lines.of(place), "rename the target"))
        if isinstance(table, dict):
            target = _target(name, table, shared, lines)
            if isinstance(target, Target):
                found.append(target)
            else:
                problems += target
    return tuple(found), problems


def _too_long(model: ModelSection, targets: Sequence[Target], lines: Lines) -> list[Problem]:
    """Targets whose bundles couldn't be named on common file systems."""
    lengths = {target.name: len(f"{model.name}-{model.version}-{target.name}") for target in targets}
    return [
        Problem(
            dotted(("targets", name)),
            f"its bundle's name has {length} characters, {MAX_BUNDLE_NAME} are allowed",
            lines.of(("targets", name)),
            "shorten the model's name, its version or the target's name",
        )
        for name, length in lengths.items()
        if length > MAX_BUNDLE_NAME
    ]


def _target(name: str, table: Mapping[str, object], shared: _Shared, lines: Lines) -> Target | list[Problem]:
    """One target's table, checked by the common keys and by its room's."""
    place = ("targets", name)
    common_keys = list(TargetTable.model_fields)
    common = check(TargetTable, {key: table[key] for key in common_keys if key in table}, place, lines)
    problems = common if isinstance(common, list) else []
    named = table.get("kind", name)
    kind = room.kinds().get(named) if isinstance(named, str) else None
    if kind is None:
        if isinstance(named, str):
            where = (*place, "kind") if "kind" in table else place
            problems = [
                *problems,
                _unknown("kind", named, where, lines, room.kinds()),
                *_known_nowhere(name, table, lines),
            ]
        return problems
    own = {key: value for key, value in table.items() if key not in common_keys}
    options = check(room_options(kind), own, place, lines, also=common_keys)
    precision = table.get("precision", kind.facts.precisions[0])
    if isinstance(precision, str) and precision not in kind.facts.choices:
        where = (*place, "precision")
        problems = [*problems, _unknown("precision", precision, where, lines, kind.facts.choices)]
    if isinstance(options, list):
        return [*problems, *options]
    if problems or isinstance(common, list):
        return problems
    return _filled(name, kind, common, options, shared)


def _known_nowhere(name: str, table: Mapping[str, object], lines: Lines) -> list[Problem]:
    """Keys of a target of unknown kind that are mistakes whatever kind was meant."""
    known = set(TargetTable.model_fields).union(*(room_options(kind).model_fields for kind in room.kinds().values()))
    places = [("targets", name, key) for key in table if key not in known]
    return [_unknown("key", place[-1], place, lines, known) for place in places[:MAX_PROBLEMS]]


def _filled(name: str, kind: Kind, table: TargetTable, options: RoomOptions, shared: _Shared) -> Target:
    facts = kind.facts
    precision = table.precision or facts.precisions[0]
    data = None if table.calibration_data is None else _absolute(shared.root, table.calibration_data)
    return Target(
        name=name,
        kind=kind.name,
        precision=precision,
        shapes=tuple(table.shapes.items()),
        tolerance=_tolerance(table.tolerance).over(
            dict(shared.tolerances).get(policy_precision(precision), Tolerance())
        ),
        min_level=table.min_level or shared.min_level,
        archive=table.archive,
        build_timeout=table.build_timeout or facts.time_limits.build,
        verify_timeout=table.verify_timeout or facts.time_limits.verify,
        options=options,
        conversion=Conversion(tuple(table.keep), tuple(table.keep_operators), table.calibration, data),
    )


def _plain(name: str, shared: _Shared) -> Target:
    """The target a kind is without a table.

    Raises:
        UsageError: the kind has options without a default.
    """
    target = _target(name, {}, shared, Lines({}))
    if isinstance(target, list):
        said = "; ".join(map(str, target))
        raise UsageError(f"target '{name}' has no defaults: {said}", f"write a table for it in {FILE_NAME}")
    return target


def _tolerance(table: ToleranceTable) -> Tolerance:
    bounds = Bounds(max_abs=table.max_abs, scaled=table.scaled, cosine=table.cosine, top1=table.top1)
    return Tolerance(bounds, tuple(table.outputs.items()))


def _over(mine: Bounds, base: Bounds) -> Bounds:
    return base.model_copy(update=mine.model_dump(exclude_none=True))


def _model(root: Path, file: str, name: str | None = None, version: str = DEFAULT_VERSION) -> ModelSection:
    path = _absolute(root, file)
    return ModelSection(path, name or names.slug(path.stem, "model"), version)


def _absolute(root: Path, text: str) -> Path:
    """An absolute path. Its last part is kept as written, so that a link is still beside the data files it names.

    Raises:
        UsageError: the folder is a loop of symbolic links, or no file could have that name.
    """
    path = root / text
    try:
        return path.parent.resolve() / path.name
    except (OSError, RuntimeError, ValueError) as error:  # a loop before Python 3.13, a zero character
        raise UsageError(f"{str(path)!r} can't be resolved: {error}") from error
