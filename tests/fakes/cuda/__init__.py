"""A stand-in for NVIDIA's package cuda-bindings."""
