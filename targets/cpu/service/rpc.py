"""The gRPC front end: ``inference.GRPCInferenceService``.

Tensors come as ``contents`` or as ``raw_input_contents`` and go as ``raw_output_contents``. Messages are parsed here
rather than by grpc, whose answer to malformed ones would blame the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from .core import Core, Refusal
from .messages import METHODS, SERVICE, message
from .protocol import (
    DTYPES,
    Array,
    Malformed,
    check_outputs,
    datatype_of,
    from_bytes,
    from_values,
    read_shape,
    text_of,
    to_bytes,
)

CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""Where typed values of a datatype lie; FP16 has no place and comes raw."""

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

Answer = Callable[[Core, Any], Awaitable[Any]]


async def start(core: Core, address: str) -> tuple[Any, int]:
    """A started server, and its port.

    Raises:
        RuntimeError: the address can't be listened on.
    """
    most = core.limits.body
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", most),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
    )
    handlers = {name: grpc.unary_unary_rpc_method_handler(_handler(core, name, ANSWERS[name])) for name in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, port


def _handler(core: Core, method: str, made: Answer) -> Callable[[bytes, Any], Awaitable[bytes]]:
    kind = message(f"{method}Request")

    async def answer(raw: bytes, context: Any) -> bytes:  # noqa: ANN401 - of grpc
        status = 200
        try:
            response = await made(core, kind.FromString(raw))
            sent: bytes = response.SerializeToString()
            return sent
        except DecodeError:
            status, told = 400, f"the bytes are no {method}Request"
        except Malformed as error:
            status, told = 400, str(error)
        except Refusal as error:
            status, told = error.status, str(error)
        except MemoryError:
            status, told = 503, "there is no memory for this request"
        finally:
            if method == "ModelInfer":
                core.metrics.requests.labels("grpc", str(status)).inc()
        await context.abort(CODES[status], told[:2000])
        raise AssertionError("abort raises")

    return answer


async def _live(core: Core, _: Any) -> Any:  # noqa: ANN401 - messages that protobuf makes
    return message("ServerLiveResponse")(live=True)


async def _ready(core: Core, _: Any) -> Any:  # noqa: ANN401
    return message("ServerReadyResponse")(ready=core.ready)


async def _model_ready(core: Core, asked: Any) -> Any:  # noqa: ANN401
    core.check_model(asked.name, asked.version)
    return message("ModelReadyResponse")(ready=core.ready)


async def _metadata(core: Core, _: Any) -> Any:  # noqa: ANN401
    return message("ServerMetadataResponse")(**core.server_metadata())


async def _model_metadata(core: Core, asked: Any) -> Any:  # noqa: ANN401
    core.check_model(asked.name, asked.version)
    return message("ModelMetadataResponse")(**core.model_metadata())


async def _infer(core: Core, asked: Any) -> Any:  # noqa: ANN401
    core.check_model(asked.model_name, asked.model_version)
    with core.admitted():
        feeds = _feeds(asked)
        wanted = [output.name for output in asked.outputs]
        check_outputs(wanted, core.outputs)
        outputs = await core.infer(feeds)
    response = message("ModelInferResponse")(model_name=core.model.name, model_version=core.model.version, id=asked.id)
    for name in dict.fromkeys(wanted) or outputs:
        array = outputs[name]
        response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        response.raw_output_contents.append(to_bytes(array))
    return response


ANSWERS: dict[str, Answer] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _metadata,
    "ModelMetadata": _model_metadata,
    "ModelInfer": _infer,
}


def _feeds(asked: Any) -> dict[str, Array]:  # noqa: ANN401
    raw = asked.raw_input_contents
    if raw and len(raw) != len(asked.inputs):
        raise Malformed(f"{len(asked.inputs)} inputs come with {len(raw)} raw contents")
    feeds: dict[str, Array] = {}
    for index, tensor in enumerate(asked.inputs):
        if tensor.name in feeds:
            raise Malformed(f"input {tensor.name!a} is given twice")
        shape = read_shape(list(tensor.shape), tensor.name)
        if raw:
            if tensor.contents.ListFields():
                raise Malformed(f"input {tensor.name!a} has both contents and raw contents")
            feeds[tensor.name] = from_bytes(tensor.name, tensor.datatype, shape, raw[index])
        else:
            feeds[tensor.name] = _typed(tensor, shape)
    return feeds


def _typed(tensor: Any, shape: tuple[int, ...]) -> Array:  # noqa: ANN401
    name, datatype = tensor.name, tensor.datatype
    if datatype not in DTYPES:
        raise Malformed(f"input {name!a} has datatype {datatype!a}; known are {', '.join(DTYPES)}")
    place = CONTENTS.get(datatype)
    if place is None:
        raise Malformed(f"input {name!a}: {datatype} comes as raw_input_contents only")
    strange = [field.name for field, _ in tensor.contents.ListFields() if field.name != place]
    if strange:
        raise Malformed(f"input {name!a} is {datatype} and has its values in {', '.join(strange)}, not in {place}")
    values = getattr(tensor.contents, place)
    if datatype == "BYTES":
        return from_values(name, datatype, shape, [text_of(name, each) for each in values])
    if datatype == "FP32":  # infinities are values here, not overflows, and lists would be slow
        given = np.array(values, np.float32)
        return from_bytes(name, datatype, shape, given.astype("<f4").tobytes())
    return from_values(name, datatype, shape, list(values))
