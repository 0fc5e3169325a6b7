import Foundation

// The judge of packager's parity.py in Swift: the same rules, metrics and reasons, so that a verdict made on a phone
// means what the build's verdict means. What may never pass: another rank, shape or dtype, a missing or an extra
// output, NaN or infinity on one side only, and a case in which nothing was compared.

private let steps = 64.0
private let roundingSQNR = 20.0
private let outsized = 1e6
private let gap = 65536.0
private let tiny = 0x1p-126
private let epsilon = 0x1p-23

/// One output or tensor as it is judged: numbers, or texts of what is compared exactly.
struct Judged {
    let dtype: String
    let shape: [Int]
    let numbers: [Double]
    let exact: [String]
}

/// What was found of one output.
struct OutputResult {
    let name: String
    var reasons: [String]
    var metrics: [String: Any]?

    var document: [String: Any] {
        ["name": name, "passed": reasons.isEmpty, "reasons": reasons, "metrics": metrics.map { $0 as Any } ?? NSNull()]
    }
}

/// A number as JSON can hold it.
func safe(_ number: Double) -> Any {
    number.isNaN ? "nan" : number.isFinite ? number as Any : number > 0 ? "inf" : "-inf"
}

func judge(_ name: String, expected: Judged, actual: Judged, rule: Golden.Rule) -> OutputResult {
    let elements = expected.shape.reduce(1, *)
    var metrics: [String: Any] = [
        "expected_shape": expected.shape, "actual_shape": actual.shape, "expected_dtype": expected.dtype,
        "actual_dtype": actual.dtype, "elements": elements, "compared": 0, "nan_expected": 0, "nan_actual": 0,
        "inf_expected": 0, "inf_actual": 0,
    ]
    for key in ["max_abs", "max_rel", "scaled", "rmse", "cosine", "sqnr_db", "top1", "mismatches", "worst_index"] {
        metrics[key] = NSNull()
    }
    var reasons: [String] = []
    if expected.shape != actual.shape {
        let what = expected.shape.count == actual.shape.count ? "shape" : "rank"
        reasons.append("\(what) differs: expected \(expected.shape), got \(actual.shape)")
    }
    if expected.dtype != actual.dtype {
        reasons.append("dtype differs: expected \(expected.dtype), got \(actual.dtype)")
    }
    if reasons.isEmpty && elements > 0 {
        reasons = expected.dtype == "float32"
            ? judgeFloats(expected, actual, rule, &metrics) : judgeExact(expected, actual, &metrics)
    }
    return OutputResult(name: name, reasons: reasons, metrics: metrics)
}

private func place(_ position: Int, _ shape: [Int]) -> [Int] {
    var left = position
    var index: [Int] = []
    for size in shape.reversed() {
        index.insert(left % size, at: 0)
        left /= size
    }
    return index
}

private func judgeExact(_ expected: Judged, _ actual: Judged, _ metrics: inout [String: Any]) -> [String] {
    let wrong = expected.exact.indices.filter { expected.exact[$0] != actual.exact[$0] }
    metrics["compared"] = expected.exact.count
    metrics["mismatches"] = wrong.count
    guard let first = wrong.first else { return [] }
    metrics["worst_index"] = place(first, expected.shape)
    if expected.dtype != "string" && expected.dtype != "bool" {
        metrics["max_abs"] = wrong.map { abs(expected.numbers[$0] - actual.numbers[$0]) }.max() ?? 0
    }
    return [
        "\(wrong.count) of \(expected.exact.count) \(expected.dtype) values differ, first at "
            + "\(place(first, expected.shape)): expected \(expected.exact[first]), got \(actual.exact[first])"
    ]
}

private struct Group {
    var magnitude = 0.0
    var most = 0.0
    var scaled = 0.0
    var cosine = 1.0
    var sqnr = Double.infinity
}

private func judgeFloats(
    _ expected: Judged, _ actual: Judged, _ rule: Golden.Rule, _ metrics: inout [String: Any]
) -> [String] {
    let (one, other) = (expected.numbers, actual.numbers)
    var reasons: [String] = []
    let sides: [(String, String, (Double) -> Bool)] = [
        ("NaN", "nan", { $0.isNaN }), ("+inf", "inf", { $0 == .infinity }), ("-inf", "inf", { $0 == -.infinity }),
    ]
    for (what, key, test) in sides {
        metrics["\(key)_expected"] = (metrics["\(key)_expected"] as? Int ?? 0) + one.filter(test).count
        metrics["\(key)_actual"] = (metrics["\(key)_actual"] as? Int ?? 0) + other.filter(test).count
        let sided = one.indices.filter { test(one[$0]) != test(other[$0]) }
        if let first = sided.first {
            reasons.append(
                "\(what) on one side only at \(sided.count) positions, first at \(place(first, expected.shape))")
        }
    }
    let finite = one.indices.filter { one[$0].isFinite && other[$0].isFinite }
    metrics["compared"] = finite.count
    if finite.isEmpty { return reasons + ["nothing compared: no position is finite on both sides"] }
    let bounds = rule.tolerance
    if bounds.max_abs == nil && bounds.scaled == nil && bounds.cosine == nil
        && (bounds.top1 == nil || rule.score_axis == nil) {
        reasons.append("nothing judged: the tolerance of this output sets no bound that applies to it")
    }
    let groups = grouped(one, finite).map { measure(one, other, $0) }
    let worst = finite.max { abs(one[$0] - other[$0]) < abs(one[$1] - other[$1]) } ?? finite[0]
    let squares = finite.reduce(0.0) { $0 + (one[$1] - other[$1]) * (one[$1] - other[$1]) }
    let relative = finite.map { index -> Double in
        let difference = abs(one[index] - other[index])
        return one[index] != 0 ? difference / abs(one[index]) : difference > 0 ? .infinity : 0
    }
    metrics["max_abs"] = abs(one[worst] - other[worst])
    metrics["max_rel"] = safe(relative.max() ?? 0)
    metrics["rmse"] = (squares / Double(finite.count)).squareRoot()
    metrics["scaled"] = safe(groups.map(\.scaled).max() ?? 0)
    metrics["cosine"] = groups.map(\.cosine).min() ?? 1
    metrics["sqnr_db"] = safe(groups.map(\.sqnr).min() ?? .infinity)
    metrics["worst_index"] = place(worst, expected.shape)
    for group in groups {
        for reason in judgeGroup(group, rule) where !reasons.contains(reason) { reasons.append(reason) }
    }
    if let axis = rule.score_axis {
        let tie = (bounds.scaled ?? 0) * groups[0].magnitude
        reasons += judgeTop1(one, other, expected.shape, axis, tie, bounds.top1, &metrics)
    }
    return reasons
}

/// Places to be judged by one magnitude: all, or ordinary ones first and outsized ones (masks) apart.
private func grouped(_ one: [Double], _ finite: [Int]) -> [[Int]] {
    let sizes = finite.map { abs(one[$0]) }.filter { $0 > 0 }.sorted()
    for index in sizes.indices.dropFirst() where sizes[index] >= outsized && sizes[index] / gap >= sizes[index - 1] {
        let parts = [
            finite.filter { abs(one[$0]) < sizes[index] }, finite.filter { abs(one[$0]) >= sizes[index] },
        ]
        return parts.filter { !$0.isEmpty }
    }
    return [finite]
}

private func measure(_ one: [Double], _ other: [Double], _ places: [Int]) -> Group {
    var group = Group()
    group.magnitude = places.map { abs(one[$0]) }.max() ?? 0
    group.most = places.map { abs(one[$0] - other[$0]) }.max() ?? 0
    let reach = places.map { abs(other[$0]) }.max() ?? 0
    if group.most == 0 { return group }
    group.scaled = group.magnitude > 0 ? group.most / group.magnitude : .infinity
    if group.magnitude == 0 || reach == 0 {
        group.cosine = 0
        group.sqnr = group.magnitude > 0 ? 0 : -.infinity
        return group
    }
    var (ea, ee, aa, dd) = (0.0, 0.0, 0.0, 0.0)
    for index in places {
        let e = one[index] / group.magnitude
        let a = other[index] / reach
        let d = (one[index] - other[index]) / group.magnitude
        ea += e * a
        ee += e * e
        aa += a * a
        dd += d * d
    }
    group.cosine = min(1, max(-1, ea / (ee * aa).squareRoot()))
    group.sqnr = dd > 0 ? 10 * log10(ee / dd) : .infinity
    return group
}

private func judgeGroup(_ group: Group, _ rule: Golden.Rule) -> [String] {
    if group.most <= tiny { return [] }
    var reasons: [String] = []
    if let bound = rule.tolerance.max_abs {
        let widest = max(bound, steps * epsilon * group.magnitude)
        if !(group.most <= widest) { reasons.append("max abs \(group.most) is over \(widest)") }
    }
    if group.most <= rule.rounding && group.sqnr >= roundingSQNR { return reasons }
    if let bound = rule.tolerance.scaled, !(group.scaled <= bound) {
        reasons.append("scaled error \(group.scaled) is over \(bound)")
    }
    if let bound = rule.tolerance.cosine, !(group.cosine >= bound) {
        reasons.append("cosine \(group.cosine) is under \(bound)")
    }
    return reasons
}

private func judgeTop1(
    _ one: [Double], _ other: [Double], _ shape: [Int], _ given: Int, _ tie: Double, _ least: Double?,
    _ metrics: inout [String: Any]
) -> [String] {
    let axis = given < 0 ? given + shape.count : given
    guard shape.indices.contains(axis) else {
        return ["score axis \(given) doesn't exist in an output of rank \(shape.count)"]
    }
    let stride = shape.dropFirst(axis + 1).reduce(1, *)
    let count = shape[axis]
    func score(_ values: [Double], _ index: Int) -> Double { values[index].isNaN ? -.infinity : values[index] }
    var (agreed, rows) = (0, 0)
    for start in one.indices where (start / stride) % count == 0 {
        var (best, chosen) = (start, start)
        for index in Swift.stride(from: start, to: start + count * stride, by: stride) {
            if score(one, index) > score(one, best) { best = index }
            if score(other, index) > score(other, chosen) { chosen = index }
        }
        rows += 1
        agreed += score(one, chosen) >= score(one, best) - tie ? 1 : 0
    }
    let share = Double(agreed) / Double(rows)
    metrics["top1"] = share
    guard let least, !(share >= least) else { return [] }
    return ["top-1 agreement \(share) is under \(least)"]
}
