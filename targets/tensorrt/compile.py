"""Build the engine of this folder from model.onnx, by what engine.json says, with the library that is installed here.

    python build.py

writes ``built/model.engine`` and ``built/engine.json``; ``infer.py`` takes them before the engine that was shipped. So
an engine can be had for another release of the library, and for another GPU where TensorRT proper builds it. It needs
TensorRT for RTX (``tensorrt_rtx`` or the wheels ``tensorrt-rtx-cu12-bindings`` and ``-libs``; no GPU), or TensorRT
proper (``tensorrt``, and ``cuda-bindings``) with the GPU the engine is for.

Exit status: 0 built, 2 something is missing here, 5 the library refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packager.targets.tensorrt.fit import BUILT, ENGINE, NAMES, SIDECAR, load_cuda, load_library, look, read_sidecar

ONNX, TIMING_CACHE = "model.onnx", "timing.cache"
WIDE_INTEGERS_SINCE = 10
"""TensorRT has 64-bit integers since version 10; before, constants beyond 32 bits were clamped."""

DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8", "INT32": "int32",
    "INT64": "int64", "BOOL": "bool", "FP8": "float8e4m3fn", "INT4": "int4",
}  # fmt: skip
"""TensorRT's data types to names of dtypes."""


class Missing(Exception):
    """The library isn't here."""


@dataclass(frozen=True)
class Unparsed:
    """A node that the parser can't take: operator, name (may be empty), place in the main graph, and its reason.

    No ``operator``: the parser doesn't say which node it is.
    """

    operator: str
    name: str
    number: int
    reason: str

    def __str__(self) -> str:
        where = f"node {self.operator} '{self.name or f'number {self.number}'}'" if self.operator else "the model"
        return f"{where}: {self.reason}"


class Unsupported(Exception):
    """The parser, or a rule, refuses nodes; the message has a line for each, ``nodes`` those of the parser."""

    def __init__(self, message: str, nodes: tuple[Unparsed, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class Failed(Exception):
    """The library didn't build; the message is its own."""


@dataclass(frozen=True)
class Built:
    """An engine, and what its network takes and gives: ``name``, ``side``, ``dtype``, ``dims`` (-1 where free) and
    ``shape_tensor``, for inputs that decide shapes."""

    data: bytes
    bindings: tuple[Mapping[str, Any], ...]


@cache
def _logger(trt: Any) -> Any:  # noqa: ANN401 - of two libraries
    """The process's logger, which keeps errors: TensorRT takes the first one that it is given and no other."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


def compile_engine(trt: Any, onnx: Path, wanted: Mapping[str, Any], timing_cache: Path | None = None) -> Built:  # noqa: ANN401
    """Parse and build.

    Args:
        trt: the library's module.
        onnx: the model's file; external data beside it.
        wanted: what ``engine.json`` says.
        timing_cache: a file by which TensorRT proper chooses the same kernels again; read if it is there, written
            after. TensorRT for RTX measures nothing when it builds and has none.

    Raises:
        Unsupported: the parser can't take nodes, each of which is told, or reads some in another sense.
        Failed: the library refused to build.
    """
    logger = _logger(trt)
    logger.errors.clear()
    builder = trt.Builder(logger)
    network, _parser = _parse(trt, builder, onnx, wanted)  # the parser owns weights of the network
    bindings = tuple(_bindings(network))
    config = _configured(trt, builder, wanted, timing_cache)
    _give_profile(builder, config, bindings, wanted["profiles"])
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise Failed("; ".join(logger.errors) or "it gives no reason")
    if timing_cache is not None and wanted["builder"] == "tensorrt":
        timing_cache.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))
    return Built(bytes(memoryview(data)), bindings)


def parse_only(trt: Any, onnx: Path, wanted: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Parse and build nothing.

    Raises:
        Unsupported: the parser can't take nodes, each of which is told, or reads some in another sense.
    """
    logger = _logger(trt)
    logger.errors.clear()
    _parse(trt, trt.Builder(logger), onnx, wanted)


def _parse(trt: Any, builder: Any, onnx: Path, wanted: Mapping[str, Any]) -> tuple[Any, Any]:  # noqa: ANN401
    """The network, and the parser that filled it."""
    logger = _logger(trt)
    _check_release(trt, wanted)
    network, parser = _network(trt, builder, logger)
    if not parser.parse_from_file(str(onnx)):
        nodes = _refusals(trt, builder, logger, onnx)
        raise Unsupported("\n".join(map(str, nodes)) or "\n".join(logger.errors) or "it gives no reason", nodes)
    _check_senses(trt, network, wanted)
    return network, parser


def _network(trt: Any, builder: Any, logger: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """An empty network, strongly typed (from TensorRT 11 on there is no other), and a parser that fills it."""
    flags = getattr(trt, "NetworkDefinitionCreationFlag", None)
    typed = getattr(flags, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    return network, trt.OnnxParser(network, logger)


def _check_release(trt: Any, wanted: Mapping[str, Any]) -> None:  # noqa: ANN401
    major = int(str(trt.__version__).split(".", 1)[0])
    if wanted["builder"] == "tensorrt" and major < WIDE_INTEGERS_SINCE and wanted["wide_constants"]:
        raise Unsupported(
            f"TensorRT {trt.__version__} clamps 64-bit integers to 32 bits, and these constants are beyond: "
            + ", ".join(wanted["wide_constants"])
        )


def _refusals(trt: Any, builder: Any, logger: Any, onnx: Path) -> tuple[Unparsed, ...]:  # noqa: ANN401
    """Every node the parser can't take, with its reason; parsing itself stops at the first."""
    _, parser = _network(trt, builder, logger)
    parser.supports_model_v2(onnx.read_bytes(), str(onnx))
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        reason = " ".join(str(error.desc()).split())
        told = "it has no importer for the operator" if reason in ("false", "") else reason
        found.append(Unparsed(error.node_operator() or "", error.node_name() or "", error.node(), told))
    return tuple(dict.fromkeys(found))


def _check_senses(trt: Any, network: Any, wanted: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Some releases read ``linear`` and ``cubic`` of GridSample (opset 20) as ``nearest``, without a word."""
    expected = sorted(wanted["grid_sample"])
    if not expected:
        return
    found = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.GRID_SAMPLE:
            layer.__class__ = trt.IGridSampleLayer
            found.append(str(layer.interpolation_mode).rpartition(".")[2].lower())
    if sorted(found) != expected:
        raise Unsupported(
            f"this release's parser reads the modes of GridSample nodes as {sorted(found)}, the model says {expected}: "
            "export it for operator set 19 or lower"
        )


def _bindings(network: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    found = []
    for side, count, get in (
        ("input", network.num_inputs, network.get_input),
        ("output", network.num_outputs, network.get_output),
    ):
        for index in range(count):
            tensor = get(index)
            dtype = str(tensor.dtype).rpartition(".")[2]
            found.append({
                "name": tensor.name,
                "side": side,
                "dtype": DTYPES.get(dtype, dtype),
                "dims": list(tensor.shape),
                "shape_tensor": bool(tensor.is_shape_tensor),
            })  # fmt: skip
    return found


def _configured(trt: Any, builder: Any, wanted: Mapping[str, Any], timing_cache: Path | None) -> Any:  # noqa: ANN401
    config = builder.create_builder_config()
    if not wanted["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    if wanted["builder"] == "rtx":
        chosen = wanted["compute_capabilities"] if wanted["compute_capabilities_named"] else []
        if chosen:
            config.num_compute_capabilities = len(chosen)
            for index, each in enumerate(chosen):
                config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + each.replace(".", "")), index)
        return config
    if wanted["optimization_level"] is not None:
        config.builder_optimization_level = wanted["optimization_level"]
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    return config


def _give_profile(builder: Any, config: Any, bindings: tuple[Mapping[str, Any], ...], ranges: list[Any]) -> None:  # noqa: ANN401
    """Set the profile through the API, never as text: names may hold colons and slashes."""
    by_name = {each["name"]: each for each in ranges}
    dynamic = [each for each in bindings if each["side"] == "input" and (each["shape_tensor"] or -1 in each["dims"])]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for binding in dynamic:
        name, wanted = binding["name"], by_name[binding["name"]]
        if -1 in binding["dims"]:
            profile.set_shape(name, *(tuple(shape) for shape in wanted["shapes"]))
        if binding["shape_tensor"]:
            if wanted["values"] is None:
                raise Unsupported(f"input '{name}' decides shapes, and no range of its values is known")
            profile.set_shape_input(name, *(tuple(values) for values in wanted["values"]))
    if config.add_optimization_profile(profile) < 0:
        raise Failed("it refuses the profile " + json.dumps(ranges))


def shipped_facts(trt: Any, builder: str) -> dict[str, Any]:  # noqa: ANN401
    """What of ``engine.json`` depends on what builds, and where.

    TensorRT proper locks an engine to its release, the GPU's compute capability and the system; TensorRT for RTX to its
    release only, and its engines run on x86-64 Linux and Windows.

    Raises:
        Missing: TensorRT proper builds for the GPU that is here, and none is.
    """
    facts: dict[str, Any] = {"library": NAMES[builder], "version": str(trt.__version__), "recipe": False}
    if builder == "rtx":
        return facts | {"systems": ["Linux", "Windows"], "machines": ["x86_64", "AMD64"]}
    cuda = load_cuda()
    machine = look(str(trt.__version__), cuda, builder)
    if machine.lacking:
        raise Missing("; ".join(machine.lacking))
    status, version = cuda.cudaRuntimeGetVersion()
    facts |= {"compute_capabilities": [machine.capability], "later_too": False}
    facts |= {"systems": [machine.system], "machines": [machine.machine]}
    return facts | ({} if int(status) else {"cuda": f"{version // 1000}.{version % 1000 // 10}"})


def _write_context(folder: Path, out: Path, sidecar: Mapping[str, Any]) -> None:
    """The engine as ONNX Runtime takes it; without it the engine is still built."""
    from packager.targets.tensorrt.ep_context import CONTEXT, write_context

    try:
        write_context(folder / ONNX, out, sidecar)
    except (ImportError, ValueError) as error:
        print(f"no {CONTEXT}: {error}", file=sys.stderr)  # noqa: T201


def main(folder: Path) -> int:
    """Build beside this file. Returns the exit status."""
    out = folder / BUILT
    try:
        wanted = read_sidecar(folder)
        trt = load_library(wanted["builder"])
        if trt is None:
            raise Missing(f"{NAMES[wanted['builder']]} can't be imported here")
        wanted |= shipped_facts(trt, wanted["builder"])
        out.mkdir(exist_ok=True)
        made = compile_engine(trt, folder / ONNX, wanted, out / TIMING_CACHE)
    except (Missing, OSError, ValueError) as error:
        print(f"not built: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (Unsupported, Failed) as error:
        print(f"{NAMES[wanted['builder']]} refused:\n{error}", file=sys.stderr)  # noqa: T201
        return 5
    wanted["bindings"] = list(made.bindings)
    (out / ENGINE).write_bytes(made.data)
    (out / SIDECAR).write_text(json.dumps(wanted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if wanted.get("ep_context", "off") != "off":
        _write_context(folder, out, wanted)
    print(f"{out / ENGINE}: {len(made.data)} bytes, {wanted['library']} {wanted['version']}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
