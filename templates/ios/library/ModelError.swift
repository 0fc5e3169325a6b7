import Foundation

/// What can go wrong. Every case says which tensor or file it is about.
public enum ModelError: Error, Equatable, LocalizedError {
    /// A file of the package isn't in the app.
    case missingResource(String)
    /// A file isn't the one that was verified.
    case damagedResource(String)
    /// No value is given for an input.
    case missingInput(String)
    /// The model has no input of that name.
    case unknownInput(String)
    /// A tensor's elements are of another type.
    case wrongType(name: String, expected: String, actual: String)
    /// A tensor has another shape; `nil` stands for any size.
    case wrongShape(name: String, expected: [Int?], actual: [Int])
    /// A tensor has more or fewer values than its shape has places.
    case wrongCount(name: String, expected: Int, actual: Int)
    /// The runtime gave no value for an output.
    case missingOutput(String)
    /// The runtime failed; the text is its own.
    case runtime(String)

    public var errorDescription: String? {
        switch self {
        case .missingResource(let name): return "\(name) is missing from the app's resources"
        case .damagedResource(let name): return "\(name) is not the file that was verified"
        case .missingInput(let name): return "no value is given for input '\(name)'"
        case .unknownInput(let name): return "the model has no input '\(name)'"
        case .wrongType(let name, let expected, let actual): return "'\(name)' is \(actual), not \(expected)"
        case .wrongShape(let name, let expected, let actual):
            let sizes = expected.map { $0.map(String.init) ?? "any" }.joined(separator: ", ")
            return "'\(name)' has shape \(actual), not [\(sizes)]"
        case .wrongCount(let name, let expected, let actual):
            return "'\(name)' has \(actual) values for \(expected) places"
        case .missingOutput(let name): return "the runtime gave no output '\(name)'"
        case .runtime(let text): return "ONNX Runtime failed: \(text)"
        }
    }
}
