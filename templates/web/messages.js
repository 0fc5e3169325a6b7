// Every sentence that the loader can say, and the looking into what went wrong. Fetched only when something did.
const quote = (name) => JSON.stringify(name);
const shape = (dims) => (dims ? `[${dims.map((dim) => dim ?? "?").join(", ")}]` : "[...]");
const listed = (specs) => specs.map((spec) => `${quote(spec.name)} (${spec.dtype}${shape(spec.dims)})`).join(", ") || "none";
const input = (spec) => `Input ${quote(spec.name)} (${spec.dtype}${shape(spec.dims)})`;
const product = (sizes) => sizes.reduce((count, size) => count * size, 1);
const RELOAD = "Reload the page before another try.";

const SAID = {
  simd: () => new Error("This browser has no WebAssembly SIMD, which the runtime needs; use a browser of 2023 or later."),
  released: () => new Error("The model was released; load it again."),
  inputs: () => new TypeError("run() takes an object with one entry per input."),
  unknown: (name, inputs) => new TypeError(`There is no input ${quote(name)}; inputs are ${listed(inputs)}.`),
  missing: (spec, inputs) => new TypeError(`${input(spec)} is missing; inputs are ${listed(inputs)}.`),
  dtype: (spec, dtype) => new TypeError(`${input(spec)} was given as ${dtype}.`),
  dims: (spec, dims, length) => new RangeError(`${input(spec)}: ${dims ? misfit(spec.dims, dims, length) : unguessed(spec.dims, length)}.`),
  empty: (spec) => new TypeError(`${input(spec)} has no data.`),
  array: (spec, given, wanted) => new TypeError(`${input(spec)}: ${wanted} or an array of numbers is expected, not ${given.constructor?.name}.`),
  strings: (spec, given) => new TypeError(`${input(spec)}: ${hasNul(given) ? "a string has a NUL, at which the runtime would cut it" : "an array of strings is expected"}.`),
  flat: (spec, value) => new TypeError(`${input(spec)}: a flat array of numbers is expected, not one with ${Array.isArray(value) ? "arrays" : typeof value} in it.`),
  value: (spec, value) => new RangeError(`${input(spec)}: ${value} is no ${spec.dtype}.`),
  fetch: (url, error) => new Error(`${url} can't be fetched (${error.message}); is it there, and does the page's CSP allow it (connect-src 'self')?`),
  status: (url, status) => new Error(`${url}: the server answered ${status}; deploy every file of the bundle.`),
  size: (url, size, packaged, type, start) =>
    /^\s*<(!|html)/i.test(start)
      ? new Error(`${url}: the server answered with an HTML page (${type}), not with the file; is it deployed, and does the server answer 404 where one is missing?`)
      : new Error(`${url} has ${size} bytes (${type ?? "no type"}), ${packaged} were packaged; deploy the bundle's own file.`),
  digest: (url, hex) => new Error(`${url} is not the file that was packaged: its SHA-256 is ${hex}.`),
  script: (error, url = new URL("./runtime/ort.wasm.min.js", import.meta.url).href) => unimportable(url, error.message),
  start: notStarted,
};

/** The error to throw instead of what the loader stopped with. */
export async function explain(stopped) {
  const said = await SAID[stopped.message](...stopped.details);
  said.cause = stopped.details.find((detail) => detail instanceof Error);
  return said;
}

const hasNul = (given) => Array.isArray(given) && given.some((text) => String(text).includes("\0"));

/** What is wrong with dims that were given. */
function misfit(wanted, dims, length) {
  if (!dims.every((size) => Number.isSafeInteger(size) && size >= 0)) return `dims [${dims}] aren't whole numbers`;
  if (product(dims) !== length) return `dims [${dims}] hold ${product(dims)} values, ${length} were given`;
  if (wanted.length !== dims.length) return `dims [${dims}] are of rank ${dims.length}, not ${wanted.length}`;
  const axis = wanted.findIndex((dim, at) => typeof dim === "number" && dim !== dims[at]);
  return `dims [${dims}] have ${dims[axis]} at axis ${axis} where ${wanted[axis]} is expected`;
}

/** Why so many values have no dims. */
function unguessed(dims, length) {
  const free = dims?.filter((dim) => typeof dim !== "number").length;
  if (!dims || free > 1) return `give { dims, data }, the dims can't be told from ${length} values`;
  if (!free) return `dims [${dims}] hold ${product(dims)} values, ${length} were given`;
  return `${length} values don't fill dims ${shape(dims)}; give { dims, data }`;
}

/** Why a script can't be imported, which browsers keep to themselves. */
async function unimportable(url, text) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    return new Error(`${url} can't be fetched (${text}); is it there, and does the page's CSP allow it (script-src and connect-src 'self')?`);
  }
  if (!response.ok) return new Error(`${url}: the server answered ${response.status}; deploy every file of the bundle.`);
  const type = response.headers.get("content-type") ?? "no type";
  if (!/javascript|ecmascript/.test(type)) {
    return new Error(`${url} comes as ${type}; browsers run modules only as text/javascript: set the type, or stop the server's HTML fallback.`);
  }
  return new Error(`${url} can't be run: ${text}`);
}

/** Why the runtime didn't start, or didn't take the model. */
async function notStarted(error, glue, threads, limit) {
  const text = String(error?.message ?? error);
  if (!/backend/i.test(text)) return new Error(`onnxruntime-web can't load the model: ${text}`);
  if (/timeout|timed out/i.test(text)) {
    const workers = threads > 1 ? ` with ${threads} threads; does the CSP allow workers (worker-src 'self')?` : ".";
    return new Error(`The runtime didn't start within ${limit} ms${workers} ${RELOAD}`);
  }
  return unimportable(glue, `${text}. Does the CSP allow WebAssembly (script-src 'wasm-unsafe-eval')? ${RELOAD}`);
}
