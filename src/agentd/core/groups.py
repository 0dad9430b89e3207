"""Values in groups, and lists of ids that a sentence can hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

MAX_NAMED = 4
"""Devices that one warning names."""


def group(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, in the order of the pairs."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def join_first(ids: Sequence[str]) -> str:
    """Return the first ids, and the number of the others."""
    text = ", ".join(ids[:MAX_NAMED])
    return text if len(ids) <= MAX_NAMED else f"{text} and {len(ids) - MAX_NAMED} more"
