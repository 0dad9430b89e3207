"""Persistent collections: agents ranked by free amounts, and layered mappings.

A row holds the free amounts of an agent by column; a place is an agent's position in one column. A
ranking holds the places of one column, ascending, in chunks: a change copies one chunk and shares
all others with the previous ranking. A place knows only its own column, so the cost of a change
depends on the columns that it touches. Agents without a free amount have no place in a ranking, so
a full fleet needs no search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from types import MappingProxyType
from typing import TypeAlias, TypeVar

K = TypeVar("K")
T = TypeVar("T")

AgentKey: TypeAlias = tuple[str, str]
"""The node id and the agent id."""

Row: TypeAlias = tuple[int, ...]
"""The free amounts of an agent by column, in base units."""

Place: TypeAlias = tuple[int, AgentKey]
"""The free amount of an agent in the ranked column."""

Chunk: TypeAlias = tuple[Place, ...]
"""Consecutive places; a tuple, which the garbage collector skips."""

AGENT = 0
"""The first column, with one agent each, for requests without any amount."""

CHUNK = 32
"""Approximate number of places in a chunk; at most twice as many."""

MOST_ABOVE = 256
"""Maximum keys above the base of a layered mapping, before the two are merged."""

_first, _last = itemgetter(0), itemgetter(-1)


class Ranking:
    """Places in ascending order; immutable."""

    __slots__ = ("_chunks", "_ends")

    def __init__(self, chunks: Sequence[Chunk] = ()) -> None:
        self._chunks = chunks
        self._ends = list(accumulate(map(len, chunks)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, position: int) -> Place:
        at = bisect_right(self._ends, position)
        return self._chunks[at][position - self._ends[at]]

    def __iter__(self) -> Iterator[Place]:
        return self.upwards(0)

    def first_with(self, amount: int) -> int:
        """Return the first position with at least this amount."""
        at = bisect_left(self._chunks, (amount,), key=_last)
        if at == len(self._chunks):
            return len(self)
        return (self._ends[at - 1] if at else 0) + bisect_left(self._chunks[at], (amount,))

    def upwards(self, position: int) -> Iterator[Place]:
        """Yield the places from a position on."""
        at = bisect_right(self._ends, position)
        for chunk in self._chunks[at : at + 1]:
            yield from chunk[position - self._ends[at] :]
        for chunk in self._chunks[at + 1 :]:
            yield from chunk

    def changed(self, gone: Collection[Place], come: Collection[Place]) -> Ranking:
        """Return the ranking without some of its places, and with others."""
        if not gone and not come:
            return self
        chunks = [*self._chunks]
        for place in gone:
            at = bisect_right(chunks, place, key=_first) - 1
            chunk = [*chunks[at]]
            del chunk[bisect_left(chunk, place)]
            if len(chunk) < CHUNK // 2 and at + 1 < len(chunks):
                chunks[at : at + 2] = _chunks_of([*chunk, *chunks[at + 1]])
            else:
                chunks[at : at + 1] = _chunks_of(chunk)
        for place in come:
            at = max(bisect_right(chunks, place, key=_first) - 1, 0)
            chunk = [*chunks[at]] if chunks else []
            insort(chunk, place)
            chunks[at : at + 1] = _chunks_of(chunk)
        return Ranking(chunks)


def ranked(rows: Mapping[AgentKey, Row], column: int) -> Ranking:
    """Return the ranking of rows by a column."""
    return Ranking(
        _chunks_of(sorted((row[column], key) for key, row in rows.items() if row[column]))
    )


def reranked(
    rankings: Sequence[Ranking], before: Mapping[AgentKey, Row], after: Mapping[AgentKey, Row]
) -> list[Ranking]:
    """Return the rankings of all columns after some rows changed."""
    gone, come = defaultdict[int, list[Place]](list), defaultdict[int, list[Place]](list)
    nothing = (0,) * len(rankings)
    for key in before.keys() | after.keys():
        was, now = before.get(key, nothing), after.get(key, nothing)
        for column, (old, new) in enumerate(zip(was, now, strict=True)):
            if old != new:
                gone[column] += [(old, key)] if old else []
                come[column] += [(new, key)] if new else []
    later = [*rankings]
    for column, places in gone.items():
        later[column] = rankings[column].changed(places, come[column])
    return later


def _chunks_of(places: Sequence[Place]) -> list[Chunk]:
    if len(places) <= 2 * CHUNK:
        return [tuple(places)] if places else []
    size = -(-len(places) // (len(places) // CHUNK))
    return [tuple(places[at : at + size]) for at in range(0, len(places), size)]


class Layered(Mapping[K, T]):
    """An immutable mapping: recent changes are layered above an older base.

    Keys keep the order of their first insertion, until one is removed.
    """

    __slots__ = ("_above", "_base", "_length")

    def __init__(
        self,
        base: Mapping[K, T],
        above: Mapping[K, T] = MappingProxyType({}),
        length: int | None = None,
    ) -> None:
        self._base, self._above = base, above
        self._length = len(base) if length is None else length

    def __getitem__(self, key: K) -> T:
        return self._above[key] if key in self._above else self._base[key]

    def __iter__(self) -> Iterator[K]:
        yield from self._base
        yield from (key for key in self._above if key not in self._base)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: object) -> bool:
        return key in self._above or key in self._base

    def changed(self, come: Mapping[K, T], gone: Collection[K] = ()) -> Layered[K, T]:
        """Return the mapping with some keys set, and then without others."""
        base, above = self._base, {**self._above, **come}
        if not gone and len(above) <= MOST_ABOVE:
            return Layered(base, above, self._length + sum(key not in self for key in come))
        flat = {**base, **above}
        for key in gone:
            flat.pop(key, None)
        return Layered(flat)
