from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import TypeAdapter

from packager.errors import BuildError, InternalError, ModelError, Refused
from packager.model import Signature, TensorSpec, open_model
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_cleaning import Clean
from packager.transform_files import load, signature_of
from packager.transform_float16 import Float16
from packager.transform_registry import PASSES, AnyPass, dump_pass
from packager.transform_shapes import Fold, PinShapes
from packager.transform_versions import DropUnusedImports, InlineFunctions, SetVersions
from packager.transforming import Applied, signature_differences
from tests import builders
from tests.builders import BOOL, FLOAT, INT64, value
from tests.golden_models import node
from tests.transform_models import answer, array, floats, model, same, transform


@dataclass(frozen=True)
class Broken:
    """A pass that breaks what it promises: it does ``what`` to the model."""

    what: str
    name: str = "broken"

    def step(self) -> Step:
        return Step("Breaking")

    def signature(self, before: Signature) -> Signature:
        return before

    def run(self, loaded, context: Context) -> Outcome:
        import onnx_ir as ir

        graph = loaded.graph
        if self.what == "rename":
            graph.outputs[0].name = "other"
        elif self.what == "dim":
            graph.inputs[0].shape = ir.Shape([1, 3])
        elif self.what == "dtype":
            graph.inputs[0].dtype = ir.DataType.FLOAT16
        elif self.what == "operator":
            graph[0].op_type = "NoSuchOperator"
        return Outcome(loaded, ("one", "one"))


def test_no_pass_keeps_every_real_model(corpus: Path, tmp_path: Path) -> None:
    for path in sorted(corpus.glob("*.onnx")):
        made = transform(path, tmp_path)
        before = open_model(path)
        assert made.applied.signature == before.signature
        assert made.applied.opsets == before.structure.opsets
        assert [item.operator for item in before.structure.walk()] == [
            item.operator for item in open_model(made.applied.path).structure.walk()
        ]


def test_real_models_answer_alike_from_external_data(corpus: Path, tmp_path: Path) -> None:
    feeds = {"input_ids": np.array([[101, 7592, 102]]), "attention_mask": np.ones((1, 3), np.int64),
             "token_type_ids": np.zeros((1, 3), np.int64)}  # fmt: skip
    made = transform(corpus / "text_encoder.onnx", tmp_path, max_inline_bytes=1000, max_file_bytes=12 << 20)
    assert [file.name for file in made.applied.files][:3] == ["model.onnx", "weights-000.bin", "weights-001.bin"]
    assert max(file.stat().st_size for file in made.applied.files[1:]) <= 12 << 20
    assert made.applied.bytes == sum(file.stat().st_size for file in made.applied.path.parent.iterdir())
    same(made, **feeds)


def test_a_tensor_larger_than_a_data_file_has_one_of_its_own(tmp_path: Path) -> None:
    weights = [array(f"w{index}", floats(3, size, seed=index)) for index, size in ((0, 300), (1, 2000), (2, 300))]
    nodes = [node("Concat", ["w0", "w1", "w2"], ["w"], axis=1), node("MatMul", ["x", "w"], ["y"])]
    source = model(tmp_path, nodes, initializers=weights)
    made = transform(source, tmp_path, max_inline_bytes=0, max_file_bytes=8000)
    sizes = [file.stat().st_size for file in made.applied.files[1:]]
    assert sizes == [3600, 24000, 3600]
    same(made, x=floats(2, 3))


def test_data_is_aligned(tmp_path: Path) -> None:
    weights = [array("small", floats(300)), array("large", floats(600, 600)), array("tiny", floats(2))]
    nodes = [node("Size", [name], [f"s{name}"]) for name in ("small", "large", "tiny")]
    nodes += [node("Sum", ["a", "b", "c"], ["y"])]
    nodes[3:3] = [
        node("Cast", [f"s{one}"], [two], to=1) for one, two in zip(("small", "large", "tiny"), "abc", strict=True)
    ]
    made = transform(model(tmp_path, nodes, [], initializers=weights), tmp_path, max_inline_bytes=0)
    placed = {item.name: {entry.key: entry.value for entry in item.external_data}
              for item in onnx.load(str(made.applied.path), load_external_data=False).graph.initializer}  # fmt: skip
    assert placed["tiny"] == {}
    assert int(placed["small"]["offset"]) % 64 == 0
    assert int(placed["large"]["offset"]) == 65536
    assert same(made)[0] == 360302


def test_awkward_names_survive(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["in:0/é", "w:0/重み"], ["mid::1"]), node("Relu", ["mid::1"], ["out/0:0"])]
    weights = [array("w:0/重み", floats(3, 200))]
    source = model(tmp_path, nodes, [value("in:0/é")], initializers=weights)
    for options in ({}, {"max_inline_bytes": 0}):
        made = transform(source, tmp_path, Clean(), PinShapes((("n", 2),)), Fold(), SetVersions((("", 21),)), **options)
        assert [spec.name for spec in made.applied.signature.inputs] == ["in:0/é"]
        assert made.applied.signature.inputs[0].dims == (2, 3)
        same(made, **{"in:0/é": floats(2, 3)})


def test_external_sources_are_read_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    weight, shape = floats(3, 4000), np.array([-1, 2000, 2])
    proto = builders.model(
        [node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "s"], ["y"])],
        [value("x")], [value("y", FLOAT, None)], [array("w", weight), array("s", shape)],
    )  # fmt: skip
    onnx.save(proto, str(folder / "m.onnx"), save_as_external_data=True, location="odd name.bin", size_threshold=0)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for options in ({}, {"max_inline_bytes": 0}):
        made = transform(folder / "m.onnx", tmp_path, PinShapes((("n", 2),)), Fold(), Clean(), **options)
        assert "odd name.bin" not in {file.name for file in made.applied.files}
        x = floats(2, 3)
        # ONNX Runtime itself refuses the source: it can't read an external shape.
        np.testing.assert_allclose(
            answer(made.applied.path, {"x": x})[0], (x @ weight).reshape(-1, 2000, 2), rtol=1e-5, atol=1e-5
        )
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_sparse_constants_become_dense(tmp_path: Path) -> None:
    def sparse(name: str) -> onnx.SparseTensorProto:
        where = helper.make_tensor("i", INT64, [2], [1, 5])
        return helper.make_sparse_tensor(helper.make_tensor(name, FLOAT, [2], [2.0, 3.0]), where, [2, 3])

    nodes = [
        helper.make_node("Constant", [], ["c"], name="konst", sparse_value=sparse("")),
        node("Add", ["c", "s"], ["y"]),
    ]
    proto = builders.model(nodes, [], [value("y", FLOAT, None)])
    proto.graph.sparse_initializer.append(sparse("s"))
    source = builders.save(proto, tmp_path / "m.onnx")
    made = transform(source, tmp_path)
    assert [note.split(" ")[0:3] for note in made.applied.notes] == [
        ["the", "sparse", "constant"],
        ["sparse", "initializer", "'s'"],
    ]
    assert answer(made.applied.path, {})[0].tolist() == [[0, 4, 0], [0, 0, 6]]


def test_a_huge_sparse_constant_is_refused(tmp_path: Path) -> None:
    where = helper.make_tensor("i", INT64, [1], [1])
    proto = builders.model([node("Relu", ["s"], ["y"])], [], [value("y", FLOAT, None)])
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(helper.make_tensor("s", FLOAT, [1], [2.0]), where, [1 << 20, 1 << 20])
    )
    with pytest.raises(Refused, match=r"'s' .* would take more than 256 MiB"):
        load(builders.save(proto, tmp_path / "m.onnx"))


def test_training_information_is_left_out_with_a_note(tmp_path: Path) -> None:
    proto = onnx.load(str(builders.relu(tmp_path / "m.onnx")))
    proto.training_info.add()
    made = transform(builders.save(proto, tmp_path / "m.onnx"), tmp_path)
    assert made.applied.notes == ("training information was left out",)
    assert not made.proto.training_info


def test_maps_survive(tmp_path: Path) -> None:
    zipped = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[4, 5, 6])
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))
    proto = builders.model([zipped], [value("x")], [helper.make_value_info("y", kind)], domains=[("ai.onnx.ml", 3)])
    source = builders.save(proto, tmp_path / "m.onnx")
    made = transform(source, tmp_path, Clean(), PinShapes((("n", 2),)), Fold())
    assert made.applied.signature.outputs == open_model(source).signature.outputs
    x = floats(2, 3)
    assert answer(made.applied.path, {"x": x}) == answer(source, {"x": x})


def test_a_captured_initializer_of_a_subgraph_is_saved_outside(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["a"])],
        "then",
        [],
        [value("a", FLOAT, None)],
        [array("w", floats(3, 500))],
    )
    other = helper.make_graph([helper.make_node("MatMul", ["x", "v"], ["b"])], "else", [], [value("b", FLOAT, None)])
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other)]
    source = model(
        tmp_path, nodes, [value("c", BOOL, []), value("x")], initializers=[array("v", floats(3, 500, seed=1))]
    )
    made = transform(source, tmp_path, Clean(), Fold(), max_inline_bytes=0)
    assert len(made.applied.files) == 2
    for condition in (True, False):
        same(made, c=np.array(condition), x=floats(2, 3))


@pytest.mark.parametrize(
    ("what", "phrase"),
    [
        ("rename", "outputs are 'other', not 'y'"),
        ("dim", r"input 'x' is x: float32\[1, 3\], not x: float32\[n, 3\]"),
        ("dtype", "input 'x' is x: float16"),
    ],
)
def test_a_pass_is_held_to_its_promise(tmp_path: Path, what: str, phrase: str) -> None:
    with pytest.raises(InternalError, match=f"pass 'broken' broke the signature it promised: .*{phrase}"):
        transform(builders.relu(tmp_path / "m.onnx"), tmp_path, Broken(what))


def test_a_result_that_does_not_load_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="NoSuchOperator"):
        transform(builders.relu(tmp_path / "m.onnx"), tmp_path, Broken("operator"))


def test_what_the_checker_says_of_the_source_too_is_no_error(tmp_path: Path) -> None:
    made = transform(model(tmp_path, [node("Relu", ["x"], ["y"])]), tmp_path)
    with pytest.raises(onnx.checker.ValidationError, match="shape"):
        onnx.checker.check_model(str(made.applied.path))
    known = builders.relu(tmp_path / "m.onnx")

    class Forgets(Broken):
        def signature(self, before: Signature) -> Signature:
            return replace(before, outputs=(replace(before.outputs[0], dims=None),))

        def run(self, loaded, context: Context) -> Outcome:
            loaded.graph.outputs[0].shape = None
            return Outcome(loaded)

    with pytest.raises(BuildError, match=r"the onnx checker refuses the transformed model: .*shape"):
        transform(known, tmp_path, Forgets(""))


def test_a_dialect_that_the_runtime_lacks_can_be_written(tmp_path: Path) -> None:
    x = value("x", TensorProto.BFLOAT16)
    source = model(tmp_path, [node("Erf", ["x"], ["y"])], [x], [value("y", TensorProto.BFLOAT16)])
    with pytest.raises(BuildError, match="ONNX Runtime can't load"):
        transform(source, tmp_path)
    assert transform(source, tmp_path, check_runtime=False).applied.signature.inputs[0].dtype == "bfloat16"


def test_notes_are_not_repeated(tmp_path: Path) -> None:
    made = transform(builders.relu(tmp_path / "m.onnx"), tmp_path, Broken(""), Broken(""))
    assert made.applied.notes == ("one",)
    assert made.applied.passes == ("broken", "broken")


def test_unreadable_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x01\xff\xff")
    with pytest.raises(ModelError, match="not a whole ONNX model"):
        load(tmp_path / "m.onnx")


def test_differences_name_all_tensors() -> None:
    one = Signature((TensorSpec("a", "float32", (1,)), TensorSpec("b", "int64", None)), ())
    assert signature_differences(one, one) == []
    other = replace(one, inputs=(one.inputs[0], replace(one.inputs[1], dtype="int32")))
    assert signature_differences(one, other) == ["input 'b' is b: int32[...], not b: int64[...]"]
    assert "inputs are 'b', 'a'" in signature_differences(one, replace(one, inputs=one.inputs[::-1]))[0]


def test_signature_is_what_opening_the_file_says(corpus: Path) -> None:
    for path in sorted(corpus.glob("*.onnx")):
        loaded = load(path)
        assert signature_of(loaded.model, loaded.foreign) == open_model(path).signature


def test_passes_travel_as_json() -> None:
    made = (PinShapes((("n", 1), ("x:1", 3))), Fold(max_bytes=7), SetVersions((("", 17), ("ai.onnx.ml", 3)), 8),
            Clean(), InlineFunctions(), DropUnusedImports())  # fmt: skip
    adapter = TypeAdapter(tuple[AnyPass, ...])
    text = json.dumps(adapter.dump_python(made, mode="json"))
    assert adapter.validate_json(text) == made
    assert json.loads(text)[1]["name"] == "fold"
    with pytest.raises(ValueError, match="no pass is named 'nope'"):
        adapter.validate_json('[{"name": "nope"}]')
    with pytest.raises(InternalError, match="broken"):
        dump_pass(Broken(""))


def test_what_was_made_travels_as_json(tmp_path: Path) -> None:
    applied = transform(builders.relu(tmp_path / "m.onnx"), tmp_path, Clean()).applied
    adapter = TypeAdapter(Applied)
    assert adapter.validate_json(adapter.dump_json(applied)) == applied
    assert applied.digest == open_model(applied.path).digest


def test_every_registered_pass_is_a_pass() -> None:
    from packager.transform_registry import _adapter

    for name in PASSES:
        assert _adapter(name).core_schema is not None


FLAT = {
    "versions": ('SetVersions((("", 21),))', 1.0, 22),
    "fp16": ("Float16()", 0.5, 11),
    "int8": ("Int8Dynamic()", 0.25, 11),
}
"""Passes that stream, the share of the bytes that they leave, and how many weights of 100 MB they are given."""


@pytest.mark.parametrize("chosen", FLAT)
def test_memory_stays_flat_over_gigabytes(tmp_path: Path, chosen: str) -> None:
    """1.1 or 2.2 GB of zeros in a sparse file, through passes, out to data files, checked and loaded.

    Held to bounds is a child's RssAnon, which leaves out pages of mapped files that the system can take back.
    """
    if not Path("/proc/self/status").exists():
        pytest.fail("needs /proc for RssAnon")
    count, size = FLAT[chosen][2], 5000
    nbytes = size * size * 4
    with (tmp_path / "w.data").open("wb") as handle:
        handle.truncate(count * nbytes)
    weights, nodes = [], []
    for index in range(count):
        tensor = TensorProto(name=f"w{index}", data_type=FLOAT, dims=[size, size], data_location=TensorProto.EXTERNAL)
        for key, text in (("location", "w.data"), ("offset", index * nbytes), ("length", nbytes)):
            tensor.external_data.add(key=key, value=str(text))
        weights.append(tensor)
        nodes.append(node("MatMul", [f"h{index}" if index else "x", f"w{index}"], [f"h{index + 1}"]))
    model(tmp_path, nodes, [value("x", FLOAT, ("n", size))], initializers=weights)
    script = """
        import sys, threading, time, onnx, onnxruntime, onnx_ir
        from pathlib import Path
        from packager.goldens import GoldenSet
        from packager.transform import Context
        from packager.transform_float16 import Float16
        from packager.transform_int8 import Int8Dynamic
        from packager.transform_shapes import Fold, PinShapes
        from packager.transform_versions import SetVersions
        from packager.transforming import apply

        def anonymous():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

        most = before = anonymous()

        def watch():
            global most
            while True:
                most = max(most, anonymous())
                time.sleep(0.01)

        threading.Thread(target=watch, daemon=True).start()
        folder = Path(sys.argv[1])
        (folder / "out").mkdir()
        passes = (PinShapes((("n", 1),)), Fold(), eval(sys.argv[2]))
        context = Context(folder / "m.onnx", folder, GoldenSet(()))
        made = apply(passes, context, folder / "out" / "m.onnx", max_inline_bytes=1 << 20)
        print(len(made.files), made.bytes, most - before)
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), FLAT[chosen][0]],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        )  # fmt: skip
    finally:
        for file in tmp_path.rglob("*.bin"):
            file.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    files, written, grown = map(int, done.stdout.split())
    assert files > 1
    assert written == pytest.approx(count * nbytes * FLAT[chosen][1], rel=0.01)
    assert grown < 300, f"peak memory grew by {grown} MiB over {written >> 20} MiB of weights"


def test_an_output_of_unknown_rank_stays_so_in_half_precision(tmp_path: Path) -> None:
    """Inference for the conversion must not write into the signature."""
    weights = [onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")]
    path = model(tmp_path, [node("MatMul", ["x", "w"], ["y"])], initializers=weights)
    made = transform(path, tmp_path, Float16()).applied
    assert made.signature.outputs[0].dims is None
