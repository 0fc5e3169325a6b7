"""A recorded fake of TensorRT's Python API, as far as packager uses it. An "engine" is the ONNX file with a mark before
it, and ONNX Runtime computes what a GPU would.

The surface (classes, methods, argument order) was recorded from the bindings of TensorRT 11.4 and of TensorRT for RTX;
a test holds every name against the latter. What a GPU does isn't here: a verdict by this fake is evidence that packager
and its loaders call the API as it is, and of nothing else.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

__version__ = os.environ.get("FAKE_TENSORRT", "11.4.0")
MARK = b"fake engine\n"


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def __init__(self):
        pass


class BuilderFlag(IntEnum):
    TF32 = 7


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class LayerType(IntEnum):
    GRID_SAMPLE = 40


class _Named:
    """A value that prints as pybind11's enums do."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


DTYPES = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 16: "BF16"}


class ITensor:
    def __init__(self, value):
        self.name = value.name
        tensor = value.type.tensor_type
        self.dtype = _Named(f"DataType.{DTYPES[tensor.elem_type]}")
        self.shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
        self.is_shape_tensor = self.name.startswith("shape")


class IGridSampleLayer:
    """Reads a mode as some releases of the parser do, where ``FAKE_GRID_SAMPLE`` says so."""

    type = LayerType.GRID_SAMPLE

    def __init__(self, mode):
        self.interpolation_mode = _Named("InterpolationMode." + (os.environ.get("FAKE_GRID_SAMPLE") or mode).upper())


class INetworkDefinition:
    def __init__(self):
        self._model = None
        self._layers = []

    def _graph(self):
        return self._model.graph if self._model is not None else onnx.GraphProto()

    @property
    def num_inputs(self):
        return len(self._graph().input)

    @property
    def num_outputs(self):
        return len(self._graph().output)

    @property
    def num_layers(self):
        return len(self._layers)

    def get_input(self, index):
        return ITensor(self._graph().input[index])

    def get_output(self, index):
        return ITensor(self._graph().output[index])

    def get_layer(self, index):
        return self._layers[index]


class ParserError:
    def __init__(self, index, node):
        self._index, self._node = index, node

    def desc(self):
        return "Plugin not found"

    def node(self):
        return self._index

    def node_name(self):
        return self._node.name

    def node_operator(self):
        return self._node.op_type


class OnnxParser:
    """Takes every operator but Det."""

    def __init__(self, network, logger):
        self._network, self._errors = network, []

    def parse_from_file(self, path):
        model = onnx.load(path)
        self._find(model)
        if self._errors:
            return False
        self._network._model = model
        for node in model.graph.node:
            if node.op_type == "GridSample":
                modes = [attribute.s.decode() for attribute in node.attribute if attribute.name == "mode"]
                self._network._layers.append(IGridSampleLayer(modes[0]))
        return True

    def supports_model_v2(self, model, path=None):
        self._find(onnx.load_from_string(bytes(model)))
        return not self._errors

    def _find(self, model):
        found = enumerate(model.graph.node)
        self._errors = [ParserError(index, node) for index, node in found if node.op_type == "Det"]

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]


class IOptimizationProfile:
    def __init__(self):
        self.shapes, self.values = {}, {}

    def set_shape(self, input, min, opt, max):
        self.shapes[input] = (min, opt, max)

    def set_shape_input(self, input, min, opt, max):
        self.values[input] = (min, opt, max)


class IHostMemory(bytes):
    """Whatever TensorRT gives as a buffer."""


class ITimingCache:
    def __init__(self, data):
        self._data = data

    def serialize(self):
        return IHostMemory(self._data + b"tactics")


class IBuilderConfig:
    def __init__(self):
        self.builder_optimization_level = 3
        self._flags, self._profiles, self._cache = {BuilderFlag.TF32}, [], None

    def clear_flag(self, flag):
        self._flags.discard(flag)

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache, ignore_mismatch):
        self._cache = cache

    def get_timing_cache(self):
        return self._cache

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1


class Builder:
    def __init__(self, logger):
        self._logger = logger

    def create_network(self, flags=0):
        return INetworkDefinition()

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        dynamic = [tensor.name for tensor in map(network.get_input, range(network.num_inputs)) if -1 in tensor.shape]
        given = config._profiles[0].shapes if config._profiles else {}
        if set(dynamic) - set(given):
            self._logger.log(ILogger.Severity.ERROR, f"no profile for {sorted(set(dynamic) - set(given))}")
            return None
        return IHostMemory(MARK + network._model.SerializeToString())


class IOutputAllocator:
    def __init__(self):
        pass


class Runtime:
    def __init__(self, logger):
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine):
        if not serialized_engine.startswith(MARK):
            self._logger.log(ILogger.Severity.ERROR, "magic tag does not match")
            return None
        return ICudaEngine(serialized_engine[len(MARK) :])


class ICudaEngine:
    def __init__(self, data):
        self._session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    @property
    def num_io_tensors(self):
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index):
        return (self._inputs + self._outputs)[index]

    def is_shape_inference_io(self, tensor_name):
        return tensor_name.startswith("shape")

    def create_execution_context(self):
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine):
        self._engine, self._shapes, self._addresses, self._allocators = engine, {}, {}, {}

    def set_input_shape(self, name, shape):
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name, memory):
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name, output_allocator):
        self._allocators[name] = output_allocator
        return True

    def get_tensor_shape(self, name):
        return self._shapes[name]

    def get_max_output_size(self, name):
        return 64

    def execute_async_v3(self, stream_handle):
        session, feeds = self._engine._session, {}
        for each in session.get_inputs():
            shape = self._shapes[each.name]
            dtype = np.dtype({"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}[each.type])
            raw = ctypes.string_at(self._addresses[each.name], int(np.prod(shape)) * dtype.itemsize)
            feeds[each.name] = np.frombuffer(raw, dtype).reshape(shape)
        for each, array in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            data = np.ascontiguousarray(array)
            if each.name in self._allocators:
                allocator = self._allocators[each.name]
                address = allocator.reallocate_output_async(each.name, 0, data.nbytes, 256, stream_handle)
                allocator.notify_shape(each.name, data.shape)
            else:
                address, self._shapes[each.name] = self._addresses[each.name], data.shape
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
        return True


def engine_file(path: Path) -> bytes:
    """An engine of this fake, for tests."""
    return MARK + path.read_bytes()
