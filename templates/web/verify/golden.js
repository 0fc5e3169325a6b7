// Reads the golden cases of the bundle: golden/golden.json (names, dtypes, dims, tolerances, strings) and
// golden/golden.safetensors (numbers).
const ARRAYS = {
  F64: Float64Array, F32: Float32Array, F16: Uint16Array, I64: BigInt64Array, I32: Int32Array, I16: Int16Array,
  I8: Int8Array, U64: BigUint64Array, U32: Uint32Array, U16: Uint16Array, U8: Uint8Array, BOOL: Uint8Array,
};

async function fetched(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} can't be fetched: the server answered ${response.status}.`);
  return response;
}

/** Gives `{ document, cases: [{ name, inputs, outputs, transformed }] }`, tensors as `{ dtype, dims, data }` by name. */
export async function readGolden() {
  const document = await (await fetched(new URL("../golden/golden.json", import.meta.url))).json();
  const buffer = await (await fetched(new URL("../golden/golden.safetensors", import.meta.url))).arrayBuffer();
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensor = (entry) => {
    const { dtype, shape, strings } = entry;
    if (strings) return { dtype, dims: shape, data: strings };
    const stored = header[entry.tensor];
    const [begin, end] = stored.data_offsets;
    const bytes = buffer.slice(8 + length + begin, 8 + length + end); // a copy starts where any array may
    return { dtype, dims: shape, data: new ARRAYS[stored.dtype](bytes) };
  };
  const named = (entries) => {
    const found = Object.create(null);
    for (const entry of entries) found[entry.name] = tensor(entry);
    return found;
  };
  const cases = document.cases.map(({ name, inputs, outputs, transformed }) => ({
    name, inputs: named(inputs), outputs: named(outputs), transformed: transformed && named(transformed),
  }));
  return { document, cases };
}
