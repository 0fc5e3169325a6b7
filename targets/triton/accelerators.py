"""ONNX Runtime's execution providers as the onnxruntime backend names them, and the options each of them takes.

Names and meanings are those of the backend's README for this release and of ONNX Runtime 1.19's own documentation. The
backend hands options on to ONNX Runtime, which refuses the model at load for one that it doesn't know; a server
without a GPU never gets that far. So a manifest is held against these lists.
"""

from __future__ import annotations

from packager.names import suggestion
from packager.targets.triton.options import Options

KNOWN: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "openvino": frozenset(),
    "tensorrt": frozenset(
        {
            "precision_mode", "max_workspace_size_bytes", "trt_max_partition_iterations", "trt_min_subgraph_size",
            "trt_engine_cache_enable", "trt_engine_cache_path", "trt_engine_cache_prefix",
            "trt_force_sequential_engine_build", "trt_context_memory_sharing_enable", "trt_layer_norm_fp32_fallback",
            "trt_timing_cache_enable", "trt_timing_cache_path", "trt_force_timing_cache",
            "trt_build_heuristics_enable", "trt_sparsity_enable", "trt_builder_optimization_level",
            "trt_auxiliary_streams", "trt_profile_min_shapes", "trt_profile_max_shapes", "trt_profile_opt_shapes",
            "trt_cuda_graph_enable",
        }
    ),
    "cuda": frozenset(
        {
            "gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream",
            "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "use_ep_level_unified_stream", "use_tf32",
            "prefer_nhwc", "enable_skip_layer_norm_strict_mode",
        }
    ),
}  # fmt: skip
"""By accelerator: its options."""

LATER = {
    ("tensorrt", "trt_op_types_to_exclude"): "25.03, with ONNX Runtime 1.20",
    ("cuda", "sdpa_kernel"): "25.03, with ONNX Runtime 1.20",
}
"""Options of later releases: the first release of Triton that is known to have them."""

PRECISION_MODES = ("FP32", "FP16", "INT8")
SWITCHES = ("0", "1", "true", "false")


def objections(options: Options, release: str) -> list[str]:
    """What is wrong with the accelerator and its options for a release, one line each."""
    name, given = options.accelerator, options.accelerator_options
    found = []
    if name in ("tensorrt", "cuda") and options.device == "cpu":
        found.append(f'accelerator {name} needs a GPU, and device is cpu: set device = "gpu" or "auto"')
    if name == "openvino" and options.device == "gpu":
        found.append("accelerator openvino runs on CPU, and device is gpu")
    for key, value in given.items():
        later = LATER.get((name, key))
        if later:
            found.append(f"Triton {release} has no {name} option '{key}'; Triton {later}, does")
        elif key not in KNOWN[name]:
            known = suggestion(key, KNOWN[name], "it takes")
            found.append(f"accelerator {name} has no option '{key}' in Triton {release}: {known}")
        elif key == "precision_mode" and value not in PRECISION_MODES:
            found.append(f"precision_mode is '{value}', not one of {', '.join(PRECISION_MODES)}")
        elif key.endswith("_enable") and value not in SWITCHES:
            found.append(f"{key} is '{value}', not one of {', '.join(SWITCHES)}")
        elif key in ("max_workspace_size_bytes", "gpu_mem_limit") and not value.isdecimal():
            found.append(f"{key} is '{value}', not a number of bytes")
    return found
