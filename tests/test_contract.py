"""What every room must keep, whoever wrote it: run over each room that is discovered on this machine."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import onnx
import pytest
from onnx import helper, numpy_helper
from pydantic import TypeAdapter, ValidationError

import packager
from packager import report, room
from packager.bundle import seal
from packager.errors import Refused
from packager.golden_synth import synthesise
from packager.graph import DTYPES
from packager.host import this_host
from packager.levels import LEVELS, below
from packager.manifest_tables import TargetTable
from packager.model import open_model
from packager.policy import policies
from packager.precisions import policy_precision
from packager.readme import write_readme
from packager.room import JudgingRoom, Kind, Plan, PlanRequest, Room, RoomOptions
from packager.verdict import Verdict
from tests.builders import FLOAT, model, save, value

ROOT = Path(__file__).parents[1]
SNAPSHOTS = Path(__file__).with_name("snapshots")
HEAVY = {"onnx", "onnxruntime", "openvino", "torch", "tensorflow", "onnx_ir"}
HOSTILE = ["line\nend", "`tick`", "a|b", 'it\'s "quoted"', "</script>", "名前", "back\\slash", "{{ 7 * 7 }}", "```"]
KINDS = sorted(room.kinds())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return room.kind_named(request.param)


def batch(kind: Kind) -> str | int:
    """A free batch, or one of 1 for kinds that take no free dims."""
    return 1 if kind.facts.limits.fixed_shapes else "n"


@pytest.fixture
def dense(kind: Kind, tmp_path: Path) -> Path:
    """``score = Relu(features @ weights)``: a model so plain that every room should have a plan for it."""
    (tmp_path / "model").mkdir()
    weights = numpy_helper.from_array(onnx.numpy_helper.to_array(helper.make_tensor("w", FLOAT, [3, 2], range(6))), "w")
    nodes = [
        helper.make_node("MatMul", ["features", "w"], ["hidden"], name="project"),
        helper.make_node("Relu", ["hidden"], ["score"], name="act"),
    ]
    rows = batch(kind)
    proto = model(nodes, [value("features", FLOAT, [rows, 3])], [value("score", FLOAT, [rows, 2])], [weights])
    return save(proto, tmp_path / "model/ranker.onnx")


def request_for(kind: Kind, path: Path) -> PlanRequest:
    opened = open_model(path)
    return PlanRequest(
        target=kind.name, kind=kind.name, name="ranker", version="1.4.0", model=opened, goldens=synthesise(opened),
        precision=kind.facts.precisions[0], shapes=(), options=kind.load().Options(), facts=kind.facts,
    )  # fmt: skip


def test_there_is_a_room():
    assert KINDS


def test_facts_are_complete_and_make_sense(kind: Kind):
    facts = kind.facts
    assert facts.title and facts.summary and facts.level in LEVELS
    known = policies()["default-1"].precisions
    judged = {policy_precision(precision) for precision in facts.precisions}
    assert judged <= set(known), "a precision without bounds in the default policy"
    assert set(facts.dialect.ladder) <= set(facts.precisions), "auto may try only what the room can build"
    by_precision = {*facts.dialect.precisions, *facts.dialect.minimum_opset, *facts.dialect.maximum_opset}
    assert by_precision <= set(facts.precisions)
    assert set(facts.tolerance) <= set(facts.precisions)
    assert set(facts.limits.dtypes) <= set(DTYPES.values())
    assert all(re.search(r"[a-z]{3}", reason) for reason in facts.limits.refused_operators.values())
    assert all(facts.roles.values()) and "model" in facts.roles.values()
    assert facts.time_limits.build > 0 and facts.time_limits.verify > 0


def test_tools_are_installed_with_the_room(kind: Kind):
    declared = {re.split(r"[^A-Za-z0-9_-]", text)[0] for text in importlib.metadata.requires("packager") or ()}
    assert set(kind.facts.tools) <= declared | set(kind.facts.requires.python)


def test_extras_that_hints_speak_of_exist(kind: Kind):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, package in kind.facts.requires.python.items():
        if package.extra is not None:
            assert f"{name}{package.version}" in extras[package.extra], "pyproject.toml and target.toml differ"


def test_an_own_room_has_its_readme(kind: Kind):
    assert kind.templates is not None and (kind.templates / "README.md.j2").is_file()


def test_the_module_has_the_names_and_signatures_of_a_room(kind: Kind):
    made = kind.load()
    assert issubclass(made.Options, RoomOptions)
    for name in ("missing", "plan", "build", "runner"):
        wanted = list(inspect.signature(getattr(Room, name)).parameters)[1:]
        assert list(inspect.signature(getattr(made, name)).parameters) == wanted, name
        assert inspect.getdoc(getattr(made, name)), name
    reach = room.reach_of(kind, this_host())
    assert not below(kind.facts.level, reach.level), "target.toml has the highest level there is"
    assert bool(reach.reason) == (reach.level != kind.facts.level), "a lower level has its reason"
    for name in ("remarks", "query"):  # optional
        if hasattr(made, name):
            wanted = list(inspect.signature(getattr(JudgingRoom, name)).parameters)[1:]
            assert list(inspect.signature(getattr(made, name)).parameters) == wanted, name
            assert inspect.getdoc(getattr(made, name)), name
    assert hasattr(made, "remote") == (kind.facts.endpoint is not None), "target.toml and module differ on endpoints"
    if kind.facts.endpoint is not None:
        remote = kind.load_remote().remote
        assert list(inspect.signature(remote).parameters) == ["bundle", "endpoint"]
        assert isinstance(remote(Path("absent"), "nowhere"), AbstractContextManager)
    assert isinstance(made.runner(Path("absent")), AbstractContextManager)
    assert isinstance(made.missing(this_host()), list)


def test_options_have_defaults_and_descriptions_and_forbid_the_rest(kind: Kind):
    options = kind.load().Options
    made = options()
    assert options.model_validate_json(made.model_dump_json()) == made
    with pytest.raises(ValidationError):
        options.model_validate({"no_such_option": 1})
    assert all(field.description for field in options.model_fields.values())
    assert not set(options.model_fields) & set(TargetTable.model_fields), "an option hides a common key of targets"


ALONE = """
import json, sys
sys.dont_write_bytecode = True
events, recording = [], False

def hook(event, arguments):
    if not recording:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "subprocess.Popen", "socket.connect"):
        events.append(f"{event} {arguments!r}")

sys.addaudithook(hook)
from packager.room import kind_named
kind = kind_named(sys.argv[1])
made = kind.load()
imported = sorted(set(sys.argv[3].split(",")) & set(sys.modules))
from pathlib import Path
from pydantic import TypeAdapter
from packager.room import Plan
from packager.golden_synth import synthesise
from packager.model import open_model
from packager.room import PlanRequest
opened = open_model(Path(sys.argv[2]))
request = PlanRequest(kind.name, kind.name, "ranker", "1.4.0", opened, synthesise(opened), kind.facts.precisions[0], (),
                      made.Options(), kind.facts)
before = set(sys.modules)
recording = True
plans = [made.plan(request) for _ in range(2)]
recording = False
planned = sorted(set(sys.argv[3].split(",")) & (set(sys.modules) - before))
dump = TypeAdapter(Plan).dump_json
print(json.dumps([imported, planned, events, *(dump(plan).decode() for plan in plans)]))
"""


def test_a_plan_is_pure_and_needs_no_sdk(kind: Kind, dense: Path):
    heavy = HEAVY | {name.replace("-", "_") for name in kind.facts.requires.python}
    before = {path: path.read_bytes() for path in dense.parent.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, kind.name, str(dense), ",".join(sorted(heavy))],
        cwd=dense.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported, planned, events, first, second = json.loads(done.stdout)
    assert imported == [], "importing the room imports an SDK"
    assert planned == [], "planning imports an SDK"
    assert events == [], "planning writes, starts or calls something"
    assert first == second
    assert {path: path.read_bytes() for path in dense.parent.iterdir()} == before
    here = kind.load().plan(request_for(kind, dense))
    assert TypeAdapter(Plan).validate_json(first) == here, "a plan must be the same in every process"
    assert TypeAdapter(Plan).validate_python(TypeAdapter(Plan).dump_python(here, mode="json"), strict=False) == here


def test_a_plan_says_what_was_asked_for(kind: Kind, dense: Path):
    request = request_for(kind, dense)
    plan = kind.load().plan(request)
    for name in ("target", "kind", "name", "version", "precision", "shapes"):
        assert getattr(plan, name) == getattr(request, name)
    assert plan.model_digest == request.model.digest and plan.opset == request.model.opset
    assert [spec.name for spec in plan.signature.inputs] == ["features"]
    assert [spec.name for spec in plan.signature.outputs] == ["score"]
    assert plan.steps and all(step.title.split()[0].endswith("ing") for step in plan.steps), "titles are gerunds"
    assert kind.load().Options.model_validate_json(plan.options) == request.options


def test_the_plan_as_printed_is_the_snapshot(kind: Kind, dense: Path):
    text = report.plans_text(packager.plan(dense, targets=[kind.name], cache=False))
    snapshot = SNAPSHOTS / f"plan_{kind.name}.txt"
    if os.environ.get("PACKAGER_REFRESH_SNAPSHOTS") == "1":
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(text, encoding="utf-8", newline="\n")
    assert snapshot.is_file(), f"no {snapshot}; look at the plan, then run with PACKAGER_REFRESH_SNAPSHOTS=1"
    assert text == snapshot.read_text(encoding="utf-8")


def named(path: Path, names: list[str], rows: str | int) -> Path:
    """A model with an input and an output after each name."""
    pairs = [(name, f"{name} out") for name in names]
    nodes = [helper.make_node("Relu", [one], [other], name=one) for one, other in pairs]
    inputs = [value(one, FLOAT, [rows, 3]) for one, _ in pairs]
    return save(model(nodes, inputs, [value(other, FLOAT, [rows, 3]) for _, other in pairs]), path)


def readme(kind: Kind, folder: Path, names: list[str]) -> str | None:
    """The README of a bundle of such a model; ``None`` where the room refuses it, with a reason."""
    folder.mkdir()
    path = named(folder / "m.onnx", names, batch(kind))
    try:
        plan = kind.load().plan(request_for(kind, path))
    except Refused as error:
        assert error.message
        return None
    verdict = Verdict("passed", kind.facts.level, names[0], "R", "1", "CPU", 3, 0.0, 0.0, 1.0, None, "p", "fp32")
    write_readme(folder, kind, plan, verdict, seal(folder, plan, {}, kind.facts.roles))
    return (folder / "README.md").read_text(encoding="utf-8")


def bars(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line.replace("\\\\", "")))


def test_a_readme_stays_whole_whatever_tensors_are_called(kind: Kind, tmp_path: Path):
    plain = readme(kind, tmp_path / "plain", [f"plain{number}" for number in range(len(HOSTILE))])
    hostile = readme(kind, tmp_path / "hostile", HOSTILE)
    assert plain is not None
    if hostile is None:
        return
    assert all(char.isprintable() or char == "\n" for char in hostile)
    assert len(hostile.splitlines()) == len(plain.splitlines())
    for one, other in zip(plain.splitlines(), hostile.splitlines(), strict=True):
        assert one.startswith("|") == other.startswith("|")
        assert one.startswith("```") == other.startswith("```")
        if one.startswith("|"):
            assert bars(one) == bars(other), other
    texts = [
        node.value
        for block in re.findall(r"^```python\n(.*?)^```", hostile, re.DOTALL | re.MULTILINE)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Constant)
    ]
    if "```python" in plain:
        assert set(HOSTILE) | {f"{name} out" for name in HOSTILE} <= set(texts)


def test_a_model_with_hostile_names_is_built_or_refused_with_a_reason(kind: Kind, tmp_path: Path):
    path = named(tmp_path / "m ' $(x) 名前.onnx", HOSTILE, batch(kind))
    made = packager.build(path, targets=[kind.name], out=tmp_path / "dist", cache=False)
    (result,) = made.targets
    if result.exit_code == 0:
        assert result.status == "passed" and result.archive is not None
        assert packager.verify(tmp_path / "dist" / result.archive).exit_code == 0
    else:
        assert result.status in ("refused", "missing", "error")
        assert result.message
