"""Standard output and standard error of a command line.

A write to standard output that fails is an `OutputFailed`; later ones do nothing. What cannot be
written to standard error is lost: the exit status says what happened. Characters that a terminal's
encoding lacks are escaped.
"""

from __future__ import annotations

import io
import os
import select
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
        while self.failure is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another program made the shared pipe or terminal non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError as error:
                self.failure = OutputFailed(error)
                if self._is_raising:
                    raise self.failure from None
        return memoryview(data).nbytes


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
