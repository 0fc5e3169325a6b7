"""The reference run: run twice, random nodes named, int8 without saturation, NaN refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packager import golden_store, reference
from packager.errors import GoldenError, ModelError
from packager.golden_synth import synthesise
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import open_model
from packager.reference import OrtSession, Reference, ReferenceJob, SynthesisSettings, answer, golden_inputs
from packager.transform import Context
from packager.transform_int8 import Int8Static
from packager.transforming import apply
from tests.builders import BOOL, FLOAT, INT64, model, relu, save, value


def job(path: Path, **more) -> ReferenceJob:
    chosen = {
        "goldens": None, "synthesis": SynthesisSettings(), "exclude": (), "allow_nan": False, "policy": "default-1",
        "precision": "fp32", **more,
    }  # fmt: skip
    return ReferenceJob(model=path, out=path.parent / "answered", **chosen)


def answered(path: Path, **more) -> tuple[Reference, GoldenSet]:
    made = answer(job(path, **more))
    return made, golden_store.read(path.parent / "answered")


def test_synthesised_cases_are_answered_and_kept(tmp_path: Path):
    made, goldens = answered(relu(tmp_path / "m.onnx"), synthesis=SynthesisSettings(cases=2, seed=7))
    assert (made.runtime, made.cases, made.source) == ("ONNX Runtime", 2, "synthesised, seed 7")
    assert made.settings == "no graph optimisation" and made.artifact is None and made.excluded == ()
    for case in goldens.cases:
        assert case.outputs_from == "reference"
        np.testing.assert_array_equal(case.outputs["y"], np.maximum(case.inputs["x"], 0))


def test_an_output_that_differs_between_two_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs: list[str] = []
    whole = OrtSession.run

    def run(self: OrtSession, feeds: Mapping[str, Array], outputs: list[str], case: str) -> dict[str, Array]:
        runs.append(case)
        found = whole(self, feeds, outputs, case)
        if runs.count(case) == 2 and case.endswith("1"):
            found["y"] = np.add(found["y"], np.float32(1e-6))
        return found

    monkeypatch.setattr(OrtSession, "run", run)
    with pytest.raises(ModelError, match="output 'y' differed between two runs of case 'synthesised-1'"):
        answer(job(relu(tmp_path / "m.onnx")))
    assert sorted(runs) == sorted(2 * [f"synthesised-{number}" for number in range(3)])


def random_branch() -> onnx.NodeProto:
    """An If that draws random numbers in one branch only."""
    draw = helper.make_graph(
        [helper.make_node("RandomNormal", [], ["drawn"], name="dice", shape=[2], seed=1.0)], "draw", [],
        [value("drawn", FLOAT, [2])],
    )  # fmt: skip
    zeros = helper.make_node("Constant", [], ["zeros"], value=numpy_helper.from_array(np.zeros(2, np.float32)))
    keep = helper.make_graph([zeros], "keep", [], [value("zeros", FLOAT, [2])])
    return helper.make_node("If", ["flag"], ["noise"], name="branch", then_branch=draw, else_branch=keep)


def test_a_random_node_inside_a_branch_is_named_even_when_the_branch_is_not_taken(tmp_path: Path):
    nodes = [random_branch(), helper.make_node("Add", ["noise", "x"], ["y"], name="sum")]
    proto = model(nodes, [value("flag", BOOL, []), value("x", FLOAT, [2])], [value("y", FLOAT, [2])])
    np.savez(tmp_path / "g.npz", flag=np.array(False), x=np.ones(2, np.float32))
    with pytest.raises(ModelError, match="output 'y' depends on random node RandomNormal 'dice'") as caught:
        answer(job(save(proto, tmp_path / "m.onnx"), goldens=tmp_path / "g.npz"))
    assert 'exclude = ["..."]' in str(caught.value.hint)


def test_a_body_that_reads_a_random_value_from_outside_is_random_too(tmp_path: Path):
    inner = helper.make_graph(
        [helper.make_node("Identity", ["noise"], ["inner"])], "then", [], [value("inner", FLOAT, [2])]
    )
    nodes = [
        helper.make_node("RandomUniform", [], ["noise"], name="dice", shape=[2], seed=1.0),
        helper.make_node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner),
    ]
    proto = model(nodes, [value("flag", BOOL, [])], [value("y", FLOAT, [2])])
    with pytest.raises(ModelError, match="'y' depends on random node RandomUniform 'dice'"):
        answer(job(save(proto, tmp_path / "m.onnx")))


def test_the_shape_of_a_random_value_is_not_random(tmp_path: Path):
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="dice", seed=1.0),
        helper.make_node("Shape", ["noise"], ["dims"]),
        helper.make_node("Size", ["noise"], ["count"]),
    ]
    outputs = [value("dims", INT64, [2]), value("count", INT64, [])]
    made, goldens = answered(save(model(nodes, [value("x")], outputs), tmp_path / "m.onnx"))
    assert made.cases == 3
    assert goldens.cases[0].outputs["dims"].tolist() == list(goldens.cases[0].inputs["x"].shape)


def quantised(path: Path, weights: np.ndarray) -> Path:
    """``y = float(quantise(x) . weights)``: 8-bit activations times 8-bit weights, as dynamic quantisation makes it."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["y"], to=TensorProto.FLOAT),
    ]
    proto = model(
        nodes, [value("x", FLOAT, ["n", weights.shape[0]])], [value("y", FLOAT, ["n", weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    return save(proto, path)


def test_int8_sums_that_would_saturate_in_16_bits_are_exact(tmp_path: Path):
    rng = np.random.default_rng(3)
    path = quantised(tmp_path / "m.onnx", rng.choice(np.array([-128, 127], np.int8), (64, 32)))
    # Activations of 255 times weights of 127, two by two, exceed 2**15: without VNNI the plain kernel saturates there.
    x = np.where(rng.random((8, 64)) < 0.9, 1.0, 0.0).astype(np.float32)
    np.savez(tmp_path / "g.npz", x=x)
    made, goldens = answered(path, goldens=tmp_path / "g.npz", precision="int8")
    assert made.settings == "extended optimisation, session.x64quantprecision=1"
    (exact,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.testing.assert_array_equal(goldens.cases[0].outputs["y"], exact)
    assert np.abs(exact).max() > 2**15


def test_symmetric_int8_that_onnx_runtime_cannot_optimise_runs_as_it_is_defined(tmp_path: Path, corpus: Path):
    goldens = synthesise(open_model(corpus / "file_type.onnx"), cases=1)
    (tmp_path / "out").mkdir()
    context = Context(corpus / "file_type.onnx", tmp_path, goldens)
    made = apply((Int8Static(scheme="symmetric"),), context, tmp_path / "out/m.onnx").path
    assert open_model(made).is_quantized and not open_model(made).multiplies_integers
    session = OrtSession(made, quantized=True)
    assert session.settings == "no graph optimisation"
    case = goldens.cases[0]
    found = session.run(case.inputs, ["target_label"], case.name)["target_label"]
    (plain,) = OrtSession(made, quantized=False).run(case.inputs, ["target_label"], case.name).values()
    assert found.tobytes() == plain.tobytes() and np.isfinite(found).all()


def divides(path: Path) -> Path:
    nodes = [helper.make_node("Div", ["x", "x"], ["y"])]
    return save(model(nodes, [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]), path)


def test_nan_in_the_reference_is_refused_unless_it_is_allowed(tmp_path: Path):
    path = divides(tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", x=np.array([0, 2], np.float32))
    with pytest.raises(GoldenError, match="the reference answers NaN in output 'y'") as caught:
        answer(job(path, goldens=tmp_path / "g.npz"))
    assert "allow_nan" in str(caught.value.hint)
    _, goldens = answered(path, goldens=tmp_path / "g.npz", allow_nan=True)
    np.testing.assert_array_equal(goldens.cases[0].outputs["y"], [np.nan, 1])


def test_a_case_that_nothing_could_be_compared_in_is_refused(tmp_path: Path):
    np.savez(tmp_path / "g.npz", x=np.zeros(2, np.float32))
    with pytest.raises(GoldenError, match="output 'y' has no finite value, so nothing can be compared") as caught:
        answer(job(divides(tmp_path / "m.onnx"), goldens=tmp_path / "g.npz", allow_nan=True))
    assert "exclude" in str(caught.value.hint)
    made = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])])
    np.savez(tmp_path / "g.npz", x=np.zeros(0, np.float32))
    with pytest.raises(GoldenError, match="every output is empty, so nothing can be compared"):
        answer(job(save(made, tmp_path / "m.onnx"), goldens=tmp_path / "g.npz"))


@pytest.mark.parametrize(("training", "ratio", "drawn"), [(1, 0.5, True), (1, 0.0, False), (0, 0.5, False)])
def test_a_dropout_in_training_mode_draws_though_it_has_a_seed(
    tmp_path: Path, training: int, ratio: float, drawn: bool
):
    node = helper.make_node("Dropout", ["x", "ratio", "training"], ["y"], name="drop", seed=7)
    held = [helper.make_tensor("ratio", FLOAT, [], [ratio]), helper.make_tensor("training", BOOL, [], [training])]
    path = save(model([node], [value("x", FLOAT, [4])], [value("y", FLOAT, [4])], held), tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", x=np.arange(4, dtype=np.float32))
    if drawn:
        with pytest.raises(ModelError, match="output 'y' depends on random node Dropout 'drop'"):
            answer(job(path, goldens=tmp_path / "g.npz"))
    else:
        _, goldens = answered(path, goldens=tmp_path / "g.npz")
        assert goldens.cases[0].outputs["y"].tolist() == [0, 1, 2, 3]


def test_integer_models_without_a_kernel_are_refused_in_words(tmp_path: Path):
    """The optimiser's failure and then the runtime's own: the second must not escape."""
    nodes = [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])]
    held = [
        helper.make_tensor("scale", FLOAT, [], [0.5]), helper.make_tensor("zero", TensorProto.FLOAT4E2M1, [], [0]),
    ]  # fmt: skip
    made = model(nodes, [value("x", FLOAT, [2])], [value("y", TensorProto.FLOAT4E2M1, [2])], held, opset=24, ir=11)
    with pytest.raises(ModelError, match="ONNX Runtime can't load the model") as caught:
        OrtSession(save(made, tmp_path / "m.onnx"), quantized=True)
    assert "QuantizeLinear" in caught.value.message


def test_a_model_the_runtime_cannot_load_is_named_with_its_reason(tmp_path: Path):
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"], name="odd")]
    path = save(model(nodes, [value("x")], [value("y")]), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="ONNX Runtime can't load the model") as caught:
        answer(job(path))
    assert str(path) in caught.value.message and "NoSuchOperator" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_case_the_model_does_not_take_is_named_with_its_shapes(tmp_path: Path):
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    to = numpy_helper.from_array(np.array([2, 8]), "to")
    path = save(model(nodes, [value("x", FLOAT, ["n"])], [value("y", FLOAT, [2, 8])], [to]), tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", x=np.zeros(15, np.float32))
    with pytest.raises(ModelError, match=r"ONNX Runtime failed on golden case '.*' \(x \[15\]\)"):
        answer(job(path, goldens=tmp_path / "g.npz"))


def test_other_sizes_are_tried_until_the_model_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []

    def sets(*_: object) -> Iterator[GoldenSet]:
        for size in (15, 17, 16, 32):
            tried.append(size)
            yield GoldenSet((GoldenCase("c", {"x": np.zeros(size, np.float32)}, source=f"size {size}"),))

    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    to = numpy_helper.from_array(np.array([2, 8]), "to")
    path = save(model(nodes, [value("x", FLOAT, ["n"])], [value("y", FLOAT, [2, 8])], [to]), tmp_path / "m.onnx")
    monkeypatch.setattr(reference, "golden_inputs", sets)
    made, goldens = answered(path)
    assert tried == [15, 17, 16] and made.source == "size 16"
    assert goldens.cases[0].inputs["x"].shape == (16,)


def test_synthesis_offers_other_sizes_after_its_first_guess(tmp_path: Path):
    path = relu(tmp_path / "m.onnx", shape=("n", "frames"))
    sizes = [made.cases[0].inputs["x"].shape for made in golden_inputs(open_model(path), job(path))]
    assert len(set(sizes)) > 3
    pinned = job(path, synthesis=SynthesisSettings(dims=(("n", 5), ("frames", 7))))
    assert {made.cases[0].inputs["x"].shape for made in golden_inputs(open_model(path), pinned)} == {(5, 7)}


def test_the_first_failure_is_told_when_no_size_works(tmp_path: Path):
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    to = numpy_helper.from_array(np.array([7919, 6007]), "to")
    path = save(model(nodes, [value("x", FLOAT, ["n"])], [value("y", FLOAT, None)], [to]), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="'synthesised-0'"):
        answer(job(path))


def test_what_to_exclude_must_exist_and_something_must_be_left(tmp_path: Path):
    path = relu(tmp_path / "m.onnx")
    with pytest.raises(GoldenError, match="excluded output 'z' is no output"):
        answer(job(path, exclude=("z",)))
    with pytest.raises(ModelError, match="no output is left to compare"):
        answer(job(path, exclude=("y",)))


def test_outputs_that_are_no_tensors_are_left_out_by_themselves(tmp_path: Path):
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["s"]), helper.make_node("Relu", ["x"], ["y"])]
    sequence = helper.make_tensor_sequence_value_info("s", FLOAT, ["n", 3])
    made, goldens = answered(save(model(nodes, [value("x")], [sequence, value("y")]), tmp_path / "m.onnx"))
    assert [name for name, _ in made.excluded] == ["s"] and "not a tensor" in made.excluded[0][1]
    assert list(goldens.cases[0].outputs) == ["y"]


@pytest.mark.parametrize(("off", "passed"), [(0.0, True), (2e-4, True), (0.5, False)])
def test_the_artifact_is_judged_against_its_sources_outputs(tmp_path: Path, off: float, passed: bool):
    path = relu(tmp_path / "m.onnx")
    x = np.array([[1, 2, 3]], np.float32)
    np.savez(tmp_path / "g.npz", x=x, y=x + np.float32(off))
    made, goldens = answered(path, goldens=tmp_path / "g.npz")
    assert made.artifact is not None and made.artifact.passed is passed
    assert made.artifact.max_abs == pytest.approx(off, abs=1e-6) and made.artifact.tolerance == 1e-3
    assert bool(made.artifact.reasons) is not passed
    np.testing.assert_array_equal(goldens.cases[0].outputs["y"], x)
