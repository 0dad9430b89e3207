"""Damaged records, and others than those that agentd wrote."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from agentd.core.kernel.record import read_members, seal


def flipped(content: bytes, bit: int) -> bytes:
    """Return a content with one bit flipped; beyond the end it begins again."""
    place, mask = bit // 8 % len(content), 1 << bit % 8
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


def every_flip(text: str) -> Iterator[str]:
    """Yield a record with each of its bits flipped, as agentd decodes it."""
    for bit in range(8 * len(text.encode())):
        yield flipped(text.encode(), bit).decode(errors="replace")


_ODD = (2**40, 2**63, 10**30, 0, -1, 0.5, 1e308, True, None, "", "X\0", "X\ud800", "X" * 9000,
        "../X", [], {}, [[None]], {"X": 2**70})  # fmt: skip


def odd_records(text: str) -> Iterator[str]:
    """Yield a record of schema 1 with each of its values replaced by odd ones, and one left out."""

    def changed(value: Any) -> Iterator[Any]:
        yield from _ODD
        names: Iterable[Any] = value if isinstance(value, dict) else ()
        for name in range(len(value)) if isinstance(value, list) else names:
            for odd in changed(value[name]):
                copy = value.copy()
                copy[name] = odd
                yield copy
            copy = value.copy()
            del copy[name]
            yield copy

    yield from map(json.dumps, changed(json.loads(of_schema_1(text))))


def resealed(text: str, **members: object) -> str:
    """Return a record with other members and a right sum."""
    return seal({**read_members(text), **members})


def forged(text: str, *changes: tuple[str, str]) -> str:
    """Return a record with texts of its JSON replaced and a right sum."""
    for old, new in changes:
        text = seal(json.loads(json.dumps(read_members(text)).replace(old, new)))
    return text


def of_schema_1(text: str, **members: object) -> str:
    """Return a record as it was written before records had sums."""
    return json.dumps({**read_members(text), **members, "schema": 1}, separators=(",", ":"))
