"""Goldens are found and joined in every arrangement people keep them in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packager import golden_formats, golden_store
from packager.errors import GoldenError, UsageError
from packager.golden_formats import read_goldens
from packager.goldens import GoldenCase, GoldenSet
from tests.golden_builders import (
    SIGNATURE,
    X,
    Y,
    assert_one_case,
    npz,
    proto,
    refused,
    run_results,
    saved,
    signature,
    tensor,
    write_json,
)


def test_cases_of_a_folder_come_in_natural_order(tmp_path):
    for number in (10, 2, 1):
        npz(tmp_path / f"case-{number}.npz", x=X + number)
    (tmp_path / "README.md").write_text("about these")
    npz(tmp_path / "more" / "a.npz", x=X)
    goldens = read_goldens(tmp_path, SIGNATURE)
    assert [case.name for case in goldens.cases] == ["case-1", "case-2", "case-10", "more/a"]
    assert [float(case.inputs["x"][0, 0]) for case in goldens.cases] == [1, 2, 10, 0]


def test_two_files_alone_in_a_folder_belong_together(tmp_path):
    write_json(tmp_path / "feeds.json", [{"x": saved(X)}])
    write_json(tmp_path / "layerwise.json", run_results({"y": Y}))
    assert_one_case(read_goldens(tmp_path, SIGNATURE))


def test_outputs_without_their_inputs_are_refused(tmp_path):
    write_json(tmp_path / "outputs.json", run_results({"y": Y}))
    assert "outputs.json holds outputs, and no inputs for them" in refused(tmp_path).message
    write_json(tmp_path / "inputs.json", [{"x": saved(X)}, {"x": saved(X)}])
    assert "holds 2 cases of inputs, outputs.json 1 of outputs" in refused(tmp_path).message


def test_outputs_that_fit_several_inputs_are_refused(tmp_path):
    write_json(tmp_path / "a.input.json", {"x": saved(X)})
    write_json(tmp_path / "a.request.json", {"x": saved(X)})
    write_json(tmp_path / "a.output.json", run_results({"y": Y}))
    assert "several files of inputs fit it" in refused(tmp_path).message


def test_packagers_own_format_is_read_back(tmp_path):
    case = GoldenCase("one", {"x": X}, {}, "synthesised, seed 0", "")
    golden_store.write(tmp_path, GoldenSet((case,)), {}, policy="default-1", precision="fp32", excluded={})
    read = assert_one_case(read_goldens(tmp_path, SIGNATURE), outputs=False)
    assert (read.name, read.source) == ("one", "synthesised, seed 0")


def test_formats_mix_and_names_stay_unique(tmp_path):
    npz(tmp_path / "a.npz", x=X, y=Y)
    write_json(tmp_path / "a.json", {"inputs": [tensor("x", X)]})
    proto(tmp_path / "test_data_set_0" / "input_0.pb", X)
    names = [case.name for case in read_goldens(tmp_path, SIGNATURE).cases]
    assert names == ["a.json", "a.npz", "test_data_set_0"]


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such file or folder"):
        read_goldens(tmp_path / "nowhere", SIGNATURE)


def test_a_folder_without_goldens_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("none yet")
    error = refused(tmp_path)
    assert "no golden case found" in error.message
    assert ".npz" in str(error.hint)


@pytest.mark.parametrize(("name", "words"), [("a.npy", "a single array"), ("a.txt", "not a golden file")])
def test_files_of_other_kinds_are_refused(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"x")
    assert words in refused(tmp_path / name).message


def test_linked_and_endless_folders_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert "symbolic link" in refused(tmp_path).message
    npz(tmp_path / "deep" / Path(*"123456789") / "a.npz", x=X)
    assert "more than 8 deep" in refused(tmp_path / "deep").message


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path):
    scalar = signature("float32", ())
    empty = signature("float32", (0, 3))
    for sig, array in ((scalar, np.array(2.5, np.float32)), (empty, np.zeros((0, 3), np.float32))):
        folder = tmp_path / str(array.shape)
        npz(folder / "a.npz", x=array)
        proto(folder / "set" / "input_0.pb", array, "x")
        write_json(folder / "k.json", {"inputs": [tensor("x", array)]})
        write_json(folder / "p.json", [{"x": saved(array)}])
        cases = read_goldens(folder, sig).cases
        assert len(cases) == 4
        for case in cases:
            assert case.inputs["x"].shape == array.shape
            np.testing.assert_array_equal(case.inputs["x"], array)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), suffix=st.sampled_from([".npz", ".json"]), cut=st.integers(0, 400))
def test_no_bytes_raise_anything_but_a_golden_error(tmp_path, data, suffix, cut):
    path = tmp_path / f"a{suffix}"
    whole = npz(tmp_path / "w.npz", x=X).read_bytes()
    path.write_bytes(whole[:cut] + data + whole[cut + len(data) :] if suffix == ".npz" else data)
    try:
        goldens = read_goldens(path, SIGNATURE, allow_nan=True)
    except GoldenError as error:
        assert str(path) in error.message
    else:
        assert goldens.cases[0].inputs["x"].shape[1] == 3


def test_natural_order_mixes_words_and_numbers():
    assert sorted(["b1", "a10", "a9", "1", "a"], key=golden_formats.natural) == ["1", "a", "a9", "a10", "b1"]
