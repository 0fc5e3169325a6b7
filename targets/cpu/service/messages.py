"""gRPC's messages of the Open Inference Protocol, made from a table instead of generated code.

Generated modules carry the version of the compiler that wrote them and refuse an older protobuf; descriptors don't.
Names and field numbers are those of KServe's published ``open_inference_grpc.proto`` (package ``inference``). The pool
is one of our own, so that a program may load another copy of the protocol beside this one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
TENSOR = "name:1:string datatype:2:string shape:3:int64* parameters:4:map contents:5:InferTensorContents"
TABLE = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:1:bool",
    "ModelReadyRequest": "name:1:string version:2:string",
    "ModelReadyResponse": "ready:1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:1:string version:2:string extensions:3:string*",
    "ModelMetadataRequest": "name:1:string version:2:string",
    "ModelMetadataResponse": "name:1:string versions:2:string* platform:3:string "
    "inputs:4:ModelMetadataResponse.TensorMetadata* outputs:5:ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "name:1:string datatype:2:string shape:3:int64*",
    "InferParameter": "bool_param:1:bool? int64_param:2:int64? string_param:3:string?",
    "InferTensorContents": "bool_contents:1:bool* int_contents:2:int32* int64_contents:3:int64* "
    "uint_contents:4:uint32* uint64_contents:5:uint64* fp32_contents:6:float* fp64_contents:7:double* "
    "bytes_contents:8:bytes*",
    "ModelInferRequest": "model_name:1:string model_version:2:string id:3:string parameters:4:map "
    "inputs:5:ModelInferRequest.InferInputTensor* outputs:6:ModelInferRequest.InferRequestedOutputTensor* "
    "raw_input_contents:7:bytes*",
    "ModelInferRequest.InferInputTensor": TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "name:1:string parameters:2:map",
    "ModelInferResponse": "model_name:1:string model_version:2:string id:3:string parameters:4:map "
    "outputs:5:ModelInferResponse.InferOutputTensor* raw_output_contents:6:bytes*",
    "ModelInferResponse.InferOutputTensor": TENSOR,
}
"""Message to its fields, ``name:number:type``; ``*`` is repeated, ``?`` one of a choice, ``map`` text to parameter."""

METHODS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")


def message(name: str) -> Any:  # noqa: ANN401 - a class that protobuf makes
    """The class of a message."""
    return _CLASSES[name]


def _built() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name, fields in sorted(TABLE.items()):
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        for field in fields.split():
            _add(made[name], name, *field.split(":"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in TABLE}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add(message: Any, name: str, field: str, number: str, kind: str) -> None:  # noqa: ANN401 - a descriptor
    types = descriptor_pb2.FieldDescriptorProto
    made = message.field.add(name=field, number=int(number), label=types.LABEL_OPTIONAL)
    bare = kind.rstrip("*?")
    if kind.endswith("*") or kind == "map":
        made.label = types.LABEL_REPEATED
    if kind.endswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        made.oneof_index = 0
    if kind == "map":
        entry = message.nested_type.add(name=f"{field.capitalize()}Entry")
        entry.options.map_entry = True
        _add(entry, "", "key", "1", "string")
        _add(entry, "", "value", "2", "InferParameter")
        made.type, made.type_name = types.TYPE_MESSAGE, f".{PACKAGE}.{name}.{entry.name}"
    elif bare in TABLE:
        made.type, made.type_name = types.TYPE_MESSAGE, f".{PACKAGE}.{bare}"
    else:
        made.type = types.Type.Value(f"TYPE_{bare.upper()}")


_CLASSES = _built()
