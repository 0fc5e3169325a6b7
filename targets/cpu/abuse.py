"""What nobody should send, sent: a service must refuse it with a 4xx, and go on.

Requests are made from one that is right by one mistake each, so that a refusal is for that mistake.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from packager.goldens import Array
from packager.targets.cpu.infer import Session
from packager.targets.cpu.service.protocol import DATATYPES, HEADER, padded, to_bytes

SECONDS = 60.0
Body = tuple[str, bytes, dict[str, str], int]
"""What is wrong, the body, its headers, and the status that is right."""


def survived(http_url: str, grpc_url: str, model: Session, feeds: Mapping[str, Array], limit: int) -> list[str]:
    """Send everything. What wasn't refused as it should be, a line each.

    Args:
        http_url: of the service.
        grpc_url: of the service.
        model: whose service it is.
        feeds: inputs that are right.
        limit: bytes a request may have.
    """
    address = urlsplit(http_url).netloc
    path = f"/v2/models/{quote(model.name, safe='')}/infer"
    found = []
    for what, body, headers, wanted in bodies(model, feeds):
        status = post(address, path, body, headers)
        if status != wanted:
            found.append(f"HTTP, {what}: status {status}, not {wanted}")
    for name, wanted in ((f"{model.name}x", 404), (model.name, 405)):
        status = post(
            address, f"/v2/models/{quote(name, safe='')}/{'infer' if wanted == 404 else ''}".rstrip("/"), b"{}"
        )
        if status != wanted:
            found.append(f"HTTP, a wrong path: status {status}, not {wanted}")
    found += _raw(address, path, limit)
    return found + _grpc(grpc_url, model, feeds)


def bodies(model: Session, feeds: Mapping[str, Array]) -> Iterator[Body]:
    """Malformed bodies of an ``infer`` request."""
    for what, document in documents(model, feeds):
        yield what, json.dumps(document).encode(), {}, 400
    for what, body in (
        ("an empty body", b""),
        ("no JSON", b"{"),
        ("no UTF-8", b'{"inputs": "\xff"}'),
        ("a list", b"[]"),
        ("lists in lists", b"[" * 100_000),
    ):
        yield what, body, {}, 400
    head, rest = binary_request(model, feeds)
    yield "a header length beyond the body", head, {HEADER: str(len(head) + 1)}, 400
    yield "a header length that is no number", head + rest, {HEADER: "-1"}, 400
    yield "binary data cut off", head + rest[:-1], {HEADER: str(len(head))}, 400 if rest else 200
    yield "binary data left over", head + rest + b"x", {HEADER: str(len(head))}, 400
    yield "an encoding", head + rest, {HEADER: str(len(head)), "Content-Encoding": "gzip"}, 415


def documents(model: Session, feeds: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests as JSON, each with one mistake."""
    right = [
        {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": list(feeds[tensor.name].shape),
         "data": feeds[tensor.name].ravel().tolist()}
        for tensor in model.inputs
    ]  # fmt: skip
    yield "no inputs", {}
    yield "inputs that are no list", {"inputs": {}}
    yield (
        "an unknown input",
        {"inputs": [*right, {"name": "no such input", "datatype": "FP32", "shape": [1], "data": [0]}]},
    )
    yield "an unknown output", {"inputs": right, "outputs": [{"name": "no such output"}]}
    yield "an id that is a number", {"inputs": right, "id": 1}
    if not right:
        return
    first, rest = right[0], right[1:]
    ones = [1] * len(first["data"])
    yield "an input left out", {"inputs": rest}
    yield "an input twice", {"inputs": [first, *right]}
    for what, change in (
        ("another dtype", {"datatype": "INT8" if first["datatype"] == "UINT8" else "UINT8", "data": ones}),
        ("an unknown dtype", {"datatype": "FP31"}),
        ("a name that is a number", {"name": 7}),
        ("a dim more", {"shape": [*first["shape"], 1]} if model.inputs[0].dims is not None else {"shape": None}),
        ("a dim below 0", {"shape": [-1]}),
        ("dims beyond memory", {"shape": [1 << 40, 1 << 40]}),
        ("no shape", {"shape": None}),
        ("a value more", {"data": [*first["data"], 1]}),
        ("values of another kind", {"data": [None] * max(1, len(first["data"]))}),
        ("no values", {"data": None}),
        ("binary data that isn't there", {"parameters": {"binary_data_size": 1 << 60}}),
    ):  # fmt: skip
        yield what, {"inputs": [{**first, **change}, *rest]}


def binary_request(model: Session, feeds: Mapping[str, Array]) -> tuple[bytes, bytes]:
    """A right request in the binary extension: its JSON header and the bytes after it."""
    payloads = [to_bytes(feeds[tensor.name]) for tensor in model.inputs]
    inputs = [
        {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": list(feeds[tensor.name].shape),
         "parameters": {"binary_data_size": len(payload)}}
        for tensor, payload in zip(model.inputs, payloads, strict=True)
    ]  # fmt: skip
    return padded(json.dumps({"inputs": inputs}).encode()), b"".join(payloads)


def post(address: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> int:
    """The status of a request; 0 where there was no answer."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request("POST", path, body, dict(headers or {}))
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _raw(address: str, path: str, limit: int) -> list[str]:
    """Requests that no HTTP library sends: too long, cut off, no HTTP at all."""
    start = f"POST {path} HTTP/1.1\r\nHost: {address}\r\n"
    found = []
    for what, sent, wanted in (
        ("a body longer than allowed", f"{start}Content-Length: {limit + 1}\r\n\r\n", b" 413 "),
        ("a body without an end", f"{start}Transfer-Encoding: chunked\r\n\r\n{limit + 1:x}\r\n", b""),
        ("a length below 0", f"{start}Content-Length: -5\r\n\r\n", b" 400 "),
        ("no HTTP", "\x00\x01\x02\r\n\r\n", b" 400 "),
        ("a body cut off", f"{start}Content-Length: 100\r\n\r\n{{", b""),
    ):
        told = exchange(address, sent.encode("latin-1"), wait=bool(wanted))
        if wanted and wanted not in told.split(b"\r\n", 1)[0]:
            found.append(f"HTTP, {what}: {told[:80]!r}, not{wanted.decode().rstrip()}")
    return found


def exchange(address: str, sent: bytes, wait: bool) -> bytes:
    """What a server answers to bytes; nothing is read where it needn't answer, and we hang up."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS) as link:
        link.sendall(sent)
        return link.recv(4096) if wait else b""


def _grpc(url: str, model: Session, feeds: Mapping[str, Array]) -> list[str]:
    import grpc

    from packager.targets.cpu.service.messages import SERVICE, message

    kind = message("ModelInferRequest.InferInputTensor")
    inputs = [
        kind(name=tensor.name, datatype=DATATYPES[tensor.dtype], shape=feeds[tensor.name].shape)
        for tensor in model.inputs
    ]
    raw = [to_bytes(feeds[tensor.name]) for tensor in model.inputs]

    def asked(**change: object) -> bytes:
        fields = {"model_name": model.name, "inputs": inputs, "raw_input_contents": raw, **change}
        sent: bytes = message("ModelInferRequest")(**fields).SerializeToString()
        return sent

    wrong, nothing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    tries = [
        ("bytes that are no message", b"\xff\xff\xff", wrong),
        ("another model", asked(model_name=f"{model.name}x"), nothing),
        (
            "an unknown output",
            asked(outputs=[message("ModelInferRequest.InferRequestedOutputTensor")(name="none")]),
            wrong,
        ),
        ("raw contents left over", asked(raw_input_contents=[*raw, b"x"]), wrong),
    ]
    if inputs:
        other = kind(name=inputs[0].name, datatype="FP31", shape=inputs[0].shape)
        deep = kind(name=inputs[0].name, datatype=inputs[0].datatype, shape=[-1, 1 << 62])
        tries += [
            ("an input left out", asked(inputs=inputs[1:], raw_input_contents=raw[1:]), wrong),
            ("an unknown dtype", asked(inputs=[other, *inputs[1:]]), wrong),
            ("a shape beyond memory", asked(inputs=[deep, *inputs[1:]]), wrong),
            ("a byte more", asked(raw_input_contents=[raw[0] + b"x", *raw[1:]]), wrong),
        ]
    found = []
    with grpc.insecure_channel(urlsplit(url).netloc, [("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for what, sent, wanted in tries:
            try:
                call(sent, timeout=SECONDS)
                found.append(f"gRPC, {what}: answered, not {wanted.name}")
            except grpc.RpcError as error:
                if error.code() != wanted:
                    found.append(f"gRPC, {what}: {error.code().name}, not {wanted.name}")
    return found
