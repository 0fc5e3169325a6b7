"""Every node case of onnx, built and verified by every kind: it passes, is refused or is caught, or packager fails."""
