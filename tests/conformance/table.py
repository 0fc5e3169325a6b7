"""The page that says how the cases ended: totals by kind, refusals by reason, what was caught and what was near."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packager import __version__
from packager.planning import tool_versions
from packager.render import markdown
from packager.room import kind_named, kinds
from tests.conformance.cases import Case, operators
from tests.conformance.worker import BAD, ENDS, REFERENCE, Ending

BEGIN, END = "<!-- written by make conformance -->\n", "<!-- end -->\n"
SECTION = "\n### "
HEAD = ["| kind | " + " | ".join(ENDS) + " |", "|---|" + "---|" * len(ENDS)]
AS_REFERENCE = "the reference run refused the model, so nothing was built"

REASONS = (
    (r"ONNX Runtime can't load the model: .*Could not find an implementation for", "ONNX Runtime has no kernel for it"),
    (r"ONNX Runtime can't load the model: .*is not a registered function/op", "ONNX Runtime doesn't know the operator"),
    (r"ONNX Runtime can't load the model: .*(Type '|type inference|Type Error)", "ONNX Runtime refuses the type"),
    (r"ONNX Runtime can't load the model: .*(seq\(|sequence|optional)", "ONNX Runtime refuses a sequence or optional"),
    (r"ONNX Runtime can't load the model", "ONNX Runtime can't load the model"),
    (r"ONNX Runtime failed on golden case", "ONNX Runtime fails while computing"),
    (r"ONNX Runtime's quantiser failed", "ONNX Runtime's quantiser fails"),
    (r"QNN took no node of the model", "QNN takes no node of it"),
    (r"the NPU doesn't take \d+ of \d+ nodes", "QNN doesn't take all nodes of it"),
    (r"QNN can't compile the model", "QNN can't compile the nodes that it takes"),
    (r"QNN can't run the model", "QNN runs no such operator"),
    (r"no output is left to compare", "no output is a tensor"),
    (r"not deterministic", "not deterministic"),
    (r"no golden case found", "it has neither inputs nor ones that could be made"),
    (r"and golden cases hold tensors", "an input is a sequence or an optional"),
)
"""Refusals that name much beside the reason, and what they come to. All others are their own words without names."""


def reason(why: str) -> str:
    """What kind of refusal it is: the words without names, places and numbers of this one case."""
    for pattern, words in REASONS:
        if re.search(pattern, why):
            return words
    text = re.sub(r"^/\S*: ", "", why)
    text = re.sub(r"(?<!\w)'[^']*'(?!\w)", "_", text)
    text = re.sub(r"node \S+( _| \([^)]*\))|node _", "a node", text)
    text = re.sub(r"(can't convert the model): .*", r"\1", text)
    text = re.sub(r".* \d+ nodes? of the model: a node: (.*?)( a node: .*|$)", r"\1", text)
    text = re.sub(r"(can't \w+ this signature: )(?:input|output) _ (.*?)( (?:input|output) _ .*|$)", r"\1one \2", text)
    text = re.sub(r"one is \w+, which", "one has a dtype, which", text)
    text = re.sub(r"\[[-\d, ?]*\]", "[...]", text)
    return text[:110].rstrip(" :;,")


def totals(ends: Mapping[tuple[str, str], Ending], kinds: Sequence[str]) -> list[str]:
    """A table with a row for each kind: how many cases ended how."""
    return [*HEAD, *(_row(ends, kind) for kind in kinds)]


def _row(ends: Mapping[tuple[str, str], Ending], kind: str) -> str:
    found = [ending.end for (_, each), ending in ends.items() if each == kind]
    return f"| {kind} | " + " | ".join(str(found.count(end)) for end in ENDS) + " |"


def section(cases: Sequence[Case], ends: Mapping[tuple[str, str], Ending], kind: str) -> str:
    """All that the page says of a kind."""
    of = {case.name: case for case in cases}
    mine = {case: ending for (case, each), ending in sorted(ends.items()) if each == kind}
    share = f"{len(mine)} cases" if len(mine) == len(cases) else f"{len(mine)} of {len(cases)} cases"
    lines = [f"{share}; {_versions(kind)}.", "", *_refused(mine, ends, kind)]
    for end, title in (("caught", "caught"), ("near", "near"), *((bad, f"**{bad}**") for bad in BAD)):
        named = [case for case, ending in mine.items() if ending.end == end]
        if named:
            lines += [f"{title}, {len(named)}:", "", *_by_operator(of[case] for case in named), ""]
    return "\n".join(lines).rstrip("\n")


def _refused(mine: Mapping[str, Ending], ends: Mapping[tuple[str, str], Ending], kind: str) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for case, ending in mine.items():
        if ending.end == "refused":
            groups[refusal(case, kind, ends)].append(case)
    if not groups:
        return []
    rows = ["| refused, because | cases | for instance |", "|---|---|---|"]
    for words, named in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        rows.append(f"| {markdown(words)} | {len(named)} | `{named[0]}` |")
    return [*rows, ""]


def refusal(case: str, kind: str, ends: Mapping[tuple[str, str], Ending]) -> str:
    """Why a kind refused a case; that the reference did is said once."""
    reference = ends.get((case, REFERENCE))
    if kind != REFERENCE and reference is not None and reference.end == "refused":
        return AS_REFERENCE
    return reason(ends[case, kind].why)


def _by_operator(cases: Iterable[Case]) -> list[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        expanded = case.name.partition("_expanded")[1]
        made_of = operators(case)
        key = made_of[0] if len(made_of) == 1 else "several operators" + (" of a function" if expanded else "")
        found[key].append(f"`{case.name.removeprefix('test_')}`")
    return [f"- {operator}: {', '.join(names)}" for operator, names in sorted(found.items())]


def _versions(kind: str) -> str:
    told = {name: importlib.metadata.version(name) for name in ("onnx", "onnxruntime")}
    if kind != REFERENCE:
        told |= tool_versions(kind_named(kind))
        pins = kind_named(kind).facts.pins
        told |= {f"{pins.get('package', kind)} ({kind})": pins[key] for key in ("version", "release") if key in pins}
    told["packager"] = __version__
    return ", ".join(f"{name} {version}" for name, version in sorted(told.items()))


def write(file: Path, cases: Sequence[Case], ends: Mapping[tuple[str, str], Ending], asked: Sequence[str]) -> None:
    """Put it between the marks of the page. Kinds that weren't asked for stay as they are."""
    start, rest = file.read_text(encoding="utf-8").split(BEGIN)
    old, end = rest.split(END)
    rows = {line.split(" ")[1]: line for line in old.splitlines() if re.match(r"\| \w+ \|( \d+ \|)+$", line)}
    sections = {text.partition("\n")[0]: text.partition("\n")[2].strip("\n") for text in old.split(SECTION)[1:]}
    rows |= {kind: _row(ends, kind) for kind in asked}
    sections |= {kind: section(cases, ends, kind) for kind in asked}
    order = [kind for kind in (REFERENCE, *kinds()) if kind in sections]
    parts = ["\n".join([*HEAD, *(rows[kind] for kind in order)])]
    parts += [f"{SECTION.lstrip()}{kind}\n\n{sections[kind]}" for kind in order]
    file.write_text(start + BEGIN + "\n" + "\n\n".join(parts) + "\n\n" + END + end, encoding="utf-8")
