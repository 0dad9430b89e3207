"""Turns: the share of the event loop that one caller gets before the others are served.

A caller is a token, or a user on a unix socket, with all of its connections. In one turn it is
served at most `CEILINGS` of each kind. Its next turn of that kind begins `ROUNDS` rounds of the
event loop after it was last served; a `/livez` needs fewer rounds from its arrival to its answer.
If turns of several callers are due, one begins in each round, in the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import TypeAlias

ROUNDS = 8
KIB = 1024


class Kind(Enum):
    """Units of service, each with its own ceiling and turns."""

    READ = auto()
    """KiB read from the caller's sockets; each read counts as at least one."""
    FRAMES = auto()
    """WebSocket frames from the caller."""
    WRITTEN = auto()
    """KiB of streams sent to the caller; each write counts as at least `MIN_WRITE`."""
    REQUESTS = auto()
    PROBES = auto()
    """Unauthenticated requests, such as `/livez`; they do not queue behind others."""


CEILINGS = {Kind.READ: 64, Kind.FRAMES: 64, Kind.WRITTEN: 64, Kind.REQUESTS: 1, Kind.PROBES: 1}

MIN_WRITE = 4
"""KiB that a short write costs."""

_Line: TypeAlias = tuple[Hashable, Kind]
_Grant: TypeAlias = Callable[[], bool]


def kib(size: int) -> int:
    """Convert bytes to whole KiB, at least one."""
    return size // KIB or 1


class _Turn:
    """The amount served in a caller's turn, and the last round in which it was served."""

    __slots__ = ("last_round", "served")

    def __init__(self) -> None:
        self.served = 0
        self.last_round = 0


class Turns:
    """The turns of all callers of one process."""

    def __init__(self) -> None:
        self._turns: OrderedDict[_Line, _Turn] = OrderedDict()
        self._waiting: OrderedDict[_Line, deque[tuple[int, _Grant]]] = OrderedDict()
        self._connections: Counter[Hashable] = Counter()
        self._round = 0
        self._has_begun_one = False
        self._is_counting = False

    def join(self, caller: Hashable) -> None:
        """Count a connection of a caller."""
        self._connections[caller] += 1

    def leave(self, caller: Hashable) -> None:
        """Uncount a connection of a caller."""
        self._connections[caller] -= 1
        if not self._connections[caller]:
            del self._connections[caller]

    def has_one_connection(self, caller: Hashable) -> bool:
        """Return whether the caller has a single connection, which limits it without turns."""
        return self._connections[caller] <= 1

    def take(self, caller: Hashable, kind: Kind, amount: int = 1) -> bool:
        """Serve an amount now if the caller's turn has room, and return whether it was served.

        An amount above the ceiling takes a whole turn.
        """
        line = caller, kind
        amount = min(amount, CEILINGS[kind])
        if line in self._waiting:
            return False
        if (turn := self._turns.get(line)) is None:
            if self._has_begun_one:
                return False
            self._has_begun_one = True
        elif turn.served + amount > CEILINGS[kind]:
            return False
        self._serve(line, amount)
        return True

    def queue(self, caller: Hashable, kind: Kind, amount: int, grant: Callable[[], bool]) -> None:
        """Call `grant` when the amount is due; it returns False if it is not needed any more."""
        amount = min(amount, CEILINGS[kind])
        self._waiting.setdefault((caller, kind), deque()).append((amount, grant))
        self._count_rounds()

    async def wait(self, caller: Hashable, kind: Kind, amount: int = 1) -> None:
        """Wait until the amount is due."""
        if self.take(caller, kind, amount):
            return
        granted = asyncio.get_running_loop().create_future()

        def grant() -> bool:
            if granted.done():
                return False
            granted.set_result(None)
            return True

        self.queue(caller, kind, amount, grant)
        await granted

    def _serve(self, line: _Line, amount: int) -> None:
        turn = self._turns.setdefault(line, _Turn())
        turn.served += amount
        turn.last_round = self._round
        self._turns.move_to_end(line)
        self._count_rounds()

    def _count_rounds(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._round += 1
        self._has_begun_one = False
        while self._turns:
            line, turn = next(iter(self._turns.items()))
            if self._round - turn.last_round < ROUNDS:
                break
            del self._turns[line]
        self._is_counting = False
        try:
            self._begin_one()
        finally:
            if self._turns or self._waiting:
                self._count_rounds()

    def _begin_one(self) -> None:
        """Begin the turn that has been due longest."""
        line = next((line for line in self._waiting if line not in self._turns), None)
        if line is None:
            return
        queued = self._waiting[line]
        self._waiting.move_to_end(line)
        served = 0
        try:
            while queued and served + queued[0][0] <= CEILINGS[line[1]]:
                amount, grant = queued.popleft()
                if grant():
                    served += amount
                    self._serve(line, amount)
        finally:
            self._has_begun_one = served > 0
            if not queued:
                del self._waiting[line]
