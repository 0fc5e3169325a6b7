import Foundation

#if canImport(CryptoKit)
import CryptoKit
#endif

/// The SHA-256 of a file's bytes in hexadecimal digits.
func sha256(_ data: Data) -> String {
    #if canImport(CryptoKit)
    return SHA256.hash(data: data).map { String(format: "%02x", $0) }.joined()
    #else
    return portableSHA256(data)
    #endif
}

/// SHA-256 as FIPS 180-4 defines it, for platforms without CryptoKit.
func portableSHA256(_ data: Data) -> String {
    var state: [UInt32] = [
        0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
    ]
    var message = [UInt8](data)
    let bits = UInt64(message.count) * 8
    message.append(0x80)
    message.append(contentsOf: [UInt8](repeating: 0, count: (120 - message.count % 64) % 64))
    message.append(contentsOf: (0..<8).map { UInt8(truncatingIfNeeded: bits >> (56 - 8 * UInt64($0))) })
    message.withUnsafeBufferPointer { bytes in
        for start in stride(from: 0, to: bytes.count, by: 64) {
            mix(&state, UnsafeBufferPointer(rebasing: bytes[start..<start + 64]))
        }
    }
    return state.map { word in
        let digits = String(word, radix: 16)
        return String(repeating: "0", count: 8 - digits.count) + digits
    }.joined()
}

private func rotated(_ word: UInt32, _ count: UInt32) -> UInt32 {
    (word >> count) | (word << (32 - count))
}

private func mix(_ state: inout [UInt32], _ block: UnsafeBufferPointer<UInt8>) {
    var words = [UInt32](repeating: 0, count: 64)
    for index in 0..<16 {
        words[index] = (0..<4).reduce(0) { $0 << 8 | UInt32(block[4 * index + $1]) }
    }
    for index in 16..<64 {
        let near = words[index - 15]
        let far = words[index - 2]
        let first = rotated(near, 7) ^ rotated(near, 18) ^ (near >> 3)
        let second = rotated(far, 17) ^ rotated(far, 19) ^ (far >> 10)
        words[index] = words[index - 16] &+ first &+ words[index - 7] &+ second
    }
    var (a, b, c, d) = (state[0], state[1], state[2], state[3])
    var (e, f, g, h) = (state[4], state[5], state[6], state[7])
    for index in 0..<64 {
        let sum1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
        let choice = (e & f) ^ (~e & g)
        let first = h &+ sum1 &+ choice &+ roundConstants[index] &+ words[index]
        let sum0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)
        let majority = (a & b) ^ (a & c) ^ (b & c)
        (h, g, f, e) = (g, f, e, d &+ first)
        (d, c, b, a) = (c, b, a, first &+ sum0 &+ majority)
    }
    for (index, word) in [a, b, c, d, e, f, g, h].enumerated() {
        state[index] = state[index] &+ word
    }
}

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
private let roundConstants: [UInt32] = primes(64).map(cubeRootFraction)

private func primes(_ count: Int) -> [UInt64] {
    var found: [UInt64] = []
    var next: UInt64 = 2
    while found.count < count {
        if found.allSatisfy({ next % $0 != 0 }) { found.append(next) }
        next += 1
    }
    return found
}

/// The largest whole number whose cube is at most `prime · 2⁹⁶` ends in the 32 bits; it is found by bisection.
private func cubeRootFraction(_ prime: UInt64) -> UInt32 {
    var low: UInt64 = 0
    var high: UInt64 = 7 << 32
    while low + 1 < high {
        let middle = (low + high) / 2
        if isCubeAtMost(middle, prime) { low = middle } else { high = middle }
    }
    return UInt32(truncatingIfNeeded: low)
}

/// Whether `root³ ≤ prime · 2⁹⁶`, in whole numbers of 128 bits and more.
private func isCubeAtMost(_ root: UInt64, _ prime: UInt64) -> Bool {
    let square = root.multipliedFullWidth(by: root)
    let low = square.low.multipliedFullWidth(by: root)
    let high = square.high.multipliedFullWidth(by: root)
    let (middle, carry) = low.high.addingReportingOverflow(high.low)
    let top = high.high + (carry ? 1 : 0)
    // prime · 2⁹⁶ is prime · 2³² in the middle word and what overflows it in the top word.
    let limit = prime.multipliedFullWidth(by: 1 << 32)
    if top != limit.high { return top < limit.high }
    if middle != limit.low { return middle < limit.low }
    return low.low == 0
}
