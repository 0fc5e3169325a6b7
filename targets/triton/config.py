"""``config.pbtxt``: what Triton is told of a model, written through an encoder and read back by Triton's own schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packager.errors import BuildError
from packager.render import c_string
from packager.targets.triton.options import Options

BACKEND = "onnxruntime"
MODEL_FILE = "model.onnx"
DTYPES = {
    "float32": "TYPE_FP32", "float64": "TYPE_FP64", "float16": "TYPE_FP16", "int8": "TYPE_INT8",
    "int16": "TYPE_INT16", "int32": "TYPE_INT32", "int64": "TYPE_INT64", "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32", "uint64": "TYPE_UINT64", "bool": "TYPE_BOOL",
    "string": "TYPE_STRING",
}  # fmt: skip
"""dtype names of signatures to Triton's."""

KINDS = {"cpu": "KIND_CPU", "auto": "KIND_AUTO"}


@dataclass(frozen=True)
class Entry:
    """One input or output: exact name, Triton's type, and the ONNX dims in full, -1 where free, none for a scalar."""

    name: str
    data_type: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class WarmUp:
    """One input of the request that warms the model up: its dims as they travel, and the file of its bytes."""

    entry: Entry
    dims: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Config:
    """A model's configuration. ``max_batch`` 0 is no batching; ``why`` says in one line why it is what it is."""

    name: str
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    max_batch: int
    why: str
    options: Options
    warm_up: tuple[WarmUp, ...] = ()


def config_text(config: Config) -> str:
    """The whole file."""
    options = config.options
    lines = [
        f"# {' '.join(config.why.split())}",
        f"name: {c_string(config.name)}",
        f"backend: {c_string(BACKEND)}",
        f"default_model_filename: {c_string(MODEL_FILE)}",
        f"max_batch_size: {config.max_batch}",
    ]
    for side, entries in (("input", config.inputs), ("output", config.outputs)):
        lines.append(f"{side} [")
        lines.append(",\n".join(_entry(entry, config.max_batch > 0) for entry in entries))
        lines.append("]")
    lines.append(f"instance_group [\n  {{ count: {options.instances} kind: {KINDS[options.device]} }}\n]")
    lines.append(f"version_policy {{ specific {{ versions: [ {options.model_version} ] }} }}")
    if config.max_batch > 1:
        preferred = ", ".join(str(size) for size in options.preferred_batch_sizes)
        lines.append("dynamic_batching {")
        lines += [f"  preferred_batch_size: [ {preferred} ]"] if preferred else []
        lines += [f"  max_queue_delay_microseconds: {options.queue_delay_us}", "}"]
    if config.warm_up:
        lines.append('model_warmup [\n  {\n    name: "golden"\n    batch_size: 1')
        for each in config.warm_up:
            value = f"data_type: {each.entry.data_type} dims: [ {', '.join(map(str, each.dims))} ]"
            file = f"input_data_file: {c_string(each.file)}"
            lines.append(f"    inputs {{ key: {c_string(each.entry.name)} value {{ {value} {file} }} }}")
        lines.append("  }\n]")
    return "\n".join(lines) + "\n"


def _entry(entry: Entry, batching: bool) -> str:
    dims = list(entry.dims[1:] if batching else entry.dims)
    # Triton has no empty dims: a scalar is [1], and so is a row without dims, which the core then reshapes away.
    reshape = " reshape: { shape: [ ] }" if batching and not dims else ""
    shape = ", ".join(str(dim) for dim in dims or [1])
    return f"  {{ name: {c_string(entry.name)} data_type: {entry.data_type} dims: [ {shape} ]{reshape} }}"


FIELDS = frozenset(
    {"name", "backend", "platform", "default_model_filename", "max_batch_size", "input", "output", "instance_group",
     "version_policy", "dynamic_batching", "model_warmup"}
)  # fmt: skip
"""What a configuration of a bundle may say. Others can name code: another backend, a library of operators, a Python
environment."""


def safety_objection(text: str) -> str:
    """Why a configuration that came from somewhere isn't handed to a server; empty where it may be."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        parsed = text_format.Parse(text, ModelConfig())
    except (text_format.ParseError, ValueError) as error:
        return f"Triton's schema refuses it: {error}"
    other = sorted(field.name for field, _ in parsed.ListFields() if field.name not in FIELDS)
    if other:
        return f"it sets {', '.join(other)}, which no bundle does"
    if (parsed.backend or BACKEND, parsed.platform) not in ((BACKEND, ""), (BACKEND, f"{BACKEND}_onnx")):
        return f"it is for backend '{parsed.backend or parsed.platform}', not for {BACKEND}"
    if parsed.default_model_filename not in ("", MODEL_FILE):
        return f"its model file is '{parsed.default_model_filename}', not {MODEL_FILE}"
    return ""


def check_text(text: str, config: Config, place: Path) -> None:
    """Read the file back with Triton's own schema and hold it against what was meant.

    Raises:
        BuildError: it doesn't parse, or says something else.
    """
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        parsed = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise BuildError(f"{place}: Triton's schema refuses it: {error}") from error
    wanted = [
        (entry.name, entry.data_type, list(entry.dims[1:] if config.max_batch else entry.dims) or [1])
        for entry in (*config.inputs, *config.outputs)
    ]
    found = [
        (each.name, each.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[each.data_type].name,
         list(each.dims))
        for each in (*parsed.input, *parsed.output)
    ]  # fmt: skip
    same = (parsed.name, parsed.max_batch_size, found) == (config.name, config.max_batch, wanted)
    if not same:
        raise BuildError(f"{place}: reads back as something else than was written", "report the model's tensor names")
