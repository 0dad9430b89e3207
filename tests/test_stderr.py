"""Standard error of a program that serves: a write neither raises nor waits for its reader."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd import stderr
from agentd.stderr import NO_READER, REMEDY, SKIP_WAIT_S, WARN_S, LostLines, Stderr


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pipe:
    """A pipe of two pages, and what a program writes to it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lost = LostLines(self.clock)
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 8192)
        self.stderr = Stderr(self.writer, self.lost)

    def read(self) -> bytes:
        return os.read(self.reader, 1 << 16)

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def reports(lost: LostLines) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    lost.report(lambda lines, reason: found.append((lines, reason)))
    return found


def test_line_is_lost_after_its_reader_ended(pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.reader = -1
    assert pipe.stderr.write(b"one\ntwo\n") == 8
    assert pipe.lost.total == 2
    assert pipe.lost.problems() == [
        ("the log cannot be written: Broken pipe", f"{REMEDY}; lines lost since the start: 2")
    ]
    assert reports(pipe.lost) == []


@pytest.mark.parametrize("is_blocking", [True, False])
def test_full_pipe_loses_lines_until_it_is_read(pipe: Pipe, *, is_blocking: bool) -> None:
    os.set_blocking(pipe.writer, is_blocking)
    pipe.stderr.write(b"x" * 8191 + b"\n")
    assert pipe.lost.total == 0
    for _ in range(3):
        pipe.stderr.write(b"lost\n")
    assert (pipe.lost.total, reports(pipe.lost)) == (3, [])
    pipe.read()
    pipe.stderr.write(b"whole\n")
    assert pipe.read() == b"whole\n"
    assert reports(pipe.lost) == [(3, NO_READER)]
    assert reports(pipe.lost) == []


def test_line_cut_by_a_full_pipe_ends_before_the_next(pipe: Pipe) -> None:
    pipe.stderr.write(b"x" * 9000 + b"\n")
    assert (pipe.lost.total, pipe.read()) == (1, b"x" * 8192)
    pipe.stderr.write(b"next\n")
    pipe.stderr.write(b"last\n")
    assert pipe.read() == b"\nnext\nlast\n"


def test_full_socket_loses_lines() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lost = LostLines()
        stream = Stderr(ours.fileno(), lost)
        for _ in range(10_000):
            stream.write(b"x" * 1000 + b"\n")
            if lost.total:
                break
        assert lost.total == 1


@pytest.mark.parametrize(
    ("number", "raised"),
    [("full disk", errno.ENOSPC), ("closed", errno.EBADF)],
    ids=str,
)
def test_error_of_a_descriptor_is_counted(number: str, raised: int) -> None:
    lost = LostLines()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        if number == "closed":
            os.close(descriptor)
        Stderr(descriptor, lost).write(b"line\n")
    finally:
        if number != "closed":
            os.close(descriptor)
    assert lost.total == 1
    assert os.strerror(raised) in lost.problems()[0][0]


def test_wait_for_a_reader_is_not_repeated(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Poll:
        def register(self, *_: object) -> None: ...

        def poll(self, timeout: int) -> list[object]:
            waits.append(timeout)
            return []

    monkeypatch.setattr("agentd.stderr.select.poll", Poll)
    pipe.stderr.write(b"1\n")
    pipe.stderr.write(b"2\n")
    pipe.clock.now += SKIP_WAIT_S
    pipe.stderr.write(b"3\n")
    assert waits == [stderr.WRITE_TIMEOUT_MS, 0, stderr.WRITE_TIMEOUT_MS]


def test_warning_of_lost_lines_goes_after_its_time() -> None:
    clock = Clock()
    lost = LostLines(clock)
    assert lost.problems() == []
    lost.add(2, "why")
    clock.now += 2 * WARN_S
    remedy = f"{REMEDY}; lines lost since the start: 2"
    assert lost.problems() == [("the log cannot be written: why", remedy)]
    lost.add(1, "why")
    lost.mark_writable()
    clock.now += WARN_S - 1
    assert lost.problems() == [
        ("the log could not be written: why", "lines lost since the start: 3")
    ]
    clock.now += 1
    assert (lost.problems(), lost.total) == ([], 3)


def test_report_that_is_lost_itself_is_repeated() -> None:
    lost = LostLines()
    lost.add(2, "why")
    lost.mark_writable()
    lost.report(lambda *_: lost.add(1, "again"))
    assert reports(lost) == []
    lost.mark_writable()
    assert reports(lost) == [(3, "again")]


def test_attempt_that_is_lost_is_not_counted() -> None:
    lost = LostLines()
    lost.add(2, "why")
    found: list[int] = []
    for _ in range(3):
        lost.report(lambda *_: lost.add(1, "again"), is_attempt=True)
    assert lost.total == 2

    def write(lines: int, _: str) -> None:
        found.append(lines)
        lost.mark_writable()

    lost.report(write, is_attempt=True)
    lost.report(write, is_attempt=True)
    assert (found, lost.total) == ([2], 2)


PROGRAM = """
import logging, os, sys, warnings
from agentd import stderr
stderr.guard()
logging.getLogger("library").error("an error of a library")
warnings.warn("a warning of a library", stacklevel=1)
sys.stderr.write("\\udcff\\n")
print("counted", stderr.LOST.total, os.readlink("/proc/self/fd/2"))
"""


def run(tmp_path: Path, *, is_closed: bool) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    reader, writer = os.pipe()
    os.close(reader)
    closing = ["sh", "-c", 'exec "$0" "$@" 2>&-'] if is_closed else []
    try:
        command = [*closing, sys.executable, str(program)]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=30, check=False
        )
    finally:
        os.close(writer)


def test_program_outlives_the_reader_of_its_libraries(tmp_path: Path) -> None:
    done = run(tmp_path, is_closed=False)
    assert done.returncode == 0, "the interpreter's own end may fail with 120"
    assert done.stdout.startswith("counted 4 pipe:"), done.stdout


def test_closed_stderr_becomes_no_other_file(tmp_path: Path) -> None:
    done = run(tmp_path, is_closed=True)
    assert (done.returncode, done.stdout) == (0, "counted 0 /dev/null\n")
