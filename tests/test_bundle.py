"""The seal: same files, same bytes; whatever is damaged or malformed is told by name, never by a traceback."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packager.bundle import SEAL, damage, open_bundle, seal, strangers
from packager.errors import PackagerError, UsageError, VerificationError
from packager.model import Signature, TensorSpec
from packager.room import Plan, Step

PLAN = Plan(
    target="edge", kind="some", name="ranker", version="1.4.0", model_digest="sha256:00", opset=17, precision="fp32",
    shapes=(("batch", 1),),
    signature=Signature(
        (TensorSpec("x\n名前", "float32", (1, "n", None)),),
        (TensorSpec("y", "int64", None), TensorSpec("z", "bool", ())),
    ),
    steps=(Step("Copying", (("from", "here"),)),), options='{"a": 1}', notes=("a note",),
)  # fmt: skip
FILES = {"model.bin": b"\0" * 100, "README.md": b"# hi\n", "golden/golden.json": b"{}", "verify.py": b"", "x/odd": b"1"}


def fill(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed bundle."""
    seal(fill(tmp_path / "bundle"), PLAN, {"tool": "1.0", "atool": "2"}, {"*.bin": "weights"})
    return tmp_path / "bundle"


def test_a_sealed_bundle_opens_as_it_was_planned(folder: Path):
    bundle = open_bundle(folder)
    assert (bundle.name, bundle.version, bundle.target, bundle.kind) == ("ranker", "1.4.0", "edge", "some")
    assert bundle.signature == PLAN.signature and bundle.precision == "fp32"
    assert {file.path: file.role for file in bundle.files} == {
        "README.md": "documentation", "golden/golden.json": "golden", "model.bin": "weights",
        "verify.py": "self-check", "x/odd": "file",
    }  # fmt: skip
    assert bundle.total_bytes == sum(map(len, FILES.values()))
    assert damage(bundle) == [] and strangers(bundle) == []


def test_the_same_files_seal_to_the_same_bytes_wherever_and_whenever(folder: Path, tmp_path: Path):
    other = fill(tmp_path / "elsewhere")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    (other / "verdict.json").write_text("{}")
    seal(other, PLAN, {"atool": "2", "tool": "1.0"}, {"*.bin": "weights"})
    assert (other / SEAL).read_bytes() == (folder / SEAL).read_bytes()
    assert str(tmp_path) not in (folder / SEAL).read_text()


def test_sealing_again_changes_nothing(folder: Path):
    before = (folder / SEAL).read_bytes()
    seal(folder, PLAN, {"tool": "1.0", "atool": "2"}, {"*.bin": "weights"})
    assert (folder / SEAL).read_bytes() == before


def test_the_digest_covers_every_file_and_the_plan(tmp_path: Path):
    digests = set()
    for number, (name, data) in enumerate({**FILES, "new": b"", "none": b""}.items()):
        made = fill(tmp_path / str(number))
        if name != "none":
            (made / name).write_bytes(data + b"+")
        digests.add(seal(made, PLAN, {}, {}).digest)
    digests.add(seal(made, replace(PLAN, options="{}"), {}, {}).digest)
    digests.add(seal(made, PLAN, {"tool": "2"}, {}).digest)
    assert len(digests) == len(FILES) + 4


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "model.bin (weights) is missing"),
        (lambda path: path.write_bytes(b"\0" * 99), "model.bin (weights) has 99 bytes, sealed with 100"),
        (lambda path: path.write_bytes(b"\1" * 100), "model.bin (weights) was changed: its SHA-256 is not the sealed"),
        (link, "model.bin is a link"),
        (lambda path: (path.unlink(), path.mkdir()), "model.bin (weights) is missing"),
    ],
)
def test_damage_is_told_by_file_and_kind(folder: Path, harm, words: str):
    harm(folder / "model.bin")
    (told,) = damage(open_bundle(folder))
    assert words in told


def test_files_that_came_later_are_strangers(folder: Path):
    (folder / "verdict.json").write_text("{}")
    (folder / "x/later").write_text("")
    assert strangers(open_bundle(folder)) == ["x/later"]


def test_what_is_no_bundle_is_bad_usage(tmp_path: Path):
    with pytest.raises(UsageError, match="no such bundle"):
        open_bundle(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"it has no bundle\.json"):
        open_bundle(tmp_path)


def edited(folder: Path, change) -> Path:
    document = json.loads((folder / SEAL).read_text())
    change(document)
    (folder / SEAL).write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    "key", ["schema", "name", "version", "target", "kind", "model", "precision", "signature", "files"]
)
@pytest.mark.parametrize("value", [None, 5, [], {"x": 1}, "gone"])
def test_a_malformed_key_is_refused(folder: Path, key: str, value: object):
    def change(document: dict[str, Any]) -> None:
        if value == "gone":
            del document[key]
        else:
            document[key] = value

    if (key, value) == ("files", []):
        assert open_bundle(edited(folder, change)).files == ()  # whole as a document; `strangers` tells
        return
    with pytest.raises(VerificationError, match=r"bundle\.json: malformed: ") as caught:
        open_bundle(edited(folder, change))
    if value == "gone":
        assert f"the key '{key}' is missing" in caught.value.message


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "x/../../other", "", "a\\..\\b", "x/..", "//host/share"])
def test_a_sealed_path_may_not_leave_the_folder(folder: Path, path: str):
    with pytest.raises(VerificationError, match="leaves the bundle's folder"):
        open_bundle(edited(folder, lambda document: document["files"][0].update(path=path)))


def test_a_file_listed_twice_is_refused(folder: Path):
    with pytest.raises(VerificationError, match="a file is listed twice"):
        open_bundle(edited(folder, lambda document: document["files"].append(document["files"][0])))


def test_a_seal_of_another_schema_is_refused(folder: Path):
    with pytest.raises(VerificationError, match=r"schema is 'packager\.bundle/2'"):
        open_bundle(edited(folder, lambda document: document.update(schema="packager.bundle/2")))


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"null", b"{}"])
def test_a_seal_that_is_no_document_is_refused(folder: Path, data: bytes):
    (folder / SEAL).write_bytes(data)
    with pytest.raises(VerificationError, match="malformed"):
        open_bundle(folder)


def test_a_seal_too_large_to_be_one_is_not_read(folder: Path):
    os.truncate(folder / SEAL, (64 << 20) + 1)
    with pytest.raises(VerificationError, match="larger than"):
        open_bundle(folder)


@pytest.mark.parametrize("path", ["n" * 300, "a\0b", "\ud800", "x/odd/below", "golden"])
def test_a_path_that_no_file_can_have_is_missing_or_unreadable(folder: Path, path: str):
    told = damage(open_bundle(edited(folder, lambda document: document["files"][0].update(path=path))))
    assert told and path in told[0]


PLACES = ["schema", "name", "model", "signature", "files", "plan", "tools", "precision"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from spots(inner)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_of_a_seal_is_a_traceback(folder: Path, data: st.DataObject):
    whole = (folder / SEAL).read_bytes()
    document = copy.deepcopy(json.loads(whole))
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(spots(document))))
        if data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = data.draw(VALUES)
    (folder / SEAL).write_text(json.dumps(document))
    try:
        bundle = open_bundle(folder)
        assert all(isinstance(line, str) for line in [*damage(bundle), *strangers(bundle)])
    except PackagerError as error:
        assert SEAL in error.message
    finally:
        (folder / SEAL).write_bytes(whole)


@pytest.mark.parametrize("key", ["opset", "shapes"])
def test_a_number_no_whole_number_can_be_is_malformed(folder: Path, key: str):
    document = json.loads((folder / SEAL).read_text())
    if key == "opset":
        document["model"]["opset"] = math.inf
    else:
        document["plan"]["shapes"] = {"n": math.inf}
    (folder / SEAL).write_text(json.dumps(document))
    with pytest.raises(VerificationError, match="malformed: cannot convert float infinity"):
        open_bundle(folder)


def test_a_bundle_of_a_name_too_long_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="no such bundle"):
        open_bundle(tmp_path / ("n" * 300))
