"""The manifest that is written for a model: it reads back, and means what no manifest means."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Literal

import onnx
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from packager import manifest, room
from packager.errors import UsageError
from packager.manifest_init import init_text
from packager.model import open_model
from packager.room import Kind, RoomOptions, TargetFacts
from tests.builders import FLOAT, INT64, STRING, model, relu, save, value


class EdgeOptions(RoomOptions):
    """Options of every sort."""

    threads: int = Field(1, ge=1, description="threads;\nas many as there are cores")
    mode: Literal["safe", "fast"] = Field("safe", description="how 'daring' \u2028 to be")
    scale: float = Field(1e-5, description="scale")
    cache: str | None = Field(None, description="folder of the cache")
    order: tuple[str, ...] = Field(("n", '"c"'), description="axes")
    sizes: dict[str, int] = Field({"a b": 1}, description="sizes")
    strict: bool = False


class LicensedOptions(RoomOptions):
    """A room that needs to be told something."""

    licence: str = Field(description="who may run it")


def fake_kind(name: str, options: type[RoomOptions], patch: pytest.MonkeyPatch) -> Kind:
    """A room that exists only here."""
    module = types.ModuleType(f"fake_init_room_{name}")
    module.Options = options  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    facts = TargetFacts(
        kind=name, title=f"{name} title", summary="what it is for", level="proxy", precisions=["fp32", "fp16"]
    )
    return Kind(name, facts, Path("rooms") / name, module.__name__, None)


@pytest.fixture(scope="module", autouse=True)
def rooms():
    with pytest.MonkeyPatch.context() as patch:
        made = {name: fake_kind(name, EdgeOptions, patch) for name in ("cloud", "edge")}
        patch.setattr(room, "kinds", lambda: made)
        yield made


def round_trip(folder: Path, file: Path, targets: list[str]) -> str:
    """Write the manifest of a model, read it back, hold it against the defaults, and give its text."""
    text = init_text(open_model(file), targets, folder)
    path = folder / "packager.toml"
    path.write_bytes(text.encode("utf-8"))
    read = manifest.load(path)
    plain = manifest.default(file, targets)
    assert read == replace(plain, root=read.root, path=read.path)
    return text


def uncommented(text: str) -> str:
    """Every suggested setting put to use."""
    return "".join(re.sub(r"^#(?! )", "", line) for line in text.splitlines(keepends=True))


def test_the_manifest_means_what_no_manifest_means(tmp_path):
    text = round_trip(tmp_path, relu(tmp_path / "my ranker.onnx"), ["edge", "cloud", "edge"])
    assert 'path = "my ranker.onnx"\nname = "my-ranker"\nversion = "0.0.0"\n' in text
    assert re.findall(r"^\[.*\]$", text, re.MULTILINE) == ["[model]", "[golden]", "[targets.edge]", "[targets.cloud]"]


def test_the_signature_options_and_symbolic_dims_are_shown(tmp_path):
    lines = init_text(open_model(relu(tmp_path / "m.onnx")), ["edge"], tmp_path).splitlines()
    assert '#   "x": float32[n, 3]' in lines
    assert "#shapes = { n = 1 }" in lines
    assert "#dims = { n = 16 }" in lines
    assert "#ranges = { x = [0, 1] }" in lines
    assert "#exclude = []" in lines
    assert "# threads: threads; as many as there are cores" in lines
    assert "#threads = 1" in lines
    assert "#scale = 1e-05" in lines
    assert r'#order = ["n", "\"c\""]' in lines
    assert '#sizes = { "a b" = 1 }' in lines
    assert "#strict = false" in lines
    assert "# cache: folder of the cache" in lines
    assert not [line for line in lines if line.startswith("#cache")]
    assert "# precisions: fp32, fp16" in lines


def test_every_suggested_setting_works_as_it_stands(tmp_path):
    text = init_text(open_model(relu(tmp_path / "m.onnx")), ["edge", "cloud"], tmp_path)
    path = tmp_path / "packager.toml"
    path.write_bytes(uncommented(text).encode("utf-8"))
    read = manifest.load(path)
    assert read.golden.path == tmp_path / "goldens"
    assert (read.golden.dims, read.golden.ranges) == ((("n", 16),), (("x", (0.0, 1.0)),))
    assert [(target.shapes, target.options) for target in read.targets] == [((("n", 1),), EdgeOptions())] * 2
    assert read.targets[0].tolerance.bounds.max_abs == 1e-3


def test_a_model_without_symbolic_dims_or_numeric_inputs_is_described_too(tmp_path):
    node = onnx.helper.make_node("Identity", ["s"], ["t"])
    file = save(model([node], [value("s", STRING, (2,))], [value("t", STRING, (2,))]), tmp_path / "m.onnx")
    text = round_trip(tmp_path, file, ["edge"])
    assert "#shapes = {}" in text
    assert "#ranges = {}" in text


def test_the_path_is_relative_where_the_model_lies_inside(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "other").mkdir()
    file = relu(tmp_path / "sub" / "m.onnx")
    assert 'path = "sub/m.onnx"' in round_trip(tmp_path, file, ["edge"])
    assert f'path = "{file.as_posix()}"' in round_trip(tmp_path / "other", file, ["edge"])
    monkeypatch.chdir(tmp_path)
    assert 'path = "sub/m.onnx"' in init_text(open_model(Path("sub/m.onnx")), ["edge"])


ODD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file names")
@given(ODD, ODD, ODD, ODD)
@example("x\n[evil]", 'y"\\', "n\r\nb", 'a "b"\\\n[c]')
@example("\u2028", "\u202e", "\x7f", "\x85")
@example("'''", '"""', "#", "con")
@example("x", "y", "n", ".")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_names_of_files_tensors_and_dims_survive(tmp_path, name_in, name_out, symbol, stem):
    fit = "".join(letter for letter in stem if letter not in "/\0")
    if name_in == name_out:
        name_out += "'"
    assume(symbol != "?")  # how some exporters write "unknown": no symbol
    file = relu(tmp_path / f"{fit}.onnx", name_in, name_out, (symbol, 3))
    try:
        text = round_trip(tmp_path, file, ["edge"])
        assert all(line.isprintable() for line in text.split("\n"))
        (tmp_path / "all.toml").write_bytes(uncommented(text).encode("utf-8"))
        read = manifest.load(tmp_path / "all.toml")
    finally:
        file.unlink()
    assert read.golden.ranges == ((name_in, (0.0, 1.0)),)
    assert read.targets[0].shapes == ((symbol, 1),)


def test_the_first_numeric_input_serves_as_the_example_of_a_range(tmp_path):
    nodes = [onnx.helper.make_node("Identity", ["s"], ["t"]), onnx.helper.make_node("Identity", ["i"], ["j"])]
    inputs = [value("s", STRING, (1,)), value("i", INT64, (1,)), value("f", FLOAT, (1,))]
    outputs = [value("t", STRING, (1,)), value("j", INT64, (1,))]
    file = save(model(nodes, inputs, outputs), tmp_path / "m.onnx")
    assert "#ranges = { i = [0, 1] }" in round_trip(tmp_path, file, ["edge"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux file names are bytes")
def test_a_file_name_that_toml_cannot_hold_is_refused(tmp_path):
    file = relu(tmp_path / "m.onnx")
    odd = replace(open_model(file), path=tmp_path / "m\udcff.onnx")
    with pytest.raises(UsageError, match="not valid Unicode"):
        init_text(odd, ["edge"], tmp_path)


def test_an_option_that_must_be_set_is_pointed_out(tmp_path, rooms, monkeypatch):
    licensed = fake_kind("licensed", LicensedOptions, monkeypatch)
    monkeypatch.setattr(room, "kinds", lambda: {**rooms, "licensed": licensed})
    lines = init_text(open_model(relu(tmp_path / "m.onnx")), ["licensed"], tmp_path).splitlines()
    assert lines[lines.index("# licence: who may run it") + 1] == "# licence must be set."


@pytest.mark.parametrize(
    ("targets", "message", "hint"),
    [
        (["egde"], "no target kind 'egde'", "did you mean `edge`? known kinds: cloud, edge"),
        ([], "no target is named", "known kinds: cloud, edge"),
    ],
)
def test_targets_must_be_known_kinds(tmp_path, targets, message, hint):
    opened = open_model(relu(tmp_path / "m.onnx"))
    with pytest.raises(UsageError, match=message) as caught:
        init_text(opened, targets)
    assert caught.value.hint == hint
