"""The CPU service room without a build: plans, refusals, the protocol byte by byte, merging, and what is measured."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as published
from onnx import TensorProto, helper

from packager.errors import BuildError, Refused
from packager.golden_synth import synthesise
from packager.goldens import GoldenSet
from packager.model import open_model
from packager.room import Plan, PlanRequest, Stage, kind_named
from packager.targets.cpu import Options, infer, tune
from packager.targets.cpu.building import constraints, place, settings_for
from packager.targets.cpu.planning import plan_for
from packager.targets.cpu.service import messages
from packager.targets.cpu.service.batching import Batcher
from packager.targets.cpu.service.protocol import (
    Malformed,
    Request,
    from_bytes,
    read_request,
    to_bytes,
    write_response,
)
from tests.builders import FLOAT, model, relu, save, value

NAMES = ("y", "z")


def request(path: Path, **options: object) -> PlanRequest:
    opened = open_model(path)
    return PlanRequest(
        target="cpu", kind="cpu", name="m", version="1", model=opened, goldens=synthesise(opened), precision="fp32",
        shapes=(), options=Options.model_validate(options), facts=kind_named("cpu").facts,
    )  # fmt: skip


def plan(path: Path, **options: object) -> Plan:
    made: Plan = plan_for(request(path, **options))
    return made


# What is decided


def test_what_cannot_be_served_is_named(tmp_path: Path):
    nodes = [helper.make_node("Identity", [name], [f"{name}2"]) for name in ("brain", "fine")]
    kinds = {"brain": TensorProto.BFLOAT16, "fine": FLOAT}
    path = save(model(nodes, [value(n, k) for n, k in kinds.items()], [value(f"{n}2", k) for n, k in kinds.items()]),
                tmp_path / "m.onnx")  # fmt: skip
    with pytest.raises(Refused, match=r"input 'brain' is bfloat16.*\n.*output 'brain2' is bfloat16") as told:
        plan(path)
    assert "fine" not in told.value.message


def test_a_model_newer_than_the_oldest_runtime_allowed_is_refused(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    with pytest.raises(Refused, match=r"opset 27.*ONNX Runtime reads up to 26"):
        plan(save(model(nodes, [value("x")], [value("y")], opset=27, ir=13), tmp_path / "m.onnx"))


def test_merging_asked_for_where_it_can_not_be(tmp_path: Path):
    fixed = relu(tmp_path / "m.onnx", shape=[8, 3])
    with pytest.raises(Refused, match="first dim of input 'x' is fixed at 8"):
        plan(fixed, max_batch=4)
    assert plan(fixed).notes == ("requests aren't merged: the first dim of input 'x' is fixed at 8",)
    assert plan(relu(tmp_path / "free.onnx")).notes == ()
    mean = [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])]
    mixing = save(model(mean, [value("x")], [value("y")]), tmp_path / "mean.onnx")
    goldens = synthesise(open_model(mixing))
    settings = settings_for(plan(mixing), mixing, goldens, Options())
    assert (settings["max_batch"], settings["rows_independent"]) == (0, False)
    assert "answers differently in a batch of 2" in str(settings["batching"])
    with pytest.raises(BuildError, match="max_batch is 4, but the model can't be batched"):
        settings_for(plan(mixing, max_batch=4), mixing, goldens, Options(max_batch=4))


def test_another_cpu_than_the_one_asked_for_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = relu(tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    stage = Stage(tmp_path / "out", path, GoldenSet(()))
    monkeypatch.setattr(infer, "cpu_features", lambda: {"sse4_2", "avx2", "fma", "f16c"})
    assert infer.cpu_level() == "x86-64-v3"
    for other in ("x86-64-v2", "x86-64-v4"):
        with pytest.raises(BuildError, match=f"for {other}, but this CPU is x86-64-v3"):
            place(stage, Options(optimize_for=other))
    place(stage, Options(optimize_for="x86-64-v3"))
    assert (tmp_path / "out/model.onnx").is_file()
    infer.check_level("x86-64-v3")
    infer.check_level("portable")
    with pytest.raises(RuntimeError, match=r"optimised for x86-64-v4.*lacks avx512"):
        infer.check_level("x86-64-v4")
    monkeypatch.setattr(infer, "cpu_features", set)
    assert infer.cpu_level() == ""


def test_constraints_are_what_is_installed_and_all_of_it():
    lines = dict(line.split("==") for line in constraints(["starlette"]).splitlines())
    assert {"anyio", "numpy", "onnxruntime", "starlette"} <= set(lines)
    assert lines["numpy"] == np.__version__
    assert list(lines) == sorted(lines)


# The protocol


def parsed(document: object, **more: Any) -> Request:
    made: Request = read_request(json.dumps(document).encode(), more.get("header"), NAMES)
    return made


def tensor(datatype: str, shape: list[Any], data: object) -> dict[str, object]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}]}


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "wanted"),
    [
        ("FP32", [2, 2], [1, 2.5, -3, 4], np.array([[1, 2.5], [-3, 4]], np.float32)),
        ("FP32", [2, 2], [[1, 2.5], [-3, 4]], np.array([[1, 2.5], [-3, 4]], np.float32)),
        ("FP16", [1], [65504], np.array([65504], np.float16)),
        ("FP64", [], [1e300], np.array(1e300)),
        ("UINT64", [1], [2**64 - 1], np.array([2**64 - 1], np.uint64)),
        ("INT64", [2], [-(2**63), 2**63 - 1], np.array([-(2**63), 2**63 - 1], np.int64)),
        ("BOOL", [2], [True, False], np.array([True, False])),
        ("FP32", [0, 3], [], np.zeros((0, 3), np.float32)),
        ("FP32", [2, 0], [[], []], np.zeros((2, 0), np.float32)),
    ],
)
def test_values_become_arrays(datatype: str, shape: list[int], data: object, wanted: np.ndarray):
    found = parsed(tensor(datatype, shape, data)).inputs["x"]
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)


def test_texts_travel_both_ways():
    found = parsed(tensor("BYTES", [2], ["", "naïve 名前 🎈"])).inputs["x"]
    assert found.tolist() == ["", "naïve 名前 🎈"]
    again = from_bytes("x", "BYTES", (2,), to_bytes(found))
    assert again.tolist() == found.tolist()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (tensor("INT8", [1], [128]), "beyond INT8"),
        (tensor("UINT8", [1], [-1]), "beyond UINT8"),
        (tensor("INT64", [1], [10**30]), "beyond INT64"),
        (tensor("INT32", [1], [1.0]), "is INT32, but its data has float"),
        (tensor("INT32", [1], [True]), "is INT32, but its data has bool"),
        (tensor("BOOL", [1], [1]), "is BOOL, but its data has int"),
        (tensor("FP32", [1], [1e300]), "beyond FP32"),
        (tensor("FP16", [1], [65536]), "beyond FP16"),
        (tensor("FP32", [1], [10**400]), "beyond FP32"),
        (tensor("FP32", [1], ["1"]), "its data has str"),
        (tensor("BYTES", [1], ["\ud800"]), "half a surrogate pair"),
        (tensor("FP32", [3], [1, 2]), r"has 2 values, its shape \[3\] holds 3"),
        (tensor("FP32", [4, 1], [[1, 2], [3, 4]]), "aren't nested as its shape"),
        (tensor("FP32", [2, 2], [[1, 2], 3]), "aren't nested"),
        (tensor("FP32", [True], [1]), "list of sizes"),
        (tensor("FP32", [1 << 70], [1]), "beyond what can be served"),
        (tensor("FP32", [0, 1 << 39, 1 << 39], []), "beyond what can be served"),
        (tensor("FP32", [1] * 33, [1]), "beyond what can be served"),
        ({"inputs": [], "outputs": [{"name": "q"}]}, "no output 'q'"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "true or false"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(document: object, reason: str):
    with pytest.raises(Malformed, match=reason):
        parsed(document)


def test_bytes_are_held_to_dtype_and_shape():
    with pytest.raises(Malformed, match=r"3 bytes, FP32\[1\] has 4"):
        from_bytes("x", "FP32", (1,), b"abc")
    with pytest.raises(Malformed, match="other than 0 and 1"):
        from_bytes("x", "BOOL", (2,), b"\x01\x02")
    with pytest.raises(Malformed, match="no UTF-8"):
        from_bytes("x", "BYTES", (1,), b"\x01\x00\x00\x00\xff")
    for cut in (b"\x05\x00\x00\x00ab", b"\x05\x00"):
        with pytest.raises(Malformed, match=r"a text of 5 bytes, 2 are left|end inside the length"):
            from_bytes("x", "BYTES", (1,), cut)
    assert from_bytes("x", "FP32", (2,), memoryview(b"\0" * 9)[1:]).flags.aligned


def test_an_answer_is_bytes_where_bytes_were_asked_for():
    asked = parsed(
        {"id": "7", "inputs": [], "outputs": [{"name": "z"}, {"name": "y", "parameters": {"binary_data": True}}]}
    )
    outputs = {"y": np.array([1, 2], np.float32), "z": np.array([[True]]), "w": np.zeros(1)}
    parts, length = write_response(("m", "1"), asked, outputs)
    head = json.loads(parts[0])
    assert length == len(parts[0])
    assert head == {
        "model_name": "m", "model_version": "1", "id": "7",
        "outputs": [
            {"name": "z", "datatype": "BOOL", "shape": [1, 1], "data": [True]},
            {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
        ],
    }  # fmt: skip
    assert parts[1] == np.array([1, 2], "<f4").tobytes()
    plain, none = write_response(("m", "1"), parsed({"inputs": []}), {"y": np.array([np.nan], np.float32)})
    assert none is None and b'"data": [NaN]' in plain[0]


def test_the_messages_are_those_that_are_published():
    """Field for field as in a client that somebody else maintains; fields that only it has are its extensions."""
    for name in messages.TABLE:
        ours = messages.message(name).DESCRIPTOR
        theirs = published.DESCRIPTOR.message_types_by_name[name.split(".")[0]]
        for inner in name.split(".")[1:]:
            theirs = theirs.nested_types_by_name[inner]
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type) == (other.number, other.type), f"{name}.{field.name}"
            assert field.is_repeated == other.is_repeated, f"{name}.{field.name}"
    service = published.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == messages.SERVICE
    assert set(messages.METHODS) <= {method.name for method in service.methods}


# Merging


def merged(sizes: list[int], limit: int, *, fail: bool = False, delay: float = 0.0) -> tuple[list[Any], list[int]]:
    """Answers to requests of so many rows that wait while a first run is on, and the rows of every run."""
    runs: list[int] = []
    first, go = threading.Event(), threading.Event()

    def run(arrays: Any) -> dict[str, np.ndarray]:
        x = arrays["x"]
        runs.append(len(x))
        if not first.is_set():
            first.set()
            assert go.wait(30)
        if fail and (x < 0).any():
            raise RuntimeError("a negative row")
        return {"y": x * 2}

    async def ask() -> list[Any]:
        batcher = Batcher(run, asyncio.get_running_loop(), limit, delay, 1, lambda *_: None)
        futures = [batcher.submit({"x": np.zeros((1, 1))})]
        await asyncio.to_thread(first.wait, 30)
        futures += [batcher.submit({"x": np.full((size, 1), index)}) for index, size in enumerate(sizes, 1)]
        if fail:
            futures.append(batcher.submit({"x": np.full((1, 1), -1)}))
        go.set()
        answers = await asyncio.gather(*futures, return_exceptions=True)
        await asyncio.to_thread(batcher.close)
        return answers[1:]

    return asyncio.run(ask()), runs


def test_what_waits_goes_together_and_each_gets_its_own():
    answers, runs = merged([1, 2, 1], 8)
    assert runs == [1, 4]
    assert [answer["y"].tolist() for answer in answers] == [[[2]], [[4], [4]], [[6]]]


def test_no_batch_is_larger_than_allowed_and_none_is_made_where_rows_may_mix():
    assert merged([3, 3, 1], 4)[1] == [1, 4, 3]
    assert merged([1, 1], 0)[1] == merged([1, 1], 1)[1] == [1, 1, 1]
    answers, runs = merged([9], 4)
    assert runs == [1, 9] and len(answers[0]["y"]) == 9, "a request larger than a batch is run alone"


def test_a_strangers_failure_is_not_anothers():
    answers, runs = merged([1, 1], 8, fail=True)
    assert [type(answer).__name__ for answer in answers] == ["dict", "dict", "RuntimeError"]
    assert runs == [1, 3, 1, 1, 1]


def test_rows_of_another_shape_are_not_merged():
    seen: list[tuple[int, ...]] = []

    def run(arrays: Any) -> dict[str, np.ndarray]:
        seen.append(arrays["x"].shape)
        return {"y": arrays["x"]}

    async def ask() -> None:
        batcher = Batcher(run, asyncio.get_running_loop(), 8, 0.2, 1, lambda *_: None)
        await asyncio.gather(*(batcher.submit({"x": np.zeros((1, size))}) for size in (2, 3, 2)))
        await asyncio.to_thread(batcher.close)

    asyncio.run(ask())
    assert sorted(seen) == [(1, 3), (2, 2)]


def test_settings_worth_measuring_keep_the_cores_busy():
    found = list(tune.settings(4, 2))
    assert (4, 1, 1) in found and (1, 4, 2) in found and (2, 2, 1) in found
    assert all(threads * runs <= 4 and batch in (1, 2) for threads, runs, batch in found)
    assert [each for each in tune.settings(1, 1)] == [(1, 1, 1)]  # noqa: C416 - an iterator, spelled out


def test_a_session_is_set_as_the_bundle_says():
    made = infer.session_options(
        {"quantized": True, "memory_pattern": False, "memory_arena": False, "spinning": False}, 3, Path("model.ort")
    )
    assert (made.intra_op_num_threads, made.enable_mem_pattern, made.enable_cpu_mem_arena) == (3, False, False)
    for key, wanted in (
        ("session.x64quantprecision", "1"),
        ("session.intra_op.allow_spinning", "0"),
        ("session.load_model_format", "ORT"),
    ):
        assert made.get_session_config_entry(key) == wanted
    plain = infer.session_options({}, 0, Path("model.onnx"))
    assert plain.enable_mem_pattern and plain.enable_cpu_mem_arena
    with pytest.raises(RuntimeError, match="x64quantprecision"):
        plain.get_session_config_entry("session.x64quantprecision")
