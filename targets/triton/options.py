"""The manifest options of the Triton room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from packager.room import RoomOptions

Count = Annotated[int, Field(ge=1, le=1024)]
Key = Annotated[str, Field(min_length=1, max_length=200)]


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
    instances: Count = Field(1, description="copies of the model that run at the same time, on each GPU where on GPUs")
    device: Literal["cpu", "gpu", "auto"] = Field(
        "cpu",
        description="where the server runs the model: on CPU (KIND_CPU), on GPUs only (KIND_GPU), or on a GPU where it "
        "has one (KIND_AUTO)",
    )
    gpus: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        (), strict=False, description='numbers of the GPUs to use, with device = "gpu"; none: every one'
    )
    rate_limit: dict[Key, Count] = Field(
        {},
        description="resources, by name, that each instance takes while it runs; the server must be started with "
        "--rate-limit=execution_count, as the deployment files do",
    )
    priority: int = Field(0, ge=0, le=2**31 - 1, description="of an instance under rate_limit; 1 is the highest")
    accelerator: Literal["none", "openvino", "tensorrt", "cuda"] = Field(
        "none",
        description="ONNX Runtime's execution provider: openvino on CPU, tensorrt or cuda (to give it options) on GPU",
    )
    accelerator_options: dict[Key, str] = Field(
        {}, description='the accelerator\'s own, as text, such as { precision_mode = "FP16" } for tensorrt'
    )
    graph_optimization: Literal["all", "extended", "basic", "none"] = Field(
        "all", description="how far ONNX Runtime may rewrite the graph"
    )
    intra_op_threads: int = Field(
        0, ge=0, le=1024, description="threads within one operator; 0 leaves it to ONNX Runtime: one for each core"
    )
    response_cache: bool = Field(
        False,
        description="let the server answer a request it has seen from its cache, which must be switched on with "
        "--cache-config, as the deployment files do",
    )
    labels: dict[Key, tuple[str, ...]] = Field(
        {}, strict=False, description="names of an output's classes, by output; Triton gives them to clients that ask"
    )
    warm_up: bool = Field(
        False, description="let Triton run the first golden case on every instance before it says the model is ready"
    )
    model_version: int = Field(1, ge=1, le=2**31 - 1, description="the version's folder in the repository")
    version_policy: Literal["specific", "latest", "all"] = Field(
        "specific",
        description="which versions the server loads where others are put beside this one; specific: this one",
    )
    pre: str | None = Field(
        None,
        min_length=1,
        description="an ONNX file, relative to the manifest, that makes the model's inputs; with it, or with `post`, "
        "the repository has an ensemble of pre, model and post too, joined by the names of their tensors",
    )
    post: str | None = Field(None, min_length=1, description="an ONNX file that takes the model's outputs")

    def files(self) -> tuple[str, ...]:
        """The steps of an ensemble beside the model."""
        return tuple(name for name in (self.pre, self.post) if name is not None)

    def steps(self) -> dict[str, str]:
        """The same by part, ``pre`` and ``post``."""
        return {part: name for part, name in (("pre", self.pre), ("post", self.post)) if name is not None}
