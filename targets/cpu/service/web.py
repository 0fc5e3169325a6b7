"""The HTTP front end: the Open Inference Protocol's paths, ``/metrics`` and ``/openapi.json``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .core import Core, Limits, Refusal
from .openapi import document
from .protocol import HEADER, Malformed, read_request, write_response

JSON, BINARY, LENGTH = b"application/json", b"application/octet-stream", HEADER.lower().encode()
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

    async def metrics(_: Request) -> Response:
        return Response(core.metrics.text(), headers={"content-type": core.metrics.content_type})

    async def openapi(_: Request) -> Response:
        return Response(described, media_type="application/json")

    paths, infer = (model, model + "/versions/{version}"), Inference(core)
    routes = [
        *(Route(f"{path}/infer", infer, methods=["POST"]) for path in paths),  # first: most requests are these
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2", server),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    for path in paths:
        routes += [Route(path, metadata), Route(f"{path}/ready", model_ready)]
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


class Inference:
    """The route of inference, an ASGI application of its own: a request costs half of what Starlette's objects make it.

    What is refused is raised, for the handlers of the whole application.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._answered = core.metrics.requests.labels("http", "200")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        core, status, asked = self._core, 400, scope["path_params"]
        try:
            core.check_model(asked["model"], asked.get("version", ""))
            with core.admitted():
                length, body = await self._infer(dict(scope["headers"]), receive)
            status = 200
        except Refusal as error:
            status = error.status
            raise
        except ClientDisconnect:
            return
        except MemoryError:
            status = 503
            raise Refusal(503, "there is no memory for this request") from None
        finally:
            (self._answered if status == 200 else core.metrics.requests.labels("http", str(status))).inc()
        headers = [(b"content-type", JSON if length is None else BINARY), (b"content-length", b"%d" % len(body))]
        if length is not None:
            headers.append((LENGTH, b"%d" % length))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _infer(self, headers: Mapping[bytes, bytes], receive: Receive) -> tuple[int | None, bytes]:
        """The length of the answer's JSON header, where bytes follow it, and the answer's body."""
        core = self._core
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refusal(415, "bodies are taken as they are, without an encoding")
        body = await _body(core.limits, headers.get(b"content-length", b"0"), receive)
        length = headers.get(LENGTH)
        told = (body, None if length is None else length.decode("latin-1"), core.outputs)
        asked = await asyncio.to_thread(read_request, *told) if len(body) > OFF_LOOP else read_request(*told)
        outputs = await core.infer(asked.inputs)
        answer = ((core.model.name, core.model.version), asked, outputs)
        large = sum(array.nbytes for array in outputs.values()) > OFF_LOOP
        parts, head = await asyncio.to_thread(write_response, *answer) if large else write_response(*answer)
        return head, b"".join(parts)


async def _body(limits: Limits, told: bytes, receive: Receive) -> bytes:
    """The whole body, if it is no longer than allowed and arrives in time.

    Raises:
        Refusal: it is too long, or too slow.
        ClientDisconnect: the connection ended first.
    """
    too_long = f"a request may have {limits.body} bytes"
    if not told.isdigit() or int(told) > limits.body:
        raise Refusal(413, too_long)
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                if size > limits.body:
                    raise Refusal(413, too_long)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {limits.body_seconds:g} s to arrive") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)
