"""The passes there are, by name, so that a tuple of them travels as JSON between processes and into cache keys.

A pass registers by one line in :data:`PASSES`. Its JSON is its settings and its ``name``, which tells them apart. A
room may bring passes of its own: they are named ``<kind>/<name>``, and its ``target.toml`` says where they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, cast

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from packager.errors import InternalError
from packager.room import kinds
from packager.transform import Pass

PASSES: Mapping[str, str] = {
    "annotate": "packager.transform_shapes:Annotate",
    "bf16": "packager.transform_float16:BFloat16",
    "clean": "packager.transform_cleaning:Clean",
    "drop-unused-imports": "packager.transform_versions:DropUnusedImports",
    "fold": "packager.transform_shapes:Fold",
    "fold-batchnorm": "packager.transform_batchnorm:FoldBatchNorm",
    "fp8": "packager.transform_fp8:Float8",
    "fp16": "packager.transform_float16:Float16",
    "fp16-weights": "packager.transform_float16_weights:HalfWeights",
    "inline-functions": "packager.transform_versions:InlineFunctions",
    "int8-dynamic": "packager.transform_int8:Int8Dynamic",
    "int8-static": "packager.transform_int8:Int8Static",
    "int4-weights": "packager.transform_weights:WeightOnly",
    "int8-weights": "packager.transform_weights:WeightOnly",
    "pin-shapes": "packager.transform_shapes:PinShapes",
    "set-versions": "packager.transform_versions:SetVersions",
    "strip-zipmap": "packager.transform_cleaning:StripZipMap",
    "exact-int8": "packager.transform_exact_int8:ExactInt8",
}
"""Name of a pass to ``module:class``."""


def _place(name: str) -> str | None:
    """``module:class`` of a pass; ``None`` where there is none of that name."""
    kind, _, own = name.partition("/")
    if not own:
        return PASSES.get(name)
    found = kinds().get(kind)
    place = None if found is None else found.facts.dialect.own.get(name)
    return None if found is None or place is None else f"{found.module}.{place}"


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    place = _place(name)
    if place is None:
        raise InternalError(f"no pass is named '{name}'; there are: {', '.join(PASSES)}")
    module, _, cls = place.partition(":")
    return TypeAdapter(getattr(importlib.import_module(module), cls))


def dump_pass(made: Pass) -> dict[str, Any]:
    """The JSON of a pass: ``name`` and its settings.

    Raises:
        InternalError: its class isn't registered under its name.
    """
    adapter = _adapter(made.name)
    place = f"{type(made).__module__}:{type(made).__qualname__}"
    if place != _place(made.name):
        raise InternalError(f"pass '{made.name}' is {_place(made.name)}, not {place}")
    return {"name": made.name, **adapter.dump_python(made, mode="json")}


def load_pass(value: object) -> Pass:
    """The pass of that JSON (or the pass itself).

    Raises:
        ValueError: it isn't the JSON of a registered pass (pydantic reports it with its place).
    """
    name = getattr(value, "name", None)
    if isinstance(name, str) and _place(name) is not None:
        return cast(Pass, value)
    if not isinstance(value, dict):
        raise ValueError("a pass is an object with a 'name'")
    settings = dict(value)
    name = settings.pop("name", None)
    if not isinstance(name, str) or _place(name) is None:
        raise ValueError(f"no pass is named {name!r}")
    made: Pass = _adapter(name).validate_python(settings)
    return made


AnyPass = Annotated[Pass, PlainValidator(load_pass), PlainSerializer(dump_pass)]
"""A field of this type holds any registered pass and survives JSON."""
