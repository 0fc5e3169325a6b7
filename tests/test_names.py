"""Names that become file names."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packager.names import MAX_LENGTH, RESERVED, check_name, dns_label, nearest, slug, suggestion


@pytest.mark.parametrize(
    "good", ["a", "resnet50", "1.4.0", "2.0.0-rc.1+build_7", "Partner-Tablets", "console", "a" * 100]
)
def test_a_plain_name_is_accepted(good):
    assert check_name(good) is None


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("", "empty"),
        ("a" * 101, "101 characters"),
        ("a b", "isn't a name"),
        (".hidden", "isn't a name"),
        ("-rf", "isn't a name"),
        ("../up", "isn't a name"),
        ("a/b", "isn't a name"),
        ("naïve", "isn't a name"),
        ("a\n", "isn't a name"),
        ("٣", "isn't a name"),
        ("a.", "dot"),
        ("CON", "Windows"),
        ("nul.onnx", "Windows"),
        ("Lpt9", "Windows"),
    ],
)
def test_an_unfit_name_is_refused_with_the_reason(bad, word):
    problem = check_name(bad)
    assert problem is not None
    assert word in problem


@pytest.mark.parametrize(
    ("stem", "made"),
    [
        ("resnet50-v1.5", "resnet50-v1.5"),
        ("my model (final)", "my-model-final"),
        ("naïve café", "naive-cafe"),
        ("..", "model"),
        ("模型", "model"),
        ("--help", "help"),
        (".hidden", "hidden"),
        ("con", "model-con"),
        ("nul.v2", "model-nul.v2"),
        ("a" * 300, "a" * MAX_LENGTH),
        ("", "model"),
    ],
)
def test_a_stem_becomes_the_name_one_would_expect(stem, made):
    assert slug(stem, "model") == made


@given(st.text(), st.text())
@example("aux", "aux")
@example("ﷺ" * 400, "")
@example("a" * 99 + ".b", "x")
@example("COM¹", "-")
def test_every_slug_is_a_name(text, fallback):
    assert check_name(slug(text, fallback)) is None


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,98}[A-Za-z0-9]", fullmatch=True))
def test_a_good_name_is_its_own_slug(text):
    if check_name(text) is None:
        assert slug(text, "model") == text


def test_windows_devices_are_all_known():
    assert {"con", "prn", "aux", "nul", "com1", "com9", "lpt1", "lpt9"} <= RESERVED


def test_the_nearest_choice_is_suggested_and_a_far_one_is_not():
    assert nearest("precison", ["path", "precision"]) == "precision"
    assert nearest("EDGE", ["edge", "cloud"]) == "edge"
    assert nearest("qqq", ["edge", "cloud"]) is None
    assert nearest("x" * 1_000_000, ["edge"]) is None
    assert nearest("edge", []) is None


def test_a_hint_names_the_nearest_choice_and_all_of_them():
    assert suggestion("egde", ["edge", "cloud"], "known kinds") == "did you mean `edge`? known kinds: cloud, edge"
    assert suggestion("qqq", ["edge", "cloud"], "known kinds") == "known kinds: cloud, edge"
    assert suggestion("qqq", [], "known kinds") == "known kinds: none"


def test_names_become_dns_labels():
    assert dns_label("Ranker_v2.1+x", "svc") == "svc-ranker-v2-1-x"
    assert dns_label("+", "svc") == "svc" and len(dns_label("a" * 100, "svc")) <= 63
