"""What is said about mistakes in the tables of a manifest."""

from __future__ import annotations

import tomllib

import pytest
import tomlkit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.manifests import (
    MODEL,
    WHOLE,
    documents,
    only_mistakes,
    places,
    problems,
    rooms_of_tests,
    values,
    write,
)


@pytest.fixture(scope="module", autouse=True)
def rooms():
    with rooms_of_tests() as made:
        yield made


@pytest.mark.parametrize(
    ("text", "place", "line", "message"),
    [
        ("", "model", None, "`model` is missing"),
        ("[model]\n", "model.path", 1, "`path` is missing"),
        ('modle.path = "m.onnx"\n[model]\npath = "m"', "modle", 1, "unknown key `modle`"),
        ('[model]\npath = ""', "model.path", 2, "names no file"),
        ('[model]\npath = ".."', "model.path", 2, "names no file"),
        ('[model]\npath = "a\\u0000b"', "model.path", 2, "zero character"),
        ('[model]\npath = "m"\nname = "a/b"', "model.name", 3, "isn't a name"),
        ('[model]\npath = "m"\nversion = "1.0 beta"', "model.version", 3, "isn't a name"),
        ('[model]\npath = "m"\nversion = 1.0', "model.version", 3, "must be text in quotes, not 1.0"),
        ('[model]\npath = "m"\nversion = 2024-01-01', "model.version", 3, "a date or time"),
        (MODEL + "[golden]\ncases = 1001", "golden.cases", 4, "less than or equal to 1000"),
        (MODEL + "[golden]\ncases = true", "golden.cases", 4, "must be a whole number, not true"),
        (MODEL + "[golden]\ncases = 3.0", "golden.cases", 4, "must be a whole number, not 3.0"),
        (MODEL + "[golden]\nseed = -1", "golden.seed", 4, "greater than or equal to 0"),
        (MODEL + "[golden]\nseed = 0x" + "f" * 20, "golden.seed", 4, "64 bits"),
        (MODEL + "[golden]\nallow_nan = 'yes'", "golden.allow_nan", 4, "must be true or false"),
        (MODEL + "[golden]\nexclude = [\n'a',\n3]", "golden.exclude[1]", 6, "must be text in quotes"),
        (MODEL + "[golden.dims]\nseq = 0", "golden.dims.seq", 4, "greater than or equal to 1"),
        (MODEL + "[golden.dims]\nseq = 2147483648", "golden.dims.seq", 4, "less than or equal to 2147483647"),
        (MODEL + "[golden.ranges]\nx = [2, 1]", "golden.ranges.x", 4, "the low end 2.0 is above the high end 1.0"),
        (MODEL + "[golden.ranges]\nx = [0, inf]", "golden.ranges.x[1]", 4, "finite"),
        (MODEL + "[golden.ranges]\nx = [0, nan]", "golden.ranges.x[1]", 4, "finite"),
        (MODEL + "[golden.ranges]\nx = [0]", "golden.ranges.x", 4, "too few values"),
        (MODEL + "[golden.ranges]\nx = [0, 1, 2]", "golden.ranges.x", 4, "at most 2"),
        (MODEL + "targets = 3", "model.targets", 3, "unknown key `targets`"),
        ("targets = 3\n" + MODEL, "targets", 1, "must be a table, not 3"),
        ("targets.edge = 3\n" + MODEL, "targets.edge", 1, "must be a table, not 3"),
        ("targets = {}\n" + MODEL, "targets", 1, "no target"),
        (MODEL + "[targets.egde]", "targets.egde", 3, "unknown kind `egde`"),
        (MODEL + "[targets.edge]\nkind = 'clod'", "targets.edge.kind", 4, "unknown kind `clod`"),
        (MODEL + "[targets.edge]\nkind = 3", "targets.edge.kind", 4, "must be text in quotes"),
        (MODEL + "[targets.edge]\nprecision = 'int8'", "targets.edge.precision", 4, "unknown precision `int8`"),
        (MODEL + "[targets.edge]\nshapes.batch = -1", "targets.edge.shapes.batch", 4, "greater than or equal to 1"),
        (MODEL + "[targets.edge]\nmin_level = 'best'", "targets.edge.min_level", 4, "must be"),
        (MODEL + "[targets.edge]\narchive = 'rar'", "targets.edge.archive", 4, "'tar.gz' or 'zip'"),
        (MODEL + "[targets.edge]\nbuild_timeout = 0", "targets.edge.build_timeout", 4, "greater than 0"),
        (MODEL + "[targets.edge]\nverify_timeout = inf", "targets.edge.verify_timeout", 4, "finite"),
        (MODEL + "[targets.edge]\nthreads = '2'", "targets.edge.threads", 4, "must be a whole number"),
        (MODEL + "[targets.edge]\ncache = 1.5", "targets.edge.cache", 4, "must be a whole number, not 1.5 or must be"),
        (MODEL + "[targets.edge.layout]\nordr = []", "targets.edge.layout.ordr", 4, "unknown key `ordr`"),
        (MODEL + "[targets.edge.tolerance]\nmax_abs = 0", "targets.edge.tolerance.max_abs", 4, "greater than 0"),
        (MODEL + "[targets.edge.tolerance]\nscaled = nan", "targets.edge.tolerance.scaled", 4, "finite"),
        (MODEL + "[targets.edge.tolerance]\ncosine = 1.1", "targets.edge.tolerance.cosine", 4, "than or equal to 1"),
        (MODEL + "[targets.edge.tolerance]\ntop1 = -0.1", "targets.edge.tolerance.top1", 4, "than or equal to 0"),
        (
            MODEL + '[targets.edge.tolerance.outputs."a b"]\nmaxabs = 1',
            'targets.edge.tolerance.outputs."a b".maxabs', 4, "unknown key `maxabs`",
        ),
        (MODEL + "[tolerance.fp61]\nmax_abs = 1", "tolerance.fp61", 3, "unknown precision `fp61`"),
        (MODEL + "[tolerance]\nfp16 = 0.1", "tolerance.fp16", 4, "must be a table"),
        (MODEL + "[tolerance]\npolicy = 'lax'", "tolerance.policy", 4, "must be 'default-1'"),
        (MODEL + "[gates]\nmin_level = 3", "gates.min_level", 4, "must be"),
        (MODEL + "[gates]\nmin_parity = 3", "gates.min_parity", 4, "unknown key `min_parity`"),
        (MODEL + '[targets."CON"]\nkind = "edge"', "targets.CON", 3, "Windows"),
        (MODEL + '[targets."a\\nb"]\nkind = "edge"', 'targets."a\\nb"', 3, "isn't a name"),
        (MODEL + "[targets.edge]\n[targets.EDGE]\nkind = 'edge'", "targets.EDGE", 4, "only in letter case"),
        (MODEL + "x = " + "[" * 40 + "]" * 40, "model", None, "more than 32 deep"),
        ("[model]\npath = 'm'\nx = " + "[" * 5000 + "]" * 5000, "packager.toml", None, "nested too deeply"),
        (".".join("a" * 200_000) + " = 1", "packager.toml", 1, "more than 100 parts"),
        ("[model]\npath = m.onnx", "packager.toml", 2, "not TOML"),
        ("[model]\npath = 'm'\npath = 'n'", "packager.toml", 3, "not TOML"),
        ("[model]\npath = '''m\n\n", "packager.toml", 4, "the end of the file"),
        ("[model]\npath = " + "9" * 5000, "packager.toml", None, "not TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_place_line_and_reason(tmp_path, text, place, line, message):
    found = problems(tmp_path, text)
    assert [(where, at) for where, at, _, _ in found] == [(place, line)]
    assert message in found[0][2]


@given(documents)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_document_gives_mistakes_and_never_a_crash(tmp_path, document):
    only_mistakes(write(tmp_path, tomlkit.dumps(document)))


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(WHOLE) - 1), st.integers(0, 6), st.text(max_size=4) | st.sampled_from("[]{}='\"#\n.")
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([(0, 6, "\ud800")])
def test_a_damaged_manifest_gives_mistakes_and_never_a_crash(tmp_path, edits):
    text = WHOLE
    for at, cut, put in edits:
        text = text[:at] + put + text[at + cut :]
    only_mistakes(write(tmp_path, text.encode("utf-8", "surrogatepass")))


@given(st.sampled_from(sorted(places(tomllib.loads(WHOLE)) - {()}, key=str)), values)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_of_any_type_anywhere_gives_mistakes_and_never_a_crash(tmp_path, place, value):
    document = tomllib.loads(WHOLE)
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    only_mistakes(write(tmp_path, tomlkit.dumps(document)))
