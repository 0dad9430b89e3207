"""What happened on the node, for those who listen; the past is kept for a while.

Events have numbers in the order in which they happened. A listener that was away goes on
where it was, as long as that is still kept and the daemon is the same; else it is told
to look anew. One that is too slow is dropped, never waited for.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

_DIGITS = 19
KEPT = 4096
"""How many events of the past are kept, and how far a listener may be behind."""


class EventKind(StrEnum):
    """What an event is about."""

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
    RESET = "reset"


class Audit(msgspec.Struct, frozen=True):
    """A call that was to change a kernel or claim: the caller, the action and the outcome.

    `uid` is known on a unix socket; `via` is the gateway that acted for the caller, if one did.
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
    """Something happened; `value` is what the kind says as it was just then."""

    number: int
    kind: EventKind
    value: object
    is_of_shares: bool = False
    """Whether a kernel holds other devices than before."""


class TooSlow(Exception):
    """A listener is further behind than what is kept."""


class Listener:
    """One who listens; made by `EventLog.listener`."""

    def __init__(self, backlog: Iterable[Event]) -> None:
        self._waiting = deque(backlog)
        self._woken = asyncio.Event()
        self._is_behind = False
        self._is_closed = False

    def put(self, event: Event) -> None:
        if len(self._waiting) >= KEPT:
            self._is_behind = True
        else:
            self._waiting.append(event)
        self._woken.set()

    def close(self) -> None:
        self._is_closed = True
        self._woken.set()

    def more(self, most: int) -> list[Event]:
        """Return further events that are there already."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    async def follow(self, pause_s: float) -> AsyncIterator[Event | None]:
        """Yield events until the log is closed; None in every pause.

        Raises:
            TooSlow: the caller did not keep up.
        """
        while self._waiting or not self._is_closed:
            if self._is_behind:
                raise TooSlow(f"over {KEPT} events behind")
            if self._waiting:
                yield self._waiting.popleft()
                continue
            self._woken.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
            except TimeoutError:
                yield None


class EventLog:
    """The events of one daemon; `epoch` tells it from another's."""

    def __init__(self) -> None:
        self._epoch = uuid.uuid4().hex[:12]
        self._past: deque[Event] = deque(maxlen=KEPT)
        self._number = 0
        self._listeners: set[Listener] = set()
        self._is_closed = False

    def publish(self, kind: EventKind, value: object, *, is_of_shares: bool = False) -> None:
        """Tell everybody; waits for nobody."""
        self._number += 1
        event = Event(self._number, kind, value, is_of_shares)
        self._past.append(event)
        for listener in self._listeners:
            listener.put(event)

    def close(self) -> None:
        """Let every listener come to an end."""
        self._is_closed = True
        for listener in self._listeners:
            listener.close()

    def id_of(self, event: Event) -> str:
        """Return the id after which a listener can go on."""
        return f"{self._epoch}-{event.number}"

    @contextmanager
    def listener(self, last_id: str | None) -> Iterator[Listener]:
        """Listen to what happens from now on, or since the event of `last_id`."""
        made = Listener(self._since(last_id))
        if self._is_closed:
            made.close()
        self._listeners.add(made)
        try:
            yield made
        finally:
            self._listeners.discard(made)

    def _since(self, last_id: str | None) -> list[Event]:
        if last_id is None:
            return []
        epoch, _, number = last_id.rpartition("-")
        first = self._past[0].number if self._past else self._number + 1
        is_known = number.isdecimal() and len(number) < _DIGITS and epoch == self._epoch
        if is_known and first - 1 <= int(number) <= self._number:
            return [event for event in self._past if event.number > int(number)]
        why = "what happened since is not kept; list anew"
        return [Event(self._number, EventKind.RESET, why)]
