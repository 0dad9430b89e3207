"""Limits of a request that its runtime carries out, and the refusal of members that it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from agentd.core.kernel.states import KernelSpec
from agentd.errors import Problem


class Ulimit(msgspec.Struct, frozen=True):
    """A limit of setrlimit(2); -1 means unlimited."""

    soft: int
    hard: int

    @property
    def is_inverted(self) -> bool:
        """Whether the soft limit is above the hard one."""
        return self.hard != UNLIMITED and not UNLIMITED < self.soft <= self.hard


ULIMITS = (
    "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc",
    "rss", "rtprio", "rttime", "sigpending", "stack",
)  # fmt: skip
"""The names that an engine accepts (setrlimit(2) without RLIMIT_)."""
UNLIMITED = -1
MAX_GROUP_ID = 2**31 - 1
"""The largest id of a user or group that an engine accepts."""
_MAX_GROUP_NAME = 256
_PATH_MAX, _NAME_MAX = 4095, 255
"""Maximum bytes of a path and of each name in it (limits.h)."""
TOO_LONG = f"is too long: expected at most {_PATH_MAX} bytes, and {_NAME_MAX} in each name"


def parse_group(raw: object) -> int | str:
    """Return the number of a group, or its name; a name of digits is a number.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(raw, str) and raw.isascii() and raw.isdecimal():
        raw = int(raw) if len(raw) <= len(str(MAX_GROUP_ID)) else None
    if type(raw) is int and 0 <= raw <= MAX_GROUP_ID:
        return raw
    if isinstance(raw, str) and 0 < len(raw) <= _MAX_GROUP_NAME and "\0" not in raw:
        return raw
    raise ValueError(f"expected the name of a group, or its number from 0 to {MAX_GROUP_ID}")


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


_OF_AGENTD = frozenset(
    {
        *("kernel_id", "agent_id", "spec_hash", "slots", "devices", "labels", "options"),
        *("created_by", "is_discreet", "claim_id", "keeps_claim", "overcommits"),
        *("attempt", "removes", "caller"),
    }
)
"""Members of a spec that agentd carries out itself, on every runtime."""
_REASONS = {
    "init": ", which reaps ended processes already",
    "entrypoint": ", which uses no image",
}
"""Further words about members that only a container needs."""


def unsupported_members(
    spec: KernelSpec, runtime: str, supported: Collection[str]
) -> Iterator[Problem]:
    """Yield the members of a request that its runtime does not carry out.

    Members with their default value are not refused.
    """
    members = (name for name in spec.__struct_fields__ if name not in _OF_AGENTD)
    given = [*(name for name in members if getattr(spec, name)), *spec.options]
    for name in given:
        if name not in supported:
            yield Problem(name, f"not supported by the {runtime} runtime{_REASONS.get(name, '')}")
