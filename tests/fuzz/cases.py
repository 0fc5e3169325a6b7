"""Cases by surface: what is fuzzed, each as a hypothesis strategy of :class:`tests.fuzz.oracle.Case`.

The spoilt files start as good ones: a small model, a manifest, golden cases in every format, and a bundle of it.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from onnx import numpy_helper

import packager
from packager.bundle import SEAL, VERDICT
from packager.files import list_files
from tests import builders
from tests.fuzz.models import models
from tests.fuzz.mutators import BOMBS, spoilt, spoilt_json
from tests.fuzz.oracle import OUT, Case
from tests.sealing import reseal

PLANNED = "openvino,cpu,triton,web,tensorrt"
"""Kinds that plan without transforming the model first, which takes seconds."""

MODEL = "m.onnx"
BUNDLE = "b"

MANIFEST = b"""[model]
path = "m.onnx"
name = "witness"
version = "1.4.0"
[golden]
cases = 2
seed = 7
dims = { n = 2 }
ranges = { x = [-1.0, 1.0] }
[targets.openvino]
[targets.shop-floor]
kind = "openvino"
precision = "fp16"
shapes = { n = 1 }
tolerance = { max_abs = 0.5, outputs = { y = { cosine = 0.9 } } }
archive = "zip"
[tolerance]
policy = "default-1"
[tolerance.fp16]
scaled = 0.01
[gates]
min_level = "runtime"
"""


@dataclass(frozen=True)
class Good:
    """Files with which nothing is wrong: a model, golden files by name, and a bundle's files by path."""

    model: bytes
    goldens: Mapping[str, bytes]
    bundle: Mapping[str, bytes]


def good(folder: Path) -> Good:
    """Make them, in a folder."""
    model = builders.relu(folder / MODEL)
    report = packager.build(model, targets=["openvino"], out=folder / "dist", cache=False)
    (result,) = report.targets
    assert result.exit_code == 0, result.message
    bundle = folder / "dist" / str(result.bundle)
    files = {str(path): (bundle / path).read_bytes() for path in list_files(bundle)}
    own = {f"own/{Path(path).name}": data for path, data in files.items() if path.startswith("golden/")}
    return Good(model.read_bytes(), _goldens() | own, files)


def _goldens() -> dict[str, bytes]:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = io.BytesIO()
    np.savez_compressed(packed, x=array, y=array)
    saved = io.BytesIO()
    np.save(saved, array)
    tensors = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": array.ravel().tolist()}
    kserve = {"inputs": [tensors], "outputs": [tensors | {"name": "y"}]}
    return {
        "a.npz": packed.getvalue(),
        "a.json": json.dumps(kserve).encode(),
        "set/input_0.pb": numpy_helper.from_array(array, "x").SerializeToString(),
        "set/output_0.pb": numpy_helper.from_array(array, "y").SerializeToString(),
    }


@st.composite
def model_cases(draw: st.DrawFn, verbs: tuple[str, ...] = ("inspect", "plan", "golden", "init")) -> Case:
    """A made model, looked at, planned, run by the reference, or given a manifest."""
    made = draw(models())
    verb = draw(st.sampled_from(verbs))
    more = {
        "inspect": ("--format", draw(st.sampled_from(("text", "json")))),
        "plan": ("-t", PLANNED, "--no-cache"),
        "golden": ("-o", OUT, "--cases", "1"),
        "init": ("-o", f"{OUT}.toml"),
        "build": ("-o", OUT, "-t", "openvino,cpu", "--no-cache"),
    }[verb]
    return Case((verb, MODEL, *more), {MODEL: made.data, **made.files}, made.links, (MODEL, *PLANNED.split(",")))


@st.composite
def spoilt_models(draw: st.DrawFn) -> Case:
    """The bytes of a made model, spoilt."""
    made = draw(models())
    data = draw(spoilt(made.data))
    verb = draw(st.sampled_from((("inspect", MODEL), ("plan", MODEL, "-t", PLANNED, "--no-cache"))))
    return Case(verb, {MODEL: data, **made.files}, made.links, (MODEL, *PLANNED.split(",")))


def manifest_cases(made: Good) -> st.SearchStrategy[Case]:
    """A spoilt manifest."""
    arguments = ("plan", "-m", "packager.toml", "--no-cache")
    names = ("packager.toml", "work/", "openvino", "shop-floor")
    return spoilt(MANIFEST).map(lambda data: Case(arguments, {"packager.toml": data, MODEL: made.model}, names=names))


@st.composite
def golden_cases(draw: st.DrawFn, made: Good) -> Case:
    """One spoilt golden file, alone or beside the good ones of its folder."""
    name = draw(st.sampled_from(sorted(made.goldens)))
    how = spoilt_json if name.endswith(".json") and draw(st.booleans()) else spoilt
    folder = name.rpartition("/")[0]
    files = {other: data for other, data in made.goldens.items() if folder and other.startswith(f"{folder}/")}
    files[name] = draw(how(made.goldens[name]))
    where = f"g/{folder}" if folder else f"g/{name}"
    laid = {f"g/{path}": data for path, data in files.items()} | {MODEL: made.model}
    arguments = ("plan", MODEL, "--golden", where, "-t", "openvino", "--no-cache")
    return Case(arguments, laid, names=(Path(name).name, folder or "g/", "openvino"))


@st.composite
def bundle_cases(draw: st.DrawFn, made: Good) -> Case:
    """A bundle with one file spoilt, under its old seal or one that fits; or a verdict to import."""
    files = dict(made.bundle)
    name = draw(st.sampled_from((SEAL, SEAL, VERDICT, "golden/golden.json", *sorted(files))))
    how = spoilt_json if name.endswith(".json") and draw(st.booleans()) else spoilt
    files[name] = draw(how(files[name]))
    imported = name == VERDICT and draw(st.booleans())
    if name not in (SEAL, VERDICT) and draw(st.booleans()):
        files = _resealed(files)
    laid = {f"{BUNDLE}/{path}": data for path, data in files.items()}
    arguments: tuple[str, ...] = ("verify", BUNDLE)
    if imported:
        laid["v.json"] = files[VERDICT]
        laid[f"{BUNDLE}/{VERDICT}"] = made.bundle[VERDICT]
        arguments = ("verify", BUNDLE, "--import", "v.json")
    return Case(arguments, laid, names=(f"{BUNDLE}: ", "v.json"), writes=(f"{BUNDLE}/{VERDICT}",))


def _resealed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        reseal(folder)
        return {str(path): (folder / path).read_bytes() for path in list_files(folder)}


@st.composite
def archive_cases(draw: st.DrawFn, made: Good) -> Case:
    """A bundle's archive, spoilt outside or inside its compression."""
    zipped = draw(st.booleans())
    packed = io.BytesIO()
    if zipped:
        with zipfile.ZipFile(packed, "w") as pack:
            for path, data in made.bundle.items():
                pack.writestr(zipfile.ZipInfo(f"{BUNDLE}/{path}"), data)
    else:
        with tarfile.open(fileobj=packed, mode="w:gz" if draw(st.booleans()) else "w") as tar:
            for path, data in made.bundle.items():
                member = tarfile.TarInfo(f"{BUNDLE}/{path}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    data = draw(spoilt(packed.getvalue()))
    if not zipped and data[:2] != b"\x1f\x8b" and draw(st.booleans()):
        data = gzip.compress(data, 1, mtime=0)
    name = "b.zip" if zipped else "b.tar.gz"
    return Case(("verify", name), {name: data}, names=(name,))


def bomb_cases() -> dict[str, Case]:
    """An archive bomb of each sort, by file name, and a golden file that is one."""
    return {name: Case(("verify", name), {name: make()}, names=(name,)) for name, make in BOMBS.items()}


SURFACES: dict[str, Callable[[Good], st.SearchStrategy[Case]]] = {
    "model": lambda _: model_cases(),
    "looks": lambda _: model_cases(("inspect", "init")),
    "build": lambda _: model_cases(("build",)),
    "model bytes": lambda _: spoilt_models(),
    "manifest": manifest_cases,
    "golden": golden_cases,
    "bundle": bundle_cases,
    "archive": archive_cases,
}
"""What is fuzzed, by name."""
