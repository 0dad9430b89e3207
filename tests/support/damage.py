"""Damaged records, and others than those that agentd wrote."""

import json
from collections.abc import Iterator
from pathlib import Path

from agentd.core.kernel.record import read_members, seal


def flipped(content: bytes, bit: int) -> bytes:
    """Return a file's content with one bit flipped; bits are counted from its beginning, round and round."""
    place, mask = bit // 8 % len(content), 1 << bit % 8
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


def every_flip(text: str) -> Iterator[str]:
    """Yield a record with each of its bits flipped, as agentd decodes it."""
    for bit in range(8 * len(text.encode())):
        yield flipped(text.encode(), bit).decode(errors="replace")


def resealed(text: str, **members: object) -> str:
    """Return a record with other members and a right sum."""
    return seal({**read_members(text), **members})


def reseal(path: Path, **members: object) -> None:
    """Change members of a record on the disk, with a right sum."""
    text = resealed(path.read_text(), **members)
    path.unlink()
    path.write_text(text)


def of_schema_1(text: str, **members: object) -> str:
    """Return a record as it was written before records had sums."""
    return json.dumps({**read_members(text), **members, "schema": 1}, separators=(",", ":"))
