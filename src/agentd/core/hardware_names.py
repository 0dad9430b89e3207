"""Names of hardware: UUIDs and PCI addresses, which tools and people write in several ways.

`nvidia-smi` has `00000000:3B:00.0`, Linux `0000:3b:00.0` and `lspci` `3b:00.0`. All names of
devices are compared in one normal form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

_V = TypeVar("_V")

_UUID = re.compile(
    r"(?:[a-z]+-)*([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE | re.ASCII
)
"""A UUID, with a prefix such as `GPU-`."""
_PCI = re.compile(
    r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE | re.ASCII
)


def is_hardware_name(name: str) -> bool:
    """Return whether a name is a UUID or a PCI address, and so of one device in the world."""
    return bool(_UUID.fullmatch(name) or _PCI.fullmatch(name))


@lru_cache(maxsize=1 << 14)
def normal_name(name: str) -> str:
    """Return a name in normal form; one that is neither UUID nor PCI address is unchanged."""
    if match := _PCI.fullmatch(name):
        return f"{int(match[1] or '0', 16):04x}:{match[2].lower()}"
    return name.lower() if _UUID.fullmatch(name) else name


@lru_cache(maxsize=1 << 14)
def normal_names(*names: str) -> frozenset[str]:
    """Return the normal forms of a device's names, and its UUIDs without prefix."""
    bare = (match[1].lower() for name in names if (match := _UUID.fullmatch(name)))
    return frozenset((*map(normal_name, names), *bare))


def by_normal_names(items: Mapping[str, _V]) -> dict[str, _V]:
    """Return what has these names by all their normal forms."""
    return {name: item for key, item in items.items() for name in normal_names(key)}
