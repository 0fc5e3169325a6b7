"""Templates, rendered strictly: an undefined variable is an error, line ends are LF, and text from a model reaches
another language only through a filter that encodes it for that language."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from packager.graph import printable
from packager.room import Kind, package_folder

if TYPE_CHECKING:
    import jinja2


def common_templates() -> Path:
    """The folder of templates that several kinds share."""
    return package_folder("packager.templates") / "common"


def render(kind: Kind, template: str, /, **values: object) -> str:
    """Render ``<kind>/<file>`` or ``common/<file>``.

    Raises:
        jinja2.UndefinedError: the template uses a value that isn't given.
    """
    text: str = _environment(kind.name, kind.templates).get_template(template).render(values)
    return text.replace("\r\n", "\n").rstrip("\n") + "\n"


def render_common(template: str, **values: object) -> str:
    """Render ``common/<template>``, which belongs to no kind."""
    text: str = _environment("", None).get_template(f"common/{template}").render(values)
    return text.replace("\r\n", "\n").rstrip("\n") + "\n"


@cache
def _environment(name: str, templates: Path | None) -> jinja2.Environment:
    import jinja2

    loaders: dict[str, jinja2.BaseLoader] = {"common": jinja2.FileSystemLoader(common_templates())}
    if templates is not None:
        loaders[name] = jinja2.FileSystemLoader(templates)
    environment = jinja2.Environment(
        loader=jinja2.PrefixLoader(loaders),
        undefined=jinja2.StrictUndefined,
        autoescape=jinja2.select_autoescape(enabled_extensions=("html", "html.j2"), default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        c_string=c_string, py_string=py_string, js_literal=js_literal, md=markdown, md_code=markdown_code,
        swift_string=swift_string, swift_comment=swift_comment,
    )  # fmt: skip
    return environment


def c_string(text: str) -> str:
    """A C/C++ string literal, quotes included. Non-ASCII bytes become octal escapes of their UTF-8 form.

    Octal escapes take at most three digits (C11 6.4.4.4), so a digit that follows can't be swallowed.
    """
    out = []
    for byte in text.encode("utf-8"):
        char = chr(byte)
        if char in '"\\?':
            out.append("\\" + char)
        elif 32 <= byte < 127:
            out.append(char)
        else:
            out.append(f"\\{byte:03o}")
    return '"' + "".join(out) + '"'


def py_string(text: str) -> str:
    """A Python string literal, quotes included, ASCII only."""
    return json.dumps(text, ensure_ascii=True) if not _has_surrogates(text) else ascii(text)


def js_literal(value: object) -> str:
    """A JavaScript (and TypeScript) literal of a text, or of lists and dicts of plain values: ASCII only, on one line.

    JSON is JavaScript but for one key, ``__proto__``. ``<``, ``>``, ``&`` and the backtick are escaped too, so that
    nothing ends a script element, a template or a Markdown fence around it.

    Raises:
        ValueError: a dict has the key ``__proto__``, which would set a prototype, or a number isn't finite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    if '"__proto__":' in text:
        raise ValueError("a JavaScript object can't have '__proto__' as a key")
    return re.sub(r"[<>&`]", lambda match: f"\\u{ord(match[0]):04x}", text)


def swift_string(text: str) -> str:
    """A Swift string literal, quotes included, ASCII only: nothing of the text can end it or be interpolated.

    Raises:
        ValueError: the text holds half of a surrogate pair, which no Swift string can.
    """
    out = []
    for char in text:
        code = ord(char)
        if 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{text!a} holds half of a surrogate pair, which no Swift string can")
        out.append(f"\\{char}" if char in '"\\' else char if 32 <= code < 127 else f"\\u{{{code:X}}}")
    return '"' + "".join(out) + '"'


def swift_comment(text: str) -> str:
    """Text for inside a one-line comment of Swift: no line end, no control character, no backtick."""
    return printable(text).replace("`", "\N{MODIFIER LETTER GRAVE ACCENT}")


def _has_surrogates(text: str) -> bool:
    return any(0xD800 <= ord(char) <= 0xDFFF or ord(char) > 0xFFFF for char in text)


def markdown(text: str) -> str:
    """Text safe inside a Markdown line or table cell: punctuation that Markdown reads is escaped, line ends shown."""
    return "".join("\\" + char if char in "\\`*_{}[]()#+!|<>~&" else char for char in printable(text))


def markdown_code(text: str) -> str:
    """Text for inside a Markdown code span in a table: no backtick, no bar, no line end."""
    return printable(text).replace("`", "\N{MODIFIER LETTER GRAVE ACCENT}").replace("|", "\\|")
