"""Which builder serves a target on this machine, and what is missing for it.

TensorRT proper builds for the GPU that is here, so library and GPU enter the plan, and with it the cache's keys. The
library is looked up by its metadata; CUDA's small bindings are imported only where TensorRT proper may serve.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packager.errors import ToolchainMissing
from packager.targets.tensorrt.fit import load_cuda, look
from packager.targets.tensorrt.options import Options

PROPER = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings")
"""Distributions that bring the module ``tensorrt``."""


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
    version = proper_version()
    if options.builder == "auto" and not version:
        return Chosen("rtx")
    machine = look(version or None, load_cuda(), "tensorrt")
    if options.builder == "auto" and machine.lacking:
        return Chosen("rtx")
    if machine.lacking and not options.allow_recipe:
        raise ToolchainMissing(
            "can't build an engine by TensorRT: " + "; ".join(machine.lacking),
            "on the GPU machine: pip install tensorrt cuda-bindings; or set allow_recipe = true for a bundle that "
            'builds its engine there; or builder = "rtx"',
        )
    return Chosen("tensorrt", version, machine.capability, "; ".join(machine.lacking))


def proper_version() -> str:
    """The version of TensorRT proper that is installed, empty for none."""
    for name in PROPER:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
