"""The JSON Schema of the manifest says what the loader does."""

from __future__ import annotations

import datetime
import json
import math
import re
import tomllib

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packager import manifest
from packager.errors import UsageError
from tests.manifests import (
    MODEL,
    WHOLE,
    places,
    problems,
    rooms_of_tests,
    values,
    write,
)


@pytest.fixture(scope="module", autouse=True)
def rooms():
    with rooms_of_tests() as made:
        yield made


def accepts(schema: dict, root: dict, value: object) -> bool:
    """The part of JSON Schema 2020-12 that the schema uses, so that it can be held against the loader."""
    if "$ref" in schema:
        assert schema["$ref"].startswith("#/$defs/")
        if not accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, value):
            return False
    kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "array": list}
    if "type" in schema and (
        not isinstance(value, kinds[schema["type"]])
        or (isinstance(value, bool) and schema["type"] in ("integer", "number"))
    ):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if "anyOf" in schema and not any(accepts(choice, root, value) for choice in schema["anyOf"]):
        return False
    if not all(accepts(each, root, value) for each in schema.get("allOf", ())):
        return False
    if "if" in schema:
        branch = "then" if accepts(schema["if"], root, value) else "else"
        if not accepts(schema.get(branch, {}), root, value):
            return False
    if isinstance(value, str):
        return bool(
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            and re.search(schema.get("pattern", ""), value) is not None
        )
    if isinstance(value, int | float):
        return bool(
            schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
            and value > schema.get("exclusiveMinimum", -math.inf)
            and value < schema.get("exclusiveMaximum", math.inf)
        )
    if isinstance(value, list):
        firsts = schema.get("prefixItems", [])
        rest = schema.get("items", {})
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return bool(fits) and all(
            accepts(firsts[index] if index < len(firsts) else rest, root, item) for index, item in enumerate(value)
        )
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        if not set(schema.get("required", ())) <= set(value) or len(value) < schema.get("minProperties", 0):
            return False
        if not all(accepts(schema.get("propertyNames", {}), root, key) for key in value):
            return False
        return all(
            accepts(known[key], root, item) if key in known else (rest is not False and accepts(rest, root, item))
            for key, item in value.items()
        )
    return True


def test_the_schema_is_json_schema_of_2020_12_and_always_the_same():
    text = manifest.json_schema()
    assert text == manifest.json_schema()
    schema = json.loads(text)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == {"model", "golden", "targets", "tolerance", "gates"}
    for reference in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', text):
        assert reference in schema["$defs"]
    assert "null" not in text
    edge = schema["$defs"]["target.edge"]["properties"]
    assert {"threads", "mode", "precision", "tolerance"} <= set(edge)
    assert all(value.get("description") or "$ref" in value for value in edge.values() if value.get("title") != "Kind")
    assert edge["precision"]["enum"] == ["fp32", "fp16"]
    assert edge["build_timeout"]["default"] == 900


def test_the_schema_takes_what_the_loader_takes():
    schema = json.loads(manifest.json_schema())
    assert accepts(schema, schema, tomllib.loads(WHOLE))
    assert accepts(schema, schema, tomllib.loads(MODEL))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[model]\n",
        '[model]\npath = "m"\nname = "a/b"',
        MODEL + "[golden]\ncases = 0",
        MODEL + "[golden.ranges]\nx = [0]",
        MODEL + "[targets.tablets]",
        MODEL + "[targets.tablets]\nkind = 'clod'",
        MODEL + "[targets.edge]\nregion = 'x'",
        MODEL + "[targets.edge]\nkind = 'cloud'\nthreads = 1",
        MODEL + "[targets.edge]\nprecision = 'int8'",
        MODEL + "[targets.edge]\nthreads = 0",
        MODEL + "[targets.edge]\nthread = 1",
        MODEL + "[targets.edge.layout]\nordr = []",
        MODEL + "[targets.edge.tolerance]\nmax_abs = 0",
        MODEL + '[targets."a b"]\nkind = "edge"',
        MODEL + "[tolerance.fp61]",
        MODEL + "[tolerance]\npolicy = 'lax'",
        MODEL + "[gates]\nmin_parity = 1",
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(tmp_path, text):
    schema = json.loads(manifest.json_schema())
    assert problems(tmp_path, text)
    assert not accepts(schema, schema, tomllib.loads(text))


@given(st.sampled_from(sorted(places(tomllib.loads(WHOLE)) - {()}, key=str)), values)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_loader_takes_the_schema_takes_too(tmp_path, place, value):
    document = tomllib.loads(WHOLE)
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    try:
        manifest.load(write(tmp_path, tomlkit.dumps(document)))
    except UsageError:
        return
    schema = json.loads(manifest.json_schema())
    assert accepts(schema, schema, json.loads(json.dumps(document, default=datetime.datetime.isoformat)))
