"""``packager schema``: the JSON Schema of ``packager.toml``, for editors and for whoever writes manifests by program.

It is made from the same tables that check a manifest, with the options of every kind found on this machine, and so says
nothing else than they do. What JSON Schema can't say (a low end above a high end, names that differ only in case) is
left to :func:`packager.manifest.load`.
"""

from __future__ import annotations

import json
from typing import Any

from packager import names, room
from packager.manifest_tables import MAX_TARGETS, File, TargetTable, room_options
from packager.manifest_text import FILE_NAME
from packager.precisions import policy_precision
from packager.room import Kind


def json_schema() -> str:
    """JSON Schema (2020-12) as JSON text: sorted, indented, the same from run to run."""
    schema = File.model_json_schema()
    kinds = room.kinds()
    definitions = schema["$defs"]
    for kind in kinds.values():
        definitions |= _target(kind)
    definitions["AnyTarget"] = {
        "description": "A target that names its kind.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": [
            {"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/target.{kind}"}}
            for kind in kinds
        ],
    }
    any_target = {"$ref": "#/$defs/AnyTarget"}
    schema["properties"]["targets"] = {
        "description": File.model_fields["targets"].description,
        "type": "object",
        "minProperties": 1,
        "maxProperties": MAX_TARGETS,
        "propertyNames": {"pattern": f"^{names.PATTERN}$", "maxLength": names.MAX_LENGTH},
        "properties": {
            kind: {"if": {"required": ["kind"]}, "then": any_target, "else": {"$ref": f"#/$defs/target.{kind}"}}
            for kind in kinds
        },
        "additionalProperties": any_target,
    }
    precisions = {policy_precision(precision) for kind in kinds.values() for precision in kind.facts.precisions}
    definitions["PolicyTable"]["propertyNames"] = {"enum": ["policy", *sorted(precisions)]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FILE_NAME}
    return json.dumps(_without_null(schema | head), indent=2, sort_keys=True) + "\n"


def _target(kind: Kind) -> dict[str, Any]:
    """Definitions for one kind: ``target.<kind>``, and what its properties refer to."""
    common = TargetTable.model_json_schema()
    own = room_options(kind).model_json_schema(ref_template=f"#/$defs/{kind.name}.{{model}}")
    facts = kind.facts
    properties = common["properties"] | own.get("properties", {})
    properties["kind"] |= {"const": kind.name}
    properties["precision"] |= {"enum": facts.choices, "default": facts.precisions[0]}
    properties["build_timeout"] |= {"default": facts.time_limits.build}
    properties["verify_timeout"] |= {"default": facts.time_limits.verify}
    table = {
        "title": facts.title,
        "description": facts.summary,
        "type": "object",
        "properties": properties,
        "required": own.get("required", []),
        "additionalProperties": False,
    }
    referred = {f"{kind.name}.{name}": definition for name, definition in own.get("$defs", {}).items()}
    return {**common["$defs"], **referred, f"target.{kind.name}": table}


def _without_null(node: Any) -> Any:  # noqa: ANN401 - JSON is any JSON
    """``node`` without ``null``, which TOML hasn't: neither as a default nor as an alternative."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _without_null(value) for key, value in node.items() if value is not None}
    choices = made.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        choices.remove({"type": "null"})
        if len(choices) == 1:
            del made["anyOf"]
            made = choices[0] | made
    return made
