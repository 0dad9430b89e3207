"""Container options of a request; only runtimes with containers use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec


class PullPolicy(StrEnum):
    """When an image is fetched from its registry."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


class Tmpfs(msgspec.Struct, frozen=True):
    """A folder in memory; `size` bytes, or None for the engine's limit (half of the memory)."""

    target: str
    size: int | None = None


class Ulimit(msgspec.Struct, frozen=True):
    """A limit of setrlimit(2); -1 means unlimited."""

    soft: int
    hard: int


ULIMITS = (
    "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc",
    "rss", "rtprio", "rttime", "sigpending", "stack",
)  # fmt: skip
"""The names that an engine takes (setrlimit(2) without its RLIMIT_)."""
UNLIMITED = -1
_PATH_MAX, _NAME_MAX = 4095, 255
"""Bytes of a path and of one name in it (limits.h)."""
TOO_LONG = f"is too long; allowed: {_PATH_MAX} bytes, and {_NAME_MAX} for each name in it"


def is_too_long(path: str) -> bool:
    """Return whether no file can have this path."""
    raw = path.encode(errors="replace")
    return len(raw) > _PATH_MAX or max(map(len, raw.split(b"/"))) > _NAME_MAX


def over_ceiling(
    limits: Mapping[str, Ulimit], ceilings: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield each limit that is over what the operator allows, and why it is refused."""
    for name, limit in limits.items():
        ceiling = ceilings.get(name, UNLIMITED)
        values = (limit.soft, limit.hard)
        if ceiling != UNLIMITED and any(v == UNLIMITED or v > ceiling for v in values):
            given = "unlimited" if limit.hard == UNLIMITED else limit.hard
            yield name, f"{given} exceeds the limit of {ceiling}"


class ContainerOptions(msgspec.Struct, frozen=True):
    """Options of a container; None leaves the choice to the node."""

    pull_policy: PullPolicy = PullPolicy.MISSING
    platform: str | None = None
    network: str | None = None
    tmpfs: tuple[Tmpfs, ...] = ()
    shm_size: int | None = None
    pids_limit: int | None = None
    ulimits: Mapping[str, Ulimit] = {}
