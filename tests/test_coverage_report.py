"""Coverage as people and programs read it."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

from packager.coverage import Coverage, Covered
from packager.coverage_report import coverage_document, coverage_html, coverage_text, matrix
from packager.covering import Inspected
from packager.files import to_json
from packager.model import open_model
from tests.builders import relu

HOSTILE = "</code><script>alert(1)</script>"
NODES = (
    Covered("Relu 'a'", "Relu"),
    Covered("Det 'b'", "Det", "refused", "there is no Det", "leave it out"),
    Covered(f"Mul '{HOSTILE}'", "Mul", "fallback", "of rank 6", "make it smaller"),
)
REFUSED = Coverage("edge", "some", "fp16", NODES, ("rules", "Tool 1.2"), "can't take it:\n  node Det", "leave it out")
PLANNED = Coverage("far", "other", "fp32", NODES[:1], ("rules",), missing=(("Python package x", "pip install x"),))
SHAPES = Coverage(
    "odd", "some", "fp32", (Covered("Relu 'a'", "Relu", "unjudged"),), ("rules",), "free dims", "[targets.odd]\nshapes"
)


def inspected(folder: Path) -> Inspected:
    return Inspected(open_model(relu(folder / "m.onnx")), (REFUSED, PLANNED, SHAPES))


def test_text_has_a_table_then_what_is_not_simply_supported(tmp_path: Path) -> None:
    table, *paragraphs = coverage_text(inspected(tmp_path)).split("\n\n")[1:]
    assert [line.split() for line in table.splitlines()] == [
        ["TARGET", "KIND", "PRECISION", "SUPPORTED", "REWRITTEN", "FALLBACK", "REFUSED", "UNJUDGED", "VERDICT"],
        ["edge", "some", "fp16", "1", "0", "1", "1", "0", "refused:", "1", "node"],
        [
            "far",
            "other",
            "fp32",
            "1",
            "0",
            "0",
            "0",
            "0",
            *["plans;", "its", "toolchain", "isn't", "here", "to", "be", "asked"],
        ],
        ["odd", "some", "fp32", "0", "0", "0", "0", "1", "refused:", "free", "dims"],
    ]
    assert paragraphs[0].splitlines() == [
        "edge, by rules and Tool 1.2:",
        "  refused: 1 Det: there is no Det",
        "    1 node: Det 'b'",
        "    do: leave it out",
        "  falls back: 1 Mul: of rank 6",
        f"    1 node: Mul '{HOSTILE}'",
        "    do: make it smaller",
    ]
    assert paragraphs[1].splitlines()[1:] == ["  not asked: Python package x is missing", "    get it: pip install x"]
    assert paragraphs[2].splitlines()[1:] == ["  free dims", "    do: [targets.odd]", "    do: shapes"]


def test_json_has_every_node_with_the_model(tmp_path: Path) -> None:
    told = json.loads(to_json(coverage_document(inspected(tmp_path))))
    assert told["schema"] == "packager.model/1" and told["operators"] == {"Relu": 1}
    first = told["coverage"][0]
    assert first["verdict"] == "refused: 1 node" and first["judges"] == ["rules", "Tool 1.2"]
    assert first["counts"] == {"supported": 1, "rewritten": 0, "fallback": 1, "refused": 1, "unjudged": 0}
    assert first["nodes"][1] == {
        "node": "Det 'b'", "operator": "Det", "state": "refused", "reason": "there is no Det", "hint": "leave it out",
    }  # fmt: skip


def test_the_matrix_has_operators_down_and_targets_across() -> None:
    lines = matrix((REFUSED, PLANNED))
    assert [(line.operator, line.nodes, line.states) for line in lines] == [
        ("Det", 1, ("refused",)),
        ("Mul", 1, ("fallback",)),
        ("Relu", 1, ("supported",)),
    ]
    assert [None if cell is None else cell.state for cell in lines[0].cells] == ["refused", None]
    assert lines[2].cells[1] is not None and lines[2].cells[1].counts == (("supported", 1),)


class Page(html.parser.HTMLParser):
    """Tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_stands_alone_and_names_are_escaped(tmp_path: Path) -> None:
    page = Page()
    page.feed(coverage_html(inspected(tmp_path)))
    assert "script" not in page.tags and "link" not in page.tags and page.references == []
    assert f"Mul '{HOSTILE}'" in page.texts, "as text, whole"
    assert page.tags.count("input") == 6, "one filter for each state, and one for none"
