"""The manifest: what it means, with one and without."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from packager import manifest, room
from packager.errors import InternalError, UsageError
from packager.manifest import Bounds, Tolerance
from tests.manifests import (
    MODEL,
    WHOLE,
    ClashingOptions,
    EdgeOptions,
    Layout,
    StrictOptions,
    fake_kind,
    problems,
    rooms_of_tests,
    write,
)


@pytest.fixture(scope="module", autouse=True)
def rooms():
    with rooms_of_tests() as made:
        yield made


@pytest.fixture
def strict_room(rooms, monkeypatch):
    strict = fake_kind("strict", StrictOptions, monkeypatch)
    monkeypatch.setattr(room, "kinds", lambda: {**rooms, "strict": strict})


@pytest.fixture
def only_edge(rooms, monkeypatch):
    monkeypatch.setattr(room, "kinds", lambda: {"edge": rooms["edge"]})


def test_a_whole_manifest_is_read_with_every_value_in_its_place(tmp_path):
    read = manifest.load(write(tmp_path, WHOLE))
    assert (read.root, read.path) == (tmp_path, tmp_path / "packager.toml")
    assert read.model == manifest.ModelSection(tmp_path / "models/ranker.onnx", "ranker", "1.4.0")
    assert read.golden == manifest.GoldenSection(
        tmp_path / "goldens", 5, 7, True, ("noise",), (("seq", 16),), (("pixels", (0.0, 255.0)),)
    )
    edge, tablets = read.targets
    assert (edge.name, edge.kind, edge.precision, edge.shapes) == ("edge", "edge", "fp32", ())
    assert (edge.min_level, edge.archive, edge.build_timeout, edge.verify_timeout) == ("structural", "tar.gz", 900, 300)
    assert edge.options == EdgeOptions(threads=2, layout=Layout(order=("n", "c")))
    assert edge.tolerance == Tolerance()
    assert (tablets.name, tablets.kind, tablets.precision) == ("partner-tablets", "edge", "fp16")
    assert tablets.shapes == (("batch", 1), ("x:0", 2))
    assert (tablets.min_level, tablets.archive, tablets.build_timeout) == ("runtime", "zip", 60)
    assert tablets.verify_timeout == 1.5
    assert tablets.options == EdgeOptions(mode="fast")
    assert (read.policy, read.min_level) == ("default-1", "structural")


def test_a_targets_tolerance_is_its_own_over_that_of_its_precision(tmp_path):
    tolerance = manifest.load(write(tmp_path, WHOLE)).targets[1].tolerance
    assert tolerance.bounds == Bounds(max_abs=0.01, cosine=0.99)
    assert tolerance.for_output("other") == Bounds(max_abs=0.01, cosine=0.99)
    assert tolerance.for_output("box") == Bounds(max_abs=2, cosine=0.99)
    assert tolerance.for_output('scores "raw"') == Bounds(max_abs=0.01, cosine=0.99, top1=0.9)


def test_bounds_of_one_output_merge_key_by_key():
    base = Tolerance(Bounds(), (("y", Bounds(max_abs=1, scaled=2)),))
    mine = Tolerance(Bounds(cosine=0.5), (("y", Bounds(max_abs=3)),))
    assert mine.over(base) == Tolerance(Bounds(cosine=0.5), (("y", Bounds(max_abs=3, scaled=2)),))


def test_a_manifest_is_frozen_and_hashable_all_through(tmp_path):
    read = manifest.load(write(tmp_path, WHOLE))
    assert hash(read) == hash(manifest.load(write(tmp_path, WHOLE)))
    with pytest.raises(FrozenInstanceError):
        read.targets[0].precision = "fp16"  # type: ignore[misc]


@pytest.mark.usefixtures("only_edge")
def test_the_smallest_manifest_means_what_no_manifest_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = manifest.load(write(tmp_path, '[model]\npath = "my ranker.onnx"\n'))
    plain = manifest.default(Path("my ranker.onnx"), None)
    assert read.model == plain.model == manifest.ModelSection(tmp_path / "my ranker.onnx", "my-ranker", "0.0.0")
    assert (read.golden, read.targets, read.policy) == (plain.golden, plain.targets, plain.policy)
    assert [target.name for target in read.targets] == ["edge"]
    assert (plain.path, plain.root) == (None, tmp_path)


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path):
    plain = manifest.load(write(tmp_path, WHOLE))
    assert manifest.load(write(tmp_path, b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())) == plain
    found = problems(tmp_path, b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").replace("cases", "casses").encode())
    assert [(place, line) for place, line, _, _ in found] == [("golden.casses", 8)]


def test_a_linked_model_keeps_the_links_name(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "sha").write_bytes(b"x")
    try:
        (tmp_path / "m.onnx").symlink_to(tmp_path / "blobs" / "sha")
    except OSError:
        pytest.skip("no symbolic links here")
    read = manifest.load(write(tmp_path, '[model]\npath = "blobs/../m.onnx"\n[targets.edge]\n'))
    assert read.model == manifest.ModelSection(tmp_path / "m.onnx", "m", "0.0.0")


def test_five_mistakes_are_all_told_with_their_lines(tmp_path):
    text = """\
[model]
path = 7

[golden]
cases = 0

[targets."partner tablets"]
kind = "edge"
precison = "fp16"

[targets.edge]
shapes = { batch = 1, seq = "x" }
thread = 2

[gates]
min_levle = "runtime"
"""
    found = problems(tmp_path, text)
    assert [(place, line) for place, line, _, _ in found] == [
        ("model.path", 2),
        ("golden.cases", 5),
        ('targets."partner tablets"', 7),
        ('targets."partner tablets".precison', 9),
        ("targets.edge.shapes.seq", 12),
        ("targets.edge.thread", 13),
        ("gates.min_levle", 16),
    ]
    said = {place: (message, hint) for place, _, message, hint in found}
    assert said["model.path"][0] == "must be text in quotes, not 7"
    assert said['targets."partner tablets".precison'][0] == "unknown key `precison`"
    assert said['targets."partner tablets".precison'][1].startswith("did you mean `precision`?")
    assert said["targets.edge.thread"][1].startswith(
        "did you mean `threads`? known keys: archive, build_timeout, cache"
    )
    assert said["gates.min_levle"][1] == "did you mean `min_level`? known keys: hazards, min_golden_strength, min_level"


def test_a_missing_file_and_a_folder_are_said_plainly(tmp_path):
    with pytest.raises(UsageError, match="no such file") as missing:
        manifest.load(tmp_path / "packager.toml")
    assert "packager init" in (missing.value.hint or "")
    with pytest.raises(UsageError, match="a folder, not a manifest"):
        manifest.load(tmp_path)
    with pytest.raises(UsageError):
        manifest.load(tmp_path / "a\0b")


def test_a_loop_of_links_is_a_mistake_of_use(tmp_path):
    try:
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
    except OSError:
        pytest.skip("no symbolic links here")
    with pytest.raises(UsageError):
        manifest.load(tmp_path / "loop")
    text = '[model]\npath = "loop/m.onnx"\n[targets.edge]\n'
    if sys.version_info < (3, 13):
        with pytest.raises(UsageError, match="resolved"):
            manifest.load(write(tmp_path, text))


def test_a_bundle_name_too_long_for_file_systems_is_told(tmp_path):
    long = "n" * 100
    text = f'[model]\npath = "m"\nname = "{long}"\nversion = "{long}"\n[targets.{long}]\nkind = "edge"\n'
    assert problems(tmp_path, text)[0][:2] == (f"targets.{long}", 5)


def test_a_key_no_kind_knows_is_told_even_where_the_kind_is_unknown(tmp_path):
    found = problems(tmp_path, MODEL + "[targets.egde]\nprecison = 'fp16'\nregion = 'x'\nthreads = 1\n")
    assert [(place, line) for place, line, _, _ in found] == [("targets.egde", 3), ("targets.egde.precison", 4)]
    assert found[0][3] == "did you mean `edge`? known kinds: cloud, edge"


@pytest.mark.usefixtures("strict_room")
def test_an_option_without_a_default_must_be_set(tmp_path):
    expected = ("targets.strict.licence", "`licence` is missing", "who may run it")
    for text, line in ((MODEL, None), (MODEL + "[targets.strict]", 3)):
        assert problems(tmp_path, text) == [(expected[0], line, *expected[1:])]
        assert len(problems(tmp_path, text + "\nx = 1")) == 2
    with pytest.raises(UsageError, match="`licence` is missing") as caught:
        manifest.default(Path("m.onnx"), ["strict"])
    assert caught.value.hint == "write a table for it in packager.toml"
    target = json.loads(manifest.json_schema())["$defs"]["target.strict"]
    assert target["required"] == ["licence"]


def test_a_room_whose_option_hides_a_common_key_is_packagers_fault(rooms, monkeypatch, tmp_path):
    clashing = fake_kind("clash", ClashingOptions, monkeypatch)
    monkeypatch.setattr(room, "kinds", lambda: {"clash": clashing})
    with pytest.raises(InternalError, match="'archive'"):
        manifest.load(write(tmp_path, MODEL + "[targets.clash]\n"))


def test_defaults_are_for_the_kinds_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = manifest.default(Path("sub/m.onnx"), ["edge", "edge"], Path("goldens"))
    assert made.model.path == tmp_path / "sub/m.onnx"
    assert made.golden == manifest.GoldenSection(tmp_path / "goldens")
    assert [(target.name, target.min_level) for target in made.targets] == [("edge", "none")]
    assert made.targets[0].options == EdgeOptions()


@pytest.mark.parametrize(
    ("targets", "message", "hint"),
    [
        (["egde"], "unknown target or kind 'egde'", "did you mean `edge`? known targets: cloud, edge"),
        ([], "no target is named", "known targets: cloud, edge"),
        ([""], "an empty target name", "known targets: cloud, edge"),
    ],
)
def test_defaults_need_known_kinds(targets, message, hint):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        manifest.default(Path("m.onnx"), targets)
    assert caught.value.hint == hint


def test_targets_are_selected_in_the_order_asked_for(tmp_path):
    read = manifest.load(write(tmp_path, WHOLE))
    chosen = manifest.select(read, ["partner-tablets", "edge", "partner-tablets"])
    assert chosen.targets == (read.targets[1], read.targets[0])
    assert manifest.select(read, ["edge"]).targets == (read.targets[0],)
    with pytest.raises(UsageError) as caught:
        manifest.select(read, ["partner-tablet"])
    assert caught.value.hint == "did you mean `partner-tablets`? known targets: cloud, edge, partner-tablets"


def test_a_kind_that_is_no_target_is_added_with_the_manifests_gates_and_tolerances(tmp_path):
    text = MODEL + "[targets.tablets]\nkind = 'edge'\n[tolerance.fp32]\nmax_abs = 0.5\n[gates]\nmin_level = 'proxy'\n"
    chosen = manifest.select(manifest.load(write(tmp_path, text)), ["edge"])
    (edge,) = chosen.targets
    assert (edge.name, edge.min_level, edge.tolerance.bounds) == ("edge", "proxy", Bounds(max_abs=0.5))


def test_targets_that_would_share_files_are_not_selected_together(tmp_path):
    read = manifest.load(write(tmp_path, MODEL + "[targets.EDGE]\nkind = 'edge'\n"))
    with pytest.raises(UsageError, match="letter case"):
        manifest.select(read, ["EDGE", "edge"])


def test_goldens_can_be_put_in_place_of_the_manifests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = manifest.load(write(tmp_path, WHOLE))
    other = manifest.with_golden(read, Path("elsewhere.npz"))
    assert other.golden.path == tmp_path / "elsewhere.npz"
    assert (other.golden.cases, other.targets) == (read.golden.cases, read.targets)


def test_no_kind_is_named_in_the_manifests_code():
    own = Path(__file__).parents[1]
    kinds = [folder.name for folder in (own / "targets").iterdir() if (folder / "target.toml").exists()]
    for file in sorted((own / "packager").glob("manifest*.py")):
        words = set(re.findall(r"[a-z0-9]+", file.read_text(encoding="utf-8").lower()))
        assert not words.intersection(kinds), file.name
