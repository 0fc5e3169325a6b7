"""``config.pbtxt``: what Triton is told of a model, made and read through Triton's own protobuf schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packager.targets.triton.accelerators import KNOWN
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

KINDS = {"cpu": "KIND_CPU", "gpu": "KIND_GPU", "auto": "KIND_AUTO"}
LEVELS = {"extended": 1, "basic": -1, "none": 2}
"""The backend's numbers for how far ONNX Runtime may rewrite the graph; everything is its default."""

THREADS = "intra_op_thread_count"


@dataclass(frozen=True)
class Entry:
    """One input or output: exact name, Triton's type, and the ONNX dims in full, -1 where free, none for a scalar."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    labels: str = ""


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
    """The whole file. Its first line is a comment with the reason for the batch size."""
    return f"# {' '.join(config.why.split())}\n{printed(message(config))}"


def printed(made: Any) -> str:  # noqa: ANN401 - a protobuf message
    """A configuration in protobuf's text form, field by field, in ASCII: the same for the same message."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(made, as_utf8=False)
    return text


def message(config: Config) -> Any:  # noqa: ANN401 - a protobuf message
    """The configuration as a ``ModelConfig`` of Triton's schema."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    options = config.options
    made = ModelConfig(
        name=config.name, backend=BACKEND, default_model_filename=MODEL_FILE, max_batch_size=config.max_batch
    )
    for side, entries in ((made.input, config.inputs), (made.output, config.outputs)):
        for entry in entries:
            _add_entry(side, entry, config.max_batch > 0)
    for each, entry in zip(made.output, config.outputs, strict=True):
        each.label_filename = entry.labels
    _add_instances(made, options)
    if options.version_policy == "specific":
        made.version_policy.specific.versions.append(options.model_version)
    elif options.version_policy == "latest":
        made.version_policy.latest.num_versions = 1
    else:
        made.version_policy.all.SetInParent()
    if config.max_batch > 1:
        made.dynamic_batching.preferred_batch_size.extend(options.preferred_batch_sizes)
        made.dynamic_batching.max_queue_delay_microseconds = options.queue_delay_us
    _add_tuning(made, options)
    if config.warm_up:
        sample = made.model_warmup.add(name="golden", batch_size=1)
        for warm in config.warm_up:
            given = sample.inputs[warm.entry.name]
            given.data_type = given_type(warm.entry)
            given.dims.extend(warm.dims)
            given.input_data_file = warm.file
    return made


def given_type(entry: Entry) -> int:
    """The number of an entry's type in Triton's schema."""
    from tritonclient.grpc.model_config_pb2 import DataType

    return int(DataType.Value(entry.data_type))


def _add_entry(side: Any, entry: Entry, batching: bool) -> None:  # noqa: ANN401 - a protobuf list
    dims = list(entry.dims[1:] if batching else entry.dims)
    # Triton has no empty dims: a scalar is [1], and so is a row without dims, which the core then reshapes away.
    made = side.add(name=entry.name, data_type=given_type(entry), dims=dims or [1])
    if batching and not dims:
        made.reshape.SetInParent()


def _add_instances(made: Any, options: Options) -> None:  # noqa: ANN401 - a protobuf message
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    group = made.instance_group.add(
        count=options.instances, kind=ModelInstanceGroup.Kind.Value(KINDS[options.device]), gpus=options.gpus
    )
    if options.rate_limit or options.priority:
        group.rate_limiter.priority = options.priority
        for name, count in sorted(options.rate_limit.items()):
            group.rate_limiter.resources.add(name=name, count=count)


def _add_tuning(made: Any, options: Options) -> None:  # noqa: ANN401 - a protobuf message
    if options.accelerator != "none":
        chosen = made.optimization.execution_accelerators
        side = (
            chosen.cpu_execution_accelerator if options.accelerator == "openvino" else chosen.gpu_execution_accelerator
        )
        side.add(name=options.accelerator, parameters=options.accelerator_options)
    if options.graph_optimization != "all":
        made.optimization.graph.level = LEVELS[options.graph_optimization]
    if options.intra_op_threads:
        made.parameters[THREADS].string_value = str(options.intra_op_threads)
    if options.response_cache:
        made.response_cache.enable = True


def without_gpu(text: str) -> str:
    """The configuration as JSON, with its instances on CPU and no accelerator of a GPU; empty where it asks for none.

    A server without a GPU refuses KIND_GPU. Loaded with this in place of the file, all the rest is still checked.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

    made = text_format.Parse(text, ModelConfig())
    asking = [group for group in made.instance_group if group.kind == ModelInstanceGroup.KIND_GPU]
    if not asking:
        return ""
    for group in asking:
        group.kind = ModelInstanceGroup.KIND_CPU
        del group.gpus[:]
    del made.optimization.execution_accelerators.gpu_execution_accelerator[:]
    told: str = json_format.MessageToJson(made, preserving_proto_field_name=True)
    return told


FIELDS = frozenset(
    {"name", "backend", "platform", "default_model_filename", "max_batch_size", "input", "output", "instance_group",
     "version_policy", "dynamic_batching", "model_warmup", "optimization", "parameters", "response_cache"}
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
    whole = parsed.platform == "ensemble"
    allowed = FIELDS | {"ensemble_scheduling"} if whole else FIELDS
    other = sorted(field.name for field, _ in parsed.ListFields() if field.name not in allowed)
    other += [f"parameter {key}" for key in sorted(parsed.parameters) if key != THREADS]
    chosen = parsed.optimization.execution_accelerators
    for each in (*chosen.cpu_execution_accelerator, *chosen.gpu_execution_accelerator):
        known = KNOWN.get(each.name, frozenset())
        other += [f"{each.name} option {key}" for key in sorted(each.parameters) if key not in known]
    if other:
        return f"it sets {', '.join(other)}, which no bundle does"
    if not whole and (parsed.backend or BACKEND, parsed.platform) not in ((BACKEND, ""), (BACKEND, f"{BACKEND}_onnx")):
        return f"it is for backend '{parsed.backend or parsed.platform}', not for {BACKEND}"
    if parsed.default_model_filename not in ("", MODEL_FILE):
        return f"its model file is '{parsed.default_model_filename}', not {MODEL_FILE}"
    return ""
