"""The manifest options of the TensorRT room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from packager.room import RoomOptions

Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Size, Size, Size], Field(strict=False)]
Row = Annotated[tuple[int, ...], Field(strict=False)]
Rows = Annotated[tuple[Row, Row, Row], Field(strict=False)]


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``tensorrt``."""

    builder: Literal["auto", "rtx", "tensorrt"] = Field(
        "auto",
        description="rtx: TensorRT for RTX, which builds engines for GeForce and RTX GPUs without one being here. "
        "tensorrt: TensorRT proper, for data-centre GPUs, which needs its library and the very GPU here. auto: "
        "tensorrt where both are here, else rtx.",
    )
    allow_recipe: bool = Field(
        False,
        description="builder tensorrt without library or GPU: make a bundle of the ONNX file, the profiles and the "
        "script that builds and checks the engine on the GPU machine. It has no engine and never counts as verified.",
    )
    profiles: dict[str, Sizes] = Field(
        {},
        description="smallest, usual and largest size of each free dim, by its name or as input:axis; the engine takes "
        "nothing beyond. What isn't named is what the golden cases show.",
    )
    values: dict[str, Rows] = Field(
        {},
        description="least, usual and greatest values of inputs that decide shapes (shape tensors), by input",
    )
    compute_capabilities: tuple[Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"], ...] = Field(
        (),
        strict=False,
        description="builder rtx: GPUs the engine is for. None named: 8.0, 8.6, 8.9, 12.0 and later, from Ampere on.",
    )
    ep_context: Literal["off", "beside", "inside"] = Field(
        "off",
        description="add model_ctx.onnx, the engine as ONNX Runtime's execution provider for TensorRT takes it, an "
        "EPContext node. beside: it names model.engine. inside: it holds the engine too, up to 2 GB.",
    )
    tf32: bool = Field(
        False,
        description="let float32 matrix products and convolutions use TF32, quicker and about 3e-4 off; NVIDIA's own "
        "default is to do so",
    )
    optimization_level: int | None = Field(
        None, ge=0, le=5, description="builder tensorrt: how long it searches for quick kernels; none named: 3, its own"
    )
