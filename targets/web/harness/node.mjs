// The same work in Node: the bundle's own loader and runtime, read from disk. `node node.mjs <server> <bundle folder>`
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { work } from "./work.js";

const [server, folder] = process.argv.slice(2);
if (parseInt(process.versions.node) < 20) {
  console.error(`Node ${process.versions.node} is too old: 20 or newer is needed`);
  process.exit(1);
}
const overHttp = globalThis.fetch;
globalThis.fetch = async (input, init) => {
  const url = new URL(input);
  return url.protocol === "file:" ? new Response(await readFile(url)) : overHttp(input, init);
};
const settings = await (await fetch(`${server}settings`)).json();
try {
  const bundle = await import(pathToFileURL(join(folder, settings.module)).href);
  await work(server, bundle, settings, { engine: "Node", version: process.versions.node, isolated: false });
} catch (error) {
  await fetch(`${server}error`, { method: "POST", body: String(error?.message ?? error) });
  process.exitCode = 1;
}
