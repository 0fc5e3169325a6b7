"""The cache: a hit is exactly what was stored, anything doubtful is a miss, and it never fails a build."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from packager import cache as caches
from packager.cache import Cache, default_cache, key_of, tree_digest
from packager.errors import UsageError
from packager.scratch import scratch

INGREDIENTS = {"model": "sha256:1", "plan": "p"}


def fill(text: str, size: int = 0) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep/file").write_text(text)
        (folder / "large").write_bytes(bytes(size))

    return write


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kept")


def test_what_was_stored_is_found(cache: Cache):
    assert cache.find(INGREDIENTS) is None
    stored = cache.store(INGREDIENTS, fill("x"))
    found = cache.find(INGREDIENTS)
    assert found is not None and found == stored and (found / "deep/file").read_text() == "x"


@pytest.mark.parametrize("other", [{"model": "sha256:2", "plan": "p"}, {"model": "sha256:1"}, {}, {"plan": "sha256:1"}])
def test_other_ingredients_are_a_miss(cache: Cache, other: dict[str, str]):
    cache.store(INGREDIENTS, fill("x"))
    assert cache.find(other) is None


def test_a_key_does_not_depend_on_the_order_of_ingredients():
    assert key_of({"a": "1", "b": "2"}) == key_of({"b": "2", "a": "1"}) != key_of({"a": "12", "b": ""})


def test_a_cache_that_is_off_holds_nothing():
    off = Cache(None)
    assert off.store(INGREDIENTS, fill("x")) is None and off.find(INGREDIENTS) is None
    assert off.explain("me", INGREDIENTS) == ["the cache is off"]


def change(folder: Path) -> None:
    (folder / "deep/file").write_text("y")


def remove(folder: Path) -> None:
    (folder / "deep/file").unlink()


def add(folder: Path) -> None:
    (folder / "extra").write_text("")


def lose_the_seal(folder: Path) -> None:
    (folder / caches.CONTENTS).unlink()


def spoil_the_seal(folder: Path) -> None:
    (folder / caches.CONTENTS).write_text("[" * 100_000)


@pytest.mark.parametrize("harm", [change, remove, add, lose_the_seal, spoil_the_seal])
def test_a_poisoned_entry_is_a_miss_and_is_dropped(cache: Cache, harm: Callable[[Path], None]):
    entry = cache.store(INGREDIENTS, fill("x"))
    assert entry is not None
    harm(entry)
    assert cache.find(INGREDIENTS) is None and not entry.exists()
    cache.store(INGREDIENTS, fill("again"))
    assert cache.find(INGREDIENTS) == entry


def test_a_fill_that_fails_leaves_no_entry(cache: Cache):
    def half(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    assert cache.store(INGREDIENTS, half) is None
    assert cache.find(INGREDIENTS) is None
    assert cache.root is not None and not list(cache.root.glob("new-*"))


def test_a_fault_while_filling_is_not_hidden(cache: Cache):
    def broken(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.store(INGREDIENTS, broken)
    assert cache.find(INGREDIENTS) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path):
    (tmp_path / "file").write_text("")
    blocked = Cache(tmp_path / "file/below")
    assert blocked.store(INGREDIENTS, fill("x")) is None and blocked.find(INGREDIENTS) is None
    assert blocked.explain("me", INGREDIENTS) == ["the cache folder can't be written"]


def test_a_miss_is_explained_by_what_changed(cache: Cache):
    assert cache.explain("me", INGREDIENTS) == ["nothing was built for this target before"]
    assert cache.explain("me", INGREDIENTS) == ["the entry was pruned or damaged"]
    changed = {"model": "sha256:" + "2" * 64, "tools": "onnx 1"}
    assert cache.explain("me", changed) == [
        "model changed (sha256:1 -> sha256:22222222222222...)",
        "plan changed (p -> absent)",
        "tools changed (absent -> onnx 1)",
    ]
    assert cache.explain("somebody else", INGREDIENTS) == ["nothing was built for this target before"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 5}', "null", "[" * 100_000, '"x"'])
def test_a_spoilt_record_explains_nothing_and_breaks_nothing(cache: Cache, text: str):
    cache.explain("me", INGREDIENTS)
    assert cache.root is not None
    (record,) = (cache.root / "last").iterdir()
    record.write_text(text)
    assert cache.explain("me", INGREDIENTS) == ["nothing was built for this target before"]
    assert json.loads(record.read_text()) == INGREDIENTS


def test_entries_unused_for_longest_go_first(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKAGER_CACHE_MAX_GB", "0.000025")
    for number in range(2):
        entry = cache.store({"n": str(number)}, fill("x", 10_000))
        assert entry is not None
        os.utime(entry, (1000 + number, 1000 + number))
    assert cache.find({"n": "0"}) is not None  # its use makes it the younger one
    cache.store({"n": "2"}, fill("x", 10_000))
    assert cache.find({"n": "1"}) is None
    assert cache.find({"n": "0"}) is not None and cache.find({"n": "2"}) is not None


def test_the_newest_entry_stays_even_when_it_alone_is_too_large(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKAGER_CACHE_MAX_GB", "0.000001")
    cache.store({"n": "0"}, fill("x", 10_000))
    cache.store({"n": "1"}, fill("x", 10_000))
    assert cache.find({"n": "0"}) is None and cache.find({"n": "1"}) is not None


@pytest.mark.parametrize("text", ["20GB", "-1", "nan", "many"])
def test_a_bound_that_is_no_number_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("PACKAGER_CACHE_MAX_GB", text)
    with pytest.raises(UsageError, match=f"PACKAGER_CACHE_MAX_GB is '{text}'"):
        default_cache()


def test_leavings_of_killed_runs_are_swept_and_those_of_others_are_not(cache: Cache):
    assert cache.root is not None
    (cache.root / "new-dead").mkdir(parents=True)
    (cache.root / "new-dead/lock").write_text("")
    with scratch(cache.root, "new-") as alive:
        cache.store(INGREDIENTS, fill("x"))
        assert not (cache.root / "new-dead").exists() and alive.exists()


def test_runs_that_store_the_same_entry_at_once_leave_it_whole(cache: Cache):
    start = threading.Barrier(8)
    faults: list[BaseException] = []

    def work() -> None:
        start.wait()
        try:
            for _ in range(5):
                cache.store(INGREDIENTS, fill("same", 1000))
        except BaseException as error:  # noqa: BLE001 - none may occur
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = cache.find(INGREDIENTS)
    assert not faults
    assert found is not None and (found / "deep/file").read_text() == "same"


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PACKAGER_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache() == Cache(tmp_path / "mine")
    monkeypatch.delenv("PACKAGER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "platform"))
    root = default_cache().root
    assert root is not None and root.name == "packager"


def test_a_trees_digest_covers_names_and_bytes(tmp_path: Path):
    (tmp_path / "a").write_text("1")
    seen = {tree_digest(tmp_path)}
    (tmp_path / "a").write_text("2")
    seen.add(tree_digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(tree_digest(tmp_path))
    (tmp_path / "c").write_text("")
    seen.add(tree_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/b.pyc").write_text("x")
    assert tree_digest(tmp_path) in seen
