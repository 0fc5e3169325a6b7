"""Whether an engine fits a machine, told before the engine is read: TensorRT itself may crash on a foreign one.

``engine.json``, which lies beside the engine, says what it was built by and for. Ships beside ``infer.py`` and
``build.py`` and needs the standard library only; TensorRT and CUDA are looked for, not needed.
"""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMA = "packager.engine/1"
SIDECAR, ENGINE, BUILT = "engine.json", "model.engine", "built"

MODULES = {"rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt": ("tensorrt",)}
NAMES = {"rtx": "TensorRT for RTX", "tensorrt": "TensorRT"}
"""By builder: the names its Python module may have, and what it is called."""


class Misfit(ValueError):
    """The engine doesn't fit this machine; ``reasons`` says why, a sentence each."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


@dataclass(frozen=True)
class Machine:
    """What decides whether an engine fits. ``version`` is the library's, ``capability`` the GPU's (``8.9``).

    ``lacking`` says what isn't here at all; the fields of it are empty then.
    """

    version: str
    capability: str
    system: str
    machine: str
    lacking: tuple[str, ...] = ()


def misfits(sidecar: Mapping[str, Any], machine: Machine) -> list[str]:
    """Why an engine doesn't fit a machine, a sentence each; empty where it does.

    Args:
        sidecar: ``engine.json``.
        machine: where it is to run.
    """
    found = list(machine.lacking)
    if sidecar["recipe"]:
        found.append("the bundle has no engine yet: run `python build.py` on the GPU machine")
        return found
    library, version = sidecar["library"], sidecar["version"]
    if machine.version and machine.version != version:
        found.append(
            f"the engine was built by {library} {version} and runs in no other release; {machine.version} is here"
        )
    wanted = sidecar["compute_capabilities"]
    if machine.capability and not _is_served(machine.capability, wanted, sidecar["later_too"]):
        later = " and later" if sidecar["later_too"] else ""
        found.append(
            f"the engine is for compute capability {', '.join(wanted)}{later}; the GPU here has {machine.capability}"
        )
    if machine.system not in sidecar["systems"]:
        found.append(f"the engine is for {' and '.join(sidecar['systems'])}; this is {machine.system}")
    if machine.machine.lower() not in [each.lower() for each in sidecar["machines"]]:
        found.append(f"the engine is for {' or '.join(sidecar['machines'])}; this machine is {machine.machine}")
    return found


def _is_served(capability: str, wanted: Sequence[str], later_too: bool) -> bool:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    return capability in wanted or (later_too and number(capability) > max(number(each) for each in wanted))


def read_sidecar(folder: Path) -> dict[str, Any]:
    """``engine.json``.

    Raises:
        ValueError: it is missing or malformed.
    """
    file = folder / SIDECAR
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing; keep the files of the bundle together") from error
    except ValueError as error:
        raise ValueError(f"{file} is malformed: {error}; unpack the bundle again") from error
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{file} isn't of schema {SCHEMA}")
    return found


def load_library(builder: str) -> ModuleType | None:
    """The builder's Python module; ``None`` where none of its names can be imported."""
    for name in MODULES[builder]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def version_of(library: ModuleType | None) -> str | None:
    """The exact version of the builder's library."""
    return None if library is None else str(library.__version__)


def load_cuda() -> Any:  # noqa: ANN401 - a module of another package
    """The module of CUDA's runtime functions; ``None`` where the package cuda-bindings isn't installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None


def look(version: str | None, cuda: Any, builder: str, device: int = 0) -> Machine:  # noqa: ANN401 - a module or None
    """This machine, as far as CUDA tells.

    Args:
        version: of the builder's library; ``None`` where it isn't here.
        cuda: CUDA's module; ``None`` where it isn't here.
        builder: which library is wanted.
        device: number of the CUDA device.
    """
    lacking, capability = [], ""
    if version is None:
        lacking.append(f"{NAMES[builder]} can't be imported here (Python package {MODULES[builder][0]})")
    if cuda is None:
        lacking.append("the Python package cuda-bindings isn't installed here")
    else:
        status, count = cuda.cudaGetDeviceCount()
        if int(status) or count <= device:
            lacking.append(f"no CUDA device {device} is here" + (f" ({status.name})" if int(status) else ""))
        else:
            kinds = cuda.cudaDeviceAttr
            asked = (kinds.cudaDevAttrComputeCapabilityMajor, kinds.cudaDevAttrComputeCapabilityMinor)
            capability = ".".join(str(cuda.cudaDeviceGetAttribute(each, device)[1]) for each in asked)
    return Machine(version or "", capability, platform.system(), platform.machine(), tuple(lacking))
