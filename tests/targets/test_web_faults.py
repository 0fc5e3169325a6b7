"""The shipped loader where the web is unkind: each fault of a server or browser is a plain sentence, and none hangs.

One browser visits one page after another. Each page has its own headers and its own faults, runs the loader, posts what
came of it, and goes where the answer says.
"""

from __future__ import annotations

import http.server
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from packager.supervise import running
from packager.targets.web.browser import browser_command, find_browser, scratch
from packager.targets.web.server import ISOLATION, TYPES
from tests.targets.test_web import needs_browser
from tests.targets.test_web_loader import one_of_each

POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src 'self'"
WASM, GLUE = "runtime/ort-wasm-simd-threaded.wasm", "runtime/ort-wasm-simd-threaded.js"
SCRIPT, MODEL, MESSAGES = "runtime/ort.wasm.min.js", "model.onnx", "m.messages.js"
HTML = b"<!doctype html><title>Home</title>" + b"<p>Welcome</p>" * 200

PAGE = b'<!doctype html><meta charset="utf-8"><script type="module" src="main.js"></script>'
TELL = """
const tell = async (text) => {
  const next = await (await fetch("told", { method: "POST", body: text })).text();
  if (next) location.href = next;
};
setTimeout(() => tell("it hangs"), 30000);
"""
RUN = """
export async function answer(options) {
  try {
    const { load } = await import("./bundle/m.js");
    const model = await load(options);
    const { f_out } = await model.run({ f: [1, 2, 3], i: [1, 2], u: [0, 1], b: [1, 0], h: [1, 2, 3], s: ["", ""], z: 1,
      w: { data: [1], dims: [1, 1] } });
    return `${f_out.data.join(" ")} on ${model.threads}`;
  } catch (error) {
    return `${error.name}: ${error.message}`;
  }
}
"""
ON_THE_PAGE = "import { answer } from './run.js';\ntell(await answer(OPTIONS));"
IN_A_WORKER = """
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
worker.onmessage = ({ data }) => tell(data);
worker.onerror = ({ message }) => tell(`worker: ${message}`);
"""
WORKER = b"import { answer } from './run.js';\npostMessage(await answer({ threads: 2 }));"


@dataclass(frozen=True)
class Answer:
    """What the server says for a file: a status, a type, and a body (the file's own where it is ``None``)."""

    status: int = 200
    type: str = ""
    body: bytes | None = None


MISSING = Answer(404, "text/html", HTML)
FALLBACK = Answer(200, "text/html", HTML)


@dataclass(frozen=True)
class Visit:
    """A page: how it is served, what it does, and a regular expression for what it must say."""

    wanted: str
    faults: Mapping[str, Answer] = field(default_factory=dict)
    policy: str = POLICY
    isolated: bool = False
    options: str = "{}"
    script: str = ON_THE_PAGE


GOES = "1 2 3 on 1"
VISITS = {
    "plain": Visit(GOES, options="{ threads: 2 }"),
    "isolated": Visit("1 2 3 on 2", isolated=True, options="{ threads: 2 }"),
    "worker": Visit(GOES, script=IN_A_WORKER),
    "isolated-worker": Visit("1 2 3 on 2", isolated=True, script=IN_A_WORKER),
    "blocked-workers": Visit(
        r"Error: The runtime didn't start within 1500 ms with 2 threads; does the CSP allow workers \(worker-src",
        policy=POLICY.replace("worker-src 'self'", "worker-src 'none'"), isolated=True,
        options="{ threads: 2, initTimeoutMs: 1500 }",
    ),
    "no-simd": Visit("Error: This browser has no WebAssembly SIMD",
                     script="WebAssembly.validate = () => false;\n" + ON_THE_PAGE),
    "no-webassembly": Visit("Error: This browser has no WebAssembly SIMD",
                            script="delete globalThis.WebAssembly;\n" + ON_THE_PAGE),
    "no-wasm-eval": Visit("Error: .*Does the CSP allow WebAssembly", policy=POLICY.replace(" 'wasm-unsafe-eval'", "")),
    "wasm-type": Visit(GOES, {WASM: Answer(type="application/octet-stream")}),
    "script-type": Visit(f"Error: .*{SCRIPT} comes as text/plain; .*set the type", {SCRIPT: Answer(type="text/plain")}),
    "glue-type": Visit(f"Error: .*{GLUE} comes as text/plain; .*set the type", {GLUE: Answer(type="text/plain")}),
    "wasm-page": Visit(f"Error: .*{WASM}: the server answered with an HTML page", {WASM: FALLBACK}),
    "model-page": Visit(f"Error: .*{MODEL}: the server answered with an HTML page", {MODEL: FALLBACK}),
    "script-page": Visit(f"Error: .*{SCRIPT} comes as text/html; .*HTML fallback", {SCRIPT: FALLBACK}),
    "glue-page": Visit(f"Error: .*{GLUE} comes as text/html; .*HTML fallback", {GLUE: FALLBACK}),
    "no-wasm": Visit(f"Error: .*{WASM}: the server answered 404; deploy every file", {WASM: MISSING}),
    "no-model": Visit(f"Error: .*{MODEL}: the server answered 404; deploy every file", {MODEL: MISSING}),
    "no-script": Visit(f"Error: .*{SCRIPT}: the server answered 404; deploy every file", {SCRIPT: MISSING}),
    "no-glue": Visit(f"Error: .*{GLUE}: the server answered 404; deploy every file", {GLUE: MISSING}),
    "nothing-to-say-it-with": Visit(f"Error: status: .*{MODEL},404", {MODEL: MISSING, MESSAGES: MISSING}),
}  # fmt: skip


@contextmanager
def serving(bundle: Path) -> Iterator[tuple[str, queue.Queue[tuple[str, str]]]]:
    """Every visit under its own name, and what pages told."""
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    following = dict(zip(VISITS, [*list(VISITS)[1:], ""], strict=True))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            _, name, path = self.path.split("/", 2)
            visit = VISITS.get(name)
            if visit is None:  # the browser's own wish for an icon
                return self.answer(404, "text/plain", b"")
            main = TELL + visit.script.replace("OPTIONS", visit.options)
            own = {"page.html": PAGE, "main.js": main.encode(), "run.js": RUN.encode(), "worker.js": WORKER}
            if path in own:
                return self.answer(200, TYPES[Path(path).suffix], own[path], visit)
            file = path.removeprefix("bundle/")
            fault = visit.faults.get(file, Answer())
            body = (bundle / file).read_bytes() if fault.body is None else fault.body
            kind = fault.type or TYPES.get(Path(file).suffix, "application/octet-stream")
            return self.answer(fault.status, kind, body, visit)

        def do_POST(self):
            name = self.path.split("/")[1]
            told.put((name, self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.answer(200, "text/plain", f"../{following[name]}/page.html".encode() if following[name] else b"")

        def answer(self, status, kind, body, visit=None):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if visit is not None:
                self.send_header("Content-Security-Policy", visit.policy)
                for header, text in ISOLATION if visit.isolated else ():
                    self.send_header(header, text)
            self.end_headers()
            self.wfile.write(body)

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


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each page said, by visit."""
    program = find_browser()
    assert program is not None
    bundle = one_of_each(tmp_path_factory.mktemp("faults"))
    own = scratch()
    found: dict[str, str] = {}
    with serving(bundle) as (origin, told):
        command = browser_command(program, str(own / "profile"), f"{origin}/{next(iter(VISITS))}/page.html")
        with running(command, own):
            for _ in VISITS:
                name, text = told.get(timeout=90)
                found[name] = text
    return found


@needs_browser
@pytest.mark.parametrize("name", VISITS)
def test_a_page_goes_or_says_what_to_fix(said: dict[str, str], name: str):
    assert re.search(VISITS[name].wanted, said[name], re.DOTALL), said[name]
