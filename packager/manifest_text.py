"""The manifest as text: read within bounds, parsed, and indexed by line.

``tomllib`` drops positions, so the text is walked a second time. It has been parsed by then, and so is known to be
TOML: the walk only tells keys from values and one table from the next, and never judges.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packager.errors import ManifestError, Problem, UsageError

FILE_NAME = "packager.toml"
MAX_BYTES = 1024 * 1024
"""Largest manifest, in bytes."""
MAX_DEPTH = 32
"""Deepest nesting of tables and lists: far above any need, far below Python's recursion limit."""
MAX_PROBLEMS = 200
"""As many mistakes of one table are told; further ones would bury the first."""

Place = tuple[str | int, ...]
"""Keys and array indices from the root of the document, such as ``("targets", "edge", "shapes", "batch")``."""

_TOKEN = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""(?:"{1,2})?'  # a multi-line text may end with two quotes of its own
    r"|'''(?:[^']|'(?!''))*'''(?:'{1,2})?"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\n\[\]{}=,.]"
    r"|[^\s\[\]{}=,.\"'\#]+",
    re.DOTALL,
)
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""")
"""A dotted key of more than 100 parts: tomllib takes time quadratic in their number (20,000 of them 7 s, measured)."""
_VALUE_ENDS = frozenset({"\n", ",", "]", "}"})


@dataclass(frozen=True)
class Lines:
    """Line numbers, from 1, by place."""

    known: Mapping[Place, int]

    def of(self, place: Place) -> int | None:
        """The line of ``place``, or of the nearest thing around it that was written; ``None`` for the root."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.known:
                return self.known[place[:end]]
        return None


def read_lines(text: str) -> Lines:
    """Index ``text``, which must be valid TOML nested no deeper than Python's stack allows."""
    walk = _Walk(text)
    walk.document()
    return Lines(walk.lines)


def dotted(place: Place) -> str:
    """``targets."my edge".ranges.x[0]``, as TOML would spell it."""
    shown = ""
    for step in place:
        if isinstance(step, int):
            shown += f"[{step}]"
        else:
            bare = step if re.fullmatch(r"[A-Za-z0-9_-]+", step) else toml_text(step)
            shown += f".{bare}" if shown else bare
    return shown


def toml_text(text: str) -> str:
    """``text`` as a TOML basic string in one line; anything that doesn't print is escaped.

    A lone surrogate, which TOML can't hold, comes out as the escape that TOML refuses.
    """
    short = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}

    def spell(letter: str) -> str:
        if letter in short or letter.isprintable():
            return short.get(letter, letter)
        return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"

    return '"' + "".join(map(spell, text)) + '"'


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line, counted = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        if not match[0].startswith("#"):
            yield match[0], line
    yield "\n", line


class _Walk:
    """A cursor over the tokens that fills ``lines`` as it goes."""

    def __init__(self, text: str) -> None:
        self.tokens = list(_tokens(text))
        self.at = 0
        self.lines: dict[Place, int] = {}
        self.last: dict[Place, int] = {}
        """For each array of tables, the index of its latest element."""

    @property
    def word(self) -> str:
        return self.tokens[self.at][0]

    @property
    def line(self) -> int:
        return self.tokens[self.at][1]

    def document(self) -> None:
        table: Place = ()
        while self.at < len(self.tokens):
            if self.word == "\n":
                self.at += 1
            elif self.word == "[":
                table = self._header()
            else:
                self._setting(table)

    def _header(self) -> Place:
        line = self.line
        self.at += 1
        repeated = self.word == "["
        self.at += repeated
        parts = self._key()
        self.at += 1 + repeated
        place: Place = ()
        for number, part in enumerate(parts, start=1):
            place += (part,)
            self.lines.setdefault(place, line)
            if repeated and number == len(parts):
                self.last[place] = self.last.get(place, -1) + 1
            if place in self.last:
                place += (self.last[place],)
        self.lines[place] = line
        return place

    def _key(self) -> list[str]:
        parts = [_unquoted(self.word)]
        self.at += 1
        while self.word == ".":
            self.at += 1
            parts.append(_unquoted(self.word))
            self.at += 1
        return parts

    def _setting(self, table: Place) -> None:
        line, place = self.line, table
        for part in self._key():
            place += (part,)
            self.lines.setdefault(place, line)
        self.at += 1
        self._value(place)

    def _value(self, place: Place) -> None:
        if self.word == "[":
            self._array(place)
        elif self.word == "{":
            self.at += 1
            while self.word != "}":
                if self.word in _VALUE_ENDS:
                    self.at += 1
                else:
                    self._setting(place)
            self.at += 1
        else:
            while self.word not in _VALUE_ENDS:
                self.at += 1

    def _array(self, place: Place) -> None:
        self.at += 1
        index = 0
        while self.word != "]":
            if self.word in _VALUE_ENDS:
                index += self.word == ","
                self.at += 1
            else:
                self.lines[(*place, index)] = self.line
                self._value((*place, index))
        self.at += 1


def _unquoted(key: str) -> str:
    return str(tomllib.loads(f"key = {key}")["key"]) if key[0] in "\"'" else key


def read_text(path: Path) -> str:
    """The file's text, without a byte order mark, lines ended by LF.

    Raises:
        UsageError: there is no such file, or it can't be read.
        ManifestError: it is larger than :data:`MAX_BYTES`, or not UTF-8.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: a folder, not a manifest", f"give the file itself, such as {path / FILE_NAME}")
        if not path.exists():
            raise UsageError(f"{path}: no such file", "`packager init MODEL` writes a manifest")
        if not path.is_file():
            raise UsageError(f"{path}: not a regular file")
        with path.open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from error
    if len(data) > MAX_BYTES:
        message = f"larger than {MAX_BYTES} bytes, which no manifest needs"
        raise mistakes(path, [Problem(path.name, message, None, "is this the right file?")])
    try:
        # Windows editors put a byte order mark first and end lines with CR LF; TOML lets tomllib drop the latter.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem(path.name, f"not UTF-8: byte 0x{data[error.start]:02x}", line, "save the file as UTF-8")
        raise mistakes(path, [problem]) from error


def parse(path: Path, text: str) -> tuple[dict[str, object], Lines, list[Problem]]:
    """The values, their lines, and what TOML allows but a manifest does not (replaced, so that checks go on).

    Raises:
        ManifestError: the text isn't TOML, or it is nested deeper than :data:`MAX_DEPTH`.
    """
    long = _LONG_KEY.search(text)
    if long is not None:
        line = text.count("\n", 0, long.start()) + 1
        raise mistakes(path, [Problem(path.name, "a dotted key of more than 100 parts", line)])
    try:
        values: dict[str, object] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise mistakes(path, [_syntax(path, text, error)]) from error
    for key, value in values.items():
        if _depth(value) > MAX_DEPTH:
            problem = Problem(dotted((key,)), f"tables and lists nested more than {MAX_DEPTH} deep")
            raise mistakes(path, [problem])
    lines, problems = read_lines(text), list[Problem]()
    return {key: _usable(value, (key,), lines, problems) for key, value in values.items()}, lines, problems


def _syntax(path: Path, text: str, error: Exception) -> Problem:
    if isinstance(error, RecursionError):
        return Problem(path.name, "tables and lists are nested too deeply")
    said = re.fullmatch(r"(?s)(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
    if said is None:
        return Problem(path.name, f"not TOML: {error}")
    line = int(said[2]) if said[2] else text.count("\n") + 1
    where = f"column {said[3]}" if said[3] else "the end of the file"
    return Problem(path.name, f"not TOML: {said[1]} at {where}", line, "texts need quotes; toml.io has the syntax")


def _depth(value: object) -> int:
    deepest, todo = 0, [(value, 1)]
    while todo:
        item, depth = todo.pop()
        deepest = max(deepest, depth)
        if isinstance(item, dict | list):
            todo.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))
    return deepest


def _usable(value: object, place: Place, lines: Lines, problems: list[Problem]) -> object:
    """``value`` without dates and without whole numbers of more than 64 bits, each of which is a problem."""
    if isinstance(value, dict):
        return {key: _usable(inner, (*place, key), lines, problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [_usable(inner, (*place, index), lines, problems) for index, inner in enumerate(value)]
    if isinstance(value, datetime.date | datetime.time):
        problems.append(Problem(dotted(place), "a date or time", lines.of(place), "put it in quotes to make it text"))
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        problems.append(Problem(dotted(place), "a whole number of more than 64 bits", lines.of(place)))
        return 1
    return value


def mistakes(path: Path, problems: Sequence[Problem]) -> ManifestError:
    """The error that lists ``problems``, sorted by line."""
    count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    if len(problems) >= MAX_PROBLEMS:
        count = f"at least {count}"
    in_order = tuple(sorted(problems, key=lambda problem: (problem.line or 0, problem.place)))
    return ManifestError(f"{path}: {count}", "`packager schema` prints what a manifest may hold", in_order)
