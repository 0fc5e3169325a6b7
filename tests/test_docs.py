"""What the documentation says of things that code knows is what the code knows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from packager import cli, errors, levels, manifest, room
from packager.results import Report
from tests import builders

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def table(heading: str, text: str = README) -> list[list[str]]:
    """Rows of the first Markdown table after ``heading``, without its head."""
    lines = text.split(heading, 1)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_exit_table_is_the_error_trees():
    told = {int(row[0]) for row in table("## In CI")}
    assert told == {0} | {cls.exit_code for cls in errors.error_types().values()}


def test_the_error_tree_is_drawn_whole():
    drawn = re.findall(r"(\w+)\s+(\d)  ", errors.__doc__ or "")
    known = {name: cls.exit_code for name, cls in errors.error_types().items() if name != "PackagerError"}
    assert {name: int(code) for name, code in drawn} == known


def test_the_levels_are_all_told():
    assert [row[0].strip("`") for row in table("## What a verdict says")] == list(reversed(levels.LEVELS))


def test_every_command_is_told():
    told = " ".join(row[0] for row in table("## Commands"))
    for name in cli.cli.commands:
        assert name in told, name


def test_the_manifest_of_the_readme_is_one(tmp_path: Path):
    text = README.split("```toml", 1)[1].split("```", 1)[0]
    (tmp_path / "goldens").mkdir()
    builders.relu(tmp_path / "ranker.onnx")
    (tmp_path / "packager.toml").write_text(text)
    assert [target.name for target in manifest.load(tmp_path / "packager.toml").targets] == ["openvino", "shop-floor"]


def test_the_target_toml_of_the_guide_is_one():
    guide = (ROOT / "docs/write-a-target.md").read_text()
    text = guide.split("## 1. Facts", 1)[1].split("```toml", 1)[1].split("```", 1)[0]
    facts = room.TargetFacts.model_validate(tomllib.loads(text))
    assert set(tomllib.loads(text)) == set(room.TargetFacts.model_fields) - {"pins"}
    assert facts.limits.ir == 13


@pytest.mark.parametrize("page", [*sorted(path.name for path in (ROOT / "docs").glob("*.md")), "../README.md"])
def test_links_lead_somewhere(page: str):
    path = ROOT / "docs" / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


def test_modules_named_in_the_architecture_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    for row in table("## The flow", page):
        for name in re.findall(r"`(\w+)`", row[1]):
            assert (ROOT / f"packager/{name}.py").exists() or hasattr(room.Room, name), name


def test_a_report_of_nothing_is_a_pass_of_nothing():
    """The largest exit status of no targets; the engine never makes such a report."""
    assert Report("0", "m", "m", "0", "", 0, "dist", (), None, (), 0.0).exit_code == 0
