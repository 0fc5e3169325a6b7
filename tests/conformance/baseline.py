"""What is known to end how: ``expected.json``, which lists every case that a kind doesn't simply pass.

::

    {"openvino": {"near": ["dft dft_axis"], "caught": [...], "refused": {"OpenVINO has no rule": ["det_2d ..."]}}}

Names are those of onnx without ``test_``. A case that the reference refuses is listed there only. Of kinds that aren't
in the file nothing is expected, but that no end is a bad one.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.conformance.table import AS_REFERENCE, refusal
from tests.conformance.worker import BAD, REFERENCE, Ending

FILE = Path(__file__).with_name("expected.json")
PREFIX = "test_"
RANK = {"pass": 2, "near": 1}
"""The better the higher; a refusal is as good as being caught. A bad end is never expected."""

Ends = Mapping[tuple[str, str], Ending]


def read() -> dict[tuple[str, str], str]:
    """The expected end by case and kind of what isn't simply passed."""
    found = {}
    for kind, listed in json.loads(FILE.read_text(encoding="utf-8")).items():
        for end, names in listed.items():
            for text in names.values() if isinstance(names, dict) else (names,):
                found.update({(PREFIX + name, kind): end for name in _names(text)})
    return found


def _names(text: object) -> list[str]:
    return " ".join(text).split() if isinstance(text, list) else str(text).split()


def expected_end(known: Mapping[tuple[str, str], str], case: str, kind: str) -> str:
    """How a case ended when the file was written."""
    if known.get((case, REFERENCE)) == "refused":
        return "refused"
    return known.get((case, kind), "pass")


def failures(ends: Ends) -> Iterator[str]:
    """What must not be: bad ends, and ends that were better once."""
    known, kinds = read(), set(json.loads(FILE.read_text(encoding="utf-8")))
    for (case, kind), ending in sorted(ends.items()):
        if ending.end in BAD:
            yield f"{ending.end.upper()} {case} {kind}: {ending.why[:400]}"
        elif kind in kinds and RANK.get(ending.end, 0) < RANK.get(before := expected_end(known, case, kind), 0):
            yield f"REGRESSION {case} {kind}: was {before}, is {ending.end}: {ending.why[:400]}"


def improvements(ends: Ends) -> list[str]:
    """What ends better than the file says."""
    known = read()
    return [
        f"{case} {kind}: was {before}, is {ending.end}"
        for (case, kind), ending in sorted(ends.items())
        if RANK.get(ending.end, 0) > RANK.get(before := expected_end(known, case, kind), 0)
    ]


def write(ends: Ends, kinds: Sequence[str]) -> None:
    """Make what was found the expected; kinds that weren't asked for stay as they are."""
    document = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for kind in kinds:
        plain: dict[str, list[str]] = defaultdict(list)
        refused: dict[str, list[str]] = defaultdict(list)
        for (case, each), ending in sorted(ends.items()):
            if each != kind or ending.end in ("pass", *BAD):
                continue
            words = refusal(case, kind, ends) if ending.end == "refused" else ""
            if words != AS_REFERENCE:
                (refused[words] if words else plain[ending.end]).append(case.removeprefix(PREFIX))
        document[kind] = {
            **{end: _wrapped(names) for end, names in sorted(plain.items())},
            "refused": {words: _wrapped(names) for words, names in sorted(refused.items())},
        }
    FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _wrapped(names: Sequence[str]) -> list[str]:
    return textwrap.wrap(" ".join(names), 110, break_long_words=False, break_on_hyphens=False)
