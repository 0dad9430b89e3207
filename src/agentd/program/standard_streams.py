"""Standard output and standard error of a command line.

A write to standard output that fails is an `OutputFailed`; later ones do nothing. What cannot be
written to standard error is lost: the exit status says what happened. Characters that a terminal's
encoding lacks are escaped.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputFailed(OSError):
    """Output of a command that could not be written.

    Not a `BrokenPipeError`, which libraries take for an end of their own.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"the output cannot be written: {cause.strerror or cause}")
        self.has_no_reader = isinstance(cause, BrokenPipeError)


class _Descriptor(io.RawIOBase):
    """A descriptor that is written to until the first failure, which may be raised."""

    def __init__(self, descriptor: int, *, is_raising: bool) -> None:
        super().__init__()
        self.failure: OutputFailed | None = None
        self._descriptor = descriptor
        self._is_raising = is_raising

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                write_all(self._descriptor, data)
            except OSError as error:
                self.failure = OutputFailed(error)
                if self._is_raising:
                    raise self.failure from None
        return memoryview(data).nbytes


def write_all(descriptor: int, data: ReadableBuffer) -> None:
    """Write data past the buffers.

    Another program may have made the shared pipe or terminal non-blocking.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            is_ready(descriptor, select.POLLOUT)


def is_ready(descriptor: int, event: int, timeout_ms: int | None = None) -> bool:
    """Return whether an event of poll(2), or an error, comes within this time; None is for ever."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(timeout_ms))


def prepare_streams() -> None:
    """Prepare the standard streams of this process; those that a test replaced are left alone.

    One that the caller has closed is open for reading only, so that no file gets its number: the
    input is empty, and output cannot be written.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        is_closed = stream is None
        if is_closed:
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)
        if number and stream is getattr(sys, f"__{name}__"):
            raw = _Descriptor(number, is_raising=name == "stdout")
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                "utf-8" if is_closed else stream.encoding,
                errors="backslashreplace",
                line_buffering=raw.isatty() or name == "stderr",
            )
            setattr(sys, name, text)
        elif is_closed:
            sys.stdin = os.fdopen(number)


def write_output(data: bytes, *, err: bool = False) -> None:
    """Write bytes at once, after the text that was printed before.

    A thread that waits for a reader holds no lock that the end of the process needs.

    Raises:
        OutputFailed: they, or something before them, could not be written.
    """
    stream = sys.stderr if err else sys.stdout
    stream.flush()
    raw = getattr(stream.buffer, "raw", stream.buffer)  # a blocked write holds no lock of a buffer
    while data:
        data = data[raw.write(data) :]
    failure: OutputFailed | None = getattr(raw, "failure", None)
    if failure is not None:
        raise failure


def flush_output() -> None:
    """Write what standard output buffers.

    Raises:
        OutputFailed: something of the output could not be written.
    """
    write_output(b"")


def discard_output() -> None:
    """Write nothing more to standard output, whose reader may not read what is buffered."""
    raw = getattr(sys.stdout.buffer, "raw", None)
    if isinstance(raw, _Descriptor):
        raw.failure = OutputFailed(InterruptedError())


def is_pipe() -> bool:
    """Return whether the standard output of this process is a pipe, whose reader may leave."""
    is_own = isinstance(getattr(sys.stdout.buffer, "raw", None), _Descriptor)
    return is_own and stat.S_ISFIFO(os.fstat(1).st_mode)


def has_left(timeout_ms: int | None) -> bool:
    """Return whether the reader of standard output leaves within this time; None is for ever."""
    return is_ready(1, 0, timeout_ms)
