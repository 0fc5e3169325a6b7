"""Operators that an older operator set lacks: ONNX's own test cases answer alike after their nodes are expanded."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test.case.node import collect_testcases

from packager.transform_expanding import FLOAT32_ONLY, RANDOM
from packager.transform_versions import SetVersions
from tests.builders import save
from tests.transform_models import answer, array, floats, model, transform

TARGETS = {
    "AffineGrid": 19, "Attention": 22, "BlackmanWindow": 16, "CenterCropPad": 17, "Gelu": 19,
    "GroupNormalization": 17, "HammingWindow": 16, "HannWindow": 16, "HardSwish": 13, "LayerNormalization": 16,
    "Mish": 17, "RMSNormalization": 22, "RotaryEmbedding": 22, "Swish": 23,
}  # fmt: skip
"""By operator with a body in ONNX: the operator set before it began. ONNX Runtime runs all of these."""
CASES_EACH = 3
DTYPES = ("float16", "float32", "float64", "int32", "int64")


@cache
def cases() -> tuple[tuple[str, str, onnx.ModelProto, tuple[list[np.ndarray], list[np.ndarray]]], ...]:
    """Single-node cases of those operators whose tensors ONNX Runtime takes here, a few of each."""
    found, count = [], Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes some of its cases with an overflow
        collected = collect_testcases(None)
    for case in collected:
        nodes = list(case.model.graph.node) if case.model is not None else []
        if len(nodes) != 1 or nodes[0].op_type not in TARGETS or nodes[0].domain or not case.data_sets:
            continue
        feeds, expected = (list(map(np.asarray, side)) for side in case.data_sets[0])
        half = nodes[0].op_type in FLOAT32_ONLY and feeds[0].dtype == np.float16
        if (
            count[nodes[0].op_type] < CASES_EACH
            and not half
            and all(one.dtype.name in DTYPES for one in (*feeds, *expected))
        ):
            count[nodes[0].op_type] += 1
            found.append((nodes[0].op_type, case.name, case.model, (feeds, expected)))
    return tuple(found)


@pytest.mark.parametrize("operator", sorted(TARGETS))
def test_onnx_own_cases_answer_alike_below_the_operator(tmp_path: Path, operator: str):
    mine = [case for case in cases() if case[0] == operator]
    assert mine, f"onnx has no case of {operator} here"
    for _, name, proto, (feeds, expected) in mine:
        folder = tmp_path / name
        folder.mkdir()
        target = TARGETS[operator]
        made = transform(save(proto, folder / "m.onnx"), folder, SetVersions((("", target),)))
        lowered = onnx.load(made.applied.path)
        assert operator not in {node.op_type for node in lowered.graph.node}
        assert {one.domain: one.version for one in lowered.opset_import}[""] == target
        assert made.applied.notes[0].startswith(f"expanded by ONNX's own definition: {operator}")
        given = {spec.name: array for spec, array in zip(proto.graph.input, feeds, strict=True)}
        for one, other in zip(answer(made.applied.path, given), expected, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_table_has_every_operator_with_a_body_that_begins_late():
    """Beyond the lowest operator set that is lowered to; what is left out is named with the reason."""
    left_out = {
        "Bernoulli": "random",
        "CastLike": "onnx's cases hold 8-bit floats; test_casts_like_another has one of its own",
        "CausalConvWithState": "no runtime here has it to compare with",
        "LinearAttention": "no runtime here has it to compare with",
        "NegativeLogLikelihoodLoss": "begins at 12",
        "SequenceMap": "its body holds a graph, which the inliner doesn't take",
        "SoftmaxCrossEntropyLoss": "begins at 12",
        "SwiGLU": "no runtime here has it to compare with",
        "Celu": "begins at 12",
        "GreaterOrEqual": "begins at 12",
        "LessOrEqual": "begins at 12",
    }
    first: dict[str, int] = {}
    with_body: set[str] = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            first[schema.name] = min(first.get(schema.name, 99), schema.since_version)
            if schema.has_function or schema.has_context_dependent_function:
                with_body.add(schema.name)
    late = {name for name in with_body if first[name] > 11}
    assert late - set(left_out) == set(TARGETS)
    assert set(left_out) >= RANDOM


def test_a_layer_in_a_body_is_expanded_and_defaults_are_kept(tmp_path: Path):
    """In a branch of If; epsilon is the operator's default, not that of an operator inside."""
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = [
            helper.make_node("LayerNormalization", ["x", "s", "b"], [f"{name}_l"], name=f"{name}_norm"),
            helper.make_node("Relu" if name == "then_branch" else "Neg", [f"{name}_l"], [f"{name}_y"]),
        ]
        output = helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, (2, 5))
        branches[name] = helper.make_graph(inner, name, [], [output])
    nodes = [helper.make_node("If", ["c"], ["y"], **branches)]
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (2, 5)),
        helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, ()),
    ]
    weights = [array("s", floats(5)), array("b", floats(5, seed=1))]
    source = model(tmp_path, nodes, inputs, opset=17, initializers=weights)
    made = transform(source, tmp_path, SetVersions((("", 13),)))
    for taken in (True, False):
        feeds = {"x": floats(2, 5, seed=2) * 1e-2, "c": np.array(taken)}
        np.testing.assert_allclose(
            answer(made.applied.path, feeds)[0], answer(made.source, feeds)[0], rtol=1e-4, atol=1e-5
        )


def test_casts_like_another(tmp_path: Path):
    source = model(
        tmp_path,
        [helper.make_node("CastLike", ["x", "like"], ["y"], name="cast")],
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (3,)),
         helper.make_tensor_value_info("like", onnx.TensorProto.INT32, (1,))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.INT32, (3,))],
        opset=18,
    )  # fmt: skip
    made = transform(source, tmp_path, SetVersions((("", 13),)))
    feeds = {"x": np.array([1.7, -2.2, 3], np.float32), "like": np.array([0], np.int32)}
    np.testing.assert_array_equal(answer(made.applied.path, feeds)[0], np.array([1, -2, 3], np.int32))
