"""The manifest as text: bytes, syntax and lines."""

from __future__ import annotations

import tomllib

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from packager import manifest
from packager.errors import ManifestError
from packager.manifest_text import MAX_BYTES, dotted, read_lines, toml_text
from tests.manifests import (
    MODEL,
    WHOLE,
    documents,
    places,
    problems,
    rooms_of_tests,
    write,
)


@pytest.fixture(scope="module", autouse=True)
def rooms():
    with rooms_of_tests() as made:
        yield made


def test_a_column_is_told_for_broken_toml(tmp_path):
    assert "column 8" in problems(tmp_path, "[model]\npath = m.onnx")[0][2]


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path):
    found = problems(tmp_path, b'[model]\npath = "caf\xe9.onnx"\n')
    assert found == [("packager.toml", 2, "not UTF-8: byte 0xe9", "save the file as UTF-8")]


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path):
    assert "larger than" in problems(tmp_path, b"#" * (MAX_BYTES + 1))[0][2]
    assert manifest.load(write(tmp_path, WHOLE + "#" * (MAX_BYTES - len(WHOLE)))).model.name == "ranker"


def test_hundreds_of_mistakes_are_cut_short_and_it_says_so(tmp_path):
    with pytest.raises(ManifestError, match="at least 200 mistakes"):
        manifest.load(write(tmp_path, MODEL + "".join(f"key{number} = 1\n" for number in range(5000))))
    found = problems(tmp_path, MODEL + "".join(f"[targets.t{number}]\nkind = 'edge'\n" for number in range(300)))
    assert found == [("targets", 3, "300 targets, 256 are allowed", "")]


@pytest.mark.parametrize(
    ("text", "place", "line"),
    [
        ("a.b.c = 1", ("a", "b"), 1),
        ("\n\"a.b\" . 'c d' = 1", ("a.b", "c d"), 2),
        ("a = '''\n[b]\nc = 1\n'''\nd = 2", ("d",), 5),
        ('a = """x\\"""\n[b]""""" # """\nd = 2', ("d",), 3),
        ("a = [ # ]\n 1,\n {b = 2},\n]", ("a", 1, "b"), 3),
        ("a = '[b]'\n[b]\nc = 1", ("b", "c"), 3),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\n[a.b]\nc = 3", ("a", 1, "b", "c"), 6),
        ("[[a]]\n[[a.b]]\n[[a]]\n[[a.b]]\n[[a.b]]\nc = 1", ("a", 1, "b", 1, "c"), 6),
        ("[ a . 'b' ]\nc = { d.e = { f = 1 } }", ("a", "b", "c", "d", "e", "f"), 2),
        ("1.5 = 07:32:00\nb = 1979-05-27 07:32:00.5 # c\nd = +1e-3", ("d",), 3),
        ('"\\u0061" = 1\n"" = 2', ("",), 2),
    ],
)
def test_a_line_is_found_through_all_of_tomls_spellings(text, place, line):
    assert tomllib.loads(text)
    assert read_lines(text).known[place] == line


def test_a_place_that_was_not_written_has_the_line_of_what_is_around_it():
    lines = read_lines("[a]\n\n[b]\nc = { d = 1 }")
    assert lines.of(("b", "c", "missing", 0)) == 4
    assert lines.of(("b", "missing")) == 3
    assert lines.of(("missing",)) is None


@given(documents)
@settings(max_examples=200, deadline=None)
def test_the_lines_know_every_place_of_any_document(document):
    text = tomlkit.dumps(document)
    assert {(), *read_lines(text).known} == places(tomllib.loads(text))


@given(st.lists(st.integers(0, 50) | st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_a_dotted_place_is_one_printable_line(steps):
    assert dotted(("a", *steps)).isprintable()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_quoted_text_reads_back(text):
    assert tomllib.loads(f"a = {toml_text(text)}") == {"a": text}
