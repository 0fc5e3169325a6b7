"""What the command line does with its streams: data on standard output, progress on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packager.report import Listener


def say(text: str) -> None:
    """Write data to standard output; names with lone surrogates must not break it.

    Raises:
        StorageError: it is a file, and the disk is full.
    """
    from packager.files import storage_error

    stream = sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        quiet()
        raise storage_error("writing", error, Path("standard output")) from error


@contextlib.contextmanager
def progress() -> Iterator[Listener]:
    """Progress on standard error: a live display on a terminal, else a line for each step."""
    from packager.report import PlainProgress, RichProgress

    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with RichProgress() as shown:
            yield shown
    else:
        yield PlainProgress()


def quiet() -> None:
    """Let standard output go nowhere, so that Python's own flush of it at the end fails no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
