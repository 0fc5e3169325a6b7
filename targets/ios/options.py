"""The manifest options of the iOS room."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from packager.room import RoomOptions

ComputeUnits = Literal["ALL", "CPUOnly", "CPUAndGPU", "CPUAndNeuralEngine"]
Specialization = Literal["Default", "FastPrediction"]


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``ios``; those of the provider as its documentation names them."""

    module: str = Field("", description="name of the Swift module; empty: made of the model's name")
    deployment_target: str = Field("15.1", description="oldest iOS version; ML Programs need 15, the runtime 15.1")
    compute_units: ComputeUnits = Field("ALL", description="hardware that Core ML may use (MLComputeUnits)")
    static_shapes: bool = Field(
        True, description="let Core ML take only nodes whose shapes are fixed (RequireStaticInputShapes)"
    )
    subgraphs: bool = Field(False, description="let Core ML into branches and loop bodies (EnableOnSubgraphs)")
    specialization: Specialization = Field("Default", description="what Core ML specialises for, from iOS 18 on")
    low_precision_accumulation: bool = Field(
        False, description="let the GPU sum in float16 (AllowLowPrecisionAccumulationOnGPU)"
    )
    min_coverage: float = Field(
        0.0, ge=0.0, le=1.0, description="refuse to build where Core ML takes a smaller part of the nodes than this"
    )
    mlpackage: bool = Field(True, description="ship the model as a Core ML package too, where every operator converts")

    @field_validator("module")
    @classmethod
    def _module(cls, text: str) -> str:
        if text and not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", text):
            raise ValueError("a module's name is made of letters and digits, a letter first")
        return text

    @field_validator("deployment_target")
    @classmethod
    def _deployment(cls, text: str) -> str:
        if not re.fullmatch(r"\d{2}(\.\d{1,2})?", text) or tuple(map(int, text.split("."))) < (15, 1):
            if text == "15":
                return "15.1"
            raise ValueError("give an iOS version from 15.1 on, such as '16.0'")
        return text

    def provider(self) -> dict[str, str]:
        """The provider's options as it takes them: texts by name."""
        return {
            "ModelFormat": "MLProgram",
            "MLComputeUnits": self.compute_units,
            "RequireStaticInputShapes": "1" if self.static_shapes else "0",
            "EnableOnSubgraphs": "1" if self.subgraphs else "0",
            "SpecializationStrategy": self.specialization,
            "AllowLowPrecisionAccumulationOnGPU": "1" if self.low_precision_accumulation else "0",
        }
