"""The commands of a program, and the end of its process.

The status is 0 only if all output was written. A signal that ends a command has the status that a
shell gives it, and no text.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import click

from agentd.core.printable import printable
from agentd.program.exit_status import SIGNALLED, ExitStatus
from agentd.program.parameters import CommandGroup
from agentd.program.standard_streams import (
    OutputFailed,
    discard_output,
    flush_output,
    has_left,
    is_pipe,
    prepare_streams,
)

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask for an end."""
MAX_SIGNALS = 3
"""Such signals after which a process ends at once, whatever it is doing."""


class Signalled(BaseException):
    """A signal that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = SIGNALLED + number


class Program(CommandGroup):
    """The commands of a program."""

    ending_signals: Sequence[int] = (signal.SIGINT,)
    """Signals that end a command by an exception; the others have their usual effect."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command and end the process."""
        prepare_streams()
        try:
            with handled_signals(self.ending_signals, _end_command):
                self._run(*args, **settings)
        except Signalled as end:
            discard_output()
            sys.exit(end.status)
        except OutputFailed as failure:
            if failure.has_no_reader:
                sys.exit(ExitStatus.NO_READER)
            click.echo(printable(f"{self.name}: {failure}"), err=True)
            sys.exit(ExitStatus.OUTPUT_FAILED)

    def _run(self, *args: Any, **settings: Any) -> None:
        try:
            super().main(*args, **settings)
        except SystemExit as end:
            try:
                flush_output()
            except OutputFailed:
                if not end.code:
                    raise
            raise


@contextlib.contextmanager
def handled_signals(
    numbers: Sequence[int], handle: Callable[[int], object], leave: Callable[[], object] = bool
) -> Iterator[None]:
    """Handle signals; the third that asks for an end ends the process at once, after `leave`.

    Those that the caller ignores stay ignored.
    """
    count = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += number in ENDING_SIGNALS
        if number in ENDING_SIGNALS and count >= MAX_SIGNALS:
            leave()
            os._exit(SIGNALLED + number)
        handle(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: h for n in numbers if (h := signal.getsignal(n)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, on_signal)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_command(number: int) -> NoReturn:
    raise Signalled(number)


@contextlib.contextmanager
def ended_without_reader() -> Iterator[None]:
    """End a command as soon as the reader of its output leaves, as `grep -q` does.

    For commands that wait: without this they would run until their next output.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        if has_left(0):  # and not the daemon at the other end of a socket
            raise Signalled(number)

    def send_signal() -> None:
        has_left(None)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPIPE)

    if not is_pipe():
        yield
        return
    before = signal.signal(signal.SIGPIPE, on_signal)
    threading.Thread(target=send_signal, daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
