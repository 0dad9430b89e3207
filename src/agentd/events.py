"""The event log of the node: events for listeners, kept for a while.

Events are numbered in order. A listener that reconnects continues after its last event, if that is
still kept and the daemon is the same; otherwise it gets a `reset`. A listener that is too slow is
dropped, never awaited.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

MAX_EVENTS = 4096
"""Events that are kept, and that a listener may lag behind."""


class EventKind(StrEnum):
    """The subject of an event."""

    KERNEL = "kernel"
    KERNEL_REMOVED = "kernel-removed"
    DEVICE = "device"
    DEVICE_REMOVED = "device-removed"
    PLUGIN = "plugin"
    RUNTIME = "runtime"
    AUDIT = "audit"
    REFUSAL = "refusal"
    CLAIM = "claim"
    CLAIM_REMOVED = "claim-removed"
    COLLISION = "collision"
    FREE = "free"
    CONDITION = "condition"
    CONDITION_REMOVED = "condition-removed"
    RESET = "reset"


class Audit(msgspec.Struct, frozen=True):
    """A mutating call: the caller (`uid` on a unix socket), the action and the outcome.

    `via` is the gateway that acted for the caller, if any.
    """

    caller: str
    via: str
    uid: int | None
    action: str
    agent_id: str
    kernel_id: str
    outcome: str
    claim_id: str = ""


class Event(msgspec.Struct, frozen=True):
    """One event; `value` is the subject at that moment, `at` in seconds since the epoch."""

    number: int
    kind: EventKind
    value: object
    at: float
    changes_shares: bool = False
    """Whether the devices that a kernel holds changed."""


class TooSlow(Exception):
    """A listener lags behind by more than the kept events."""


class Listener:
    """A listener, created by `EventLog.subscribe`."""

    def __init__(self, backlog: Iterable[Event]) -> None:
        self._queue = asyncio.Queue[Event | None]()
        for event in backlog:
            self._queue.put_nowait(event)

    def put(self, event: Event | None) -> None:
        """Queue an event, or None for the end; a listener that lags behind misses it."""
        if self._queue.qsize() <= MAX_EVENTS:
            self._queue.put_nowait(event)

    async def follow(self, pause_s: float) -> AsyncIterator[Event | None]:
        """Yield events until the log is closed, and None in every pause.

        Raises:
            TooSlow: the listener did not keep up.
        """
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    event = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if self._queue.qsize() >= MAX_EVENTS:
                raise TooSlow(f"over {MAX_EVENTS} events behind")
            if event is None:
                return
            yield event


class EventLog:
    """The events of one daemon run; their ids begin with a text that only this run has."""

    def __init__(self) -> None:
        self._epoch = uuid.uuid4().hex[:12]
        self._past: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._listeners: set[Listener] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._is_closed = False

    def call_on_publish(self, callback: Callable[[], None]) -> None:
        """Register a callback for each event."""
        self._callbacks.append(callback)

    def publish(self, kind: EventKind, value: object, *, is_of_shares: bool = False) -> None:
        """Queue an event for all listeners, without waiting."""
        self._number += 1
        event = Event(self._number, kind, value, time.time(), is_of_shares)
        self._past.append(event)
        for listener in self._listeners:
            listener.put(event)
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """End all listeners after their queued events."""
        self._is_closed = True
        for listener in self._listeners:
            listener.put(None)

    def event_id(self, event: Event) -> str:
        """Return the id after which a listener can resume."""
        return f"{self._epoch}-{event.number}"

    @contextmanager
    def subscribe(self, last_id: str | None) -> Iterator[Listener]:
        """Listen to new events, and to those after the event `last_id`."""
        listener = Listener(self._backlog_after(last_id))
        if self._is_closed:
            listener.put(None)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def _backlog_after(self, last_id: str | None) -> list[Event]:
        if last_id is None:
            return []
        before = self._number - len(self._past)
        ids = [f"{self._epoch}-{number}" for number in range(before, self._number + 1)]
        if last_id in ids:
            return [*self._past][ids.index(last_id) :]
        reason = "later events are not kept; list again"
        return [Event(self._number, EventKind.RESET, reason, time.time())]
