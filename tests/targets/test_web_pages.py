"""The bundle on web servers and in bundlers: its pages, its loader in workers and under faults, as a dependency."""

from __future__ import annotations

import http.server
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from packager.supervise import running
from packager.targets.web import node
from packager.targets.web.browser import browser_command, find_browser, scratch
from packager.targets.web.server import ISOLATION, TYPES
from tests.targets.test_web import needs_browser
from tests.targets.test_web_loader import one_of_each

POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src 'self'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never changed."""
    return one_of_each(tmp_path_factory.mktemp("pages"))


WATCH = b"""
const said = document.querySelector("#said");
const post = (body) => fetch("/told", { method: "POST", body });
const done = /passed|failed|First run|can't|isn't|answered|Error/;
const save = () => document.querySelector("#save")?.click();
const look = () => done.test(said.textContent) && post(said.textContent).then(save);
new MutationObserver(look).observe(said, { childList: true, characterData: true, subtree: true });
addEventListener("error", (event) => post(`page: ${event.message ?? event.target.outerHTML}`), true);
addEventListener("unhandledrejection", (event) => post(`page: ${event.reason}`));
addEventListener("securitypolicyviolation", (event) => post(`CSP: ${event.blockedURI}`));
"""


@contextmanager
def static_server(root: Path, headers: Mapping[str, str]) -> Iterator[tuple[str, queue.Queue[str]]]:
    """A static server under a strict CSP whose pages tell what is said in ``#said``."""
    told: queue.Queue[str] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            self.extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, **TYPES}
            super().__init__(*arguments, directory=str(root))

        def do_GET(self):
            path = self.path.split("?")[0]
            if path == "/watch.js" or path.endswith("/"):
                body = WATCH
                if path != "/watch.js":
                    body = (root / path.strip("/") / "index.html").read_bytes()
                    body = body.replace(b"<script ", b'<script type="module" src="/watch.js"></script>\n<script ', 1)
                self.send_response(200)
                self.send_header("Content-Type", "text/javascript" if path == "/watch.js" else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            super().do_GET()

        def do_POST(self):
            told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def end_headers(self):
            for name, text in {"Content-Security-Policy": POLICY, **headers}.items():
                self.send_header(name, text)
            super().end_headers()

        def log_message(self, format, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def opened(root: Path, path: str, headers: Mapping[str, str], downloads: Path | None = None) -> str:
    """What a page says once its button was pressed; with ``downloads``, a verdict is saved there before it closes."""

    program = find_browser()
    assert program is not None
    own = scratch()
    with static_server(root, headers) as (origin, told):
        command = browser_command(program, str(own / "profile"), f"{origin}/{path}#run")
        if downloads is not None:
            settings = {"download": {"default_directory": str(downloads), "prompt_for_download": False}}
            (own / "profile/Default").mkdir(parents=True)
            (own / "profile/Default/Preferences").write_text(json.dumps(settings))
        with running(command, own):
            said = told.get(timeout=60)
            limit = time.monotonic() + 30
            while downloads is not None and not list(downloads.glob("*.json")) and time.monotonic() < limit:
                time.sleep(0.05)
            return said


@needs_browser
def test_the_pages_work_on_any_static_server(folder: Path, tmp_path: Path):
    (tmp_path / "some").mkdir()
    shutil.copytree(folder, tmp_path / "some/where")
    said = opened(tmp_path, "some/where/verify/", {})
    assert said.startswith("passed: 2 cases in ") and said.endswith("1 thread.")
    said = opened(tmp_path, "some/where/demo/", dict(ISOLATION))
    assert "First run" in said and "1 thread." in said


BUNDLERS = {"vite": "7.3.8", "webpack": "5.113.0"}
APP = """import { load } from "m";

const said = document.querySelector("#said");
try {
  const model = await load({ threads: "auto" });
  const { f_out } = await model.run({ f: [1, 2, 3], i: [1, 2], u: [0, 1], b: [1, 0], h: [1, 2, 3], s: ["", ""], z: 1,
    w: { data: [1], dims: [1, 1] } });
  said.textContent = `First run: ${f_out.data.join(" ")}, isolated ${crossOriginIsolated}`;
} catch (error) {
  said.textContent = `Error: ${error.message}`;
}
"""
PAGE = """<!doctype html><meta charset="utf-8"><title>app</title><p id="said"></p>
<script type="module" src="./main.js"></script>"""
VITE = """
import { build } from "vite";
await build({ root: process.cwd(), base: "./", logLevel: "error", configFile: false,
  build: { outDir: "dist", target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false } } });
"""
WEBPACK = """
import webpack from "webpack";
import { resolve } from "node:path";
const compiler = webpack({ mode: "production", entry: "./main.js",
  output: { path: resolve("dist"), filename: "main.js" }, performance: { hints: false } });
compiler.run((error, stats) => {
  if (!error && !stats.hasErrors()) return;
  console.error(error ?? stats.toString({ all: false, errors: true }));
  process.exitCode = 1;
});
"""


@pytest.fixture(scope="session")
def bundlers() -> Path:
    """A ``node_modules`` with the bundlers, fetched through npm once."""
    npm = node.find_npm()
    if npm is None:
        pytest.skip("needs npm")
    root = Path(os.environ["PACKAGER_RUNTIME_DIR"])
    root.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}@{version}" for name, version in BUNDLERS.items()]
    ready = root / "-".join(["bundlers", *BUNDLERS.values()])
    with FileLock(root / "bundlers.lock"):
        if not ready.is_dir():
            with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as name:
                work = Path(name) / "bundlers"
                work.mkdir()
                (work / "package.json").write_text('{"private": true}')
                command = [*npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *pins]
                subprocess.run(command, cwd=work, capture_output=True, check=True)
                work.rename(ready)
    return ready / "node_modules"


@needs_browser
@pytest.mark.parametrize(("bundler", "script"), [("vite", VITE), ("webpack", WEBPACK)])
def test_the_bundle_is_a_dependency_that_bundlers_take(
    bundlers: Path, folder: Path, tmp_path: Path, bundler: str, script: str
):
    app = tmp_path / "app"
    (app / "node_modules").mkdir(parents=True)
    shutil.copytree(folder, app / "node_modules/m")
    for name in bundlers.iterdir():
        (app / "node_modules" / name.name).symlink_to(name)
    (app / "main.js").write_text(APP)
    (app / "index.html").write_text(PAGE)
    (app / "build.mjs").write_text(script)
    (app / "package.json").write_text('{"type": "module", "private": true}')
    command = [*(node.find_node() or []), "build.mjs"]
    done = subprocess.run(command, cwd=app, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if not (app / "dist/index.html").exists():  # webpack makes scripts, not pages
        (app / "dist/index.html").write_text(PAGE)
    said = opened(app, "dist/", dict(ISOLATION))
    assert said == "First run: 1 2 3, isolated true"


def test_the_loader_is_small(bundlers: Path, folder: Path):
    """Under 6 kB minified, with eight inputs and outputs in its signature."""
    command = [*(node.find_node() or []), str(bundlers / "terser/bin/terser"), "--module", "-c", "-m"]
    done = subprocess.run(command, input=(folder / "m.js").read_bytes(), capture_output=True, check=True)
    assert b"WebAssembly" in done.stdout and b"/**" not in done.stdout, "minified, not lost"
    assert len(done.stdout) < 6000
