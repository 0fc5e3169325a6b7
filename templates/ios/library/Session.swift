import Foundation

#if canImport(OnnxRuntimeBindings)
import OnnxRuntimeBindings
#else
import onnxruntime_objc
#endif

/// An input or output of the model: its name there, what its elements are, and its shape (`nil`: any size).
public struct TensorDescription: Sendable, Equatable {
    public let name: String
    public let kind: ElementKind
    /// `nil` where even the rank is free.
    public let shape: [Int?]?

    /// Whether a tensor fits.
    func check(_ tensor: AnyTensor) throws {
        guard tensor.kind == kind else {
            throw ModelError.wrongType(name: name, expected: kind.rawValue, actual: tensor.kind.rawValue)
        }
        if let shape {
            let fits = shape.count == tensor.shape.count && zip(shape, tensor.shape).allSatisfy { $0 == nil || $0 == $1 }
            guard fits, !tensor.shape.contains(where: { $0 < 0 }) else {
                throw ModelError.wrongShape(name: name, expected: shape, actual: tensor.shape)
            }
        }
        let places = tensor.shape.reduce(1, *)
        guard tensor.count == places else {
            throw ModelError.wrongCount(name: name, expected: places, actual: tensor.count)
        }
    }
}

/// How a model is loaded.
public struct ModelConfiguration: Sendable {
    /// Whether Core ML computes what it can; without it everything runs on the CPU.
    public var usesCoreML: Bool
    /// Options of the Core ML provider, by the names that its documentation gives them.
    public var providerOptions: [String: String]
    /// Where compiled Core ML models are kept; `nil` for a folder of the app's caches.
    public var cacheDirectory: URL?

    public init(usesCoreML: Bool, providerOptions: [String: String], cacheDirectory: URL? = nil) {
        self.usesCoreML = usesCoreML
        self.providerOptions = providerOptions
        self.cacheDirectory = cacheDirectory
    }
}

/// A loaded model that takes and gives tensors by name. Runs are queued, so it may be shared between threads.
final class ModelSession: @unchecked Sendable {
    private let environment: ORTEnv
    private let session: ORTSession
    private let inputs: [TensorDescription]
    private let outputs: [TensorDescription]
    private let queue = DispatchQueue(label: "packager.model")

    /// Loads a model file.
    ///
    /// - Parameters:
    ///   - url: the file; its SHA-256 must be `digest`.
    ///   - configuration: how it is run.
    init(
        url: URL, digest: String, configuration: ModelConfiguration, inputs: [TensorDescription],
        outputs: [TensorDescription]
    ) throws {
        guard let data = try? Data(contentsOf: url, options: .mappedIfSafe) else {
            throw ModelError.missingResource(url.lastPathComponent)
        }
        guard sha256(data) == digest else { throw ModelError.damagedResource(url.lastPathComponent) }
        self.inputs = inputs
        self.outputs = outputs
        do {
            environment = try ORTEnv(loggingLevel: ORTLoggingLevel.warning)
            let options = try ORTSessionOptions()
            if configuration.usesCoreML {
                var provider = configuration.providerOptions
                provider["ModelCacheDirectory"] = try Self.cache(configuration, digest: digest).path
                try options.appendExecutionProvider("CoreML", providerOptions: provider)
            }
            session = try ORTSession(env: environment, modelPath: url.path, sessionOptions: options)
        } catch {
            throw Self.translated(error)
        }
    }

    /// A folder of its own for every model and runtime: a compiled model of another one must never be taken.
    private static func cache(_ configuration: ModelConfiguration, digest: String) throws -> URL {
        let manager = FileManager.default
        let root = configuration.cacheDirectory
            ?? manager.urls(for: .cachesDirectory, in: .userDomainMask).first
            ?? manager.temporaryDirectory
        let folder = root.appendingPathComponent("packager-\(digest.prefix(32))-\(ORTVersion() ?? "unknown")")
        try manager.createDirectory(at: folder, withIntermediateDirectories: true)
        return folder
    }

    /// Runs the model without blocking the caller's thread.
    func run(_ tensors: [String: AnyTensor]) async throws -> [String: AnyTensor] {
        try await withCheckedThrowingContinuation { continuation in
            queue.async { continuation.resume(with: Result { try self.runNow(tensors) }) }
        }
    }

    private func runNow(_ tensors: [String: AnyTensor]) throws -> [String: AnyTensor] {
        let known = Set(inputs.map(\.name))
        if let stranger = tensors.keys.sorted().first(where: { !known.contains($0) }) {
            throw ModelError.unknownInput(stranger)
        }
        var given: [String: ORTValue] = [:]
        for description in inputs {
            guard let tensor = tensors[description.name] else { throw ModelError.missingInput(description.name) }
            try description.check(tensor)
            given[description.name] = try Self.value(tensor)
        }
        do {
            let names = Set(outputs.map(\.name))
            let made = try session.run(withInputs: given, outputNames: names, runOptions: nil)
            var found: [String: AnyTensor] = [:]
            for description in outputs {
                guard let value = made[description.name] else { throw ModelError.missingOutput(description.name) }
                found[description.name] = try Self.tensor(value, description)
            }
            return found
        } catch {
            throw Self.translated(error)
        }
    }

    private static func value(_ tensor: AnyTensor) throws -> ORTValue {
        let shape = tensor.shape.map { NSNumber(value: $0) }
        do {
            switch tensor.payload {
            case .strings(let values):
                return try ORTValue(tensorStringData: values, shape: shape)
            case .bytes(let data):
                return try ORTValue(
                    tensorData: NSMutableData(data: data), elementType: tensor.kind.elementType, shape: shape)
            }
        } catch {
            throw translated(error)
        }
    }

    /// A copy of what the runtime gave, which may not outlive `value`.
    private static func tensor(_ value: ORTValue, _ description: TensorDescription) throws -> AnyTensor {
        let info = try value.tensorTypeAndShapeInfo()
        guard info.elementType == description.kind.elementType else {
            throw ModelError.wrongType(
                name: description.name, expected: description.kind.rawValue, actual: "\(info.elementType.rawValue)")
        }
        let payload: Payload
        if description.kind == .string {
            payload = .strings(try value.tensorStringData())
        } else {
            let data = try value.tensorData()
            payload = .bytes(Data(bytes: data.bytes, count: data.length))
        }
        let tensor = AnyTensor(kind: description.kind, shape: info.shape.map(\.intValue), payload: payload)
        try description.check(tensor)
        return tensor
    }

    private static func translated(_ error: Error) -> Error {
        error is ModelError ? error : ModelError.runtime(error.localizedDescription)
    }
}

extension ElementKind {
    /// What the runtime calls it.
    var elementType: ORTTensorElementDataType {
        switch self {
        case .float32: return .float
        case .int8: return .int8
        case .uint8: return .uInt8
        case .int32: return .int32
        case .uint32: return .uInt32
        case .int64: return .int64
        case .uint64: return .uInt64
        case .bool: return .bool
        case .string: return .string
        }
    }
}
