"""The tables of ``packager.toml`` as they are written, and the words for what can be wrong with them.

Pydantic models here are the file's form: strict (a number in quotes is not a number), closed (an unknown key is a
mistake) and described, since ``packager schema`` prints them. :mod:`packager.manifest` turns them into what the rest of
packager uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from packager import names
from packager.errors import InternalError, Problem
from packager.manifest_text import MAX_PROBLEMS, Lines, Place, dotted
from packager.room import Kind, Level, RoomOptions

T = TypeVar("T", bound=BaseModel)
Archive = Literal["tar.gz", "zip"]
Policy = Literal["default-1"]
OnHazards = Literal["warn", "refuse"]
Calibration = Literal["minmax", "entropy", "percentile"]

DEFAULT_VERSION = "0.0.0"
MAX_SIZE = 2**31 - 1
"""Largest size of one dimension: what runtimes index with an int32."""
MAX_SECONDS = 7 * 24 * 3600
"""Longest time limit: a week."""
MAX_TARGETS = 256
"""Most targets of one manifest: far above any need, and it bounds the work."""


def _name(text: str) -> str:
    problem = names.check_name(text)
    if problem is not None:
        raise ValueError(problem)
    return text


def _file(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path can't hold a zero character")
    if PurePath(text).name in ("", ".."):
        raise ValueError("this names no file or folder")
    return text


def _interval(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the low end {bounds[0]} is above the high end {bounds[1]}")
    return bounds


Key = Annotated[str, Field(min_length=1)]
Name = Annotated[
    str,
    AfterValidator(_name),
    Field(json_schema_extra={"pattern": f"^{names.PATTERN}$", "minLength": 1, "maxLength": names.MAX_LENGTH}),
]
FilePath = Annotated[str, AfterValidator(_file), Field(json_schema_extra={"minLength": 1})]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Interval = Annotated[tuple[float, float], AfterValidator(_interval)]


class Table(BaseModel):
    """Base of all tables: unknown keys are mistakes, values aren't converted, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelTable(Table):
    """The model to package."""

    path: FilePath = Field(description="the .onnx file, relative to the manifest's folder")
    name: Name | None = Field(None, description="name of the bundles; default: the file's stem")
    version: Name = Field(DEFAULT_VERSION, description="version of the bundles")


class GoldenTable(Table):
    """Where the golden cases come from."""

    path: FilePath | None = Field(
        None, description="file or folder with golden cases; absent: they are synthesised from the seed"
    )
    cases: int = Field(3, ge=1, le=1000, description="how many cases to synthesise")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of synthesised cases")
    allow_nan: bool = Field(False, description="accept NaN and inf in golden outputs")
    exclude: list[Key] = Field([], description="outputs that are not compared, such as random ones")
    dims: dict[Key, Size] = Field({}, description="sizes of symbolic dimensions in synthesised cases, by name")
    ranges: dict[Key, Interval] = Field({}, description="[low, high] of synthesised values, by input")


class Bounds(Table):
    """How far one output may be from its golden. ``None`` leaves it to the policy."""

    max_abs: float | None = Field(None, gt=0, description="largest absolute difference")
    scaled: float | None = Field(None, gt=0, description="largest difference, relative to the output's own magnitude")
    cosine: float | None = Field(None, ge=-1, le=1, description="lowest cosine similarity")
    top1: float | None = Field(None, ge=0, le=1, description="lowest share of rows whose top-1 agrees")


class ToleranceTable(Bounds):
    """How far outputs may be from their goldens, and exceptions by output."""

    outputs: dict[Key, Bounds] = Field({}, description="what differs for single outputs, by exact name")


class PolicyTable(Table):
    """Tolerances by precision, on top of a named policy."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, ToleranceTable]
    policy: Policy = Field("default-1", description="the policy everything not set here comes from")


class GatesTable(Table):
    """What refuses a target."""

    min_level: Level = Field("none", description="lowest level a verdict may have, for all targets")
    hazards: OnHazards = Field("warn", description="whether hazards of the model are told or refuse it")
    min_golden_strength: float = Field(
        0.0, ge=0, le=1, description="least share of small faults that the goldens must catch; 0: only warn"
    )


class TargetTable(Table):
    """What every target takes, whatever its kind."""

    kind: str | None = Field(None, description="the kind of target; default: the target's name")
    precision: str | None = Field(None, description="precision of the weights; default: the kind's first")
    shapes: dict[Key, Size] = Field({}, description="sizes that pin symbolic dimensions, by name")
    keep: list[Key] = Field([], description="nodes, by name, that stay in float at any precision")
    keep_operators: list[Key] = Field([], description="operators whose nodes all stay in float, such as Softmax")
    calibration: Calibration = Field("minmax", description="how int8-static finds the range of activations")
    calibration_data: str | None = Field(
        None,
        description="files like goldens, relative to the manifest, whose inputs it runs for that",
    )
    tolerance: ToleranceTable = Field(ToleranceTable(), description="overrides [tolerance.<precision>]")
    min_level: Level | None = Field(None, description="lowest level the verdict may have; default: that of [gates]")
    archive: Archive = Field("tar.gz", description="format of the bundle's archive")
    build_timeout: Seconds | None = Field(None, description="seconds a build may take; default: the kind's")
    verify_timeout: Seconds | None = Field(None, description="seconds verification may take; default: the kind's")


class File(Table):
    """The manifest of packager: one model, its goldens, tolerances, gates and targets."""

    model: ModelTable = Field(description="the model to package; `path` is all it needs")
    golden: GoldenTable = GoldenTable()
    targets: dict[str, dict[str, JsonValue]] | None = Field(
        None, description="one table per target; absent: every known kind with its defaults"
    )
    tolerance: PolicyTable = PolicyTable()
    gates: GatesTable = GatesTable()


def room_options(kind: Kind) -> type[RoomOptions]:
    """The model of a room's own options.

    Raises:
        InternalError: one is spelt like a key every target has, so nobody could set it.
    """
    found = kind.load().Options
    clash = sorted(set(found.model_fields) & set(TargetTable.model_fields))
    if clash:
        raise InternalError(f"{kind.folder}: option '{clash[0]}' of kind '{kind.name}' is also a key of every target")
    return found


class Schema:
    """The JSON Schema of a table, walked to learn which keys a place knows and what they are for."""

    def __init__(self, table: type[BaseModel]) -> None:
        self._root: dict[str, JsonValue] = table.model_json_schema()

    def keys(self, place: Place) -> dict[str, str]:
        """Known keys of the table at ``place``, with their descriptions (empty where there is none)."""
        nodes = list(self._flat(self._root))
        for step in place:
            nodes = [flat for node in nodes for child in _children(node, step) for flat in self._flat(child)]
        found: dict[str, str] = {}
        for node in nodes:
            for key, setting in _mapping(node.get("properties")).items():
                found.setdefault(key, str(_mapping(setting).get("description", "")))
        return found

    def _flat(self, node: JsonValue) -> Iterator[Mapping[str, JsonValue]]:
        """``node`` and all that its references and alternatives stand for."""
        here = _mapping(node)
        yield here
        reference = here.get("$ref")
        if isinstance(reference, str):
            yield from self._flat(_mapping(self._root.get("$defs")).get(reference.rsplit("/", 1)[-1]))
        for word in ("anyOf", "oneOf", "allOf"):
            choices = here.get(word)
            for choice in choices if isinstance(choices, list) else ():
                yield from self._flat(choice)


def _mapping(value: JsonValue | None) -> Mapping[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _children(node: Mapping[str, JsonValue], step: str | int) -> Iterator[JsonValue]:
    if isinstance(step, int):
        yield node.get("items")
    elif step in _mapping(node.get("properties")):
        yield _mapping(node["properties"])[step]
    else:
        yield node.get("additionalProperties")


def check(
    table: type[T], values: Mapping[str, object], place: Place, lines: Lines, also: Iterable[str] = ()
) -> T | list[Problem]:
    """``values`` as a ``table``, or everything that is wrong with them.

    The values go through JSON, so that strictness still lets a list be a tuple, or a text an enumeration.

    Args:
        table: the pydantic model.
        values: what TOML gave: texts, finite or infinite numbers, booleans, lists and tables.
        place: where ``values`` are in the document ``lines`` knows.
        also: keys known beside those of ``table``, for the message about an unknown one.
    """
    try:
        return table.model_validate_json(json.dumps(values))
    except ValidationError as error:
        found = error
    schema = Schema(table)
    messages: dict[Place, dict[tuple[str, str | None], None]] = {}
    said: tuple[str, str | None]
    for detail in found.errors(include_url=False)[:MAX_PROBLEMS]:
        kind, where = detail["type"], detail["loc"]
        if kind == "missing" and isinstance(where[-1], int):
            where, said = _written(where[:-1], values), ("has too few values", None)
        elif kind in ("missing", "extra_forbidden"):
            inner = _written(where[:-1], values)
            where = (*inner, *where[-1:])
            known = schema.keys(inner)
            said = about_key(str(where[-1]), kind == "missing", known, () if inner else also)
        else:
            where = _written(where, values)
            said = (_reworded(detail["msg"], detail["input"]), None)
        messages.setdefault(where, {})[said] = None
    return [
        Problem(
            dotted((*place, *where)),
            " or ".join(message for message, _ in said),
            lines.of((*place, *where)),
            next((hint for _, hint in said if hint), None)
            or schema.keys(where[:-1]).get(str(where[-1:] and where[-1])),
        )
        for where, said in messages.items()
    ]


def _written(where: Place, values: object) -> Place:
    """As much of a pydantic location as the file has; the rest names a branch of a union, or a key's own check."""
    for number, step in enumerate(where):
        inside = values if isinstance(values, dict) else dict(enumerate(values)) if isinstance(values, list) else {}
        if step not in inside:
            return where[:number]
        values = inside[step]
    return where


def about_key(key: str, missing: bool, known: Mapping[str, str], also: Iterable[str]) -> tuple[str, str | None]:
    """Message and hint about a key that is missing, or that none of the ``known`` and the ``also`` known keys is."""
    if missing:
        return f"`{key}` is missing", known.get(key) or None
    return f"unknown key `{dotted((key,))}`", names.suggestion(key, {*known, *also}, "known keys")


_WORDS = {
    "Input should be ": "must be ",
    "a valid string": "text in quotes",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table",
    "an object": "a table",
    "a valid array": "a list",
    "String should": "the text should",
}
"""Pydantic's words to TOML's."""


def _reworded(message: str, given: object) -> str:
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    shown = json.dumps(given, ensure_ascii=True, default=str)
    return f"{message}, not {shown if len(shown) <= 60 else shown[:57] + '...'}"
