"""What a model takes, and arrays that don't fit it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packager.feeds import Tensor, checked, read_description, run_file

X = Tensor("x", "float32", ("batch", 3))
WORDS = Tensor("words", "string", None)


def seal(folder: Path, **changes: object) -> Path:
    document = {
        "name": "m",
        "version": "1",
        "signature": {
            "inputs": [{"name": "x", "dtype": "float32", "dims": ["batch", 3]}],
            "outputs": [{"name": "y", "dtype": "int64", "dims": None}],
        },
        "plan": {"options": '{"threads": 2}'},
    }
    (folder / "bundle.json").write_text(json.dumps({**document, **changes}), encoding="utf-8")
    return folder


def test_a_description_is_read(tmp_path: Path) -> None:
    found = read_description(seal(tmp_path))
    assert (found.name, found.version, dict(found.options)) == ("m", "1", {"threads": 2})
    assert (found.inputs, found.outputs) == ((X,), (Tensor("y", "int64", None),))
    assert (str(found.inputs[0]), str(found.outputs[0])) == ("float32[batch, 3]", "int64[...]")


def test_what_is_missing_or_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bundle\.json is missing; keep the files"):
        read_description(tmp_path)
    wrong: list[dict[str, object]] = [
        {"signature": {}}, {"signature": {"inputs": 1, "outputs": 2}}, {"plan": {}}, {"plan": {"options": "["}},
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(ValueError, match=r"bundle\.json is malformed"):
            read_description(seal(tmp_path, **changes))
    (tmp_path / "bundle.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="malformed"):
        read_description(tmp_path)


def test_arrays_come_back_native_contiguous_and_in_order() -> None:
    given = {"words": np.array([["a", "b"]]), "x": np.ones((3, 2), ">f4").T}
    found = checked((X, WORDS), given)
    assert list(found) == ["x", "words"]
    assert found["x"].dtype.isnative and found["x"].flags.c_contiguous
    np.testing.assert_array_equal(found["x"], np.ones((2, 3), np.float32))
    assert found["words"].tolist() == [["a", "b"]]


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({}, "no array is given for input 'x'"),
        ({"x": np.ones((1, 3), np.float32), "z": np.ones(1)}, r"no input 'z'; its inputs are \['x'\]"),
        ({"x": np.ones((1, 3))}, r"'x' takes float32\[batch, 3\], but the array is float64"),
        ({"x": np.array([["a"] * 3])}, "but the array is string"),
        ({"x": np.ones((1, 4), np.float32)}, r"has shape \[1, 4\]"),
        ({"x": np.ones(3, np.float32)}, r"has shape \[3\]"),
    ],
)
def test_what_does_not_fit_is_refused(feeds: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked((X,), feeds)


def test_the_command_line_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.npz"
    np.savez(file, x=np.ones((2, 3), np.float32))
    assert run_file([str(file)], lambda feeds: {"y": feeds["x"].sum(axis=1)}, "python infer.py input.npz") == 0
    assert capsys.readouterr().out == "y: float32[2]\n"
    assert run_file([], lambda feeds: feeds, "python infer.py input.npz") == 2
    assert capsys.readouterr().err == "usage: python infer.py input.npz\n"
    assert run_file([str(tmp_path / "none.npz")], lambda feeds: feeds, "") == 1
    assert capsys.readouterr().err.startswith("error: ")
