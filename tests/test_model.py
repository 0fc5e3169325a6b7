"""Opening a model: what is refused, with which words, and that weights are never loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from packager.errors import ModelError, PackagerError, UsageError
from packager.model import open_model
from tests import builders

RELU = helper.make_node("Relu", ["x"], ["y"], name="act")


def refused(path: Path, words: str) -> ModelError:
    with pytest.raises(ModelError, match=words) as caught:
        open_model(path)
    assert str(path) in caught.value.message
    return caught.value


def test_a_model_shows_its_signature_and_digest(tmp_path: Path):
    model = open_model(builders.relu(tmp_path / "m.onnx", shape=("n", None, 3)))
    assert [str(spec) for spec in model.signature.inputs] == ["x: float32[n, ?, 3]"]
    assert (model.opset, model.structure.ir_version, model.hazards) == (17, 8, ())
    assert model.digest.startswith("sha256:")
    assert model.digest == open_model(builders.relu(tmp_path / "copy.onnx", shape=("n", None, 3))).digest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello, this is no model at all", "not a whole ONNX model"),
        (b"PK\x03\x04" + b"\0" * 60, "not a whole ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\x08\x08", "holds no graph"),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, data: bytes, words: str):
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    refused(path, words)


def test_a_model_cut_anywhere_is_refused_or_is_still_whole(tmp_path: Path):
    """A cut at a field boundary can't be told from a shorter message; it then lacks its graph or its imports."""
    data = builders.relu(tmp_path / "m.onnx").read_bytes()
    for size in range(len(data)):
        path = tmp_path / "cut.onnx"
        path.write_bytes(data[:size])
        with pytest.raises(ModelError):
            open_model(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_mutated_bytes_never_crash(tmp_path: Path, data: st.DataObject):
    original = bytearray(builders.relu(tmp_path / "m.onnx").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        original[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "mutated.onnx"
    path.write_bytes(original)
    try:
        open_model(path)
    except PackagerError as error:
        assert error.exit_code in (2, 3)


def test_missing_files_and_folders(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        open_model(tmp_path / "absent.onnx")
    with pytest.raises(UsageError, match="not a file"):
        open_model(tmp_path)


def test_duplicate_outputs(tmp_path: Path):
    outputs = [builders.value("y"), builders.value("y")]
    path = builders.save(builders.model([RELU], [builders.value("x")], outputs), tmp_path / "m.onnx")
    refused(path, "two graph outputs are named 'y', and node Relu 'act' makes it")


def test_duplicate_inputs(tmp_path: Path):
    inputs = [builders.value("x"), builders.value("x")]
    path = builders.save(builders.model([RELU], inputs, [builders.value("y")]), tmp_path / "m.onnx")
    refused(path, "two graph inputs are named 'x'")


def test_an_output_that_is_also_an_input(tmp_path: Path):
    outputs = [builders.value("y"), builders.value("x")]
    path = builders.save(builders.model([RELU], [builders.value("x")], outputs), tmp_path / "m.onnx")
    refused(path, "'x' is a graph input and a graph output at once")


@pytest.mark.parametrize(("dtype", "shape"), [(builders.FLOAT, (4,)), (builders.FLOAT, (3, 1)), (builders.INT64, (3,))])
def test_an_initializer_that_is_an_input_of_another_type(tmp_path: Path, dtype: int, shape: tuple[int, ...]):
    weight = helper.make_tensor("w", builders.FLOAT, [3], [1.0, 2.0, 3.0])
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    inputs = [builders.value("x"), builders.value("w", dtype, shape)]
    path = builders.save(builders.model([node], inputs, [builders.value("y")], [weight]), tmp_path / "m.onnx")
    refused(path, r"initializer 'w' is float32\[3\] but the graph input of that name")


def test_an_overridable_initializer_is_a_hazard_and_no_input(tmp_path: Path):
    weight = helper.make_tensor("w", builders.FLOAT, [3], [1.0, 2.0, 3.0])
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    inputs = [builders.value("x"), builders.value("w", shape=(3,))]
    path = builders.save(builders.model([node], inputs, [builders.value("y")], [weight]), tmp_path / "m.onnx")
    model = open_model(path)
    assert [spec.name for spec in model.signature.inputs] == ["x"]
    assert [hazard.code for hazard in model.hazards] == ["overridable-initializer"]


def test_a_value_nothing_makes(tmp_path: Path):
    node = helper.make_node("Add", ["x", "ghost"], ["y"], name="sum")
    path = builders.save(builders.model([node], [builders.value("x")], [builders.value("y")]), tmp_path / "m.onnx")
    refused(path, "node Add 'sum' reads 'ghost'")


def test_an_output_nothing_makes(tmp_path: Path):
    path = builders.save(builders.model([RELU], [builders.value("x")], [builders.value("z")]), tmp_path / "m.onnx")
    refused(path, "nothing makes the graph output 'z'")


def test_a_value_made_twice(tmp_path: Path):
    path = builders.save(
        builders.model([RELU, RELU], [builders.value("x")], [builders.value("y")]), tmp_path / "m.onnx"
    )
    refused(path, "'y' is made twice")


def test_a_tensor_with_too_few_bytes(tmp_path: Path):
    proto = builders.model([RELU], [builders.value("x")], [builders.value("y")])
    proto.graph.initializer.add(name="w", data_type=1, dims=[3], raw_data=b"\0" * 8)
    refused(builders.save(proto, tmp_path / "m.onnx"), r"tensor 'w' is float32\[3\], 12 bytes, but holds 8")


def external(
    folder: Path, change: Callable[[onnx.TensorProto], None] = lambda tensor: None, name: str = "w.bin"
) -> Path:
    """``y = x * w`` with ``w`` (float32[3]) in a file of its own; ``change`` edits its proto."""
    weight = helper.make_tensor("w", builders.FLOAT, [3], b"\0" * 12, raw=True)
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    proto = builders.model([node], [builders.value("x")], [builders.value("y")], [weight])
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", name), ("offset", "0"), ("length", "12")):
        tensor.external_data.add(key=key, value=text)
    change(tensor)
    return builders.save(proto, folder / "m.onnx")


def entry(key: str, text: str) -> Callable[[onnx.TensorProto], None]:
    def change(tensor: onnx.TensorProto) -> None:
        for item in tensor.external_data:
            if item.key == key:
                item.value = text

    return change


@pytest.mark.parametrize("name", ["w.bin", "./w.bin", "sub/w.bin", "a b'名前.bin"])
def test_external_data_is_part_of_the_digest(tmp_path: Path, name: str):
    path = external(tmp_path, name=name)
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(b"\0" * 12)
    before = open_model(path)
    assert [(file.location, file.bytes) for file in before.external] == [(name, 12)]
    (tmp_path / name).write_bytes(b"\1" * 12)
    assert open_model(path).digest != before.digest


@pytest.mark.parametrize("where", ["attribute", "subgraph", "function"])
def test_external_data_is_found_everywhere(tmp_path: Path, where: str):
    tensor = onnx.TensorProto(name="k", data_type=1, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="absent.bin")
    constant = helper.make_node("Constant", [], ["k"], value=tensor)
    nodes = [constant, helper.make_node("Mul", ["x", "k"], ["y"])]
    if where == "subgraph":
        body = helper.make_graph(nodes, "b", [], [builders.value("y")])
        nodes = [helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)]
    proto = builders.model(nodes, [builders.value("x"), builders.value("c", builders.BOOL, ())], [builders.value("y")])
    if where == "function":
        del proto.graph.node[:]
        proto.graph.node.append(helper.make_node("F", ["x"], ["y"], domain="my"))
        proto.functions.append(helper.make_function("my", "F", ["x"], ["y"], nodes, [helper.make_opsetid("", 17)]))
    refused(builders.save(proto, tmp_path / "m.onnx"), "external data file 'absent.bin' is missing")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/etc/passwd", "is absolute"),
        ("C:\\data\\w.bin", "is absolute"),
        ("../w.bin", "leaves the model's folder"),
        ("sub/../../w.bin", "leaves the model's folder"),
        ("..\\w.bin", "leaves the model's folder"),
        ("", "names no file"),
        ("absent.bin", "is missing"),
        (".", "not a regular file"),
    ],
)
def test_external_data_outside_or_absent(tmp_path: Path, name: str, words: str):
    refused(external(tmp_path, name=name), words)


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_external_data_through_links(tmp_path: Path, make: Callable[[Path, Path], None]):
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").write_bytes(b"\0" * 12)
    make(tmp_path / "w.bin", other / "secret")
    refused(external(tmp_path), "symbolic link|hard link")


def test_external_data_in_a_linked_folder(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/w.bin").write_bytes(b"\0" * 12)
    (tmp_path / "sub").symlink_to(tmp_path / "real")
    refused(external(tmp_path, name="sub/w.bin"), "symbolic link")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (entry("offset", "4"), "needs bytes 4 to 16"),
        (entry("length", "8"), "its record says 8"),
        (entry("offset", "-1"), "negative"),
        (entry("offset", "x"), "malformed"),
    ],
)
def test_external_records_that_do_not_fit(tmp_path: Path, change: Callable[[onnx.TensorProto], None], words: str):
    (tmp_path / "w.bin").write_bytes(b"\0" * 12)
    refused(external(tmp_path, change), words)


def test_hazards_are_named(tmp_path: Path):
    noise = helper.make_node("RandomNormalLike", ["x"], ["r"], name="noise")
    nodes = [noise, helper.make_node("Add", ["x", "r"], ["y"])]
    proto = builders.model(nodes, [builders.value("x")], [builders.value("y")], domains=[("ai.onnx.ml", 3)])
    model = open_model(builders.save(proto, tmp_path / "m.onnx"))
    assert [hazard.code for hazard in model.hazards] == ["unused-import", "random"]
    assert "RandomNormalLike 'noise'" in model.hazards[1].message


def test_precision_is_read_off_the_graph(corpus: Path):
    found = {path.stem: open_model(path).precision for path in corpus.glob("*.onnx")}
    assert found["french_forms"] == found["arabic_diacritics"] == "int8"
    assert found["text_encoder"] == found["orientation"] == "fp32"


def test_memory_stays_flat_with_four_gigabytes_of_weights(tmp_path: Path):
    """The data file is sparse: it takes no disk, but every byte of it is hashed."""
    size = 4 << 30

    def change(tensor: onnx.TensorProto) -> None:
        tensor.dims[:] = [size // 4]
        entry("length", str(size))(tensor)

    path = external(tmp_path, change)
    with (tmp_path / "w.bin").open("wb") as handle:
        os.truncate(handle.fileno(), size)
    code = (
        "import sys; from packager.cli import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "finally: print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    (tmp_path / "w.bin").unlink()
    peak = int(done.stdout.rsplit("VmHWM:", 1)[1].split()[0])  # kB; ru_maxrss would count the parent's at the fork
    assert "4.3 GB external" in done.stdout
    assert peak < 150_000


def test_a_node_without_inputs_is_no_reason_to_stop(tmp_path: Path):
    bare = helper.make_node("Identity", [], ["z"])
    made = builders.model([RELU, bare], [builders.value("x")], [builders.value("y")])
    assert [hazard.code for hazard in open_model(builders.save(made, tmp_path / "m.onnx")).hazards] == []


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), 1.5, "text"])
def test_an_attribute_of_another_type_counts_as_absent(tmp_path: Path, odd: float | str):
    norm = helper.make_node("BatchNormalization", ["x", "c", "c", "c", "c"], ["y"], training_mode=odd)
    constant = helper.make_tensor("c", builders.FLOAT, [3], [1, 1, 1])
    made = builders.model([norm], [builders.value("x")], [builders.value("y")], [constant])
    opened = open_model(builders.save(made, tmp_path / "m.onnx"))
    assert opened.structure.graph.nodes[0].integer("training_mode", 0) == 0 and opened.hazards == ()


def test_a_condition_of_an_unknown_dtype_has_no_value(tmp_path: Path):
    branch = [helper.make_graph([helper.make_node(op, ["x"], [op])], op, [], [builders.value(op)])
              for op in ("Relu", "Neg")]  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1])
    constant = onnx.TensorProto(name="c", data_type=99, raw_data=b"1")
    made = builders.model([node], [builders.value("x")], [builders.value("y")], [constant])
    (hazard,) = open_model(builders.save(made, tmp_path / "m.onnx")).hazards
    assert hazard.code == "frozen-branch" and "always takes its constant branch" in hazard.message


@pytest.mark.parametrize(
    "payload", [{"raw_data": bytes(8000)}, {"raw_data": bytes(4)}, {"float_data": [1.0] * 2000}, {}], ids=str
)
def test_a_tensor_that_declares_more_than_it_holds_is_refused(tmp_path: Path, payload: dict[str, Any]):
    lying = onnx.TensorProto(name="c", data_type=builders.FLOAT, dims=[10**12], **payload)
    add = helper.make_node("Add", ["x", "c"], ["y"])
    made = builders.model([add], [builders.value("x")], [builders.value("y")], [lying])
    words = r"tensor 'c' is float32\[1000000000000\], 4000000000000 bytes, but holds"
    refused(builders.save(made, tmp_path / "m.onnx"), words)


@pytest.mark.parametrize("rank", [65, 300_000])
def test_more_dimensions_than_any_runtime_has(tmp_path: Path, rank: int):
    tensor = onnx.TensorProto(name="c", data_type=builders.FLOAT, dims=[2**62] * rank, raw_data=b"1234")
    add = helper.make_node("Add", ["x", "c"], ["y"])
    made = builders.model([add], [builders.value("x")], [builders.value("y")], [tensor])
    refused(builders.save(made, tmp_path / "m.onnx"), f"tensor 'c' at offset .* has {rank} dimensions, more than 64")
    made = builders.model([RELU], [builders.value("x", shape=(1,) * rank)], [builders.value("y")])
    refused(builders.save(made, tmp_path / "m.onnx"), f"has {rank} dimensions, more than 64")


@pytest.mark.parametrize("location", ["n" * 300, "a/" * 3000 + "x"])
def test_an_external_location_longer_than_a_name_may_be(tmp_path: Path, location: str):
    tensor = onnx.TensorProto(name="c", data_type=builders.FLOAT, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    add = helper.make_node("Add", ["x", "c"], ["y"])
    made = builders.model([add], [builders.value("x")], [builders.value("y")], [tensor])
    refused(builders.save(made, tmp_path / "m.onnx"), r"is missing \(tensor 'c' lives in it\)")


def test_a_path_longer_than_a_name_may_be(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        open_model(tmp_path / ("n" * 300))
