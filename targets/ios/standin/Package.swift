// swift-tools-version: 5.9
import PackageDescription

// Stands in for microsoft/onnxruntime-swift-package-manager where there is no Apple framework: the same module with
// the same names, written on ONNX Runtime's C API. Only for checking generated code; it never ships.
let package = Package(
    name: "onnxruntime-swift-package-manager",
    products: [.library(name: "onnxruntime", targets: ["OnnxRuntimeBindings"])],
    targets: [
        .systemLibrary(name: "COnnxRuntime"),
        .target(name: "OnnxRuntimeBindings", dependencies: ["COnnxRuntime"]),
    ]
)
