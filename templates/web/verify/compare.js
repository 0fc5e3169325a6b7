// The judge of packager's parity.py, in JavaScript: the same rules, metrics and reasons, so that a verdict made in a
// browser means what the build's verdict means. What may never pass: another rank, shape or dtype, a missing or an
// extra output, NaN or infinity on one side only, and a case in which nothing was compared.
const STEPS = 64;
const ROUNDING_SQNR = 20;
const OUTSIZED = 1e6;
const GAP = 2 ** 16;
const TINY = 2 ** -126; // smallest normal float32
const EPS = { float32: 2 ** -23, float64: 2 ** -23, float16: 2 ** -10 };

const safe = (value) => (typeof value !== "number" || Number.isFinite(value) ? value : Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf");
const short = (value) => (Number.isFinite(value) ? Number(value.toPrecision(3)).toString() : String(safe(value)));
const sum = (count, term) => {
  let total = 0;
  for (let at = 0; at < count; at += 1) total += term(at);
  return total;
};

/** The value of a float16 given by its bits. */
export function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const rest = bits & 1023;
  if (exponent === 31) return rest ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 25) * (1024 + rest) : sign * 2 ** -24 * rest;
}

const floats = ({ dtype, data }) =>
  dtype === "float16" && data instanceof Uint16Array ? Float64Array.from(data, fromHalf) : Float64Array.from(data);

function place(at, dims) {
  const index = [];
  for (let axis = dims.length - 1; axis >= 0; axis -= 1) {
    index.unshift(at % dims[axis]);
    at = Math.floor(at / dims[axis]);
  }
  return index;
}

/** Judges one output; `rule` is an entry of `outputs` in golden.json. */
export function compareOutput(name, expected, actual, rule) {
  const elements = expected.dims.reduce((product, size) => product * size, 1);
  const metrics = {
    expected_shape: expected.dims, actual_shape: actual.dims, expected_dtype: expected.dtype, actual_dtype: actual.dtype,
    elements, compared: 0, max_abs: null, max_rel: null, scaled: null, rmse: null, cosine: null, sqnr_db: null,
    top1: null, nan_expected: 0, nan_actual: 0, inf_expected: 0, inf_actual: 0, mismatches: null, worst_index: null,
  };
  let reasons = [];
  if (String(expected.dims) !== String(actual.dims) || expected.dims.length !== actual.dims.length) {
    const what = expected.dims.length === actual.dims.length ? "shape" : "rank";
    reasons.push(`${what} differs: expected [${expected.dims.join(", ")}], got [${actual.dims.join(", ")}]`);
  }
  if (expected.dtype !== actual.dtype) reasons.push(`dtype differs: expected ${expected.dtype}, got ${actual.dtype}`);
  if (!reasons.length && actual.data.length !== elements) reasons.push(`${actual.data.length} values for ${elements} places`);
  if (!reasons.length && elements) {
    reasons = expected.dtype in EPS ? judgeFloats(expected, actual, rule, metrics) : judgeExact(expected, actual, metrics);
  }
  return { name, passed: !reasons.length, reasons, metrics: Object.fromEntries(Object.entries(metrics).map(([key, value]) => [key, safe(value)])) };
}

function judgeExact(expected, actual, metrics) {
  let wrong = 0;
  let first = -1;
  for (let at = 0; at < expected.data.length; at += 1) {
    if (expected.data[at] === actual.data[at]) continue;
    if (!wrong) first = at;
    wrong += 1;
  }
  Object.assign(metrics, { compared: expected.data.length, mismatches: wrong });
  if (!wrong) return [];
  metrics.worst_index = place(first, expected.dims);
  if (expected.dtype !== "string" && expected.dtype !== "bool") {
    metrics.max_abs = expected.data.reduce((most, value, at) => Math.max(most, Math.abs(Number(value) - Number(actual.data[at]))), 0);
  }
  return [`${wrong} of ${expected.data.length} ${expected.dtype} values differ, first at [${metrics.worst_index.join(", ")}]: expected ${expected.data[first]}, got ${actual.data[first]}`];
}

function judgeFloats(expected, actual, rule, metrics) {
  const one = floats(expected);
  const other = floats(actual);
  const reasons = [];
  const sides = [["NaN", Number.isNaN], ["+inf", (value) => value === Infinity], ["-inf", (value) => value === -Infinity]];
  for (const [what, test] of sides) {
    const key = what === "NaN" ? "nan" : "inf";
    metrics[`${key}_expected`] += sum(one.length, (at) => test(one[at]));
    metrics[`${key}_actual`] += sum(one.length, (at) => test(other[at]));
    const sided = sum(one.length, (at) => test(one[at]) !== test(other[at]));
    if (sided) reasons.push(`${what} on one side only at ${sided} positions, first at [${place(one.findIndex((value, at) => test(value) !== test(other[at])), expected.dims).join(", ")}]`);
  }
  const finite = [];
  for (let at = 0; at < one.length; at += 1) if (Number.isFinite(one[at]) && Number.isFinite(other[at])) finite.push(at);
  metrics.compared = finite.length;
  if (!finite.length) return [...reasons, "nothing compared: no position is finite on both sides"];
  const { max_abs, scaled, cosine, top1 } = rule.tolerance;
  if ([max_abs, scaled, cosine].every((bound) => bound === null) && (top1 === null || rule.score_axis === null)) {
    reasons.push("nothing judged: the tolerance of this output sets no bound that applies to it");
  }
  const groups = grouped(one, finite).map((places) => measure(one, other, places));
  const away = (at) => (Number.isFinite(one[at]) && Number.isFinite(other[at]) ? Math.abs(one[at] - other[at]) : 0);
  let worst = 0;
  let relative = 0;
  for (const at of finite) {
    const difference = away(at);
    if (difference > away(worst)) worst = at;
    relative = Math.max(relative, one[at] ? difference / Math.abs(one[at]) : difference ? Infinity : 0);
  }
  Object.assign(metrics, {
    max_abs: away(worst), max_rel: relative,
    rmse: Math.sqrt(sum(finite.length, (at) => (one[finite[at]] - other[finite[at]]) ** 2) / finite.length),
    scaled: Math.max(...groups.map((group) => group.scaled)), cosine: Math.min(...groups.map((group) => group.cosine)),
    sqnr_db: Math.min(...groups.map((group) => group.sqnr)), worst_index: place(worst, expected.dims),
  });
  for (const group of groups) {
    for (const reason of judgeGroup(group, rule, EPS[expected.dtype])) if (!reasons.includes(reason)) reasons.push(reason);
  }
  if (rule.score_axis !== null) reasons.push(...judgeTop1(one, other, expected.dims, rule, (scaled ?? 0) * groups[0].magnitude, metrics));
  return reasons;
}

/** Places to be judged by one magnitude: all, or ordinary ones first and outsized ones (masks) apart. */
function grouped(one, finite) {
  const sizes = Float64Array.from(finite, (at) => Math.abs(one[at])).filter((size) => size > 0).sort();
  for (let at = 1; at < sizes.length; at += 1) {
    if (sizes[at] >= OUTSIZED && sizes[at] / GAP >= sizes[at - 1]) {
      const parts = [finite.filter((place) => Math.abs(one[place]) < sizes[at]), finite.filter((place) => Math.abs(one[place]) >= sizes[at])];
      return parts.filter((part) => part.length);
    }
  }
  return [finite];
}

function measure(one, other, places) {
  let magnitude = 0;
  let reach = 0;
  let most = 0;
  for (const at of places) {
    magnitude = Math.max(magnitude, Math.abs(one[at]));
    reach = Math.max(reach, Math.abs(other[at]));
    most = Math.max(most, Math.abs(one[at] - other[at]));
  }
  if (!most) return { magnitude, most, scaled: 0, cosine: 1, sqnr: Infinity };
  const scaled = magnitude ? most / magnitude : Infinity;
  if (!magnitude || !reach) return { magnitude, most, scaled, cosine: 0, sqnr: magnitude ? 0 : -Infinity };
  let [ea, ee, aa, dd] = [0, 0, 0, 0];
  for (const at of places) {
    const e = one[at] / magnitude;
    const a = other[at] / reach;
    const d = (one[at] - other[at]) / magnitude;
    ea += e * a;
    ee += e * e;
    aa += a * a;
    dd += d * d;
  }
  const cosine = Math.min(1, Math.max(-1, ea / Math.sqrt(ee * aa)));
  return { magnitude, most, scaled, cosine, sqnr: dd ? 10 * Math.log10(ee / dd) : Infinity };
}

function judgeGroup(group, rule, eps) {
  if (group.most <= TINY) return [];
  const reasons = [];
  const { max_abs, scaled, cosine } = rule.tolerance;
  if (max_abs !== null) {
    const bound = Math.max(max_abs, STEPS * eps * group.magnitude);
    if (!(group.most <= bound)) reasons.push(`max abs ${short(group.most)} is over ${short(bound)}`);
  }
  if (group.most <= rule.rounding && group.sqnr >= ROUNDING_SQNR) return reasons;
  if (scaled !== null && !(group.scaled <= scaled)) reasons.push(`scaled error ${short(group.scaled)} is over ${short(scaled)}`);
  if (cosine !== null && !(group.cosine >= cosine)) reasons.push(`cosine ${group.cosine.toFixed(6)} is under ${cosine}`);
  return reasons;
}

function judgeTop1(one, other, dims, rule, tie, metrics) {
  const axis = rule.score_axis < 0 ? rule.score_axis + dims.length : rule.score_axis;
  if (!(axis >= 0 && axis < dims.length)) return [`score axis ${rule.score_axis} doesn't exist in an output of rank ${dims.length}`];
  const stride = dims.slice(axis + 1).reduce((product, size) => product * size, 1);
  const count = dims[axis];
  const score = (values, start, at) => (Number.isNaN(values[start + at * stride]) ? -Infinity : values[start + at * stride]);
  let agreed = 0;
  let rows = 0;
  for (let start = 0; start < one.length; start += 1) {
    if (Math.floor(start / stride) % count) continue; // only the first class of each row
    let best = 0;
    let chosen = 0;
    for (let at = 1; at < count; at += 1) {
      if (score(one, start, at) > score(one, start, best)) best = at;
      if (score(other, start, at) > score(other, start, chosen)) chosen = at;
    }
    rows += 1;
    agreed += score(one, start, chosen) >= score(one, start, best) - tie ? 1 : 0;
  }
  metrics.top1 = agreed / rows;
  const least = rule.tolerance.top1;
  return least === null || metrics.top1 >= least ? [] : [`top-1 agreement ${metrics.top1.toFixed(4)} is under ${least}`];
}

/** Judges one case. `rules` maps output names to entries of golden.json; `excluded` holds names that aren't judged. */
export function compareCase(name, expected, actual, rules, excluded) {
  const outputs = [];
  const lost = (output, reason) => outputs.push({ name: output, passed: false, reasons: [reason], metrics: null });
  for (const output of Object.keys(expected)) {
    if (excluded.has(output)) continue;
    if (!(output in actual)) lost(output, "the output is missing");
    else if (!rules.has(output)) lost(output, "no tolerance is given for the output");
    else outputs.push(compareOutput(output, expected[output], actual[output], rules.get(output)));
  }
  for (const output of Object.keys(actual)) {
    if (!excluded.has(output) && !(output in expected)) lost(output, "the output is not expected");
  }
  const reasons = outputs.flatMap((output) => output.reasons.map((reason) => `output '${output.name}': ${reason}`));
  if (!outputs.some((output) => output.metrics?.compared)) reasons.push("nothing compared");
  return { name, passed: !reasons.length, reasons, outputs };
}

/**
 * Judges one case of a golden document against the reference's outputs, and against the transformed model's where it
 * holds them. The metrics are those against the reference.
 */
export function judgeCase(golden, { name, outputs, transformed }, actual) {
  const excluded = new Set(golden.excluded.map((output) => output.name));
  const against = (expected, rules) =>
    compareCase(name, expected, actual, new Map(rules.map((rule) => [rule.name, rule])), excluded);
  const found = against(outputs, golden.outputs);
  if (!transformed) return found;
  const near = against(transformed, golden.transformed).reasons.map((reason) => `against the transformed model: ${reason}`);
  const reasons = [...found.reasons, ...near];
  return { ...found, passed: !reasons.length, reasons };
}

/** The worst of a metric over all cases, as the verdict tells it; null where none was measured. */
export function worst(cases, metric, sign) {
  let found = null;
  for (const { name, outputs } of cases) {
    for (const output of outputs) {
      const value = output.metrics?.[metric];
      if (value === null || value === undefined) continue;
      const number = typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value;
      const next = { case: name, output: output.name, value, rank: [sign * number, name, output.name] };
      const at = found ? next.rank.findIndex((part, place) => part !== found.rank[place]) : 0;
      if (!found || (at >= 0 && next.rank[at] > found.rank[at])) found = next; // ties go to the last name
    }
  }
  return found && { case: found.case, output: found.output, value: found.value };
}
