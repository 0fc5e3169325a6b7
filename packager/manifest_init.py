"""``packager init``: a commented ``packager.toml`` for one model.

Prose is in lines that begin with ``# ``; a setting that may be wanted is in a line that begins with ``#`` alone, shows
the default and works as it stands once that character is removed. As written, the manifest means what no manifest
means: the same model, targets and defaults.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, JsonValue

from packager import names, room
from packager.errors import UsageError
from packager.graph import printable
from packager.manifest_tables import Bounds, GatesTable, GoldenTable, ModelTable, TargetTable, room_options
from packager.manifest_text import dotted, toml_text
from packager.model import Model, TensorSpec
from packager.precisions import policy_precision

WIDTH = 100
"""Columns of prose."""


def init_text(model: Model, targets: Sequence[str], folder: Path | None = None) -> str:
    """The text of a manifest for ``model``, LF line ends; write it as UTF-8.

    Args:
        model: the opened model.
        targets: the kinds to package for, in order; duplicates collapse.
        folder: where the manifest will be; the model's path is relative to it if it can be. Default: the current one.

    Raises:
        UsageError: no target, no such kind, or a path that TOML can't hold.
    """
    known = room.kinds()
    for name in targets:
        if name not in known:
            raise UsageError(f"no target kind '{name}'", names.suggestion(name, known, "known kinds"))
    if not targets:
        raise UsageError("no target is named", f"known kinds: {', '.join(known)}")
    sections = [
        "# What packager builds and checks: `packager build` in this folder. `packager schema` describes every key.\n",
        "\n".join(_model_lines(model, folder or Path.cwd())) + "\n",
        "\n".join(_golden_lines(model)) + "\n",
        *("\n".join(_target_lines(name, model)) + "\n" for name in dict.fromkeys(targets)),
        "\n".join(_tolerance_lines(policy_precision(known[targets[0]].facts.precisions[0]))) + "\n",
    ]
    return "\n".join(sections)


def _model_lines(model: Model, folder: Path) -> Iterator[str]:
    yield "[model]"
    yield f"path = {_path(model.path, folder)}"
    yield f"name = {toml_text(names.slug(model.path.stem, 'model'))}"
    yield f"version = {toml_text(str(ModelTable.model_fields['version'].default))}"
    for title, specs in (("inputs", model.signature.inputs), ("outputs", model.signature.outputs)):
        yield f"# {title}:"
        yield from (f"#   {_shown(spec)}" for spec in specs)


def _golden_lines(model: Model) -> Iterator[str]:
    numeric = [spec.name for spec in model.signature.inputs if "int" in spec.dtype or "float" in spec.dtype]
    ranges: dict[str, JsonValue] = {name: [0, 1] for name in numeric[:1]}
    examples: dict[str, JsonValue] = {
        "path": "goldens",
        "dims": dict.fromkeys(model.signature.symbols(), 16),
        "ranges": ranges,
    }
    yield "[golden]"
    yield "# Without a path, cases are synthesised from the seed."
    yield from _settings(GoldenTable, examples)


def _target_lines(name: str, model: Model) -> Iterator[str]:
    kind = room.kinds()[name]
    facts = kind.facts
    yield from _prose(f"{facts.title}: {facts.summary}")
    yield f"[{dotted(('targets', name))}]"
    examples: dict[str, JsonValue] = {
        "precision": facts.precisions[0],
        "shapes": dict.fromkeys(model.signature.symbols(), 1),
        "min_level": GatesTable().min_level,
        "build_timeout": facts.time_limits.build,
        "verify_timeout": facts.time_limits.verify,
    }
    if len(facts.choices) > 1:
        yield from _prose(f"precisions: {', '.join(facts.choices)}")
    yield from _settings(TargetTable, examples, skip=("kind", "tolerance"))
    yield from _settings(room_options(kind), {})


def _tolerance_lines(precision: str) -> Iterator[str]:
    yield "# How far outputs may be from their goldens is the policy's to say; to say otherwise for one precision:"
    yield f"#[{dotted(('tolerance', precision))}]"
    yield from _settings(Bounds, {"max_abs": 1e-3, "scaled": 1e-3, "cosine": 0.999, "top1": 0.99})


def _settings(table: type[BaseModel], examples: Mapping[str, JsonValue], skip: Sequence[str] = ()) -> Iterator[str]:
    """Every key of ``table``: its description, then its example, or else its default, commented out."""
    defaults: dict[str, JsonValue] = table.model_construct().model_dump(mode="json", warnings=False)
    for key, field in table.model_fields.items():
        if key in skip:
            continue
        yield from _prose(f"{key}: {field.description}" if field.description else key)
        value = examples.get(key) or defaults.get(key)
        if field.is_required():
            yield f"# {key} must be set."
        elif value is not None:
            yield f"#{dotted((key,))} = {_value(value)}"


def _value(value: JsonValue) -> str:
    """``value`` as TOML, in one line. Keys without a value are left out."""
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{dotted((key,))} = {_value(inner)}" for key, inner in value.items() if inner is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    return repr(value)


def _prose(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(printable(" ".join(text.split())), WIDTH))


def _shown(spec: TensorSpec) -> str:
    return toml_text(spec.name) + printable(str(replace(spec, name="")))


def _path(path: Path, folder: Path) -> str:
    absolute = path.absolute()
    inside = absolute.is_relative_to(folder.absolute())
    text = (absolute.relative_to(folder.absolute()) if inside else absolute).as_posix()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!a}: the file's name is not valid Unicode, which TOML needs", "rename it") from error
    return toml_text(text)
