"""Values that are cheap to change: agents in order of what they have free, and layered mappings.

A row is an agent with what it has free of everything, by column; a place is a row in the order of
one column. A ranking holds the places of one column, ascending, in chunks of some dozens: a
change copies the chunk that it falls in and shares all others with the ranking before it. Who has
none of a column has no place in its ranking, so that where all are full there is nothing to walk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from struct import Struct
from types import MappingProxyType
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Row: TypeAlias = tuple[bytes, tuple[int, ...], str, str]
"""What it is ordered by; what is free by column, in base units; the node's id; the agent's id."""

Place: TypeAlias = tuple[int, Row]
"""What is free of the column that is ranked, and the row."""

Chunk: TypeAlias = tuple[Place, ...]
"""Some places that follow each other; a tuple, which the garbage collector need not look into."""

AGENT = 0
"""The first column: each agent is one of it, so that who asks for nothing asks for an agent.

Its rows tell nothing else, so that it stays as it is while agents give and take.
"""

CHUNK = 32
"""Places in a chunk, about: twice as many at most."""

MOST_ABOVE = 256
"""Keys that a layered mapping has above its base, before the two become one."""

_first, _last = itemgetter(0), itemgetter(-1)


class Ranking:
    """Places in ascending order; a value that never changes."""

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
        """Return the position from which on all have at least this much."""
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
        """Return the ranking without some places that it has, and with others."""
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


def row_of(free: Sequence[int], node_id: str, agent_id: str) -> Row:
    """Return the row of an agent; rows are ordered by all that is free, and then by the ids.

    They are compared much more often than made: hence one key of bytes for it all.
    """
    names = f"{node_id}\0{agent_id}".encode(errors="surrogatepass")
    return Struct(f">{len(free)}Q").pack(*free) + names, tuple(free), node_id, agent_id


def ranked(rows: Iterable[Row], column: int) -> Ranking:
    """Return the ranking of rows by a column; faster where they come in their own order."""
    return Ranking(_chunks_of(sorted(_places(rows, column))))


def reranked(
    rankings: Sequence[Ranking], gone: Collection[Row], come: Collection[Row]
) -> list[Ranking]:
    """Return the rankings of all columns without some rows that they have, and with others."""
    later = []
    for column, ranking in enumerate(rankings):
        was, now = set(_places(gone, column)), set(_places(come, column))
        later.append(ranking.changed(was - now, now - was))
    return later


def _places(rows: Iterable[Row], column: int) -> list[Place]:
    if column == AGENT:
        return [(1, row_of((1,), node_id, agent_id)) for _, _, node_id, agent_id in rows]
    return [(row[1][column], row) for row in rows if row[1][column]]


def _chunks_of(places: Sequence[Place]) -> list[Chunk]:
    if len(places) <= 2 * CHUNK:
        return [tuple(places)] if places else []
    size = -(-len(places) // (len(places) // CHUNK))
    return [tuple(places[at : at + size]) for at in range(0, len(places), size)]


class Layered(Mapping[str, T]):
    """A mapping that never changes: what changed lately lies above what did not.

    Keys keep the order in which they came first, until one goes.
    """

    __slots__ = ("_above", "_base", "_length")

    def __init__(
        self, base: Mapping[str, T], above: Mapping[str, T] = MappingProxyType({})
    ) -> None:
        self._base, self._above = base, above
        self._length = len(base) + sum(key not in base for key in above)

    def __getitem__(self, key: str) -> T:
        return self._above[key] if key in self._above else self._base[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        yield from (key for key in self._above if key not in self._base)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: object) -> bool:
        return key in self._above or key in self._base

    def changed(self, come: Mapping[str, T], gone: Collection[str]) -> Layered[T]:
        """Return the mapping with some keys anew, and then without others."""
        base, above = self._base, {**self._above, **come}
        if gone or len(above) > MOST_ABOVE:
            flat = {**base, **above}
            for key in gone:
                flat.pop(key, None)
            base, above = flat, {}
        return Layered(base, above)
