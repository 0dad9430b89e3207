"""Names from outside that become paths, URLs, keys or command lines: one pattern for each kind.

A name is validated on input, and once more before it becomes part of a path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from typing import TypeGuard, TypeVar

_H = TypeVar("_H", bound=Hashable)

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
"""The pattern of ids of kernels, agents and nodes, and of names of callers, runtimes and fleets."""
_NAME = re.compile(NAME)
_MAX_QUOTED = 80


def is_name(text: object) -> TypeGuard[str]:
    """Return whether this is a name."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def validate_name(text: str) -> str:
    """Validate a name that becomes part of a path.

    Raises:
        ValueError: it is not a name.
    """
    if not is_name(text):
        raise ValueError(f"invalid name {quote_untrusted(text)}")
    return text


def name_or_empty(text: object) -> str:
    """Return a name, or an empty string for anything else."""
    return text if is_name(text) else ""


def find_duplicates(items: Iterable[_H]) -> list[str]:
    """Return the items that appear more than once, as sorted text."""
    return sorted(str(item) for item, count in Counter(items).items() if count > 1)


def did_you_mean(word: str, known: Iterable[str], least: float = 0.5) -> str:
    """Return a hint at the nearest known name and a space, empty if none is near.

    `least` is the minimum similarity: 1 is equal, 0 has nothing in common (difflib).
    """
    near = get_close_matches(word, list(known), n=1, cutoff=least)
    return f"did you mean {near[0]}? " if near else ""


def quote_untrusted(text: object) -> str:
    """Quote untrusted text for a message: escaped, on one line of limited length."""
    quoted = repr(text)
    return quoted if len(quoted) <= _MAX_QUOTED else f"{quoted[:_MAX_QUOTED]}..."
