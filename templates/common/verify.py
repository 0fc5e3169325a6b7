"""Check this bundle on this machine: its files, then its answers against the golden ones.

    python verify.py [--out selfcheck.json]

It needs Python, numpy, safetensors and what infer.py needs, and nothing of the tool that made the bundle. Files are
checked first, and nothing of a damaged bundle is run. The verdict has the format of the bundle's own verdict.json.
Exit status: 0 every golden passed, 6 something is damaged or answers wrongly, 2 it couldn't be run here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
NEEDED = ("parity.py", "infer.py", "golden/golden.json", "golden/golden.safetensors")
PASSED, NOT_RUNNABLE, FAILED = 0, 2, 6
FEATURES = frozenset({
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve",
})  # fmt: skip
"""CPU features that decide which kernels a runtime picks, as Linux spells them."""


class NotRunnable(Exception):
    """The check can't be made here; the message says why."""


class Damaged(Exception):
    """The bundle isn't what was sealed; ``found`` has a sentence for each fault."""

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("; ".join(found))
        self.found = tuple(found)


@dataclass(frozen=True)
class Seal:
    """What bundle.json says: identity of the bundle and its own digest."""

    identity: Mapping[str, str]
    digest: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files, run goldens, write the verdict. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Check this bundle on this machine.")
    parser.add_argument("--out", type=Path, default=Path("selfcheck.json"), help="where the verdict is written")
    out: Path = parser.parse_args(arguments).out
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.dont_write_bytecode = True  # the bundle's folder stays as it was sealed
    sys.path.insert(0, str(FOLDER))
    try:
        if out.resolve().is_relative_to(FOLDER) and out.name not in ("selfcheck.json", "verdict.json"):
            raise NotRunnable(f"{out} may be a file of the bundle: give --out another place")
        out.unlink(missing_ok=True)  # a verdict of an earlier run must not pass for this one's
        seal = check_files()
        document, text = run_goldens(seal)
        out.write_text(text, encoding="utf-8", newline="\n")
    except NotRunnable as error:
        print(f"not checked: {error}", file=sys.stderr)
        return NOT_RUNNABLE
    except Damaged as error:
        print("FAILED: the bundle is damaged; fetch it again:")
        for sentence in error.found:
            print(f"  {sentence}")
        write_damage(out, error.found)
        return FAILED
    except OSError as error:
        print(f"not checked: {error}", file=sys.stderr)
        return NOT_RUNNABLE
    return report(document, out)


def check_files() -> Seal:
    """Size and SHA-256 of every file that bundle.json lists."""
    path = FOLDER / "bundle.json"
    if not path.is_file():
        raise NotRunnable(f"{FOLDER} is not a bundle: it has no bundle.json")
    data = path.read_bytes()
    try:
        document = json.loads(data.decode("utf-8"))
        listed = {str(file["path"]): (str(file["sha256"]), int(file["bytes"])) for file in document["files"]}
        identity = {key: str(document.get(key, "")) for key in ("target", "kind", "name", "version")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged([f"bundle.json is malformed: {type(error).__name__}: {error}"]) from error
    found = [f"bundle.json doesn't list {name}" for name in NEEDED if name not in listed]
    for name, (digest, size) in sorted(listed.items()):
        fault = check_file(name, digest, size)
        if fault:
            found.append(f"{shown(name)} {fault}")
    if found:
        raise Damaged(found)
    return Seal(identity, "sha256:" + hashlib.sha256(data).hexdigest())


def check_file(name: str, digest: str, size: int) -> str | None:
    """What is wrong with one file, or ``None``."""
    pure, path = PurePosixPath(name), FOLDER / name
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        return "lies outside of the bundle"
    if path.is_symlink() or not path.is_file():
        return "is missing, or is a link"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes, it was sealed with {size}"
    state = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            state.update(block)
    return None if state.hexdigest() == digest else "was changed since it was sealed"


def bring(name: str) -> ModuleType:
    """Import a module of the bundle."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise NotRunnable(f"{name}.py needs something that isn't installed here: {error}") from error
    except Exception as error:
        raise NotRunnable(f"{name}.py can't be loaded: {words(error)}") from error
    if Path(str(module.__file__)).resolve().parent != FOLDER:
        raise NotRunnable(f"another module named {name} is in the way: {module.__file__}")
    return module


def run_goldens(seal: Seal) -> tuple[dict[str, Any], str]:
    """Run and judge every case. Returns the verdict and its text."""
    parity, infer = bring("parity"), bring("infer")
    try:
        golden = parity.read_golden(FOLDER / "golden")
    except ImportError as error:
        raise NotRunnable(f"the goldens can't be read: {error}") from error
    except parity.GoldenFileError as error:
        raise Damaged([str(error)]) from error
    try:
        model = infer.Model(FOLDER)
        runtime = {str(key): str(value) for key, value in dict(model.info).items()}
    except Exception as error:
        raise NotRunnable(f"the runtime can't load the model: {words(error)}") from error
    results = []
    for case in golden.cases:
        try:
            outputs = dict(model.run(dict(case.inputs)))
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is this case's failure
            results.append(parity.failed_case(case.name, f"the runtime failed: {words(error)}"))
            continue
        results.append(golden.judge(case, outputs))
    document = parity.verdict_document(
        results,
        level=runtime.pop("level", "runtime"),
        level_reason=runtime.pop("reason", ""),
        runtime=runtime,
        host=host(),
        policy={"name": golden.policy, "precision": golden.precision},
        excluded=golden.excluded,
        bundle_digest=seal.digest,
        **seal.identity,
    )
    return document, parity.verdict_text(document)


def write_damage(out: Path, found: Sequence[str]) -> None:
    """The verdict of a bundle of which nothing was run. The comparator may be what is damaged: it isn't used."""
    document = {
        "schema": "packager.verdict/1", "status": "failed", "level": "none", "level_reason": "the bundle is damaged",
        "runtime": {}, "host": host(), "policy": {}, "excluded": [], "cases": [],
        "worst": {"max_abs": None, "scaled": None, "cosine": None, "top1": None}, "failures": list(found),
    }  # fmt: skip
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        out.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        print(f"the verdict can't be written: {error}", file=sys.stderr)


def host() -> dict[str, object]:
    """This machine: what decides a runtime's arithmetic."""
    cpu, flags = platform.processor(), frozenset[str]()
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        first = ""
    for line in first.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = FEATURES.intersection(value.split())
    return {
        "system": platform.system(), "machine": platform.machine(), "cpu": cpu, "features": sorted(flags),
        "cores": os.cpu_count() or 1, "python": platform.python_version(),
    }  # fmt: skip


def report(document: Mapping[str, Any], out: Path) -> int:
    """Print the table and the reasons. Returns the exit status."""
    rows: list[tuple[str, ...]] = [("case", "output", "max abs", "scaled", "cosine", "top-1", "")]
    cases, failures, runtime = document["cases"], document["failures"], document["runtime"]
    for case in cases:
        for output in case["outputs"]:
            metrics = output["metrics"] or {}
            numbers = [number(metrics.get(key)) for key in ("max_abs", "scaled", "cosine", "top1")]
            mark = "passed" if output["passed"] else "FAILED"
            rows.append((shown(case["name"]), shown(output["name"]), *numbers, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for reason in failures:
        print(f"FAILED: {shown(reason)}")
    told = " ".join(runtime.get(key, "") for key in ("name", "version", "device")).strip()
    print(f"{document['status']}: {len(cases)} cases on {told}; verdict in {out}")
    return PASSED if document["status"] == "passed" else FAILED


def number(value: object) -> str:
    """A metric in a few characters."""
    return "-" if value is None else f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def shown(text: str) -> str:
    """A name as it can be printed: no control characters."""
    return text if text.isprintable() else ascii(text)


def words(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


if __name__ == "__main__":
    sys.exit(main())
