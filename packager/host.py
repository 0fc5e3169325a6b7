"""What this machine is, as verdicts record it: operating system, architecture, CPU features that change arithmetic."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
"""CPU features that decide which kernels a runtime picks, as Linux spells them."""


@dataclass(frozen=True)
class Host:
    """The machine. ``features`` is the sorted subset of :data:`FEATURES` present; empty where it can't be read."""

    system: str
    machine: str
    cpu: str
    features: tuple[str, ...]
    cores: int
    python: str


@cache
def this_host() -> Host:
    """Describe the machine packager runs on. Reads ``/proc/cpuinfo`` on Linux; elsewhere features stay empty."""
    cpu, flags = platform.processor(), set[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        cpu=cpu,
        features=tuple(sorted(flags.intersection(FEATURES))),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
    )
