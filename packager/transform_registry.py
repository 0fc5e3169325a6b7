"""The passes there are, by name, so that a tuple of them travels as JSON between processes and into cache keys.

A pass registers by one line in :data:`PASSES`. Its JSON is its settings and its ``name``, which tells them apart.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, cast

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from packager.errors import InternalError
from packager.transform import Pass

PASSES: Mapping[str, str] = {
    "bf16": "packager.transform_float16:BFloat16",
    "clean": "packager.transform_cleaning:Clean",
    "drop-unused-imports": "packager.transform_versions:DropUnusedImports",
    "fold": "packager.transform_shapes:Fold",
    "fold-batchnorm": "packager.transform_batchnorm:FoldBatchNorm",
    "fp16": "packager.transform_float16:Float16",
    "inline-functions": "packager.transform_versions:InlineFunctions",
    "int8-dynamic": "packager.transform_int8:Int8Dynamic",
    "int8-static": "packager.transform_int8:Int8Static",
    "int4-weights": "packager.transform_weights:WeightOnly",
    "int8-weights": "packager.transform_weights:WeightOnly",
    "pin-shapes": "packager.transform_shapes:PinShapes",
    "set-versions": "packager.transform_versions:SetVersions",
    "strip-zipmap": "packager.transform_cleaning:StripZipMap",
}
"""Name of a pass to ``module:class``."""


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    if name not in PASSES:
        raise InternalError(f"no pass is named '{name}'; there are: {', '.join(PASSES)}")
    module, _, cls = PASSES[name].partition(":")
    return TypeAdapter(getattr(importlib.import_module(module), cls))


def dump_pass(made: Pass) -> dict[str, Any]:
    """The JSON of a pass: ``name`` and its settings.

    Raises:
        InternalError: its class isn't registered under its name.
    """
    adapter = _adapter(made.name)
    module, _, cls = PASSES[made.name].partition(":")
    if (type(made).__module__, type(made).__qualname__) != (module, cls):
        raise InternalError(f"pass '{made.name}' is {PASSES[made.name]}, not {type(made).__module__}:{type(made)}")
    return {"name": made.name, **adapter.dump_python(made, mode="json")}


def load_pass(value: object) -> Pass:
    """The pass of that JSON (or the pass itself).

    Raises:
        ValueError: it isn't the JSON of a registered pass (pydantic reports it with its place).
    """
    if getattr(value, "name", None) in PASSES:
        return cast(Pass, value)
    if not isinstance(value, dict):
        raise ValueError("a pass is an object with a 'name'")
    settings = dict(value)
    name = settings.pop("name", None)
    if name not in PASSES:
        raise ValueError(f"no pass is named {name!r}")
    made: Pass = _adapter(name).validate_python(settings)
    return made


AnyPass = Annotated[Pass, PlainValidator(load_pass), PlainSerializer(dump_pass)]
"""A field of this type holds any registered pass and survives JSON."""
