"""Goldens on disk: what is written comes back bit for bit, and what was tampered with is refused with its place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from packager import golden_store
from packager.errors import GoldenError
from packager.golden_store import JSON_FILE, PAYLOAD_FILE
from packager.goldens import GoldenCase, GoldenSet, dtype_name, numpy_dtype
from packager.parity import GoldenFileError, OutputRule, Tolerance, read_golden

CALM = settings(deadline=None, max_examples=60)
KINDS = st.sampled_from([
    "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "float64", "uint32",
    "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
    "float4e2m1", "float8e8m0", "int4", "uint4", "int2", "uint2",
])  # fmt: skip
NAMES = st.one_of(st.text(), st.sampled_from(["__proto__", "a/b", "..", "line\nbreak", "naïve", "\0", '"', "0.in.0"]))


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """An array of any ONNX dtype, any bits; sometimes not contiguous."""
    kind, shape = draw(KINDS), draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if kind == "string":
        return draw(hnp.arrays(object, shape, elements=st.text(max_size=4)))
    size = int(np.prod(shape))
    if kind in ("int4", "uint4", "int2", "uint2", "float4e2m1"):
        values = draw(hnp.arrays(np.int8, shape, elements=st.integers(-2, 1) if kind == "int2" else st.integers(0, 1)))
        return np.asarray(values.astype(numpy_dtype(kind)))
    if kind == "bool":
        return draw(hnp.arrays(np.bool_, shape))
    dtype = numpy_dtype(kind)
    array = np.frombuffer(draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize)), np.uint8)
    made = array.view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    return made.T if draw(st.booleans()) else made


@st.composite
def golden_sets(draw: st.DrawFn) -> GoldenSet:
    named = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    cases = [
        GoldenCase(
            draw(NAMES),
            draw(st.dictionaries(NAMES, tensors(), max_size=2)),
            {name: draw(tensors()) for name in named},
            draw(st.text()),
            draw(st.sampled_from(["", "source", "reference"])),
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    return GoldenSet(tuple(cases))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return one.ravel().tolist() == other.ravel().tolist()
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def small() -> GoldenSet:
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "t": np.array(["a", "b\0ü"], dtype=object)}
    return GoldenSet((GoldenCase("first", inputs, {"y": np.ones((2, 2), np.float32)}, "seed 0", "reference"),))


RULES = {"y": OutputRule(Tolerance(1e-3, 1e-4), 1, 4.8e-7)}


def store(folder: Path, goldens: GoldenSet | None = None, **more: Any) -> Path:
    settings: dict[str, Any] = {"policy": "default-1", "precision": "fp32", "excluded": {}} | more
    golden_store.write(folder, goldens or small(), settings.pop("rules", RULES), **settings)
    return folder


@CALM
@given(golden_sets())
def test_what_is_written_comes_back_bit_for_bit(goldens):
    rules = {name: OutputRule(Tolerance(0.5)) for name in goldens.cases[0].outputs}
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder), goldens, rules=rules)
        found = golden_store.read(Path(folder))
        assert dict(read_golden(Path(folder)).rules) == rules
    for case, back in zip(goldens.cases, found.cases, strict=True):
        assert (case.name, case.source, case.outputs_from) == (back.name, back.source, back.outputs_from)
        for arrays, returned in ((case.inputs, back.inputs), (case.outputs, back.outputs)):
            assert list(arrays) == list(returned)
            assert all(same(arrays[name], returned[name]) for name in arrays)


def test_the_same_goldens_give_the_same_bytes(tmp_path):
    one, other = store(tmp_path / "one"), store(tmp_path / "other")
    for name in (JSON_FILE, PAYLOAD_FILE):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    data = (one / JSON_FILE).read_bytes()
    assert data.endswith(b"}\n")
    assert b"\r" not in data
    assert "ü".encode() in data


def test_policy_precision_rules_and_exclusions_are_kept(tmp_path):
    store(tmp_path, policy="default-1, overridden: max_abs 0.01", precision="fp16", excluded={"r": "random"})
    found = read_golden(tmp_path)
    assert (found.policy, found.precision) == ("default-1, overridden: max_abs 0.01", "fp16")
    assert (found.rules, found.excluded, found.excluded_names) == (RULES, {"r": "random"}, frozenset({"r"}))


NEAR = {"y": OutputRule(Tolerance(scaled=1e-2), 1, 4e-3)}


def transformed(case: str = "first", **outputs: np.ndarray) -> golden_store.Transformed:
    answers = outputs or {"y": np.full((2, 2), 1.25, np.float32), "r": np.zeros(3, np.float32)}
    return golden_store.Transformed(GoldenSet((GoldenCase(case, {}, answers),)), NEAR)


def test_answers_of_the_transformed_model_go_along_with_their_rules(tmp_path):
    store(tmp_path, transformed=transformed(), excluded={"r": "random"})
    found = read_golden(tmp_path)
    assert found.transformed_rules == NEAR
    assert list(found.cases[0].transformed) == ["y"]
    assert found.cases[0].transformed["y"].tolist() == [[1.25, 1.25], [1.25, 1.25]]
    assert found.cases[0].outputs["y"].tolist() == [[1, 1], [1, 1]]
    bare = read_golden(store(tmp_path / "bare"))
    assert (bare.transformed_rules, bare.cases[0].transformed) == ({}, {})


def test_a_transformed_model_that_was_not_asked_or_lacks_an_output_is_refused(tmp_path):
    with pytest.raises(GoldenError, match="'first': the transformed model was not asked"):
        store(tmp_path, transformed=transformed("second"))
    with pytest.raises(GoldenError, match="no tolerance is given for output 'z'"):
        store(tmp_path, transformed=transformed(z=np.ones(1, np.float32)))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d["cases"][0].pop("transformed"), "tensor '0.run.0' is named nowhere"),
        (lambda d: d["transformed"].append({**d["transformed"][0], "name": "z"}), "output 'z' has no expected values"),
        (lambda d: d.pop("transformed"), "output 'y' has no rule"),
        (lambda d: d["transformed"].append(d["transformed"][0]), "an output is listed twice"),
        (lambda d: d.update(transformed={}), "'transformed' must be a list"),
    ],
)
def test_edited_answers_of_the_transformed_model_are_refused(tmp_path, edit, said):
    store(tmp_path, transformed=transformed(y=np.ones((2, 2), np.float32)))
    document = json.loads((tmp_path / JSON_FILE).read_text(encoding="utf-8"))
    edit(document)
    (tmp_path / JSON_FILE).write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(GoldenFileError, match=said):
        read_golden(tmp_path)


def test_values_of_excluded_outputs_are_left_out(tmp_path):
    case = small().cases[0]
    noisy = GoldenSet((GoldenCase(case.name, case.inputs, {**case.outputs, "r": np.ones(3)}),))
    found = golden_store.read(store(tmp_path, noisy, excluded={"r": "random"}))
    assert set(found.cases[0].outputs) == {"y"}


def test_inputs_alone_can_be_stored(tmp_path):
    bare = GoldenSet((GoldenCase("a", {"x": np.ones(2)}),))
    assert golden_store.read(store(tmp_path, bare, rules={})).cases[0].outputs == {}


def test_a_big_endian_and_a_fixed_width_text_array_come_back_plain(tmp_path):
    given_ = {"x": np.array([1.5, -2.0], ">f4"), "t": np.array(["a", "bc"]), "b": np.array([b"a", "ü".encode()])}
    goldens = GoldenSet((GoldenCase("a", given_, {"y": np.ones(1)}),))
    inputs = golden_store.read(store(tmp_path, goldens)).cases[0].inputs
    assert inputs["x"].tolist() == [1.5, -2.0]
    assert dtype_name(inputs["x"]) == "float32"
    assert [inputs["t"].tolist(), inputs["b"].tolist()] == [["a", "bc"], ["a", "ü"]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (GoldenCase("a", {"x": np.array(["\ud800"], dtype=object)}, {"y": np.ones(1)}), "isn't valid Unicode"),
        (GoldenCase("a", {"x": np.array([b"\xff"], dtype=object)}, {"y": np.ones(1)}), "isn't UTF-8"),
        (GoldenCase("a", {"x": np.array([1.5], dtype=object)}, {"y": np.ones(1)}), "float where strings belong"),
        (GoldenCase("a", {"x": np.zeros(1, "M8[s]")}, {"y": np.ones(1)}), "dtype datetime64"),
        (GoldenCase("a", {}, {}), "nothing is expected of output 'y'"),
        (GoldenCase("a", {}, {"y": np.ones(1), "z": np.ones(1)}), "no tolerance is given for output 'z'"),
    ],
)
def test_goldens_that_cannot_be_stored_are_refused(tmp_path, case, message):
    with pytest.raises(GoldenError, match=message):
        store(tmp_path, GoldenSet((case,)))
    assert not list(tmp_path.iterdir())


def test_no_cases_are_refused(tmp_path):
    with pytest.raises(GoldenError, match="no golden cases"):
        store(tmp_path, GoldenSet(()))


def _edit(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        change(document)
        (folder / JSON_FILE).write_text(json.dumps(document), encoding="utf-8")

    return apply


def _payload(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        arrays = load_file(folder / PAYLOAD_FILE)
        change(arrays)
        save_file(arrays, folder / PAYLOAD_FILE)

    return apply


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda folder: (folder / JSON_FILE).unlink(), r"golden\.json: can't be read"),
    "no payload": (lambda folder: (folder / PAYLOAD_FILE).unlink(), r"golden\.safetensors: can't be read"),
    "cut payload": (lambda folder: (folder / PAYLOAD_FILE).write_bytes(b"123"), r"golden\.safetensors: can't be read"),
    "not json": (lambda folder: (folder / JSON_FILE).write_bytes(b"{"), "not JSON"),
    "not utf-8": (lambda folder: (folder / JSON_FILE).write_bytes(b"\xff"), "not JSON"),
    "deep json": (lambda folder: (folder / JSON_FILE).write_bytes(b"[" * 200_000), "not JSON"),
    "a list": (lambda folder: (folder / JSON_FILE).write_bytes(b"[]"), "must be an object"),
    "huge json": (lambda folder: (folder / JSON_FILE).write_bytes(b" " * (2**26 + 1)), "larger than"),
    "schema": (_edit(lambda d: d.update(schema="packager.golden/9")), "schema is 'packager.golden/9'"),
    "key": (_edit(lambda d: d["cases"][0].pop("source")), r"cases\[0\]: key 'source' is missing"),
    "no cases": (_edit(lambda d: d.update(cases=[])), "tensor '0.in.0' is named nowhere|there are no cases"),
    "cases": (_edit(lambda d: d.update(cases={})), "'cases' must be a list"),
    "name": (_edit(lambda d: d["cases"][0]["inputs"][0].update(name=3)), r"inputs\[0\]: 'name' must be a text"),
    "twice": (_edit(lambda d: d["cases"][0]["inputs"][1].update(name="x")), "'x' is listed twice"),
    "rule twice": (_edit(lambda d: d["outputs"].append(d["outputs"][0])), "listed twice"),
    "no rule": (_edit(lambda d: d.update(outputs=[])), r"cases\[0\]: output 'y' has no rule"),
    "other rule": (_edit(lambda d: d["outputs"].append({**d["outputs"][0], "name": "z"})), "'z' has no expected"),
    "axis": (_edit(lambda d: d["outputs"][0].update(score_axis=True)), r"outputs\[0\]: 'score_axis'"),
    "text bound": (_edit(lambda d: d["outputs"][0]["tolerance"].update(max_abs="1")), "max_abs must be a number"),
    "NaN bound": (_edit(lambda d: d["outputs"][0]["tolerance"].update(max_abs=float("nan"))), "NaN is no JSON number"),
    "negative": (_edit(lambda d: d["outputs"][0]["tolerance"].update(scaled=-1)), "scaled must be 0 or more"),
    "rounding": (_edit(lambda d: d["outputs"][0].update(rounding=None)), "rounding must be a number"),
    "unknown bound": (_edit(lambda d: d["outputs"][0]["tolerance"].update(atol=1)), "unknown bound 'atol'"),
    "dtype": (_edit(lambda d: d["cases"][0]["inputs"][0].update(dtype="pickle")), "unknown dtype 'pickle'"),
    "other dtype": (_edit(lambda d: d["cases"][0]["inputs"][0].update(dtype="int32")), r"is F32\[2, 3\], but cases"),
    "shape": (_edit(lambda d: d["cases"][0]["inputs"][0].update(shape=[3, 2])), r"makes it F32\[3, 2\]"),
    "huge": (_edit(lambda d: d["cases"][0]["inputs"][0].update(shape=[2**62] * 9)), "'shape' must be a list"),
    "negative dim": (_edit(lambda d: d["cases"][0]["inputs"][0].update(shape=[-2, -3])), "'shape' must be a list"),
    "strings": (_edit(lambda d: d["cases"][0]["inputs"][1].update(shape=[10**12])), "needs 1000000000000 strings"),
    "no tensor": (_payload(lambda arrays: arrays.pop("0.in.0")), "tensor '0.in.0' is missing"),
    "stranger": (_payload(lambda arrays: arrays.update(z=np.ones(1))), "tensor 'z' is named nowhere"),
    "payload": (_payload(lambda arrays: arrays.update({"0.out.0": np.ones((2, 2))})), "tensor '0.out.0' is F64"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_files_are_refused_with_file_and_place(tmp_path, what):
    tamper, message = TAMPERED[what]
    tamper(store(tmp_path))
    with pytest.raises(GoldenFileError, match=message) as caught:
        read_golden(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(GoldenError, match=message):
        golden_store.read(tmp_path)


def test_an_int4_value_out_of_range_is_refused(tmp_path):
    goldens = GoldenSet((GoldenCase("a", {"x": np.ones(2, numpy_dtype("int4"))}, {"y": np.ones(1)}),))
    store(tmp_path, goldens)
    _payload(lambda arrays: arrays.update({"0.in.0": np.array([100, 1], np.int8)}))(tmp_path)
    with pytest.raises(GoldenFileError, match="a value doesn't fit int4"):
        read_golden(tmp_path)
