"""Which builder serves a target on this machine, and what is missing for it. Nothing is imported: an SDK's libraries
are large, and a plan is made in packager's own process.

TensorRT proper builds for the GPU that is here, so library and GPU enter the plan (and with it the cache's keys). The
driver is asked for the GPU through ctypes, which is quick and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass

from packager.errors import ToolchainMissing
from packager.targets.tensorrt.options import Options

PROPER = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings")
"""Distributions that bring the module ``tensorrt``."""

DRIVERS = ("libcuda.so.1", "nvcuda.dll")
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Chosen:
    """How a target is served: by which builder, of which version, for which compute capability.

    ``version`` and ``capability`` are those of TensorRT proper and its GPU, empty for TensorRT for RTX, which is
    pinned and needs none. ``lacking`` says what is missing; the target is then a recipe.
    """

    builder: str
    version: str = ""
    capability: str = ""
    lacking: str = ""


def choose(options: Options) -> Chosen:
    """The builder for these options on this machine.

    Raises:
        ToolchainMissing: TensorRT proper is asked for, it or a GPU isn't here, and no recipe is allowed.
    """
    if options.builder == "rtx":
        return Chosen("rtx")
    version, capability = proper_version(), gpu_capability()
    lacking = [] if version else ["TensorRT (the Python package tensorrt) is missing"]
    lacking += [] if capability else ["no CUDA device is here, and TensorRT builds for the very GPU it finds"]
    if options.builder == "auto":
        return Chosen("rtx") if lacking else Chosen("tensorrt", version, capability)
    if lacking and not options.allow_recipe:
        raise ToolchainMissing(
            "can't build an engine by TensorRT: " + "; ".join(lacking),
            "on the GPU machine: pip install tensorrt cuda-bindings; or set allow_recipe = true for a bundle that "
            "builds its engine there; or builder = \"rtx\"",
        )  # fmt: skip
    return Chosen("tensorrt", version, capability, "; ".join(lacking))


def proper_version() -> str:
    """The version of TensorRT proper that is installed, empty for none."""
    for name in PROPER:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def gpu_capability() -> str:
    """The compute capability of the first CUDA device, ``9.0`` for instance; empty where there is none."""
    for name in DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count, device = ctypes.c_int(0), ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            return ""
        if driver.cuDeviceGet(ctypes.byref(device), 0):
            return ""
        numbers = []
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
            number = ctypes.c_int(0)
            if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
                return ""
            numbers.append(str(number.value))
        return ".".join(numbers)
    return ""
