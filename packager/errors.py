"""Everything that can go wrong, as one tree. Each leaf knows its exit status; each instance knows what to do next.

::

    PackagerError
    ├── InternalError        1  a fault in packager itself
    ├── UsageError           2  bad command line, unwritable output, ...
    │   └── ManifestError    2  every mistake in packager.toml, with its line
    ├── Refused              3  a gate said no before anything was built
    │   ├── ModelError       3  the ONNX artifact
    │   └── GoldenError      3  the golden cases
    ├── ToolchainMissing     4  a target's SDK is absent
    ├── BuildError           5  a target failed to build
    │   ├── TargetCrashed    5  its child process died of a signal
    │   ├── TimeLimit        5  it ran past its time limit
    │   └── StorageError     5  the disk is full or a write failed
    └── VerificationError    6  a bundle is not what it says, or answers wrongly

Messages say what is wrong and where (file, node, tensor); hints say what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Objection:
    """A node that can't be taken: its label (:attr:`packager.graph.Node.label`) and why, as the end of a sentence."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.reason}" if self.reason else f"node {self.node}"


def node_lines(objections: Iterable[Objection]) -> str:
    """The lines that name nodes below the heading of a message."""
    return "".join(f"\n  {objection}" for objection in objections)


class PackagerError(Exception):
    """Base of every error packager raises on purpose.

    Args:
        message: what is wrong and where, one sentence or a few lines.
        hint: what to do about it, or ``None``.
        nodes: every node that the message is about, for what asks node by node.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, nodes: Iterable[Objection] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.nodes = tuple(nodes)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.hint, self.nodes))


class InternalError(PackagerError):
    """A fault in packager itself."""


class UsageError(PackagerError):
    """The command line or its surroundings are wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a manifest: where it is, what it is and what to do.

    ``line`` counts from 1; ``None`` where the place is a missing key.
    """

    place: str
    message: str
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = self.place if self.line is None else f"line {self.line}: {self.place}"
        return f"{where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class ManifestError(UsageError):
    """The manifest has mistakes; ``problems`` holds all of them, in file order."""

    def __init__(self, message: str, hint: str | None = None, problems: tuple[Problem, ...] = ()) -> None:
        listed = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(message + listed, hint)
        self.problems = problems


class Refused(PackagerError):
    """A gate refused the model, the goldens or a target before anything was built."""

    exit_code = 3


class ModelError(Refused):
    """The ONNX artifact is unreadable, malformed, hostile or unsupported."""


class GoldenError(Refused):
    """The golden cases are unreadable or don't fit the model."""


class ToolchainMissing(PackagerError):
    """A target's toolchain is absent on this machine."""

    exit_code = 4


class BuildError(PackagerError):
    """A target failed to build."""

    exit_code = 5


class TargetCrashed(BuildError):
    """The child process of a target died of a signal."""


class TimeLimit(BuildError):
    """The child process of a target ran past its time limit."""


class StorageError(BuildError):
    """A file could not be written: no space, no permission, a vanished folder."""


class VerificationError(PackagerError):
    """A bundle is damaged, or its outputs are not its goldens."""

    exit_code = 6


def error_types() -> dict[str, type[PackagerError]]:
    """All error classes by name, so that an error can cross a process boundary."""
    found: dict[str, type[PackagerError]] = {}
    todo: list[type[PackagerError]] = [PackagerError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
