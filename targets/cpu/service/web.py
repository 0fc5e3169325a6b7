"""The HTTP front end: the Open Inference Protocol's paths, ``/metrics`` and ``/openapi.json``."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .core import Core, Refusal
from .openapi import document
from .protocol import HEADER, Malformed, read_request, write_response

OFF_LOOP = 1 << 18
"""Bodies of so many bytes are understood on another thread, so that health checks are answered meanwhile."""


def application(core: Core) -> Starlette:
    """The ASGI application."""
    model = "/v2/models/{model}"
    described = json.dumps(document(core.model)).encode()

    async def live(_: Request) -> Response:
        return answer({"live": True})

    async def ready(_: Request) -> Response:
        return answer({"ready": core.ready}, 200 if core.ready else 503)

    async def model_ready(request: Request) -> Response:
        _check(core, request)
        return answer({"name": core.model.name, "ready": core.ready}, 200 if core.ready else 503)

    async def server(_: Request) -> Response:
        return answer(core.server_metadata())

    async def metadata(request: Request) -> Response:
        _check(core, request)
        return answer(core.model_metadata())

    async def infer(request: Request) -> Response:
        return await _infer(core, request)

    async def metrics(_: Request) -> Response:
        return Response(core.metrics.text(), headers={"content-type": core.metrics.content_type})

    async def openapi(_: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2", server),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    for path in (model, model + "/versions/{version}"):
        routes += [
            Route(path, metadata),
            Route(f"{path}/ready", model_ready),
            Route(f"{path}/infer", infer, methods=["POST"]),
        ]
    handlers: dict[Any, Any] = {HTTPException: _told, Refusal: _told, Malformed: _told}
    return Starlette(routes=routes, exception_handlers=handlers)


def answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json.dumps(content).encode(), status, headers, "application/json")


async def _told(_: Request, error: Exception) -> Response:
    """What is wrong, as the protocol says it; the connection ends where its request wasn't read to the end."""
    status, headers = 400, {}
    if isinstance(error, (HTTPException, Refusal)):
        status = error.status_code if isinstance(error, HTTPException) else error.status
        headers = dict(getattr(error, "headers", None) or {})
    if status in (408, 413, 429):
        headers["connection"] = "close"
    if status == 429:
        headers["retry-after"] = "1"
    message = error.detail if isinstance(error, HTTPException) else str(error)
    return answer({"error": message}, status, headers)


def _check(core: Core, request: Request) -> None:
    core.check_model(request.path_params["model"], request.path_params.get("version", ""))


async def _infer(core: Core, request: Request) -> Response:
    status = 400
    try:
        _check(core, request)
        with core.admitted():
            response = await _answered(core, request)
        status = response.status_code
        return response
    except Refusal as error:
        status = error.status
        raise
    except ClientDisconnect:
        return answer({"error": "the request ended early"}, status)
    except MemoryError:
        status = 503
        raise Refusal(503, "there is no memory for this request") from None
    finally:
        core.metrics.requests.labels("http", str(status)).inc()


async def _answered(core: Core, request: Request) -> Response:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "bodies are taken as they are, without an encoding")
    body = await _body(core, request)
    told = (body, request.headers.get(HEADER), core.outputs)
    asked = await asyncio.to_thread(read_request, *told) if len(body) > OFF_LOOP else read_request(*told)
    outputs = await core.infer(asked.inputs)
    names = (core.model.name, core.model.version)
    large = sum(outputs[name].nbytes for name in outputs) > OFF_LOOP
    parts, length = (
        await asyncio.to_thread(write_response, names, asked, outputs)
        if large
        else write_response(names, asked, outputs)
    )
    if length is None:
        return Response(parts[0], media_type="application/json")
    return Response(b"".join(parts), 200, {HEADER: str(length)}, "application/octet-stream")


async def _body(core: Core, request: Request) -> bytes:
    """The whole body, if it is no longer than allowed and arrives in time.

    Raises:
        Refusal: it is too long, or too slow.
    """
    limit = core.limits.body
    too_long = Refusal(413, f"a request may have {limit} bytes")
    told = request.headers.get("content-length", "0")
    if not told.isdigit() or int(told) > limit:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(core.limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {core.limits.body_seconds:g} s to arrive") from None
    return b"".join(parts)
