"""The manifest options of the Triton room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from packager.room import RoomOptions


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``triton``."""

    max_batch: Literal["auto"] | Annotated[int, Field(ge=0, le=65536)] = Field(
        "auto",
        description="max_batch_size: how many rows Triton may merge into one run. auto is 8 where every input and "
        "output has a free first dim and the golden cases prove that rows don't influence each other, else 0: no "
        "batching, and requests carry full shapes.",
    )
    preferred_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        strict=False,
        description="batch sizes the dynamic batcher prefers; Triton's advice is to name none unless one is quicker",
    )
    queue_delay_us: int = Field(
        100,
        ge=0,
        le=10_000_000,
        description="microseconds a request may wait for others to be merged with",
    )
    instances: int = Field(1, ge=1, le=1024, description="copies of the model that run at the same time")
    device: Literal["cpu", "auto"] = Field(
        "cpu", description="where the server runs the model: on CPU, or on a GPU where it has one (KIND_AUTO)"
    )
    warm_up: bool = Field(
        False, description="let Triton run the first golden case on every instance before it says the model is ready"
    )
    model_version: int = Field(1, ge=1, le=2**31 - 1, description="the version's folder in the repository")
