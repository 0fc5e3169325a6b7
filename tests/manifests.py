"""Manifests, rooms that exist only in tests, and what is asked of every manifest."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import strategies as st
from pydantic import Field

from packager import manifest, room
from packager.errors import ManifestError, UsageError
from packager.room import Kind, RoomOptions, TargetFacts

WHOLE = """\
[model]
path = "models/ranker.onnx"
name = "ranker"
version = "1.4.0"

[golden]
path = "goldens/"
cases = 5
seed = 7
allow_nan = true
exclude = ["noise", "noise"]
dims = { seq = 16 }
ranges = { pixels = [0, 255] }

[targets.edge]
threads = 2
layout = { order = ["n", "c"] }

[targets.partner-tablets]
kind = "edge"
precision = "fp16"
shapes = { batch = 1, "x:0" = 2 }
min_level = "runtime"
archive = "zip"
build_timeout = 60
verify_timeout = 1.5
mode = "fast"

[targets.partner-tablets.tolerance]
cosine = 0.99
outputs = { "scores \\"raw\\"" = { top1 = 0.9 } }

[tolerance]
policy = "default-1"

[tolerance.fp16]
max_abs = 0.01
cosine = 0.9
outputs.box.max_abs = 2

[gates]
min_level = "structural"
"""

MODEL = '[model]\npath = "m.onnx"\n'


class Layout(RoomOptions):
    """An inner table of options."""

    order: tuple[str, ...] = Field((), description="axes")


class EdgeOptions(RoomOptions):
    """Options of a room for tests."""

    threads: int = Field(1, ge=1, description="threads")
    mode: Literal["safe", "fast"] = Field("safe", description="how daring to be")
    layout: Layout = Layout()
    cache: int | str = Field("auto", description="megabytes, or 'auto'")


class CloudOptions(RoomOptions):
    """Options of another room."""

    region: str = Field("eu", description="where it runs")


class StrictOptions(RoomOptions):
    """A room without defaults for everything."""

    licence: str = Field(description="who may run it")


class ClashingOptions(RoomOptions):
    """A room with an option nobody could set."""

    archive: str = "x"


def fake_kind(name: str, options: type[RoomOptions], patch: pytest.MonkeyPatch, **facts: object) -> Kind:
    """A room that exists only here."""
    module = types.ModuleType(f"fake_room_{name}")
    module.Options = options  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    read = TargetFacts.model_validate(
        {"kind": name, "title": name.title(), "summary": f"{name} things", "level": "runtime",
         "precisions": ["fp32", "fp16"], **facts}
    )  # fmt: skip
    return Kind(name, read, Path("rooms") / name, module.__name__, None)


@contextmanager
def rooms_of_tests() -> Iterator[Mapping[str, Kind]]:
    """As long as this is open, there are the rooms ``cloud`` and ``edge`` and no others."""
    with pytest.MonkeyPatch.context() as patch:
        limits = {"build": 900.0, "verify": 300.0}
        made = {
            "cloud": fake_kind("cloud", CloudOptions, patch, precisions=["fp32", "int8"]),
            "edge": fake_kind("edge", EdgeOptions, patch, time_limits=limits),
        }
        patch.setattr(room, "kinds", lambda: made)
        yield made


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "packager.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(folder: Path, text: str | bytes) -> list[tuple[str, int | None, str, str]]:
    """Place, line, message and hint of every mistake."""
    with pytest.raises(ManifestError) as caught:
        manifest.load(write(folder, text))
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return [(problem.place, problem.line, problem.message, problem.hint or "") for problem in caught.value.problems]


def only_mistakes(path: Path) -> None:
    """Loading gives a manifest, or an error whose every problem has a place and a line inside the file."""
    try:
        read = manifest.load(path)
    except ManifestError as error:
        assert error.problems
        count = path.read_bytes().count(b"\n") + 1
        for problem in error.problems:
            assert problem.place
            assert problem.message
            assert problem.line is None or 1 <= problem.line <= count
    except UsageError as error:
        assert error.message
    else:
        assert read.targets
        assert math.isfinite(sum(target.build_timeout for target in read.targets))


def places(value: object, place: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {place, *(found for key, inner in inside for found in places(inner, (*place, key)))}


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.datetimes(),
    st.dates(),
    st.sampled_from(["edge", "fp16", "runtime", "a\n[b]\n", "'''", '"""', "\\", "]", "}", "#", ",", "="]),
)
keys = st.sampled_from(
    ["model", "path", "name", "golden", "cases", "ranges", "dims", "targets", "edge", "kind", "precision", "tolerance",
     "outputs", "max_abs", "gates", "min_level", "policy", "fp16", "shapes", "threads", "layout", "cache"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(keys, values, max_size=6)
