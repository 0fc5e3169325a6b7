import COnnxRuntime
import Foundation

/// ort_value.h
public final class ORTTensorTypeAndShapeInfo {
    public let elementType: ORTTensorElementDataType
    public let shape: [NSNumber]

    init(elementType: ORTTensorElementDataType, shape: [NSNumber]) {
        self.elementType = elementType
        self.shape = shape
    }
}

/// ort_value.h
public final class ORTValue {
    let pointer: OpaquePointer
    /// Keeps memory that was given alive: the runtime reads it in place.
    private let data: NSMutableData?

    init(owning pointer: OpaquePointer) {
        self.pointer = pointer
        data = nil
    }

    public init(tensorData: NSMutableData, elementType: ORTTensorElementDataType, shape: [NSNumber]) throws {
        guard elementType != .string else { throw failure("ORTTensorElementDataTypeString element type provided") }
        let sizes = shape.map(\.int64Value)
        var memory: OpaquePointer?
        try check(api.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeCPU, &memory))
        defer { api.ReleaseMemoryInfo(memory) }
        var made: OpaquePointer?
        try check(
            api.CreateTensorWithDataAsOrtValue(
                memory, tensorData.mutableBytes, tensorData.length, sizes, sizes.count, elementType.code, &made))
        guard let made else { throw failure("no tensor") }
        pointer = made
        data = tensorData
    }

    public init(tensorStringData: [String], shape: [NSNumber]) throws {
        let sizes = shape.map(\.int64Value)
        var allocator: UnsafeMutablePointer<OrtAllocator>?
        try check(api.GetAllocatorWithDefaultOptions(&allocator))
        var made: OpaquePointer?
        try check(
            api.CreateTensorAsOrtValue(allocator, sizes, sizes.count, ORTTensorElementDataType.string.code, &made))
        guard let made else { throw failure("no tensor") }
        pointer = made
        data = nil
        let texts = tensorStringData.map { strdup($0) }
        defer { texts.forEach { free($0) } }
        try check(api.FillStringTensor(made, texts.map { $0.map { UnsafePointer($0) } }, texts.count))
    }

    deinit { api.ReleaseValue(pointer) }

    public func tensorTypeAndShapeInfo() throws -> ORTTensorTypeAndShapeInfo {
        var info: OpaquePointer?
        try check(api.GetTensorTypeAndShape(pointer, &info))
        defer { api.ReleaseTensorTypeAndShapeInfo(info) }
        var code = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
        var rank = 0
        try check(api.GetTensorElementType(info, &code))
        try check(api.GetDimensionsCount(info, &rank))
        var sizes = [Int64](repeating: 0, count: rank)
        try check(api.GetDimensions(info, &sizes, rank))
        guard let kind = ORTTensorElementDataType.all.first(where: { $0.code == code }) else {
            throw failure("unsupported tensor element type")
        }
        return ORTTensorTypeAndShapeInfo(elementType: kind, shape: sizes.map { NSNumber(value: $0) })
    }

    public func tensorData() throws -> NSMutableData {
        if let data { return data }
        let info = try tensorTypeAndShapeInfo()
        guard info.elementType != .string else { throw failure("string tensors have no data of fixed size") }
        var memory: UnsafeMutableRawPointer?
        try check(api.GetTensorMutableData(pointer, &memory))
        let length = info.shape.reduce(1) { $0 * $1.intValue } * info.elementType.bytes
        guard let memory, length > 0 else { return NSMutableData() }
        return NSMutableData(bytes: memory, length: length)
    }

    public func tensorStringData() throws -> [String] {
        let count = try tensorTypeAndShapeInfo().shape.reduce(1) { $0 * $1.intValue }
        var length = 0
        try check(api.GetStringTensorDataLength(pointer, &length))
        var bytes = [UInt8](repeating: 0, count: max(length, 1))
        var starts = [Int](repeating: 0, count: max(count, 1))
        try check(api.GetStringTensorContent(pointer, &bytes, length, &starts, count))
        let ends = starts.prefix(count).dropFirst() + [length]
        return zip(starts.prefix(count), ends).map { String(decoding: bytes[$0..<$1], as: UTF8.self) }
    }
}
