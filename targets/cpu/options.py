"""The manifest options of the CPU service room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from packager.room import RoomOptions


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``cpu``."""

    format: Literal["onnx", "ort"] = Field(
        "onnx",
        description="onnx ships the model as it is; ort in ONNX Runtime's own format, which is always optimised ahead, "
        "loads quicker and needs the ONNX Runtime that wrote it or a newer one",
    )
    optimize_for: Literal["none", "portable", "x86-64-v2", "x86-64-v3", "x86-64-v4"] = Field(
        "none",
        description="optimise the graph ahead of time: portable leaves out what depends on the CPU; a level of the "
        "x86-64 psABI takes all, can only be built on a CPU of that very level, and the bundle refuses lower ones. "
        "none lets ONNX Runtime optimise when it loads the model, for the CPU it finds",
    )
    max_batch: Literal["auto"] | Annotated[int, Field(ge=0, le=65536)] = Field(
        "auto",
        description="rows of different requests that may be merged into one run. auto is 8 where every input and "
        "output has a free first dim and the golden cases prove that rows don't influence each other, else 0",
    )
    delay_us: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="microseconds a request may wait for others; even with 0, what waits during a run goes together",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="threads of one run; 0 is one for each physical core. tune.py measures the best"
    )
    runs: int = Field(1, ge=1, le=1024, description="runs of the model at the same time")
    memory_pattern: bool = Field(
        True, description="plan the memory of a run once for each set of input shapes; off where shapes keep changing"
    )
    memory_arena: bool = Field(
        True, description="keep memory between runs; off gives it back, and costs a little of each run"
    )
    spinning: bool = Field(
        True, description="let idle threads of a run spin for its next operator: quicker, at the cost of idle CPU time"
    )
    max_body_mb: int = Field(64, ge=1, le=2047, description="megabytes a request may have; more get status 413")
    max_in_flight: int = Field(256, ge=1, le=65536, description="requests answered at once; more get status 429")
