import COnnxRuntime
import Foundation

/// ort_env.h
public final class ORTEnv {
    let pointer: OpaquePointer

    public init(loggingLevel: ORTLoggingLevel) throws {
        var made: OpaquePointer?
        try check(api.CreateEnv(OrtLoggingLevel(UInt32(loggingLevel.rawValue)), "packager", &made))
        guard let made else { throw failure("no environment") }
        pointer = made
        try check(api.DisableTelemetryEvents(made))
    }

    deinit { api.ReleaseEnv(pointer) }
}

/// ort_session.h
public final class ORTSessionOptions {
    /// What the CoreML provider of 1.24 takes (coreml_options.cc); anything else it refuses.
    static let known: [String: [String]?] = [
        "ModelFormat": ["MLProgram", "NeuralNetwork"],
        "MLComputeUnits": ["ALL", "CPUOnly", "CPUAndGPU", "CPUAndNeuralEngine"],
        "RequireStaticInputShapes": ["0", "1"], "EnableOnSubgraphs": ["0", "1"],
        "SpecializationStrategy": ["Default", "FastPrediction"], "ProfileComputePlan": ["0", "1"],
        "AllowLowPrecisionAccumulationOnGPU": ["0", "1"], "ModelCacheDirectory": nil,
    ]

    let pointer: OpaquePointer

    public init() throws {
        var made: OpaquePointer?
        try check(api.CreateSessionOptions(&made))
        guard let made else { throw failure("no options") }
        pointer = made
    }

    deinit { api.ReleaseSessionOptions(pointer) }

    /// Checks the options as the provider would; the CPU provider computes in its place.
    public func appendExecutionProvider(_ providerName: String, providerOptions: [String: String]) throws {
        guard providerName == "CoreML" else { throw failure("Unknown provider name: \(providerName)") }
        for (key, value) in providerOptions {
            guard let allowed = Self.known[key] else { throw failure("Unknown option: \(key)") }
            if let allowed, !allowed.contains(value) { throw failure("Invalid value for option \(key): \(value)") }
        }
    }
}

/// ort_session.h
public final class ORTRunOptions {
    let pointer: OpaquePointer

    public init() throws {
        var made: OpaquePointer?
        try check(api.CreateRunOptions(&made))
        guard let made else { throw failure("no options") }
        pointer = made
    }

    deinit { api.ReleaseRunOptions(pointer) }
}

/// ort_session.h
public final class ORTSession {
    private let pointer: OpaquePointer
    private let environment: ORTEnv

    public init(env: ORTEnv, modelPath path: String, sessionOptions: ORTSessionOptions?) throws {
        let options = try sessionOptions ?? ORTSessionOptions()
        var made: OpaquePointer?
        try check(api.CreateSession(env.pointer, path, options.pointer, &made))
        guard let made else { throw failure("no session") }
        pointer = made
        environment = env
    }

    deinit { api.ReleaseSession(pointer) }

    public func run(
        withInputs inputs: [String: ORTValue], outputNames: Set<String>, runOptions: ORTRunOptions?
    ) throws -> [String: ORTValue] {
        let given = Array(inputs)
        let wanted = Array(outputNames)
        let names = (given.map(\.key) + wanted).map { strdup($0) }
        defer { names.forEach { free($0) } }
        let texts = names.map { $0.map { UnsafePointer($0) } }
        let values: [OpaquePointer?] = given.map(\.value.pointer)
        var made = [OpaquePointer?](repeating: nil, count: wanted.count)
        try check(
            api.Run(
                pointer, runOptions?.pointer, Array(texts.prefix(given.count)), values, given.count,
                Array(texts.dropFirst(given.count)), wanted.count, &made))
        return Dictionary(uniqueKeysWithValues: try zip(wanted, made).map { name, value in
            guard let value else { throw failure("no value for \(name)") }
            return (name, ORTValue(owning: value))
        })
    }
}
