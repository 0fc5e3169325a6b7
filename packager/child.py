"""Work in a child process of its own: a native crash, a hang or a leak there is one target's failure, not packager's.

:func:`call` runs a module-level function of one dataclass argument in a fresh interpreter and gives back its result.
Argument and result cross as JSON (through pydantic, checked against the annotations); arrays cross as files.
Errors of :mod:`packager.errors` come back as themselves; anything else as a :class:`BuildError` with its traceback
in the log.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from packager.errors import BuildError, Objection, PackagerError, TargetCrashed, TimeLimit, error_types
from packager.scratch import scratch

A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")

LOG_LINES = 12
LOG = "log"

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""Set for every child. ONNX Runtime's official wheels report usage to their maker and keep a device id under the
user's home from the moment they are loaded, before an API call could stop it; this variable prevents both
(``Privacy.md`` in the wheel, "Disabling Telemetry")."""


class Cancelled(BaseException):
    """The run was interrupted while this child worked."""


class Group:
    """Children that are stopped together: those of one run."""

    def __init__(self) -> None:
        self._live: set[Process] = set()
        self._guard = threading.Lock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Kill every child of the group; calls in progress and calls to come raise :class:`Cancelled`."""
        self._stopping.set()
        with self._guard:
            running = list(self._live)
        for process in running:
            _kill_group(process)

    def check(self) -> None:
        """Raise :class:`Cancelled` once the group was stopped."""
        if self._stopping.is_set():
            raise Cancelled

    @contextlib.contextmanager
    def holding(self, process: Process) -> Iterator[None]:
        """Have a child in the group, and end it, with what it started, at the end of the block."""
        with self._guard:
            self._live.add(process)
        try:
            yield
        finally:
            _kill(process)
            with self._guard:
                self._live.discard(process)


_current: ContextVar[Group] = ContextVar("group", default=Group())  # noqa: B039 - whoever opens none shares it


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Children that the block starts, and those of work it hands to a :class:`Pool`, are a group of their own."""
    token = _current.set(Group())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


class Pool(ThreadPoolExecutor):
    """Threads whose children belong to the group of whoever submitted the work."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """As :meth:`concurrent.futures.Executor.submit`."""
        context = contextvars.copy_context()
        return super().submit(lambda: context.run(fn, *args, **kwargs))


def call(function: Callable[[A], R], argument: A, *, seconds: float, what: str) -> R:
    """Run ``function(argument)`` in a child process.

    Args:
        function: a module-level function with one annotated parameter and an annotated result.
        argument: a dataclass or pydantic model that survives JSON.
        seconds: wall-clock limit.
        what: a gerund phrase for messages, such as ``building``.

    Raises:
        PackagerError: whatever the function raised on purpose.
        TargetCrashed: the child died of a signal, which is named.
        TimeLimit: it ran past ``seconds`` and was killed.
        BuildError: the function raised something else; the message has the exception and the end of the log.
    """
    from pydantic import TypeAdapter

    hints = typing.get_type_hints(function)
    returns = hints.pop("return")
    (takes,) = hints.values()
    with scratch() as folder:
        job = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "argument": TypeAdapter(takes).dump_python(argument, mode="json"),
            "path": [entry for entry in sys.path if entry],
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        status = _run(folder, seconds, what)
        result = folder / "result.json"
        if not result.exists():
            raise _died(status, folder, what)
        answer = json.loads(result.read_text(encoding="utf-8"))
        if "error" in answer:
            raise _revive(answer["error"], folder, what)
        value: R = TypeAdapter(returns).validate_python(answer["value"], strict=False)
        return value


class Process(Protocol):
    """A child at work, in a process group of its own (on Windows: whatever ``kill`` ends)."""

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, negative for a signal; :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def close(self) -> None:
        """Let go of what ties it to us."""
        ...


class _Interpreter:
    """A fresh interpreter, tied to us by its standard input."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, object] = (
            {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
        )  # CREATE_NEW_PROCESS_GROUP: Ctrl-C is ours to hand on
        with (folder / LOG).open("wb") as log:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
                [sys.executable, "-P", "-m", "packager.child", str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET},
                **options,
            )
        self.pid = self._process.pid
        self.wait, self.kill = self._process.wait, self._process.kill

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


start: Callable[[Path], Process] = _Interpreter
"""How a child is started on a job's folder. Whoever runs thousands of jobs may put something quicker here, such as a
fork of an interpreter that has imported what they need; it does :func:`work` in that folder, and logs there."""


def _run(folder: Path, seconds: float, what: str) -> int:
    ours = _current.get()
    process = start(folder)
    with ours.holding(process):
        try:
            ours.check()
            status = process.wait(seconds)
            ours.check()
        except subprocess.TimeoutExpired:
            hint = "raise build_timeout or verify_timeout for the target, or use smaller goldens"
            raise TimeLimit(f"{what} took longer than {seconds:g} s and was stopped", hint) from None
        return int(status)


def _kill(process: Process) -> None:
    """End the child and what it started."""
    _kill_group(process)
    process.wait()
    process.close()


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _log_tail(folder: Path) -> str:
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "".join(f"\n  | {line[:300]}" for line in lines[-LOG_LINES:])


def _died(status: int, folder: Path, what: str) -> PackagerError:
    tail = _log_tail(folder)
    if status < 0:
        name = signal.Signals(-status).name
        return TargetCrashed(
            f"{what}: the process died of {name} (signal {-status}){tail}", "the runtime crashed; nothing else is hurt"
        )
    return TargetCrashed(f"{what}: the process ended with status {status} and no result{tail}")


def _told(error: PackagerError) -> dict[str, object]:
    """An error as it crosses."""
    nodes = [[objection.node, objection.reason] for objection in error.nodes]
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint, "nodes": nodes}


def _revive(error: dict[str, Any], folder: Path, what: str) -> PackagerError:
    cls = error_types().get(error["type"])
    if cls is None:
        return BuildError(f"{what}: {error['type']}: {error['message']}{_log_tail(folder)}")
    # A class with a constructor of its own comes back as the nearest one that takes just a message and a hint.
    while cls.__init__ is not PackagerError.__init__:
        cls = cls.__bases__[0]
    return cls(error["message"], error["hint"], [Objection(*each) for each in error.get("nodes", ())])


def _leave_with_parent() -> None:
    """End this process when the parent goes: its end of our standard input closes however it died."""

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1024):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    """A fresh interpreter's whole life: :func:`work`, gone with its parent."""
    _leave_with_parent()
    work(folder)


def work(folder: Path) -> NoReturn:
    """Child side: read ``job.json``, run the function, write ``result.json`` whole, and leave the process."""
    from pydantic import TypeAdapter

    temporary = folder / "tmp"  # what an SDK leaves there goes with the folder, however the child ends
    temporary.mkdir()
    os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)))
    tempfile.tempdir = None
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    sys.path.extend(entry for entry in job["path"] if entry not in sys.path)
    answer: dict[str, object]
    try:
        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        hints = typing.get_type_hints(function)
        returns = hints.pop("return")
        (takes,) = hints.values()
        value = function(TypeAdapter(takes).validate_python(job["argument"], strict=False))
        answer = {"value": TypeAdapter(returns).dump_python(value, mode="json")}
    except PackagerError as error:
        answer = {"error": _told(error)}
    except OSError as error:
        from packager.files import storage_error

        traceback.print_exc()
        answer = {"error": _told(storage_error("writing", error))}
    except Exception as error:  # noqa: BLE001 - whatever an SDK raises must cross as one clear message
        traceback.print_exc()
        answer = {"error": {"type": type(error).__name__, "message": str(error), "hint": None}}
    sys.stdout.flush()
    sys.stderr.flush()
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(folder / "result.json")
    # Native libraries may crash in their destructors; the answer is written, so leave at once.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
