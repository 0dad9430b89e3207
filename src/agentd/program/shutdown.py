"""The stop of a daemon: one deadline for all steps, and an end that nothing can delay.

SIGTERM ──> steps in order, each with the time that is left ──> stopped
└────> a thread that ends the process after LIMIT_S, whatever the event loop does

A late step is abandoned and logged. Its work is then left as after a SIGKILL: the next start
finds it in the records.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog

from agentd.concurrency import Deadline
from agentd.program.process import early_signals

log = structlog.get_logger()

STOP_TIMEOUT_S = 25.0
"""Seconds for all steps together."""
LIMIT_S = 28.0
"""Seconds after which a stuck process is ended, for example on a dead disk."""
EXIT_TIMEOUT_S = 1.0
"""Seconds for the interpreter to end, and for the last line of the log."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """The stop signal, the time limits of the steps, and the late ones."""

    def __init__(self, exit_process: Callable[[int], None] = os._exit) -> None:
        self.requested = asyncio.Event()
        self.failure = ""
        self.late: list[str] = []
        self._exit = exit_process
        self._deadline: Deadline | None = None
        self._step = "start"
        self._is_over = threading.Event()

    @property
    def deadline(self) -> Deadline:
        """The deadline of the stop; its time runs from the first use."""
        if self._deadline is None:
            self._deadline = Deadline.after(STOP_TIMEOUT_S)
        return self._deadline

    def handle_signals(self, handlers: Mapping[int, Callable[[], object]]) -> None:
        """Stop at SIGTERM and SIGINT, and call `handlers` at their signals.

        A thread reads the signals, so the limit holds while the event loop is stuck.
        """
        loop = asyncio.get_running_loop()
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Before the handlers: a signal in between would be lost.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*SIGNALS, *handlers):
            signal.signal(number, lambda *_: None)

        def read_signals() -> None:
            while (number := reader.recv(1)[0]) not in SIGNALS:
                if number in handlers:
                    loop.call_soon_threadsafe(handlers[number])
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.requested.set)
            self.enforce_limit()

        threading.Thread(target=read_signals, name="shutdown", daemon=True).start()
        for number in early_signals.intersection(handlers):
            handlers[number]()

    def fail(self, reason: str) -> None:
        """Stop because of an error."""
        self.failure = reason
        signal.raise_signal(signal.SIGTERM)

    def enforce_limit(self) -> None:
        """End the process once the stop is complete, or has taken too long."""
        if not self._is_over.wait(LIMIT_S):
            self.failure = f"{self._step} did not end within {LIMIT_S:g} s"
            fields = {"during": self._step, "late": self.late}
            thread = threading.Thread(
                target=log.error, args=("daemon.stop_aborted",), kwargs=fields
            )
            thread.daemon = True
            thread.start()
        threading.Event().wait(EXIT_TIMEOUT_S)
        self.end_process()

    def end_process(self) -> None:
        """End the process now, with its tasks and threads, as a SIGKILL would."""
        self._exit(1 if self.failure else 0)

    async def step(
        self, name: str, work: Callable[[Deadline], Awaitable[object]], reserve_s: float = 0.0
    ) -> None:
        """Run one step of the stop; a late one is cancelled and abandoned.

        `reserve_s` is the time for later steps.
        """
        self._step = name
        deadline = self.deadline.earlier(reserve_s)
        task = asyncio.ensure_future(work(deadline))
        done, _ = await asyncio.wait([task], timeout=deadline.remaining_s())
        if done:
            task.result()
        else:
            self.late.append(name)
            task.cancel()

    def finish(self) -> None:
        """Mark all steps as complete."""
        self._step = "exit"
        self._is_over.set()
