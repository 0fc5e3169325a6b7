"""Names of precisions, as manifests and as policies know them."""

from __future__ import annotations

import pytest

from packager.policy import policies
from packager.precisions import COARSENESS, coarser, policy_precision


@pytest.mark.parametrize(
    ("spelt", "judged"), [("fp32", "fp32"), ("int8-static", "int8"), ("int8-dynamic", "int8"), ("int4-weights", "int4")]
)
def test_how_it_was_quantised_does_not_change_how_it_is_judged(spelt: str, judged: str):
    assert policy_precision(spelt) == judged


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("fp32", "int8", "int8"),
        ("int8-static", "fp32", "int8"),
        ("fp16", "bf16", "fp16"),
        ("int4-weights", "int8", "int4"),
    ],
)
def test_the_coarser_decides(one: str, other: str, found: str):
    assert coarser(one, other) == coarser(other, one) == found


def test_every_judged_precision_has_bounds_in_every_policy():
    for policy in policies().values():
        assert set(policy.precisions) == set(COARSENESS)
