"""Following: which answers of a stream are resumed, from where, and what its caller is told.

No I/O and no waiting: both clients and the command line make the calls and the pauses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from agentd.client.calls import Call, events_call, logs_call
from agentd.client.errors import cut_stream_error
from agentd.client.events import EventParser, NodeEvent
from agentd.errors import OutputDropped, RuntimeUnavailable, Unavailable, UnknownKernel

RETRY_S = 1.0
"""Seconds between two attempts to resume."""
OnOutage: TypeAlias = "Callable[[Unavailable], object] | None"
OnDropped: TypeAlias = "Callable[[int, int], object] | None"


class Outages:
    """The outages of one follower: an error before the first answer is the caller's.

    A later one begins an outage, which `on_outage` is told once, and which the next answer ends.
    """

    def __init__(self, on_outage: OnOutage = None) -> None:
        self._on_outage = on_outage
        self.has_answer = False
        self._is_told = False

    def on_answer(self) -> None:
        """Note an answer."""
        self.has_answer, self._is_told = True, False

    def pause_s(self, error: Unavailable) -> float:
        """Return the seconds until the next attempt.

        Raises:
            Unavailable: it is the first answer that is missing.
        """
        if not self.has_answer:
            raise error
        if not self._is_told and self._on_outage is not None:
            self._on_outage(error)
        self._is_told = True
        return RETRY_S


class LogFollower:
    """One reading of a log: the calls that resume it, and the bytes that were lost.

    A log that is not followed is resumed for at most `timeout_s` without progress.
    """

    def __init__(
        self,
        kernel_id: str,
        query: dict[str, Any],
        start: dict[str, Any],
        *,
        timeout_s: float,
        on_outage: OnOutage,
        on_dropped: OnDropped,
    ) -> None:
        self._kernel_id, self._query, self._start = kernel_id, query, start
        self._is_whole = all(value is None for value in start.values())
        self._position: int | None = 0 if self._is_whole else start["from"]
        self._kernel: str | None = None
        self._outages = Outages(on_outage)
        self._on_dropped = on_dropped
        self._timeout_s = timeout_s
        self._broken_since: float | None = None
        """The time of the first break without progress since."""

    def next_call(self) -> Call[bytes]:
        """Return the call for all that was not read yet."""
        start = {"from": self._position} if self._outages.has_answer else self._start
        return logs_call(self._kernel_id, **self._query, **start)

    def on_answer(self, header: Callable[[str], str | None]) -> None:
        """Note an answer, whose headers `header` returns.

        Raises:
            OutputDropped: bytes that were asked for are lost.
            UnknownKernel: it is the log of another kernel, or its end is lost.
        """
        is_resumed, expected = self._outages.has_answer, self._position
        kernel, position = header("Log-Kernel"), header("Log-Position") or ""
        begin = int(position) if re.fullmatch("[0-9]{1,19}", position) else None
        self._outages.on_answer()
        if is_resumed and kernel != self._kernel:
            fact = f"the kernel {self._kernel_id} whose log was read is gone"
            raise UnknownKernel(f"{fact}; another one has its id")
        self._kernel, self._position = kernel, begin
        if is_resumed and begin is None:
            raise RuntimeUnavailable("the answer has no Log-Position")
        if begin is None or expected is None:
            return
        if begin > expected and self._on_dropped is not None:
            self._on_dropped(expected, begin)
        elif begin > expected and (is_resumed or not self._is_whole):
            raise OutputDropped(self._kernel_id, expected, begin)
        elif begin < expected and is_resumed:
            fact = f"the log of {self._kernel_id} has {begin} bytes after {expected} were read"
            raise UnknownKernel(f"{fact}: its node lost the end")

    def on_chunk(self, chunk: bytes) -> None:
        """Note bytes that are given to the caller."""
        if self._position is not None:
            self._position += len(chunk)
        self._broken_since = None

    def pause_s(self, error: Unavailable) -> float:
        """Return the seconds until the next attempt.

        Raises:
            Unavailable: the log cannot be resumed.
        """
        if self._outages.has_answer:
            error = cut_stream_error(f"the log of {self._kernel_id}", error)
            now = time.monotonic()
            self._broken_since = self._broken_since or now
            is_late = now + RETRY_S > self._broken_since + self._timeout_s
            if self._position is None or (is_late and not self._query["follow"]):
                raise error
        return self._outages.pause_s(error)


class EventFollower:
    """One reading of events: the calls that resume it after the last event."""

    def __init__(self, after: str | None, on_outage: OnOutage, max_bytes: int) -> None:
        self._after = after
        self._outages = Outages(on_outage)
        self._max_bytes = max_bytes
        self._parser = EventParser(max_bytes)

    def next_call(self) -> Call[bytes]:
        """Return the call for all later events."""
        return events_call(self._after)

    def on_answer(self) -> Iterator[NodeEvent]:
        """Note an answer, and yield a `reset` if events before it were missed."""
        if self._outages.has_answer and self._after is None:
            yield NodeEvent("reset", {"reason": "the connection was lost"}, "")
        self._outages.on_answer()
        self._parser = EventParser(self._max_bytes)

    def parse(self, chunk: bytes) -> Iterator[NodeEvent]:
        """Yield the events that a chunk completes.

        Raises:
            Refused: an event exceeds the limit, or is not JSON.
        """
        for event in self._parser.parse(chunk):
            self._after = event.id or self._after
            yield event

    def pause_s(self, error: Unavailable) -> float:
        """Return the seconds until the next attempt.

        Raises:
            Unavailable: it is the first answer that is missing.
        """
        if self._outages.has_answer:
            error = cut_stream_error("the event stream", error)
        return self._outages.pause_s(error)
