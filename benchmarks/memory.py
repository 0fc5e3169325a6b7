"""Peak memory of packaging a model far larger than memory should get: `make memory`. On demand; not part of CI.

A chain of MatMul and Relu with external weights, as large as asked for, goes through pinned shapes, a conversion and a
kind's build. Every process of the tree is watched by its own marks in /proc (Linux): ``RssAnon`` is what the process
itself holds, ``VmHWM`` the most it ever had resident, pages of mapped files included, which the system takes back when
it needs them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

PACKAGER = str(Path(sys.executable).with_name("packager"))
SIZE = 5000
LAYER_BYTES = SIZE * SIZE * 4
INTERVAL_S = 0.05
PROGRAMS = ("packager.child", "triton_python_backend_stub", "tritonserver", "packager")
"""Words of a command line by which a process is counted, the first that fits: a runtime's own are told apart."""


def chain(folder: Path, gigabytes: float) -> Path:
    """A model of about so many gigabytes (1e9 bytes) of float32 weights, whose values stay near 1 all along."""
    count = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    layer = np.random.default_rng(0).normal(0, (2 / SIZE) ** 0.5, (SIZE, SIZE)).astype(np.float32)
    nodes, weights = [], []
    with (folder / "weights.data").open("wb") as handle:
        for index in range(count):
            layer.tofile(handle)
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[SIZE, SIZE])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.data"), ("offset", index * LAYER_BYTES), ("length", LAYER_BYTES)):
                tensor.external_data.add(key=key, value=str(value))
            weights.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"r{index - 1}" if index else "x", f"w{index}"], [f"m{index}"]))
            nodes.append(helper.make_node("Relu", [f"m{index}"], [f"r{index}"]))
    nodes[-1].output[0] = "y"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", SIZE)) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, folder / "chain.onnx")
    return folder / "chain.onnx"


def tree(root: int) -> Iterator[int]:
    """A process and all below it, as /proc has them now."""
    yield root
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))
    except OSError:
        return


def marks(pid: int) -> tuple[str, int, int]:
    """What the process is, and its RssAnon and VmHWM in bytes; zeros when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        anonymous, resident = (int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "VmHWM"))
        return words, anonymous, resident
    except (OSError, KeyError, ValueError):
        return "", 0, 0


class Watch(threading.Thread):
    """Samples a process tree until told to stop: the largest of each mark, and the largest sum of RssAnon."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over = root, threading.Event()
        self.anonymous: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self.together = 0

    def run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            found = [marks(pid) for pid in tree(self._root)]
            self.together = max(self.together, sum(anonymous for _, anonymous, _ in found))
            for words, anonymous, resident in found:
                name = next((word for word in PROGRAMS if word in words), "other")
                self.anonymous[name] = max(self.anonymous.get(name, 0), anonymous)
                self.resident[name] = max(self.resident.get(name, 0), resident)

    def stop(self) -> None:
        self._over.set()
        self.join()


def main() -> int:
    """Build, watch and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--kind", default="triton")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="packager-memory-") as name:
        folder = Path(name)
        model = chain(folder, chosen.gigabytes)
        table = f'[targets.{chosen.kind}]\nprecision = "{chosen.precision}"\nshapes = {{ n = 1 }}\n'
        (folder / "packager.toml").write_text(f'[model]\npath = "{model.name}"\n[golden]\ncases = 1\n{table}')
        command = [PACKAGER, "build", "-m", str(folder / "packager.toml"), "-o", str(folder / "dist"), "--no-cache"]
        begun = time.perf_counter()
        process = subprocess.Popen([*command, *(["--no-verify"] if chosen.no_verify else [])])
        watch = Watch(process.pid)
        watch.start()
        status = process.wait()
        watch.stop()
        seconds = time.perf_counter() - begun
    print(f"{chosen.gigabytes} GB, {chosen.kind}, {chosen.precision}: exit {status}, {seconds:.0f} s")
    for name, anonymous in sorted(watch.anonymous.items()):
        print(f"{name:<16} RssAnon {anonymous / 1e9:6.2f} GB   VmHWM {watch.resident[name] / 1e9:6.2f} GB")
    print(f"{'all together':<16} RssAnon {watch.together / 1e9:6.2f} GB")
    return status


if __name__ == "__main__":
    sys.exit(main())
