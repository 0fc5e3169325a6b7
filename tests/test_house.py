"""The house checks itself: what rules say of the code is true of the code, and a wheel holds what it must."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ENGINE = sorted((ROOT / "packager").rglob("*.py"))
SHIPPED = [path for folder in ("packager", "targets", "templates") for path in sorted((ROOT / folder).rglob("*.py"))]
KINDS = sorted(path.parent.name for path in (ROOT / "targets").glob("*/target.toml"))

MAX_LINES = 400
LONG = {
    "packager/room.py": "the whole contract between engine and rooms, on one page",
    "packager/parity.py": "the comparator travels in every bundle as one file that imports nothing of packager",
    "packager/graph.py": "one reader for one format: the messages of onnx.proto, each with the view it becomes",
    "packager/report.py": "one function per command and form; none is long",
}

ELSEWHERE = {
    "__init__": "test_cli: the verbs are reached through it, and `packager --version` stays light",
    "building": "test_engine: sealed, verified, built again where the first guess at inputs didn't run",
    "capture": "test_cli: `packager golden` with and without the source framework's function",
    "console": "test_cli: data on standard output whatever it is, talk on standard error",
    "choosing": "test_cli: models, manifests and names of targets that don't go together; test_dialect: rungs",
    "errors": "test_child: each class crosses a process boundary; test_cli: each exit status",
    "golden_roles": "test_golden_uses and test_golden_synth: the roles that are read off real graphs",
    "float16_rewrite": "test_transform_float16: the pass as a whole, on real models and each known fault",
    "float16_rounding": "test_transform_float16: overflow that only rounding between nodes shows",
    "float16_rules": "test_transform_float16: what stays in fp32",
    "float16_slots": "test_transform_float16: slots whose schema doesn't take half precision",
    "float16_types": "test_transform_float16: types onnx doesn't infer",
    "goldens_ready": "test_engine: references shared, cached, refused and tried again",
    "hazards": "test_model: hazards are named when a model is opened",
    "levels": "test_engine: min_level",
    "mutants": "test_strength: each change, and the model it leaves alone",
    "readme": "test_contract: every room's README with plain and hostile names",
    "results": "test_report and test_dist: what every report is made from",
    "targeting": "test_engine: the flow of one target, fault by fault",
    "planning": "test_dialect and test_engine: the room's plan behind the steps of its dialect",
    "run": "test_engine: references shared by targets, and those of a target's own shapes",
    "placing": "test_engine: what is placed, rejected, withdrawn and kept",
    "engine": "test_engine",
    "transform_edit": "test_transform_versions: the adapters that use it",
    "transform_files": "test_transforming: loading and saving, inline and external",
    "transform_folding": "test_transform_shapes: folding",
    "transform_graphs": "test_transform_shapes and test_transform_cleaning",
    "transform_inference": "test_transform_shapes: shapes inferred anew",
    "transform_ir_version": "test_transform_versions: IR versions raised and lowered",
    "transform_quantiser": "test_transform_int8: every scheme and method through ONNX Runtime's quantiser",
    "transform_registry": "test_transforming and test_dialect: passes as JSON",
    "transform_search": "test_transform_float16 and test_transform_int8_search: both searches",
    "transform_steps": "test_transform_versions: each step between operator sets",
    "transform": "a Protocol and its data only: nothing to run",
    "transform_qdq": "test_transform_int8, whose schemes for accelerators it serves",
    "verdict": "test_verifying and test_report: plain data",
}
"""Modules without a test module of their own name, and where they are tested."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def docstrings(module: ast.Module) -> set[int]:
    """Ids of the constants that are docstrings, of attributes too."""
    return {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def words(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Every word of identifiers and of string literals that are no docstrings, with its line."""
    prose = docstrings(module)
    for node in ast.walk(module):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and id(node) not in prose:
            texts = [node.value if isinstance(node.value, str) else node.value.decode("latin-1")]
        elif isinstance(node, ast.Name):
            texts = [node.id]
        elif isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            texts = [node.name]
        elif isinstance(node, ast.arg):
            texts = [node.arg]
        elif isinstance(node, ast.keyword):
            texts = [node.arg or ""]
        elif isinstance(node, ast.alias):
            texts = [node.name, node.asname or ""]
        elif isinstance(node, ast.ImportFrom):
            texts = [node.module or ""]
        for text in texts:
            spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
            yield from ((getattr(node, "lineno", 0), word) for word in re.findall(r"[a-z0-9]+", spread.lower()))


def test_the_rule_on_kinds_sees_literals_and_identifiers():
    source = '"""web in prose is fine."""\nimport a.web\nx = "for web"\ndef web_like(kind="ios"): return WebThing.ios\n'
    found = [word for _, word in words(ast.parse(source)) if word in ("web", "ios")]
    assert sorted(found) == ["ios", "ios", "web", "web", "web", "web"]


PLAIN = {"cpu": "the processor, in the words of hosts, of libraries and of ONNX Runtime's provider"}
"""Kinds whose name is a word of its own: only where it names the kind may the engine not use it."""


def named(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Plain words that name a kind all the same: as a text of its own, or in the path of a room, with the line."""
    prose = docstrings(module)
    for node in ast.walk(module):
        text = node.module if isinstance(node, ast.ImportFrom) else getattr(node, "value", None)
        if not isinstance(text, str) or id(node) in prose:
            continue
        for kind in PLAIN:
            if text == kind or re.search(rf"(targets|templates)[./]{kind}\b", text):
                yield getattr(node, "lineno", 0), kind


def test_the_rule_on_plain_words_sees_where_they_name_a_kind():
    source = (
        '"""cpu"""\nimport os\nfrom packager.targets.cpu import x\na = "cpu"\nb = "templates/cpu/x"\nos.cpu_count()\n'
    )
    assert sorted(named(ast.parse(source))) == [(3, "cpu"), (4, "cpu"), (5, "cpu")]


def test_the_engine_names_no_target_kind():
    assert set(PLAIN) < set(KINDS)
    found = []
    for path in ENGINE:
        module = tree(path)
        telling = [(line, word) for line, word in words(module) if word in KINDS and word not in PLAIN]
        found += [f"{relative(path)}:{line}: {word}" for line, word in (*telling, *named(module))]
    assert found == []


def test_the_engine_does_not_print():
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in ENGINE
        if path.stem != "feeds"  # it ships: the command line of every bundle's infer.py
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_every_module_of_the_engine_has_a_test_module():
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    lacking = {path.stem for path in ENGINE} - tests
    assert sorted(lacking - set(ELSEWHERE)) == []
    assert all((ROOT / "packager" / f"{name}.py").is_file() for name in ELSEWHERE), (
        "the list names a module that is gone"
    )


def test_every_room_has_a_test_module():
    for kind in KINDS:
        assert (ROOT / f"tests/targets/test_{kind}.py").is_file(), kind


def undocumented(module: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods of public classes without a docstring."""
    if ast.get_docstring(module) is None:
        yield "the module"
    todo: list[tuple[str, ast.stmt]] = [("", node) for node in module.body]
    while todo:
        prefix, node = todo.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            todo += [(f"{node.name}.", inner) for inner in node.body]


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_what_is_public_has_a_docstring(path: Path):
    assert list(undocumented(tree(path))) == []


def test_files_stay_short_or_say_why():
    long = {relative(path) for path in SHIPPED if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES}
    assert sorted(long - set(LONG)) == [], f"more than {MAX_LINES} lines: split it, or give a reason in LONG"
    assert sorted(set(LONG) - long) == [], "short again: take it off LONG"


def test_nothing_of_a_workplace_is_in_the_tree():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout to know which files are tracked")
    hosts = [
        "pypi" + ".org",
        "python" + "hosted",
        "npm" + "js.org",
        "registry." + "yarnpkg",
        "arti" + "factory",
        "nex" + "us.",
    ]
    homes = ["/ho" + "me/", "/Us" + "ers/", "/ro" + "ot/", "/wo" + "rk/", "C:" + "\\Users"]
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        found += [f"{name}: {word}" for word in [*hosts, *homes] if re.search(rf"(?<![\w.-]){re.escape(word)}", text)]
    assert found == []


def tracked(*more: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *more], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the checkout that has litter lying about."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout to know which files are tracked")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked("--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    for litter in (".corpus/m.onnx", "packager/__pycache__/a.pyc", f"targets/{KINDS[0]}/__pycache__/a.pyc",
                   f"templates/{KINDS[0]}/node_modules/x/index.js", "dist/x.tar.gz"):  # fmt: skip
        (source / litter).parent.mkdir(parents=True, exist_ok=True)
        (source / litter).write_text("")
    recent = Version(importlib.metadata.version("setuptools")) >= Version("77") if has("setuptools") else False
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), *(["--no-isolation"] if recent else [])]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = out.glob("*.whl")
    return zipfile.ZipFile(made)


def has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_a_wheel_holds_engine_rooms_and_templates(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    wanted = {"packager/py.typed", "packager/policies.toml", "packager/templates/common/verify.py"}
    for top in ("packager", "targets", "templates"):
        prefix = "" if top == "packager" else "packager/"
        wanted |= {f"{prefix}{relative(path)}" for path in SHIPPED if relative(path).startswith(f"{top}/")}
    for kind in KINDS:
        wanted |= {f"packager/targets/{kind}/target.toml", f"packager/templates/{kind}/README.md.j2"}
    assert sorted(wanted - names) == []


def test_a_wheel_holds_nothing_else(wheel: zipfile.ZipFile):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("packager/") for name in names)
    assert [
        name for name in names if re.search(r"__pycache__|\.pyc$|node_modules|(^|/)tests?/|\.corpus|\.onnx$", name)
    ] == []


def test_a_wheel_brings_the_command_the_licence_and_the_extra(wheel: zipfile.ZipFile):
    texts = {
        name.split(".dist-info/")[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name
    }
    assert "packager = packager.cli:main" in texts["entry_points.txt"].split("[console_scripts]")[1]
    assert "licenses/LICENSE" in texts
    assert "License-Expression: Apache-2.0" in texts["METADATA"] and "Requires-Python: >=3.11" in texts["METADATA"]
    for kind in KINDS:
        assert f"Provides-Extra: {kind}" in texts["METADATA"]
