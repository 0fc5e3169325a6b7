"""Names that become file names: of models, versions and targets. They must live on Linux, macOS and Windows alike.

A name somebody wrote is checked (:func:`check_name`), a name taken from a file is made to fit (:func:`slug`), and a
name nobody knows gets a suggestion (:func:`nearest`).
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

MAX_LENGTH = 100
"""Longest name, in characters. A bundle is called ``<name>-<version>-<target>`` and file systems stop at 255 bytes."""

PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
"""What a name looks like; as a JSON Schema pattern it needs anchors."""

RESERVED = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{device}{digit}" for device in ("com", "lpt") for digit in "0123456789"}
)
"""Device names of Windows, reserved with any extension as well (learn.microsoft.com, "Naming Files, Paths")."""


def check_name(text: str) -> str | None:
    """What is wrong with ``text`` as the name of a model, a version or a target, as a sentence; ``None`` if nothing."""
    if not text:
        return "a name can't be empty"
    if len(text) > MAX_LENGTH:
        return f"the name has {len(text)} characters, {MAX_LENGTH} are allowed"
    if not re.fullmatch(PATTERN, text):
        return f"{text!a} isn't a name: ASCII letters, digits and '._+-' are allowed, a letter or a digit first"
    if text.endswith("."):
        return f"'{text}' ends with a dot, which Windows drops from file names"
    if _is_reserved(text):
        return f"'{text}' is a device on Windows, where no file can have that name"
    return None


def slug(text: str, fallback: str) -> str:
    """A name near ``text`` that :func:`check_name` accepts: accents fall off, anything else unfit becomes ``-``.

    Args:
        text: usually a file's stem.
        fallback: used where nothing of ``text`` is left, and put before a name that Windows reserves.
    """
    made = _squeeze(text)
    if not made:
        made = _squeeze(fallback) or "unnamed"
    if _is_reserved(made):
        prefix = _squeeze(fallback)
        made = _squeeze(f"{'unnamed' if not prefix or _is_reserved(prefix) else prefix}-{made}")
    return made


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``word``, letter case aside, or ``None`` where nothing is close."""
    by_fold = {choice.casefold(): choice for choice in choices}
    # difflib takes time quadratic in the length, and no real name is that long.
    found = difflib.get_close_matches(word[:MAX_LENGTH].casefold(), list(by_fold), n=1)
    return by_fold[found[0]] if found else None


def suggestion(word: str, choices: Iterable[str], known: str) -> str:
    """A hint for an unknown ``word``: the nearest choice where there is one, then all of them after ``known``."""
    listed = sorted(set(choices))
    close = nearest(word, listed)
    everything = f"{known}: {', '.join(listed) or 'none'}"
    return everything if close is None else f"did you mean `{close}`? {everything}"


def dns_label(name: str, prefix: str) -> str:
    """A name near ``name`` for clusters and services (RFC 1123: lower-case letters, digits and dashes, at most 63)."""
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-")
    return f"{prefix}-{made}" if made else prefix


def _squeeze(text: str) -> str:
    """ASCII letters, digits and ``._+-`` of ``text``, each run of others one ``-``; clean at both ends."""
    # Four times the limit leaves room for what falls off, and bounds the work.
    spread = unicodedata.normalize("NFKD", text[: 4 * MAX_LENGTH])
    bare = "".join(letter for letter in spread if not unicodedata.combining(letter))
    fit = re.sub(r"[^A-Za-z0-9._+-]+", "-", bare)
    return fit.lstrip("._+-")[:MAX_LENGTH].rstrip(".-")


def _is_reserved(text: str) -> bool:
    return text.split(".", 1)[0].rstrip(" ").casefold() in RESERVED
