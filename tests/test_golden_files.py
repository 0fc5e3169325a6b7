"""Binary golden files keep their values, and damaged or hostile ones are refused before they cost anything."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from packager import archives, golden_files
from packager.errors import GoldenError
from packager.golden_formats import read_goldens
from packager.goldens import dtype_name
from packager.model import Signature, TensorSpec
from tests.golden_builders import (
    SIGNATURE,
    X,
    Y,
    assert_one_case,
    npz,
    proto,
    refused,
    signature,
)


def test_an_npz_gives_a_case_by_plain_names(tmp_path):
    case = assert_one_case(read_goldens(npz(tmp_path / "a.npz", x=X, y=Y), SIGNATURE))
    assert (case.name, case.source) == ("a", "a.npz")


def test_an_npz_gives_a_case_by_prefixed_names(tmp_path):
    assert_one_case(read_goldens(npz(tmp_path / "a.npz", **{"in/x": X, "out/y": Y}), SIGNATURE))


def test_an_npz_of_inputs_only_leaves_the_outputs_to_the_reference(tmp_path):
    assert_one_case(read_goldens(npz(tmp_path / "a.npz", x=X), SIGNATURE), outputs=False)


def test_plain_names_that_are_input_and_output_at_once_need_prefixes(tmp_path):
    both = Signature(SIGNATURE.inputs, (TensorSpec("x", "float32", ("n", 3)),))
    assert "is an input and an output" in refused(npz(tmp_path / "a.npz", x=X), both).message
    (case,) = read_goldens(npz(tmp_path / "b.npz", **{"in/x": X, "out/x": Y}), both).cases
    np.testing.assert_array_equal(case.outputs["x"], Y)


@pytest.mark.parametrize("name", ["", "x"])
def test_a_test_data_set_is_read_by_name_or_position(tmp_path, name):
    proto(tmp_path / "test_data_set_0" / "input_0.pb", X, name)
    proto(tmp_path / "test_data_set_0" / "output_0.pb", Y, "y" if name else "")
    assert assert_one_case(read_goldens(tmp_path, SIGNATURE)).source == "test_data_set_0"
    assert_one_case(read_goldens(tmp_path / "test_data_set_0", SIGNATURE))


def test_test_data_passes_over_outputs_that_are_no_tensors(tmp_path):
    with_map = Signature(SIGNATURE.inputs, (TensorSpec("probs", "sequence(map)", None, "sequence"), *SIGNATURE.outputs))
    proto(tmp_path / "input_0.pb", X)
    (tmp_path / "output_0.pb").write_bytes(b"\x0a\x04some")
    proto(tmp_path / "output_1.pb", Y)
    assert_one_case(read_goldens(tmp_path, with_map))


def test_test_data_of_another_model_is_refused(tmp_path):
    proto(tmp_path / "input_0.pb", X, "xx")
    error = refused(tmp_path)
    assert "no input 'xx' (did you mean 'x'?)" in error.message
    proto(tmp_path / "b" / "input_0.pb", X)
    proto(tmp_path / "b" / "input_1.pb", X)
    assert "no input of that number" in refused(tmp_path / "b").message


@pytest.mark.parametrize(
    ("payload", "words"), [(b"", "is empty"), (b"\xff\xff\xff", "not a whole TensorProto"), (b"\x08", "not a whole")]
)
def test_damaged_test_data_is_refused(tmp_path, payload, words):
    (tmp_path / "input_0.pb").write_bytes(payload)
    error = refused(tmp_path)
    assert words in error.message
    assert "input_0.pb" in error.message


def test_test_data_with_data_elsewhere_is_refused(tmp_path):
    made = numpy_helper.from_array(X)
    made.data_location = onnx.TensorProto.EXTERNAL
    (tmp_path / "input_0.pb").write_bytes(made.SerializeToString())
    assert "data is in another file" in refused(tmp_path).message


def test_object_arrays_are_never_unpickled(tmp_path):
    path = npz(tmp_path / "a.npz", x=np.array([{"a": 1}, None], dtype=object))
    error = refused(path)
    assert "array 'x' is an object array" in error.message
    assert "unpickled" in error.message


def test_cut_archives_are_refused(tmp_path):
    path = npz(tmp_path / "a.npz", x=X)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "not a whole .npz archive" in refused(path).message


def test_an_archive_that_declares_too_much_is_refused_unread(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\0" * 1000)
        archive.filelist[0].file_size = 9 << 30
    assert f"more than the {8 << 30} allowed" in refused(path).message


def test_an_array_that_says_more_than_it_has_is_refused_before_allocating(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue() + b"1234")
    assert "but has 4" in refused(tmp_path / "a.npz").message


def test_archives_of_other_things_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("notes.txt", "x")
    assert "'notes.txt' is not a .npy array" in refused(tmp_path / "a.npz").message
    with zipfile.ZipFile(tmp_path / "b.npz", "w"):
        pass
    assert "holds no arrays" in refused(tmp_path / "b.npz").message


def test_test_data_beyond_protobufs_limit_is_refused(tmp_path, monkeypatch):
    proto(tmp_path / "input_0.pb", X)
    monkeypatch.setattr(golden_files, "MAX_PB_BYTES", 10)
    assert "protobuf's limit" in refused(tmp_path).message


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("bfloat16", ml_dtypes.bfloat16), ("float8e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8e5m2", ml_dtypes.float8_e5m2),
    ],
)  # fmt: skip
def test_npz_and_test_data_carry_small_floats(tmp_path, dtype, kind):
    small = X.astype(kind)
    npz(tmp_path / "a.npz", x=small, y=small)
    proto(tmp_path / "set" / "input_0.pb", small, "x")
    for case in read_goldens(tmp_path, signature(dtype)).cases:
        assert dtype_name(case.inputs["x"]) == dtype
        np.testing.assert_array_equal(case.inputs["x"].astype(np.float32), X)
    nan = np.full_like(small, np.nan)
    assert "has 6 NaN" in refused(npz(tmp_path / "b.npz", x=nan), signature(dtype)).message


@pytest.mark.parametrize("descr", ["|S0", "|V0", "<U0"])
def test_elements_of_no_size_are_refused(descr: str):
    """A header of a few bytes could declare any number of them."""
    stream = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": (10**12, 3)}
    np.lib.format.write_array_header_1_0(stream, header)
    with pytest.raises(GoldenError, match="x says 3000000000000 elements of no size"):
        golden_files.npy_array(stream.getvalue(), "x")


def test_an_npz_that_unpacks_to_far_more_than_it_is_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archives, "FREE_BYTES", 100_000)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((50_000, 3), np.float32))
    with pytest.raises(GoldenError, match=r"a\.npz: its \d+ bytes unpack to 600128"):
        golden_files.read_npz(tmp_path / "a.npz", SIGNATURE)


def test_inputs_that_are_no_tensors_are_named(tmp_path):
    taking = Signature((TensorSpec("s", "sequence(float32)", None, "sequence"),), SIGNATURE.outputs)
    (tmp_path / "input_0.pb").write_bytes(b"\x0a\x01s")
    with pytest.raises(GoldenError, match=r"input_0\.pb: input 's' is of type sequence\(float32\)"):
        golden_files.read_data_set(tmp_path, taking)
