"""What the web bundle's loader adds to a run, measured in a browser: ``python benchmarks/web_loader.py``.

The page runs one model through the bundle's loader and through onnxruntime-web called directly, on the same runtime
instance, in turn. A round is twenty runs of each, since browsers round their clock, and the best round of each
counts, since machines are noisy. The aim is under 0.2 ms more a run.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import sys
import tempfile
import threading
from pathlib import Path

import onnx
from onnx import helper

import packager
from packager.targets.web.browser import HOW, browser_command, find_browser, running, scratch

SECONDS = 300.0
PAGE = b'<!doctype html><meta charset="utf-8"><script type="module" src="measure.js"></script>'
MEASURE = b"""
import { load } from "./bundle/relu.js";
import * as ort from "./bundle/runtime/ort.wasm.min.js";

const ROUNDS = 201;
const RUNS = 20;
const data = new Float32Array(SIZE).fill(-1);
const dims = [1, SIZE];

async function timed(once) {
  const started = performance.now();
  for (let at = 0; at < RUNS; at += 1) await once();
  return (performance.now() - started) / RUNS;
}

try {
  const model = await load();
  const bytes = new Uint8Array(await (await fetch("./bundle/model.onnx")).arrayBuffer());
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  const ways = {
    loader: () => model.run({ x: { data, dims } }),
    direct: () => session.run({ x: new ort.Tensor("float32", data, dims) }, ["y"]),
  };
  const best = { loader: Infinity, direct: Infinity };
  for (let at = 0; at < ROUNDS; at += 1) {
    for (const name in ways) best[name] = Math.min(best[name], await timed(ways[name]));
  }
  await fetch("told", { method: "POST", body: JSON.stringify(best) });
} catch (error) {
  await fetch("told", { method: "POST", body: JSON.stringify({ error: String(error) }) });
}
"""


def relu(path: Path) -> Path:
    """``y = Relu(x)`` for float32[1, n]: next to no work, so that what is around it shows."""
    shape = [1, "n"]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def measured(folder: Path, browser: str, told: queue.Queue[str]) -> dict[str, float | str]:
    """Serve ``folder``, open its page in a browser and wait for what it tells."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = scratch()
        url = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        with running(browser_command(browser, str(own / "profile"), url), own):
            found: dict[str, float | str] = json.loads(told.get(timeout=SECONDS))
        server.shutdown()
    return found


def main() -> None:
    """Build a bundle, measure two sizes of input, and print."""
    browser = find_browser()
    if browser is None:
        sys.exit(f"there is no browser here: {HOW}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = packager.build(relu(folder / "relu.onnx"), targets=["web"], out=folder / "dist", verify=False)
        assert report.exit_code == 0, report.targets[0].message
        (folder / "dist/relu-0.0.0-web").rename(folder / "bundle")
        (folder / "index.html").write_bytes(PAGE)
        for size in (16, 3 * 224 * 224):
            (folder / "measure.js").write_bytes(MEASURE.replace(b"SIZE", str(size).encode()))
            found = measured(folder, browser, queue.Queue())
            assert "error" not in found, found
            loader, direct = float(found["loader"]), float(found["direct"])
            print(
                f"{size:>7} floats: {loader:.4f} ms by the loader, {direct:.4f} ms directly: "
                f"{loader - direct:+.4f} ms (aim: 0.2 ms at most)"
            )


if __name__ == "__main__":
    main()
