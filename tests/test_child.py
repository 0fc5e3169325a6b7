"""Work in a child process: what comes back, and that nothing of a crash, a hang or a stray process stays."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from packager import child
from packager.errors import BuildError, PackagerError, StorageError, TargetCrashed, TimeLimit, UsageError, error_types

SECONDS = 30.0


@dataclass(frozen=True)
class Order:
    """What a child is asked to do."""

    word: str = ""
    number: float = 0.0
    place: Path = Path()
    pairs: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What it gives back."""

    order: Order
    pid: int


def echo(order: Order) -> Answer:
    return Answer(order, os.getpid())


def fail(order: Order) -> Answer:
    raise error_types()[order.word](f"'{order.word}' at node Relu '名前'\nline two", "do something else")


def surprise(order: Order) -> Answer:
    for line in range(40):
        os.write(1, f"line {line} {'x' * 400}\n".encode())
    raise ZeroDivisionError("the SDK divided")


def full(order: Order) -> Answer:
    raise OSError(28, "No space left on device", "/some/model.bin")


def die(order: Order) -> Answer:
    os.write(2, b"about to die\n")
    os.kill(os.getpid(), int(order.number))
    time.sleep(SECONDS)
    raise AssertionError


def leave(order: Order) -> Answer:
    os.write(1, b"gone without a word\n")
    os._exit(7)


def leave_politely(order: Order) -> Answer:
    sys.exit(3)


def crash_when_leaving(order: Order) -> Answer:
    import atexit

    atexit.register(os.abort)
    return echo(order)


def sleep(order: Order) -> Answer:
    order.place.write_text(str(os.getpid()))
    time.sleep(600)
    raise AssertionError


def leave_a_process(order: Order) -> Answer:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    order.place.write_text(str(started.pid))
    if order.word == "hang":
        time.sleep(600)
    return echo(order)


def read_input(order: Order) -> Answer:
    return Answer(Order(word=f"isatty {sys.stdin.isatty()}"), os.getpid())


def gone(pid: int) -> bool:
    """Whether the process ends within five seconds; one that nobody has waited for yet has ended too."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def written(path: Path) -> int:
    """The number in a file that somebody is about to write."""
    for _ in range(400):
        if path.exists() and (text := path.read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def test_a_result_crosses_whole(tmp_path: Path):
    order = Order("名前\n\"'\\", -math.inf, tmp_path / "a b", (("n", 1), ("m", 2)))
    answer = child.call(echo, order, seconds=SECONDS, what="echoing")
    assert answer.order == order
    assert answer.pid != os.getpid()


@pytest.mark.parametrize("name", sorted(error_types()))
def test_each_error_comes_back_as_itself(name: str):
    cls = error_types()[name]
    with pytest.raises(PackagerError) as caught:
        child.call(fail, Order(name), seconds=SECONDS, what="building")
    assert type(caught.value) is (UsageError if name == "ManifestError" else cls)
    assert caught.value.exit_code == cls.exit_code
    assert caught.value.message == f"'{name}' at node Relu '名前'\nline two"
    assert caught.value.hint == "do something else"


def test_any_other_exception_is_a_build_error_with_the_end_of_the_log():
    with pytest.raises(BuildError) as caught:
        child.call(surprise, Order(), seconds=SECONDS, what="building")
    head, *log = caught.value.message.splitlines()
    assert head == "building: ZeroDivisionError: the SDK divided"
    assert len(log) == child.LOG_LINES and all(line.startswith("  | ") and len(line) <= 304 for line in log)
    assert any("Traceback" in line for line in log) and log[-1] == "  | ZeroDivisionError: the SDK divided"


def test_a_failed_write_is_a_storage_error():
    with pytest.raises(StorageError, match=r"no space left on the device \(/some/model.bin\)"):
        child.call(full, Order(), seconds=SECONDS, what="building")


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGILL])
def test_a_signal_is_named_with_what_was_said_before(how: signal.Signals):
    with pytest.raises(TargetCrashed) as caught:
        child.call(die, Order(number=how), seconds=SECONDS, what="building")
    assert f"building: the process died of {how.name} (signal {how.value})" in caught.value.message
    assert "  | about to die" in caught.value.message
    assert caught.value.exit_code == 5


def test_ending_without_a_result_is_told_with_the_status():
    with pytest.raises(TargetCrashed, match="ended with status 7 and no result\n  \\| gone without a word"):
        child.call(leave, Order(), seconds=SECONDS, what="building")
    with pytest.raises(TargetCrashed, match="ended with status 3 and no result"):
        child.call(leave_politely, Order(), seconds=SECONDS, what="building")


def test_a_crash_after_the_answer_loses_nothing():
    assert child.call(crash_when_leaving, Order("x"), seconds=SECONDS, what="building").order.word == "x"


def test_a_child_that_hangs_is_stopped_in_time(tmp_path: Path):
    begun = time.monotonic()
    with pytest.raises(TimeLimit, match=r"verifying took longer than 1\.5 s and was stopped"):
        child.call(sleep, Order(place=tmp_path / "pid"), seconds=1.5, what="verifying")
    assert time.monotonic() - begun < 10
    assert gone(written(tmp_path / "pid"))


@pytest.mark.parametrize("word", ["", "hang"])
def test_processes_that_the_child_started_go_with_it(tmp_path: Path, word: str):
    order = Order(word, place=tmp_path / "pid")
    if word:
        with pytest.raises(TimeLimit):
            child.call(leave_a_process, order, seconds=2, what="building")
    else:
        child.call(leave_a_process, order, seconds=SECONDS, what="building")
    assert gone(written(tmp_path / "pid"))


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom packager import child\nfrom tests.test_child import Order, sleep\n"
        f"child.call(sleep, Order(place=Path({str(tmp_path / 'pid')!r})), seconds=100, what='sleeping')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        pid = written(tmp_path / "pid")
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    assert gone(pid)


def sleeping(pool: child.Pool, place: Path) -> Future[Answer]:
    """A call that sleeps on a thread of the pool, once it is there."""
    future = pool.submit(child.call, sleep, Order(place=place), seconds=100, what="sleeping")
    written(place)
    return future


def test_stopping_ends_calls_in_progress_and_calls_to_come(tmp_path: Path):
    with child.Pool(2) as pool, child.group() as ours:
        future = sleeping(pool, tmp_path / "pid")
        ours.stop()
        with pytest.raises(child.Cancelled):
            future.result(10)
        assert gone(written(tmp_path / "pid"))
        with pytest.raises(child.Cancelled):
            child.call(echo, Order(), seconds=SECONDS, what="echoing")
    assert child.call(echo, Order("again"), seconds=SECONDS, what="echoing").order.word == "again"


def test_stopping_a_run_leaves_the_children_of_another(tmp_path: Path):
    with child.Pool(2) as pool:
        with child.group() as theirs:
            other = sleeping(pool, tmp_path / "other")
        with child.group() as ours:
            mine = sleeping(pool, tmp_path / "mine")
            ours.stop()
            with pytest.raises(child.Cancelled):
                mine.result(10)
        assert gone(written(tmp_path / "mine"))
        assert not other.done() and Path(f"/proc/{written(tmp_path / 'other')}").exists()
        theirs.stop()
        with pytest.raises(child.Cancelled):
            other.result(10)


def test_a_child_has_no_terminal_to_ask():
    assert child.call(read_input, Order(), seconds=SECONDS, what="reading").order.word == "isatty False"
