"""The manifest options of the NPU room."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from packager.room import RoomOptions
from packager.targets.npu.chips import DEFAULT_ARCH, Arch, chip

PERFORMANCE = Literal[
    "default", "burst", "balanced", "high_performance", "sustained_high_performance", "high_power_saver",
    "power_saver", "low_power_saver", "low_balanced", "extreme_power_saver",
]  # fmt: skip


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``npu``."""

    htp_arch: Arch = Field(
        DEFAULT_ARCH,
        description="Hexagon architecture to compile for: 68, 69, 73, 75, 79 or 81; that of soc_model where only that "
        "is set. The binary is made for that architecture.",
    )
    soc_model: int | None = Field(
        None, description="QNN's number of the chip, such as 52 for SA8255, to use all its NPU has; default: any chip"
    )
    allow_fallback: bool = Field(
        False, description="let nodes that the NPU doesn't take run on the CPU; each costs a trip there and back"
    )
    performance: PERFORMANCE = Field(
        "burst", description="htp_performance_mode of the loaders: how fast, and how hot, the NPU runs"
    )
    optimisation: Literal[1, 2, 3] = Field(
        3, description="effort of QNN's compiler: 3 takes longest and makes the fastest graph"
    )

    @model_validator(mode="before")
    @classmethod
    def _arch_of_the_chip(cls, values: object) -> object:
        if not isinstance(values, dict) or not isinstance(values.get("soc_model"), int) or "htp_arch" in values:
            return values
        return {**values, "htp_arch": chip(values["soc_model"]).arch}

    @model_validator(mode="after")
    def _chip_and_arch_agree(self) -> Options:
        if self.soc_model is not None and (found := chip(self.soc_model)).arch != self.htp_arch:
            raise ValueError(
                f"soc_model {self.soc_model} ({found.name}) has HTP v{found.arch}, and htp_arch says "
                f"{self.htp_arch}; leave one out"
            )
        return self
