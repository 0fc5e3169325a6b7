"""The manifest options of the OpenVINO room."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packager.room import RoomOptions


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``openvino``."""

    inference_precision: Literal["f32", "bf16", "f16"] = Field(
        "f32",
        description="OpenVINO's INFERENCE_PRECISION_HINT: what float operators compute in. Left to itself, OpenVINO "
        "takes bf16 on CPUs with AMX, so it is always set; the device must support the value.",
    )
    dynamic_quantization: bool = Field(
        False,
        description="let OpenVINO quantise activations to int8 as it runs, where weights are int8: quicker, and on a "
        "text encoder 2 % of the largest output off. OpenVINO's own default is to do so.",
    )
