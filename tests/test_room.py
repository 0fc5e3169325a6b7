"""Rooms: how they are found, and what is said of one that is malformed or lacks its toolchain."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from packager import room
from packager.errors import InternalError, UsageError
from packager.host import this_host
from packager.levels import LEVELS
from packager.room import Kind, Missing, PythonPackage, Requirements, TargetFacts

WHOLE = 'title = "T"\nsummary = "s"\nlevel = "runtime"\nprecisions = ["fp32"]\n'
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a third party's distribution with a room of the given ``target.toml``; ``None`` leaves the file out."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(package: str, toml: str | None, entry: str | None = None) -> Path:
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("raise AssertionError('discovery must not import a room')\n")
        if toml is not None:
            (site / package / "target.toml").write_text(toml)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[packager.targets]\nroom = {entry or package}\n")
        importlib.invalidate_caches()
        room.kinds.cache_clear()
        return site / package

    yield make
    room.kinds.cache_clear()


def test_own_rooms_are_found_by_their_target_toml():
    own = room.package_folder("packager.targets")
    expected = sorted(file.parent.name for file in own.glob("*/target.toml"))
    assert [name for name, kind in room.kinds().items() if kind.module.startswith("packager.")] == expected != []
    for name in expected:
        kind = room.kinds()[name]
        assert (kind.name, kind.folder, kind.module) == (name, own / name, f"packager.targets.{name}")
        assert kind.templates == room.package_folder("packager.templates") / name


def test_a_third_partys_room_is_found_without_importing_it(install: Install):
    folder = install("edgy", 'kind = "edge"\n' + WHOLE)
    kind = room.kinds()["edge"]
    assert (kind.folder, kind.module, kind.templates) == (folder, "edgy", None)
    assert "edgy" not in sys.modules
    assert list(room.kinds()) == sorted(room.kinds())


def test_a_third_partys_room_loads_as_a_module(tiny: str):
    kind = room.kind_named(tiny)
    assert kind.load().missing(this_host()) == [] and kind.templates is not None
    assert kind.facts.tools == ["onnxruntime"]


def test_every_mistake_of_a_target_toml_is_listed(install: Install):
    folder = install(
        "edgy",
        'kind = "edge"\ntitel = "T"\nsummary = 5\nlevel = "guess"\nprecisions = []\n[limits]\nopset = { a = "x" }\n'
        '[requires.python]\nnumpy = { versoin = "1" }\n',
    )
    with pytest.raises(InternalError) as caught:
        room.kinds()
    assert str(folder / "target.toml") in caught.value.message
    for place in ("titel", "title", "summary", "level", "precisions", "limits.opset.a", "requires.python.numpy.version",
                  "requires.python.numpy.versoin"):  # fmt: skip
        assert f"\n{place}\n" in caught.value.message


@pytest.mark.parametrize(
    ("toml", "words"),
    [(None, "a room needs a target.toml"), (b"kind = ", "Invalid value"), (b"", "kind"), (b"\xff\xfe", "utf-8")],
)
def test_a_room_without_facts_is_named(install: Install, toml: bytes | None, words: str):
    folder = install("edgy", None)
    if toml is not None:
        (folder / "target.toml").write_bytes(toml)
    with pytest.raises(InternalError) as caught:
        room.kinds()
    assert str(folder) in caught.value.message and words in caught.value.message


@pytest.mark.parametrize("entry", ["no_such_package_anywhere", "json.decoder"])
def test_an_entry_point_must_name_a_package(install: Install, entry: str):
    install("edgy", None, entry)
    with pytest.raises(InternalError, match=f"no Python package '{entry}'"):
        room.kinds()


def test_two_rooms_of_one_kind_are_refused_with_both_places(install: Install):
    first = install("edgy", 'kind = "edge"\n' + WHOLE)
    second = install("edgier", 'kind = "edge"\n' + WHOLE)
    with pytest.raises(InternalError, match="two rooms are of kind 'edge'") as caught:
        room.kinds()
    assert str(first) in caught.value.message and str(second) in caught.value.message


def test_a_third_party_cannot_take_the_place_of_an_own_kind(install: Install):
    own = next(iter(room.kinds()))
    install("edgy", f'kind = "{own}"\n' + WHOLE)
    with pytest.raises(InternalError, match=f"two rooms are of kind '{own}'"):
        room.kinds()


def test_an_unknown_kind_is_bad_usage_and_the_hint_lists_what_there_is():
    with pytest.raises(UsageError, match="no target kind 'edg'") as caught:
        room.kind_named("edg")
    assert str(caught.value.hint) == f"known kinds: {', '.join(room.kinds())}"


def needing(kind: Kind, python: dict[str, PythonPackage], programs: dict[str, str]) -> Kind:
    facts = kind.facts.model_copy(update={"requires": Requirements(python=python, programs=programs)})
    return replace(kind, facts=facts)


def test_what_is_missing_is_named_with_the_command_that_gets_it(tiny: str, monkeypatch: pytest.MonkeyPatch):
    kind = needing(
        room.kind_named(tiny),
        {
            "numpy": PythonPackage(version=">=1", extra=None),
            "onnx": PythonPackage(version="<0.1", extra="edge"),
            "no-such-distribution": PythonPackage(version=">=2,<3", extra=None),
            "nor-this-one": PythonPackage(version="", extra="edge"),
        },
        {"python3-of-nowhere": "apt install it", "sh": "never missing"},
    )
    monkeypatch.setattr(
        importlib.import_module(kind.module), "missing", lambda host: [Missing(f"a chip for {host.system}", "buy one")]
    )
    found = room.missing_requirements(kind, this_host())
    onnx_version = importlib.metadata.version("onnx")
    assert found == [
        Missing(f"Python package onnx<0.1 ({onnx_version} is installed)", "pip install 'packager[edge]'"),
        Missing("Python package no-such-distribution>=2,<3", "pip install 'no-such-distribution>=2,<3'"),
        Missing("Python package nor-this-one", "pip install 'packager[edge]'"),
        Missing("program python3-of-nowhere", "apt install it"),
        Missing(f"a chip for {this_host().system}", "buy one"),
    ]


def test_options_forbid_unknown_keys_and_convert_nothing():
    class Options(room.RoomOptions):
        size: int = 1

    assert Options.model_validate({}).size == 1
    for wrong in ({"sise": 2}, {"size": "2"}, {"size": 2.0}, {"size": True}):
        with pytest.raises(ValidationError):
            Options.model_validate(wrong)
    with pytest.raises(ValidationError):
        setattr(Options(), "size", 3)  # noqa: B010 - frozen when it runs, and to mypy as well


def test_facts_have_defaults_that_limit_nothing():
    facts = TargetFacts(kind="k", title="t", summary="s", level=LEVELS[-1], precisions=["fp32"])
    assert (facts.limits.opset, facts.limits.ir, facts.limits.dtypes) == ({}, None, [])
    assert facts.time_limits.build == facts.time_limits.verify == 1800
    assert not (facts.requires.python or facts.requires.programs or facts.tolerance or facts.pins)
