// Takes golden cases from the server and posts the outputs. A message is the length of its JSON header (uint32, little
// endian), the header ({ tensors: [{ name, dtype, dims, bytes } or { ..., strings }] }) padded to 8 bytes, and the
// tensors' bytes, each padded to 8.
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, int16: Int16Array, int32: Int32Array,
  int64: BigInt64Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  bool: Uint8Array, float16: Uint16Array,
};
const padded = (size) => (size + 7) & ~7;

export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  let at = 8 + padded(length);
  const inputs = Object.create(null);
  for (const { name, dtype, dims, bytes, strings } of header.tensors) {
    inputs[name] = { dims, data: strings ?? new ARRAYS[dtype](buffer, at, bytes / ARRAYS[dtype].BYTES_PER_ELEMENT) };
    at += padded(bytes);
  }
  return inputs;
}

export function encode(outputs) {
  const parts = [];
  const tensors = Object.keys(outputs).map((name) => {
    const { dtype, dims, data } = outputs[name];
    if (dtype === "string") return { name, dtype, dims, bytes: 0, strings: [...data] };
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    parts.push(bytes, new Uint8Array(padded(bytes.length) - bytes.length));
    return { name, dtype, dims, bytes: bytes.length };
  });
  const header = new TextEncoder().encode(JSON.stringify({ tensors }));
  const start = new Uint8Array(8 + padded(header.length));
  new DataView(start.buffer).setUint32(0, header.length, true);
  start.set(header, 8);
  return new Blob([start, ...parts]);
}

export async function work(server, bundle, settings, host) {
  fetch(`${server}alive`).then(({ body }) => body.pipeTo(new WritableStream())).catch(() => {});
  const post = (what, body) => fetch(server + what, { method: "POST", body });
  const model = await bundle.load(settings.options);
  await post("hello", JSON.stringify({ ...host, threads: model.threads, backend: model.backend ?? "wasm", fallback: model.fallback ?? "" }));
  for (;;) {
    const response = await fetch(`${server}next`);
    if (response.status === 410) break;
    if (response.status === 204) continue;
    const inputs = decode(await response.arrayBuffer());
    let outputs;
    try {
      outputs = await model.run(inputs);
    } catch (error) {
      await post("failure", String(error?.message ?? error));
      continue;
    }
    await post("result", encode(outputs));
  }
  await model.release();
}
