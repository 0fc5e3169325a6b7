import Foundation

/// What a tensor's elements are.
public enum ElementKind: String, Sendable {
    case float32, int8, uint8, int32, uint32, int64, uint64, bool, string
}

/// A type whose values fill tensors.
public protocol TensorElement: Sendable, Equatable {
    /// How the model's description calls it.
    static var kind: ElementKind { get }
    /// The values as the runtime takes them.
    static func pack(_ values: [Self]) -> Payload
    /// The values back; `nil` if the payload holds something else.
    static func unpack(_ payload: Payload) -> [Self]?
}

/// Elements as they cross to the runtime: bytes in row-major order and native byte order, or texts.
public enum Payload: Sendable, Equatable {
    case bytes(Data)
    case strings([String])
}

/// Elements whose bytes in memory are their bytes in a tensor.
public protocol PlainElement: TensorElement {}

extension PlainElement {
    public static func pack(_ values: [Self]) -> Payload {
        .bytes(values.withUnsafeBytes { Data($0) })
    }

    public static func unpack(_ payload: Payload) -> [Self]? {
        guard case .bytes(let data) = payload, data.count % MemoryLayout<Self>.stride == 0 else { return nil }
        let count = data.count / MemoryLayout<Self>.stride
        return [Self](unsafeUninitializedCapacity: count) { buffer, filled in
            _ = data.copyBytes(to: UnsafeMutableRawBufferPointer(buffer))
            filled = count
        }
    }
}

extension Float: PlainElement { public static var kind: ElementKind { .float32 } }
extension Int8: PlainElement { public static var kind: ElementKind { .int8 } }
extension UInt8: PlainElement { public static var kind: ElementKind { .uint8 } }
extension Int32: PlainElement { public static var kind: ElementKind { .int32 } }
extension UInt32: PlainElement { public static var kind: ElementKind { .uint32 } }
extension Int64: PlainElement { public static var kind: ElementKind { .int64 } }
extension UInt64: PlainElement { public static var kind: ElementKind { .uint64 } }

extension Bool: TensorElement {
    public static var kind: ElementKind { .bool }

    public static func pack(_ values: [Bool]) -> Payload {
        .bytes(Data(values.map { $0 ? 1 : 0 }))
    }

    public static func unpack(_ payload: Payload) -> [Bool]? {
        guard case .bytes(let data) = payload else { return nil }
        return data.map { $0 != 0 }
    }
}

extension String: TensorElement {
    public static var kind: ElementKind { .string }

    public static func pack(_ values: [String]) -> Payload {
        .strings(values)
    }

    public static func unpack(_ payload: Payload) -> [String]? {
        guard case .strings(let values) = payload else { return nil }
        return values
    }
}

/// Values with a shape, in row-major order.
public struct Tensor<Element: TensorElement>: Sendable, Equatable {
    /// The elements, the last axis first.
    public let values: [Element]
    /// The size of every axis; empty for a scalar.
    public let shape: [Int]

    /// A tensor of this shape. Whether the number of values fits is checked when the model is run.
    public init(_ values: [Element], shape: [Int]) {
        self.values = values
        self.shape = shape
    }

    /// A tensor of one axis.
    public init(_ values: [Element]) {
        self.init(values, shape: [values.count])
    }

    /// A tensor without axes.
    public init(scalar value: Element) {
        self.init([value], shape: [])
    }
}

/// A tensor whose element type is known when the program runs: what crosses to the runtime.
public struct AnyTensor: Sendable, Equatable {
    public let kind: ElementKind
    public let shape: [Int]
    public let payload: Payload

    public init(kind: ElementKind, shape: [Int], payload: Payload) {
        self.kind = kind
        self.shape = shape
        self.payload = payload
    }

    public init<Element>(_ tensor: Tensor<Element>) {
        self.init(kind: Element.kind, shape: tensor.shape, payload: Element.pack(tensor.values))
    }

    /// The tensor with its element type.
    ///
    /// - Throws: ``ModelError/wrongType(name:expected:actual:)``.
    public func typed<Element: TensorElement>(as type: Element.Type = Element.self, name: String) throws -> Tensor<Element> {
        guard kind == Element.kind, let values = Element.unpack(payload) else {
            throw ModelError.wrongType(name: name, expected: Element.kind.rawValue, actual: kind.rawValue)
        }
        return Tensor(values, shape: shape)
    }

    /// How many elements the payload holds.
    var count: Int {
        switch payload {
        case .strings(let values): return values.count
        case .bytes(let data): return data.count / kind.bytes
        }
    }
}

extension ElementKind {
    /// Bytes of one element; 1 for texts, which have no fixed size.
    var bytes: Int {
        switch self {
        case .int64, .uint64: return 8
        case .float32, .int32, .uint32: return 4
        case .int8, .uint8, .bool, .string: return 1
        }
    }
}
