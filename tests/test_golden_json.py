"""Polygraphy and KServe JSON keep their values exactly, and what is malformed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packager import golden_json
from packager.errors import GoldenError
from packager.golden_formats import read_goldens
from packager.goldens import GoldenSet, dtype_name
from tests.golden_builders import (
    SIGNATURE,
    X,
    Y,
    assert_one_case,
    refused,
    run_results,
    saved,
    signature,
    tensor,
    write_json,
)


def test_polygraphy_inputs_and_outputs_are_joined(tmp_path):
    write_json(tmp_path / "inputs.json", [{"x": saved(X)}, {"x": saved(X + 1)}])
    write_json(tmp_path / "outputs.json", run_results({"y": Y}, {"y": Y + 1}))
    first, second = read_goldens(tmp_path, SIGNATURE).cases
    assert_one_case(GoldenSet((first,)))
    assert (first.name, second.name, second.source) == ("inputs-0", "inputs-1", "inputs.json")
    np.testing.assert_array_equal(second.outputs["y"], Y + 1)


def test_polygraphy_folders_of_iterations_are_joined(tmp_path):
    for number in range(2):
        write_json(tmp_path / "inputs" / f"{number:010}.json", {"x": saved(X + number)})
        write_json(tmp_path / "outputs" / f"{number:010}.json", run_results({"y": Y + number}))
    cases = read_goldens(tmp_path, SIGNATURE).cases
    assert [(float(case.inputs["x"][0, 0]), float(case.outputs["y"][0, 0])) for case in cases] == [(0, 0), (1, 1)]


def test_outputs_of_several_runners_are_refused(tmp_path):
    path = write_json(tmp_path / "outputs.json", run_results({"y": Y}, runners=2))
    assert "outputs of 2 runners" in refused(path).message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"tensor": "AAAA", "polygraphy_class": "Tensor"}, "torch tensor"),
        ({"array": "@@", "polygraphy_class": "ndarray"}, "not base64"),
        ({"array": "AAAA", "polygraphy_class": "ndarray"}, "not a .npy array"),
    ],
)
def test_damaged_polygraphy_arrays_are_refused(tmp_path, value, words):
    error = refused(write_json(tmp_path / "inputs.json", [{"x": value}]))
    assert words in error.message
    assert "array 'x'" in error.message


def test_a_kserve_document_may_hold_request_and_response(tmp_path):
    both = {"inputs": [tensor("x", X)], "outputs": [tensor("y", Y)]}
    assert_one_case(read_goldens(write_json(tmp_path / "a.json", both), SIGNATURE))
    nested = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": X.tolist()}]}
    assert_one_case(read_goldens(write_json(tmp_path / "b.json", nested), SIGNATURE), outputs=False)


def test_kserve_requests_and_responses_are_joined(tmp_path):
    write_json(tmp_path / "1.request.json", {"id": "1", "inputs": [tensor("x", X)], "outputs": [{"name": "y"}]})
    write_json(tmp_path / "1.response.json", {"model_name": "m", "outputs": [tensor("y", Y)]})
    assert_one_case(read_goldens(tmp_path, SIGNATURE))


@pytest.mark.parametrize(
    ("datatype", "dtype", "data"),
    [
        ("FP16", "float16", [0.5, -2]), ("BF16", "bfloat16", [1.5, 2]), ("FP64", "float64", [0.1, 1e300]),
        ("INT64", "int64", [2**62 + 1, -5]), ("UINT8", "uint8", [0, 255]), ("UINT64", "uint64", [2**64 - 1, 0]),
        ("BOOL", "bool", [True, False]), ("BYTES", "string", ["", "日本"]),
    ],
)  # fmt: skip
def test_kserve_datatypes_keep_their_values(tmp_path, datatype, dtype, data):
    path = write_json(
        tmp_path / "a.json", {"inputs": [{"name": "x", "shape": [2], "datatype": datatype, "data": data}]}
    )
    (case,) = read_goldens(path, signature(dtype, ("n",))).cases
    assert dtype_name(case.inputs["x"]) == dtype
    assert case.inputs["x"].tolist() == data


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [2], "datatype": "FP32", "data": [1]}, "doesn't fill its shape [2]"),
        ({"shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3]]}, "doesn't fill its shape"),
        ({"shape": [1], "datatype": "FP32", "data": ["a"]}, "has 'a' at element 0"),
        ({"shape": [1], "datatype": "INT32", "data": [1.5]}, "has 1.5 at element 0"),
        ({"shape": [1], "datatype": "INT8", "data": [300]}, "int8 can't hold"),
        ({"shape": [1], "datatype": "FP16", "data": [1e6]}, "float16 can't hold"),
        ({"shape": [1], "datatype": "BOOL", "data": [1]}, "has 1 at element 0"),
        ({"shape": [1], "datatype": "FLOAT", "data": [1]}, "datatype 'FLOAT'"),
        ({"shape": [-1], "datatype": "FP32", "data": [1]}, "no valid shape"),
        ({"shape": [1], "datatype": "FP32"}, "has no data"),
        ({"shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}, "outside the JSON"),
    ],
)
def test_malformed_kserve_tensors_are_refused(tmp_path, entry, words):
    error = refused(write_json(tmp_path / "a.json", {"inputs": [{"name": "x", **entry}]}))
    assert words in error.message
    assert "a.json: tensor 'x'" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"), ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("\udcff", "not JSON"), ("3", "not a golden"),
        ("{}", "not a golden"), ("[]", "list of cases is empty"), ('{"labels": ["a"]}', "not a golden"),
        ('{"inputs": [], "inputs": []}', "given twice"), ('{"inputs": [{"shape": [1]}]}', "without a name"),
    ],
)  # fmt: skip
def test_json_that_is_no_golden_is_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    error = refused(path)
    assert words in error.message
    assert "a.json" in error.message


def test_json_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.json", {"inputs": [tensor("x", X)]})
    monkeypatch.setattr(golden_json, "MAX_JSON_BYTES", 10)
    assert "more than the 10 allowed" in refused(path).message


@pytest.mark.parametrize(
    ("shape", "data"), [([0, 10**30], []), ([0, 2**62], []), ([1] * 100, [1.0])], ids=["10^30", "2^62", "rank 100"]
)
def test_a_shape_no_array_can_have_is_refused(tmp_path: Path, shape: list[int], data: list[float]):
    document = {"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": data}]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(GoldenError, match=r"a\.json: tensor 'x' has a shape that no array can have"):
        golden_json.read_json(tmp_path / "a.json")


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"inputs": ' + "9" * 5000 + "}")
    with pytest.raises(GoldenError, match=r"a\.json: not JSON: Exceeds the limit"):
        golden_json.read_json(tmp_path / "a.json")
