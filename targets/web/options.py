"""The manifest options of the web room."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packager.room import RoomOptions


class Options(RoomOptions):
    """Options under ``[targets.<name>]`` of kind ``web``."""

    runtime_dir: str = Field(
        "",
        exclude=True,  # a path of this machine: it reaches the build as `Plan.local` and is recorded nowhere
        description="folder with the files of onnxruntime-web (`node_modules/onnxruntime-web/dist`, or where "
        "`npm pack` put its tarball), for building offline; empty: fetched through npm once and cached.",
    )
    format: Literal["onnx", "ort"] = Field(
        "onnx",
        description="`ort` ships model.ort, ONNX Runtime's own format: it loads without parsing and optimising, holds "
        "all weights in the one file, and is tied to the runtime beside it.",
    )
    webgpu: bool = Field(
        False,
        description='ship the WebGPU build of the runtime (27 MB) beside the WASM one; `load({ backend: "webgpu" })` '
        "takes it where the browser has a GPU for it.",
    )
    max_file_mb: int = Field(
        1024,
        ge=1,
        le=1024,
        description="largest model or weights file, in MiB. A larger model is split into model.onnx and weights-*.bin, "
        "a single larger tensor has a file of its own. Browsers can't hold more than 1 GiB in one piece; some hosts "
        "stop at 25 MiB a file.",
    )
