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


_OF_AGENTD = frozenset(
    {
        *("kernel_id", "agent_id", "spec_hash", "slots", "devices", "labels", "options"),
        *("created_by", "is_discreet", "claim_id", "keeps_claim", "caller"),
    }
)
"""Members of a spec that agentd carries out itself, on every runtime."""


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
            yield Problem(name, f"not supported by the {runtime} runtime")
