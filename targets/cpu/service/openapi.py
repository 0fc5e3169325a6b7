"""The OpenAPI document of one model's service: exact names, datatypes and ranks, for clients and for fuzzers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from .core import Served, Tensor
from .protocol import DATATYPES, HEADER

INTEGERS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}
NUMBERS = ("FP16", "FP32", "FP64")


def document(model: Served) -> dict[str, Any]:
    """OpenAPI 3.1."""
    base = f"/v2/models/{quote(model.name, safe='')}"
    paths: dict[str, Any] = {
        "/v2/health/live": _get("Whether the process answers", "Live", {200}),
        "/v2/health/ready": _get("Whether requests are taken", "Ready", {200, 503}),
        "/v2": _get("Runtime and extensions", "Server", {200}),
    }
    for path in (base, f"{base}/versions/{quote(model.version, safe='')}"):
        paths[path] = _get("The model's signature", "Model", {200})
        paths[f"{path}/ready"] = _get("Whether the model is ready", "ModelReady", {200, 503})
        paths[f"{path}/infer"] = {"post": _infer()}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{model.name} {model.version}", "version": model.version},
        "paths": paths,
        "components": {"schemas": _schemas(model)},
    }


def _get(summary: str, schema: str, statuses: set[int]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {str(status): _json(schema) for status in sorted(statuses)}}}


def _json(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": schema, "content": content}


def _infer() -> dict[str, Any]:
    answers = {"200": _json("Answer"), **{str(status): _json("Error") for status in (400, 408, 413, 415, 429, 503)}}
    answers["200"]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return {
        "summary": "Run the model",
        "parameters": [
            {
                "name": HEADER, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0},
                "description": "bytes of the JSON header, where tensors follow it as bytes",
            }
        ],
        "requestBody": {"required": True, **_request()},
        "responses": answers,
    }  # fmt: skip


def _request() -> dict[str, Any]:
    return {
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/Request"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        }
    }


def _schemas(model: Served) -> dict[str, Any]:
    text, flag = {"type": "string"}, {"type": "boolean"}
    listed = {"type": "array", "items": _object({"name": text, "datatype": text, "shape": _sizes(-1)})}
    names = [tensor.name for tensor in model.outputs]
    return {
        "Live": _object({"live": flag}),
        "Ready": _object({"ready": flag}),
        "ModelReady": _object({"name": text, "ready": flag}),
        "Server": _object({"name": text, "version": text, "extensions": {"type": "array", "items": text}}),
        "Model": _object(
            {"name": text, "versions": {"type": "array", "items": text}, "platform": text, "inputs": listed,
             "outputs": listed}
        ),
        "Error": _object({"error": text}),
        "Request": {
            **_object({"inputs": _tensors(model.inputs)}),
            "properties": {
                "id": text,
                "inputs": _tensors(model.inputs),
                "outputs": {"type": "array", "items": _object({"name": {"enum": names}})},
                "parameters": {"type": "object", "properties": {"binary_data_output": flag}},
            },
        },
        "Answer": {
            **_object({"model_name": text, "model_version": text, "outputs": {"type": "array"}}),
        },
    }  # fmt: skip


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _sizes(least: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer", "minimum": least}}


def _tensors(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """One of each input, in any order: JSON Schema says so by count, kinds and names."""
    kinds = [_tensor(tensor) for tensor in tensors]
    return {"type": "array", "minItems": len(kinds), "maxItems": len(kinds), "items": {"oneOf": kinds}}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    datatype = DATATYPES[tensor.dtype]
    dims = tensor.dims or ()
    shape = {
        "type": "array", "minItems": len(dims), "maxItems": len(dims),
        "prefixItems": [{"const": dim} if isinstance(dim, int) else {"type": "integer", "minimum": 0} for dim in dims],
    }  # fmt: skip
    properties = {
        "name": {"const": tensor.name},
        "datatype": {"const": datatype},
        "shape": shape if tensor.dims is not None else _sizes(0),
        "data": {"type": "array", "items": _value(datatype), "description": "values in C order, flat or nested"},
    }
    return _object(properties)


def _value(datatype: str) -> dict[str, Any]:
    if datatype == "BOOL":
        return {"type": "boolean"}
    if datatype == "BYTES":
        return {"type": "string"}
    if datatype in NUMBERS:
        return {"type": "number"}
    if datatype in INTEGERS:
        half = 1 << (INTEGERS[datatype] - 1)
        return {"type": "integer", "minimum": -half, "maximum": half - 1}
    return {"type": "integer", "minimum": 0, "maximum": (1 << int(datatype.removeprefix("UINT"))) - 1}
