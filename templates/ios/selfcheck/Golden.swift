import Foundation

/// The golden cases as the package carries them: names, tolerances and texts in golden.json, numbers in
/// golden.safetensors.
struct Golden: Decodable {
    struct Tolerance: Decodable {
        let max_abs: Double?
        let scaled: Double?
        let cosine: Double?
        let top1: Double?
    }

    struct Rule: Decodable {
        let name: String
        let tolerance: Tolerance
        let score_axis: Int?
        let rounding: Double
    }

    struct Entry: Decodable {
        let name: String
        let dtype: String
        let shape: [Int]
        let tensor: String?
        let strings: [String]?
    }

    struct Case: Decodable {
        let name: String
        let inputs: [Entry]
        let outputs: [Entry]
    }

    struct Excluded: Decodable {
        let name: String
        let reason: String
    }

    let policy: String
    let precision: String
    let outputs: [Rule]
    let excluded: [Excluded]
    let cases: [Case]
}

/// Why the golden files can't be read.
enum GoldenError: Error {
    case malformed(String)
}

/// The numbers of golden.safetensors: a header of 8 bytes with the length of a JSON index, the index, the bytes.
struct Payloads {
    private struct Place: Decodable {
        let data_offsets: [Int]
    }

    private let data: Data
    private let start: Int
    private let places: [String: Place]

    init(_ data: Data) throws {
        guard data.count >= 8 else { throw GoldenError.malformed("golden.safetensors is too short") }
        let length = data.prefix(8).enumerated().reduce(0) { $0 | Int($1.element) << (8 * $1.offset) }
        guard length >= 0, 8 + length <= data.count else { throw GoldenError.malformed("golden.safetensors is cut") }
        var found: [String: Place] = [:]
        let index = try JSONSerialization.jsonObject(with: data.subdata(in: 8..<8 + length)) as? [String: Any] ?? [:]
        for (key, value) in index where key != "__metadata__" {
            guard let offsets = (value as? [String: Any])?["data_offsets"] as? [Int], offsets.count == 2 else {
                throw GoldenError.malformed("golden.safetensors has no place for \(key)")
            }
            found[key] = Place(data_offsets: offsets)
        }
        self.data = data
        self.start = 8 + length
        self.places = found
    }

    /// The bytes stored under a key.
    func bytes(_ key: String) throws -> Data {
        guard let place = places[key], place.data_offsets[0] >= 0, place.data_offsets[0] <= place.data_offsets[1],
            start + place.data_offsets[1] <= data.count
        else { throw GoldenError.malformed("golden.safetensors has no \(key)") }
        return data.subdata(in: start + place.data_offsets[0]..<start + place.data_offsets[1])
    }
}
