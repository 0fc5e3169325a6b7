"""Templates are strict, and text from a model arrives in another language as exactly that text."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packager.levels import LEVELS
from packager.render import (
    c_string,
    common_templates,
    js_literal,
    markdown,
    markdown_code,
    py_string,
    render,
    render_common,
    swift_comment,
    swift_string,
)
from packager.room import Kind, TargetFacts

HOSTILE = [
    "", "plain", "line\nend", "a\rb", "tab\there", "`code`", "a|b", "it's", 'say "hi"', "</script>", "名前",
    "\0nul\0001", "back\\slash",
    "\\", '\\"', "??/ ??= ??'", "%s %n", "\x1b[31m", "{{ 7 * 7 }}", "${HOME}", "\u2028\u2029", "🙂1",
    "\x7f\x80\xff", "ends\\", "*/ #include <x>", "e\u0301",
]  # fmt: skip
TEXT = st.text(st.characters(blacklist_categories=["Cs"]))


@pytest.fixture
def kind(tmp_path: Path) -> Callable[..., Kind]:
    """A kind whose templates are the given files."""

    def make(**templates: str) -> Kind:
        for name, text in templates.items():
            (tmp_path / f"{name}.j2").write_text(text)
        facts = TargetFacts(kind="made", title="Made", summary="", level=LEVELS[-1], precisions=["fp32"])
        return Kind("made", facts, tmp_path, "made", tmp_path)

    return make


def test_a_value_that_is_not_given_is_an_error(kind: Callable[..., Kind]):
    made = kind(a="{{ absent }}", b="{% if thing.absent %}x{% endif %}", c="{{ given }}")
    with pytest.raises(jinja2.UndefinedError, match="'absent' is undefined"):
        render(made, "made/a.j2")
    with pytest.raises(jinja2.UndefinedError):
        render(made, "made/b.j2", thing=object())
    assert render(made, "made/c.j2", given="") == "\n"


def test_line_ends_are_lf_and_the_last_one_is_there(kind: Callable[..., Kind]):
    assert render(kind(a="one\r\ntwo\n\n\n"), "made/a.j2") == "one\ntwo\n"
    assert render(kind(b="one"), "made/b.j2") == "one\n"


def test_a_kind_sees_its_own_templates_and_the_common_ones(kind: Callable[..., Kind]):
    made = kind(a="x")
    assert (common_templates() / "README.md.j2").is_file()
    with pytest.raises(jinja2.UndefinedError):
        render(made, "common/README.md.j2")
    with pytest.raises(jinja2.TemplateNotFound):
        render(made, "other/a.j2")
    with pytest.raises(jinja2.TemplateNotFound):
        render(made, "made/../../secret")
    with pytest.raises(jinja2.TemplateNotFound):
        render_common("absent.j2")


def test_text_is_never_a_template(kind: Callable[..., Kind]):
    assert render(kind(a="{{ name }}"), "made/a.j2", name="{{ 7 * 7 }}") == "{{ 7 * 7 }}\n"


@given(TEXT)
def test_a_python_literal_reads_back(text: str):
    literal = py_string(text)
    assert ast.literal_eval(literal) == text
    assert literal.isascii() and "\n" not in literal and "\r" not in literal


@pytest.mark.parametrize("text", ["\ud800", "a\udfff🙂"])
def test_a_python_literal_of_lone_surrogates_reads_back(text: str):
    assert ast.literal_eval(py_string(text)) == text


@given(TEXT)
def test_a_javascript_literal_is_harmless_json(text: str):
    literal = js_literal({"names": [text]})
    assert json.loads(literal) == {"names": [text]}
    assert literal.isascii() and literal.isprintable() and not set(literal) & set("<>&`")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript_reads_the_literals_back():
    texts = [*HOSTILE, "__proto__"]
    script = f"process.stdout.write(JSON.stringify({js_literal(texts)}))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, encoding="utf-8")
    assert json.loads(done.stdout) == texts


def test_a_javascript_object_keeps_its_prototype():
    with pytest.raises(ValueError, match="__proto__"):
        js_literal({"a": [{"__proto__": 1}]})


@given(TEXT)
def test_a_c_literal_is_plain_ascii_in_one_line(text: str):
    literal = c_string(text)
    assert literal.isascii() and literal.isprintable()
    assert literal[0] == literal[-1] == '"'


@pytest.mark.parametrize(("compiler", "standard"), [("gcc", "c11"), ("g++", "c++14")])
def test_a_c_literal_compiles_to_the_same_bytes(tmp_path: Path, compiler: str, standard: str):
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"needs {compiler} to compile what was generated")
    texts = [*HOSTILE, "".join(chr(code) for code in range(1, 0x250)), "7".join(HOSTILE)]
    lines = [f"    fwrite({c_string(text)}, 1, sizeof({c_string(text)}), stdout);" for text in texts]
    source = tmp_path / ("a.c" if compiler == "gcc" else "a.cc")
    source.write_text("\n".join(["#include <stdio.h>", "int main(void) {", *lines, "    return 0;", "}"]) + "\n")
    flags = [f"-std={standard}", "-trigraphs", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([found, *flags, "-o", str(tmp_path / "a"), str(source)], check=True)
    printed = subprocess.run([str(tmp_path / "a")], capture_output=True, check=True).stdout
    assert printed == b"".join(text.encode() + b"\0" for text in texts)


@given(TEXT)
def test_markdown_text_stays_in_its_line_and_cell(text: str):
    shown = markdown(text)
    assert shown.isprintable() and len(f"x{shown}x".splitlines()) == 1
    bare = shown.replace("\\\\", "")
    for char in "`*_[]<>|#":
        assert all(bare[at - 1] == "\\" for at, found in enumerate(bare) if found == char)


@given(TEXT)
def test_markdown_code_cannot_leave_its_span_or_cell(text: str):
    shown = markdown_code(text)
    assert "`" not in shown and shown.isprintable()
    assert all(shown[at - 1 : at] == "\\" for at, found in enumerate(shown) if found == "|")


def test_markdown_keeps_plain_names_as_they_are():
    assert markdown("名前 v1.2-rc") == "名前 v1.2-rc" == markdown_code("名前 v1.2-rc")
    assert markdown("a\nb") == "a\\\\nb" and markdown_code("a\nb`c") == "a\\nb\N{MODIFIER LETTER GRAVE ACCENT}c"


def test_names_are_text_in_html():
    from packager.report import report_html
    from packager.results import Report, TargetResult

    hostile = '</script><script>alert("x")</script>'
    result = TargetResult("t", "k", "fp32", "error", 5, message=hostile, hint=hostile, diagnosis=(hostile,))
    page = report_html(Report("0", hostile, hostile, "1", "d", 1, hostile, (), None, (result,), 0.0))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert json.dumps(hostile) not in page


def swift_reads(literal: str) -> str:
    """What Swift reads: escapes of a quote, a backslash and a scalar by number are all that may be there."""
    assert literal[0] == literal[-1] == '"' and literal.isascii() and literal.isprintable()
    body, out, at = literal[1:-1], [], 0
    while at < len(body):
        if body[at] != "\\":
            assert body[at] != '"'
            out.append(body[at])
            at += 1
        elif body[at + 1] == "u":
            end = body.index("}", at)
            out.append(chr(int(body[at + 3 : end], 16)))
            at = end + 1
        else:
            assert body[at + 1] in '\\"'
            out.append(body[at + 1])
            at += 2
    return "".join(out)


@given(st.text(st.characters(codec="utf-8")))
def test_a_swift_literal_reads_back(text: str):
    assert swift_reads(swift_string(text)) == text


def test_nothing_is_interpolated_into_a_swift_literal():
    assert swift_string('\\(1) "\n名') == '"\\\\(1) \\"\\u{A}\\u{540D}"'
    with pytest.raises(ValueError, match="surrogate"):
        swift_string("\ud800")


@given(st.text())
def test_a_swift_comment_stays_in_its_line(text: str):
    made = swift_comment(text)
    assert all(char.isprintable() for char in made) and "`" not in made
