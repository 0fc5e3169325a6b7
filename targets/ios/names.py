"""Swift names for tensors and modules: valid, unique, never a keyword. What the model calls a tensor stays as it is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEYWORDS = _words(
    "actor any as associatedtype async await borrowing break case catch class consuming continue convenience default "
    "defer deinit didSet do dynamic else enum extension fallthrough false fileprivate final for func get guard if "
    "import in indirect infix init inout internal is isolated lazy left let macro mutating nil none nonisolated "
    "nonmutating open operator optional override package postfix precedencegroup prefix private protocol public repeat "
    "required rethrows return right self set some static struct subscript super switch throw throws true try typealias "
    "unowned var weak where while willSet Any Protocol Self Type"
)
"""Words of Swift 6's grammar, those that are reserved in places only included."""

MEMBERS = frozenset({"tensors", "hash", "hashValue", "description", "customMirror"})
"""Names that the generated types use themselves, or that the standard library gives a meaning."""

MODULES = _words(
    "Accelerate AnyTensor Combine CoreML CryptoKit Dispatch ElementKind Foundation Glibc ModelConfiguration ModelError "
    "ObjectiveC OnnxRuntimeBindings Payload PlainElement Swift SwiftUI Tensor TensorDescription TensorElement UIKit "
    "Vision XCTest"
)
"""Modules and types that a generated module mustn't be named like."""

LETTERS = re.compile(
    r"[0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]+"
)
"""Runs of what may stand in an identifier (The Swift Programming Language, Lexical Structure): ASCII, Latin-1 letters,
kana, CJK ideographs and Hangul. Swift allows more; the rest of Unicode separates words here."""


def identifiers(names: Iterable[str], fallback: str) -> list[str]:
    """One Swift identifier for each name, in order, no two alike.

    ``class`` becomes ``class_``, ``a-b`` becomes ``aB``, ``1x`` becomes ``_1x``; the second of two that come out alike
    gets a number; where nothing of a name is left it is ``fallback`` with its place.
    """
    taken: set[str] = set()
    found: list[str] = []
    for place, name in enumerate(names, 1):
        base = _camel(name) or f"{fallback}{place}"
        made, count = base, 1
        while made in taken:
            count += 1
            made = f"{base}_{count}"
        taken.add(made)
        found.append(made)
    return found


def _camel(name: str) -> str:
    words = LETTERS.findall(unicodedata.normalize("NFC", name))
    if not words:
        return ""
    first, *rest = words
    first = first.lower() if first.isupper() and len(first) > 1 else first[:1].lower() + first[1:]
    made = first + "".join(word[:1].upper() + word[1:] for word in rest)
    if made[0].isdigit():
        made = f"_{made}"
    return f"{made}_" if made in KEYWORDS | MEMBERS else made


def module_name(name: str) -> str:
    """A Swift module's name near a model's: ``rapid_orientation-v2`` becomes ``RapidOrientationV2``."""
    made = "".join(word[:1].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", name))
    if not made or made[0].isdigit():
        made = f"Model{made}"
    return f"{made}Net" if made in MODULES else made


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of names that Swift's strings hold for equal: the same but for how accents are composed."""
    seen: dict[str, str] = {}
    pairs = []
    for name in names:
        key = unicodedata.normalize("NFC", name)
        if key in seen:
            pairs.append((seen[key], name))
        seen.setdefault(key, name)
    return pairs
