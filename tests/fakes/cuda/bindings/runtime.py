"""A recorded fake of the part of CUDA's runtime API that loaders use: device memory is memory of this process.

Names, arguments and the (status, results...) tuples are those of cuda-bindings 12.9. ``FAKE_GPU`` is the compute
capability of the one device; empty or absent, there is none.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNoDevice = 100


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaDeviceAttr(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


OK = cudaError_t.cudaSuccess
_memory: dict[int, ctypes.Array[ctypes.c_char]] = {}


def cudaGetDeviceCount():
    return (OK, 1) if os.environ.get("FAKE_GPU") else (cudaError_t.cudaErrorNoDevice, 0)


def cudaDeviceGetAttribute(attr, device):
    major, minor = os.environ["FAKE_GPU"].split(".")
    return OK, int(major if attr == cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor else minor)


def cudaRuntimeGetVersion():
    return OK, 12090


def cudaSetDevice(device):
    return (OK,)


def cudaStreamCreate():
    return OK, 7


def cudaStreamSynchronize(stream):
    return (OK,)


def cudaMalloc(size):
    block = ctypes.create_string_buffer(size)
    _memory[ctypes.addressof(block)] = block
    return OK, ctypes.addressof(block)


def cudaFree(pointer):
    return (OK,) if _memory.pop(pointer, None) is not None else (cudaError_t.cudaErrorInvalidValue,)


def cudaMemcpyAsync(dst, src, count, kind, stream):
    """Refuses what would be a wild write on a GPU: the device's side must lie in a block that was allocated."""
    device = dst if kind == cudaMemcpyKind.cudaMemcpyHostToDevice else src
    if not any(start <= device and device + count <= start + len(block) for start, block in _memory.items()):
        return (cudaError_t.cudaErrorInvalidValue,)
    ctypes.memmove(dst, src, count)
    return (OK,)
