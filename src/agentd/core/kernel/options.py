"""Container options of a request, for runtimes with containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec


class PullPolicy(StrEnum):
    """When an image is pulled."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


class Tmpfs(msgspec.Struct, frozen=True):
    """A tmpfs mount of `size` bytes; None for the engine's limit (half of the memory)."""

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
"""The names that an engine accepts (setrlimit(2) without RLIMIT_)."""
UNLIMITED = -1
_PATH_MAX, _NAME_MAX = 4095, 255
"""Maximum bytes of a path and of each name in it (limits.h)."""
TOO_LONG = f"is too long: expected at most {_PATH_MAX} bytes, and {_NAME_MAX} in each name"


def is_too_long(path: str) -> bool:
    """Return whether a path is too long for Linux."""
    raw = path.encode(errors="replace")
    return len(raw) > _PATH_MAX or max(map(len, raw.split(b"/"))) > _NAME_MAX


def over_ceiling(
    limits: Mapping[str, Ulimit], ceilings: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield each limit above the operator's ceiling, with the reason."""
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
