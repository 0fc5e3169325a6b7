"""The files a web bundle ships besides model and runtime: loader, types, judge and pages, each run or type-checked."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from onnx import TensorProto, helper

from packager import golden_store, parity
from packager.bundle import seal
from packager.goldens import GoldenCase, GoldenSet
from packager.parity import OutputRule, Tolerance
from packager.room import Stage
from packager.targets import web as room
from packager.targets.web import node
from tests.builders import BOOL, FLOAT, INT64, STRING, model, save, value
from tests.targets.test_web import HARD_NAMES, KIND, needs_node, plan_of

ROOT = Path(__file__).parents[2]
TYPESCRIPT = "typescript@5.9.3"
FLOAT16, UINT64 = TensorProto.FLOAT16, TensorProto.UINT64


def one_of_each(work: Path) -> Path:
    """A bundle of one input and output per way of giving values, with two golden cases, made in an empty folder."""
    kinds: dict[str, tuple[int, list[int | str]]] = {
        "f": (FLOAT, ["n", 3]), "i": (INT64, ["n", 2]), "u": (UINT64, [2]), "b": (BOOL, [2]), "h": (FLOAT16, [3]),
        "s": (STRING, [2]), "z": (FLOAT, []), "w": (FLOAT, ["p", "q"]),
    }  # fmt: skip
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"], name=name) for name in kinds]
    inputs = [value(name, *spec) for name, spec in kinds.items()]
    outputs = [value(f"{name}_out", *spec) for name, spec in kinds.items()]
    path = save(model(nodes, inputs, outputs), work / "m.onnx")
    plan = plan_of(path)
    made = work / "bundle"
    made.mkdir()
    room.build(plan, Stage(made, path, GoldenSet(())))
    feeds: dict[str, np.ndarray] = {
        "f": np.array([[1, 2, 3]], np.float32), "i": np.array([[1, 2**62]], np.int64),
        "u": np.array([0, 2**64 - 1], np.uint64), "b": np.array([True, False]), "h": np.array([1, 2, 3], np.float16),
        "s": np.array(["a", "名前"], object), "z": np.array(2.5, np.float32), "w": np.ones((2, 2), np.float32),
    }  # fmt: skip
    cases = tuple(
        GoldenCase(name, feeds, {f"{key}_out": array for key, array in feeds.items()}, "made", "made")
        for name in ("one", "two")
    )
    rules = {f"{name}_out": OutputRule(Tolerance(max_abs=1e-6, scaled=1e-6)) for name in kinds}
    golden_store.write(made / "golden", GoldenSet(cases), rules, policy="p", precision="fp32", excluded={})
    seal(made, plan, {}, KIND.facts.roles)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never changed."""
    return one_of_each(tmp_path_factory.mktemp("loader"))


PRELUDE = """
import { readFile } from "node:fs/promises";
globalThis.fetch = async (url) => new Response(await readFile(new URL(url)));
const { load, signature } = await import(process.argv[2]);
const good = { f: [1, 2, 3], i: [1, 2n], u: [0, 18446744073709551615n], b: [true, 0], h: [0.5, 65504, 1e-7],
  s: ["a", "b"], z: 1.5, w: { data: new Float32Array(6), dims: [2, 3] } };
const said = async (changed) => {
  try { await model.run({ ...good, ...changed }); } catch (error) { return `${error.name}: ${error.message}`; }
};
"""


def in_node(folder: Path, tmp_path: Path, script: str, module: str = "m.js") -> object:
    """Run a module in Node with the loader's exports; what it passes to ``tell`` comes back."""
    file = tmp_path / "script.mjs"
    file.write_text(
        PRELUDE + "const tell = (value) => console.log(JSON.stringify(value));\n" + script + "\nprocess.exit(0);\n"
    )
    command = [*(node.find_node() or []), str(file), (folder / module).as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_values_may_be_given_in_every_way_the_types_say(folder: Path, tmp_path: Path):
    got = in_node(folder, tmp_path, """
const model = await load();
await model.warmUp();
const { f_out, i_out, u_out, b_out, h_out, s_out, z_out, w_out } = await model.run(good);
const again = await model.run({ ...good, h: new Uint16Array([0x3800, 0x7bff, 0x8001]), f: new Float32Array(9) });
await model.release();
const late = await said({});
tell({ f: [f_out.dtype, f_out.dims, [...f_out.data]], i: [i_out.dims, [...i_out.data].map(String)],
  u: [...u_out.data].map(String), b: [...b_out.data],
  h: [...new Uint16Array(h_out.data.buffer, h_out.data.byteOffset, 3)],
  s: s_out.data, z: [z_out.dims, [...z_out.data]], w: w_out.dims, f2: again.f_out.dims, h2: [...again.h_out.data], late,
  frozen: Object.isFrozen(signature) && Object.isFrozen(signature.inputs[0].dims), threads: model.threads });
""")  # fmt: skip
    assert got == {
        "f": ["float32", [1, 3], [1, 2, 3]], "i": [[1, 2], ["1", "2"]], "u": ["0", "18446744073709551615"], "b": [1, 0],
        "h": np.array([0.5, 65504, 1e-7], np.float16).view(np.uint16).tolist(), "s": ["a", "b"], "z": [[], [1.5]],
        "w": [2, 3], "f2": [3, 3], "h2": [0x3800, 0x7BFF, 0x8001], "frozen": True, "threads": 1,
        "late": "Error: The model was released; load it again.",
    }  # fmt: skip


WRONG = {
    "{ f: undefined }": 'TypeError: Input "f" (float32[n, 3]) is missing',
    "{ x: 1 }": 'TypeError: There is no input "x"; inputs are "f" (float32[n, 3])',
    "{ f: new Float64Array(3) }": "Float32Array or an array of numbers is expected, not Float64Array",
    "{ f: [1, 2] }": "2 values don't fill dims [n, 3]",
    "{ f: { data: [1, 2, 3], dims: [3] } }": "dims [3] are of rank 1, not 2",
    "{ f: { data: [1, 2, 3, 4], dims: [1, 4] } }": "have 4 at axis 1 where 3 is expected",
    "{ f: { data: [1, 2, 3], dims: [2, 3] } }": "dims [2,3] hold 6 values, 3 were given",
    "{ f: { data: [1, 2, 3], dims: [-1, -3] } }": "aren't whole numbers",
    "{ f: { data: [1, 2, 3], dtype: 'int8' } }": "was given as int8",
    "{ f: {} }": "has no data",
    "{ f: [[1, 2, 3]] }": "a flat array of numbers is expected, not one with arrays in it",
    "{ f: [1, 2, undefined] }": "not one with undefined in it",
    "{ f: ['1', 2, 3] }": "not one with string in it",
    "{ h: [[1], 2, 3] }": "not one with arrays in it",
    "{ i: ['1', 2] }": "not one with string in it",
    "{ i: [1, 1.5] }": "1.5 is no int64",
    "{ u: [-1, 0] }": "-1 is no uint64",
    "{ b: [2, 0] }": "2 is no bool",
    "{ s: ['a\\0b', ''] }": "a string has a NUL",
    "{ s: [1, 2] }": "an array of strings is expected",
    "{ w: [1, 2, 3, 4] }": "give { dims, data }",
    "{ z: [1, 2] }": "hold 1 values, 2 were given",
}


@needs_node
def test_what_is_wrong_is_said_in_a_sentence(folder: Path, tmp_path: Path):
    calls = ", ".join(f"await said({wrong})" for wrong in WRONG)
    got = in_node(folder, tmp_path, f"const model = await load();\ntell([{calls}]);")
    assert isinstance(got, list)
    for (wrong, wanted), told in zip(WRONG.items(), got, strict=True):
        assert wanted in told, (wrong, told)


@needs_node
def test_numbers_become_the_nearest_float16(folder: Path, tmp_path: Path):
    rng = np.random.default_rng(3)
    sizes = 10.0 ** rng.uniform(-9, 5.5, 2998) * rng.choice([-1, 1], 2998)
    edges = [0.0, -0.0, 65519.99, 65520, 2**-14, 2**-24, 2**-25, 2**-25 * 1.01, 1 + 2**-11, 1 + 3 * 2**-11, 6.1e-5]
    numbers = np.array([*edges, *sizes, math.inf, -math.inf], np.float64)
    numbers = numbers[: len(numbers) // 3 * 3]
    text = json.dumps([float(number) if math.isfinite(number) else str(number) for number in numbers])
    got = in_node(folder, tmp_path, f"""
const model = await load();
const numbers = {text}.map((one) => (typeof one === "string" ? Number(one.replace("inf", "Infinity")) : one));
const bits = [];
for (let at = 0; at < numbers.length; at += 3) {{
  const {{ data }} = (await model.run({{ ...good, h: numbers.slice(at, at + 3) }})).h_out;
  bits.push(...new Uint16Array(data.buffer, data.byteOffset, 3));
}}
tell(bits);
""")  # fmt: skip
    with np.errstate(over="ignore"):
        assert got == numbers.astype(np.float16).view(np.uint16).tolist()


@needs_node
def test_bytes_can_be_handed_over_downloads_aborted_and_watched(folder: Path, tmp_path: Path):
    got = in_node(folder, tmp_path, """
const bytes = await readFile(new URL("./model.onnx", process.argv[2]));
const seen = [];
const first = await load({ onProgress: ({ loaded, total }) => seen.push([loaded, total]) });
const model = await load({ modelBytes: bytes });
const { z_out } = await model.run(good);
const gone = new AbortController();
gone.abort();
let aborted = "";
try { await load({ signal: gone.signal }); } catch (error) { aborted = error.name; }
let lost = "";
try { await load({ modelUrl: new URL("./absent.onnx", process.argv[2]) }); } catch (error) { lost = error.message; }
let other = "";
try { await load({ modelUrl: new URL("./package.json", process.argv[2]) }); } catch (error) { other = error.message; }
const rising = seen.every(([at], n) => !n || at >= seen[n - 1][0]);
tell({ z: z_out.data[0], last: seen.at(-1), rising, aborted, lost, other });
""")  # fmt: skip
    assert isinstance(got, dict)
    total = (folder / "model.onnx").stat().st_size + (folder / "runtime/ort-wasm-simd-threaded.wasm").stat().st_size
    assert (got["z"], got["last"], got["rising"], got["aborted"]) == (1.5, [total, total], True, "AbortError")
    assert "absent.onnx can't be fetched" in got["lost"]
    assert "package.json has" in got["other"] and "deploy the bundle's own file" in got["other"]


@needs_node
def test_operators_listed_as_refused_are_not_in_the_runtime(folder: Path, tmp_path: Path):
    """The runtime refuses a model of each by name; of one that isn't listed it complains about its inputs only."""
    made = tmp_path / "models"
    made.mkdir()
    names = [*KIND.facts.limits.refused_operators, "com.microsoft.QLinearAdd"]
    for name in names:
        domain, _, operator = name.rpartition(".")
        nodes = [helper.make_node(operator, ["x"], ["y"], domain=domain)]
        save(model(nodes, [value("x")], [value("y")], domains=[(domain, 1)]), made / f"{name}.onnx")
    got = in_node(folder, tmp_path, f"""
const ort = await import(new URL("./runtime/ort.wasm.min.js", process.argv[2]));
await load();
const words = {{}};
for (const name of {json.dumps(names)}) {{
  const bytes = await readFile({json.dumps(str(made))} + `/${{name}}.onnx`);
  words[name] = await ort.InferenceSession.create(bytes).then(() => "taken", (error) => error.message);
}}
tell(words);
""")  # fmt: skip
    assert isinstance(got, dict)
    missing = [name for name, words in got.items() if "is not a registered function/op" in words]
    assert missing == list(KIND.facts.limits.refused_operators)


def cases() -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray], OutputRule]]:
    """Expected and actual outputs that meet every rule of the judge, and the rule."""
    rng = np.random.default_rng(11)
    base = rng.standard_normal((4, 5)).astype(np.float32)
    full = Tolerance(max_abs=1e-3, scaled=1e-3, cosine=0.999, top1=0.9)
    for spread in (0, 1e-8, 1e-4, 1e-3, 0.1, 1):
        noisy = (base + spread * rng.standard_normal(base.shape)).astype(np.float32)
        yield {"y": base}, {"y": noisy}, OutputRule(full, 1)
        yield {"y": base}, {"y": noisy}, OutputRule(full, -2, 1e-3)
        yield {"y": base.astype(np.float16)}, {"y": noisy.astype(np.float16)}, OutputRule(full, 0)
        yield {"y": base.astype(np.float64) * 1e-7}, {"y": noisy.astype(np.float64) * 1e-7}, OutputRule(full)
        masked, other = base.copy(), noisy.copy()
        masked[0, :2], other[0, :2] = -1e9, -1e9 * (1 + spread)
        yield {"y": masked}, {"y": other}, OutputRule(full, 1)
    holed = base.copy()
    holed[0, 0], holed[1, 1], holed[2, 2] = np.nan, np.inf, -np.inf
    yield {"y": holed}, {"y": holed}, OutputRule(full, 1)
    yield {"y": holed}, {"y": base}, OutputRule(full, 1)
    yield {"y": np.full(3, np.nan, np.float32)}, {"y": np.full(3, np.nan, np.float32)}, OutputRule(full)
    yield {"y": base}, {"y": base.reshape(5, 4)}, OutputRule(full)
    yield {"y": base}, {"y": base[None]}, OutputRule(full)
    yield {"y": base}, {"y": base.astype(np.float64)}, OutputRule(full)
    yield {"y": base}, {"z": base}, OutputRule(full)
    yield {"y": base}, {"y": base}, OutputRule(Tolerance())
    yield {"y": base * 0}, {"y": base * 0 + np.float32(1e-5)}, OutputRule(full)
    yield {"y": base}, {"y": base * 0}, OutputRule(full)
    yield {"y": base}, {"y": base}, OutputRule(full, 7)
    yield {"y": base[:0]}, {"y": base[:0]}, OutputRule(full)
    big = np.array([2**62, -1], np.int64)
    yield {"y": big}, {"y": big}, OutputRule(full)
    yield {"y": big}, {"y": big + 1}, OutputRule(full)
    yield {"y": np.array([True])}, {"y": np.array([False])}, OutputRule(full)
    yield {"y": np.array(["a", "é"], object)}, {"y": np.array(["a", "e"], object)}, OutputRule(full)


def plain(array: np.ndarray) -> dict[str, object]:
    """A tensor as JSON; 64-bit integers and what isn't finite as texts."""
    kind = parity.dtype_name(array)
    data = array.view(np.uint16) if kind == "float16" else array
    return {"dtype": kind, "dims": list(array.shape), "data": [str(x) if kind != "string" else x for x in data.ravel()]}


@needs_node
def test_the_judge_in_javascript_judges_as_the_one_in_python(folder: Path, tmp_path: Path):
    made = list(cases())
    given = [
        [{name: plain(array) for name, array in side.items()} for side in (one, other)]
        + [{"tolerance": rule.tolerance.to_dict(), "score_axis": rule.score_axis, "rounding": rule.rounding}]
        for one, other, rule in made
    ]
    got = in_node(folder, tmp_path, f"""
const {{ compareCase }} = await import(new URL("./verify/compare.js", process.argv[2]));
const parsed = {{ float16: (text) => Uint16Array.from(text, Number),
  float32: (text) => Float32Array.from(text, number),
  float64: (text) => Float64Array.from(text, number), int64: (text) => BigInt64Array.from(text, BigInt),
  bool: (text) => Uint8Array.from(text, (one) => one === "True"), string: (text) => text }};
const number = (text) => Number(text.replace("inf", "Infinity"));
const tensor = ({{ dtype, dims, data }}) => ({{ dtype, dims, data: parsed[dtype](data) }});
const read = (side) => Object.fromEntries(Object.entries(side).map(([name, found]) => [name, tensor(found)]));
const judge = ([one, other, rule]) => compareCase("c", read(one), read(other), new Map([["y", rule]]), new Set());
tell({json.dumps(given)}.map(judge));
""")  # fmt: skip
    assert isinstance(got, list)
    for (one, other, rule), judged in zip(made, got, strict=True):
        wanted = parity.compare_case("c", one, other, {"y": rule})
        assert judged["passed"] == wanted.passed, (wanted.reasons, judged["reasons"])
        assert len(judged["reasons"]) == len(wanted.reasons), (wanted.reasons, judged["reasons"])
        assert [result["name"] for result in judged["outputs"]] == [result.name for result in wanted.outputs]
        for result, mine in zip(judged["outputs"], wanted.outputs, strict=True):
            metrics = None if mine.metrics is None else mine.metrics.to_dict()
            assert (result["metrics"] is None) == (metrics is None)
            for key, expected in (metrics or {}).items():
                found = result["metrics"][key]
                assert found == (pytest.approx(expected, rel=1e-9) if isinstance(expected, float) else expected), key


@needs_node
def test_the_judge_in_javascript_asks_for_nearness_to_the_transformed_model(folder: Path, tmp_path: Path):
    got = in_node(folder, tmp_path, """
const { judgeCase } = await import(new URL("./verify/compare.js", process.argv[2]));
const bounds = (scaled) => ({ max_abs: null, scaled, cosine: null, top1: null });
const rule = (scaled) => [{ name: "y", tolerance: bounds(scaled), score_axis: null, rounding: 0 }];
const y = (...values) => ({ y: { dtype: "float32", dims: [2], data: Float32Array.from(values) } });
const golden = { outputs: rule(0.1), transformed: rule(0.01), excluded: [] };
const one = { name: "c", outputs: y(1, -4), transformed: y(1.25, -4) };
const bare = { ...one, transformed: undefined };
tell([judgeCase(golden, one, y(1.25, -4)), judgeCase(golden, one, y(1, -4)), judgeCase(golden, bare, y(1, -4))]);
""")  # fmt: skip
    assert isinstance(got, list)
    assert [each["passed"] for each in got] == [True, False, True]
    assert got[0]["outputs"][0]["metrics"]["max_abs"] == 0.25
    assert got[1]["reasons"] == ["against the transformed model: output 'y': scaled error 0.0625 is over 0.01"]


@needs_node
def test_the_self_check_writes_the_verdict_that_packager_writes(folder: Path, tmp_path: Path):
    got = in_node(folder, tmp_path, """
const { check } = await import(new URL("./verify/check.js", process.argv[2]));
tell(await check());
""")  # fmt: skip
    assert isinstance(got, dict)
    golden = parity.read_golden(folder / "golden")
    results = [parity.compare_case(case.name, case.outputs, case.outputs, golden.rules) for case in golden.cases]
    wanted = parity.verdict_document(
        results, level="runtime", runtime={}, host={}, policy={"name": "p", "precision": "fp32"}, target="", kind="",
        name="", version="", bundle_digest="",
    )  # fmt: skip
    assert set(got) == set(wanted)
    assert (got["schema"], got["status"], got["kind"]) == ("packager.verdict/1", "passed", "web")
    assert (got["cases"], got["worst"]) == (wanted["cases"], wanted["worst"])


@pytest.fixture(scope="session")
def typescript() -> list[str]:
    """The command that type-checks; the compiler is fetched through npm once."""
    npm, runs = node.find_npm(), node.find_node()
    if npm is None or runs is None:
        pytest.skip("needs Node and npm")
    root = Path(os.environ["PACKAGER_RUNTIME_DIR"])
    root.mkdir(parents=True, exist_ok=True)
    ready = root / TYPESCRIPT.replace("@", "-")
    with FileLock(root / "typescript.lock"):
        if not ready.is_dir():
            with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as work:
                subprocess.run(
                    [*npm, "pack", "--loglevel=error", TYPESCRIPT], cwd=work, capture_output=True, check=True
                )
                (tarball,) = Path(work).glob("*.tgz")
                with tarfile.open(tarball) as tar:
                    tar.extractall(work, filter="data")
                (Path(work) / "package").rename(ready)
    return [*runs, str(ready / "lib/tsc.js"), "--noEmit", "--strict", "--target", "es2022", "--module", "nodenext"]


def checked(typescript: list[str], folder: Path, work: Path, source: str) -> str:
    """What the compiler says of a module that uses the bundle as a dependency; empty for nothing."""
    (work / "node_modules").mkdir(exist_ok=True)
    if not (work / "node_modules/m").exists():
        (work / "node_modules/m").symlink_to(folder)
    (work / "package.json").write_text('{"type": "module"}')
    (work / "use.ts").write_text(source)
    done = subprocess.run([*typescript, "use.ts"], cwd=work, capture_output=True, text=True, check=False)
    return done.stdout


def test_the_types_accept_what_the_loader_takes_and_nothing_else(typescript: list[str], folder: Path, tmp_path: Path):
    good = """
import { load, signature, type Inputs } from "m";
const model = await load({ threads: "auto", onProgress: ({ loaded, total }) => console.log(loaded / total) });
const inputs: Inputs = { f: [1, 2, 3], i: [1, 2n], u: new BigUint64Array(2), b: [true, 0], h: new Uint16Array(3),
  s: ["a", "b"], z: 1.5, w: { data: new Float32Array(6), dims: [2, 3] } };
const { f_out, i_out, s_out } = await model.run(inputs);
const numbers: Float32Array = f_out.data;
const big: BigInt64Array = i_out.data;
const rank: 2 = f_out.dims.length;
const texts: readonly string[] = s_out.data;
console.log(numbers, big, rank, texts, signature.inputs[0].dims, model.threads);
await model.release();
"""
    assert checked(typescript, folder, tmp_path, good) == ""
    wrong = ("f: new Float64Array(3)", "f: 'text'", "f: { data: [1], dims: [1] }", "f: [1], g: [1]", "")
    lines = [
        f"// @ts-expect-error\nexport const wrong{at}: Inputs = {{ ...rest, {text} }};" for at, text in enumerate(wrong)
    ]
    declared = "import type { Inputs } from 'm';\ndeclare const rest: Omit<Inputs, 'f'>;\n"
    assert checked(typescript, folder, tmp_path, declared + "\n".join(lines)) == ""


def test_types_with_hard_names_compile(typescript: list[str], tmp_path: Path):
    nodes = [helper.make_node("Neg", [name], [f"{name}!"], name=f"n{at}") for at, name in enumerate(HARD_NAMES)]
    inputs = [value(name, FLOAT, None if name == "class" else [2]) for name in HARD_NAMES]
    path = save(model(nodes, inputs, [value(f"{name}!", FLOAT, [2]) for name in HARD_NAMES]), tmp_path / "m.onnx")
    made = tmp_path / "bundle"
    made.mkdir()
    room.build(plan_of(path), Stage(made, path, GoldenSet(())))
    given = ", ".join(f"{json.dumps(name)}: [1, 2]" for name in HARD_NAMES)
    source = f"""import {{ load }} from "m";
const outputs = await (await load()).run({{ {given} }});
const found: Float32Array[] = [{", ".join(f"outputs[{json.dumps(name + '!')}].data" for name in HARD_NAMES)}];
console.log(found);
"""
    assert checked(typescript, made, tmp_path, source) == ""
