"""The names of keys in etcd; see the table in docs/reference/fleet.md."""

from __future__ import annotations

from agentd.core.names import checked


def prefix_of(fleet: str) -> str:
    """Return what all keys of a fleet begin with."""
    return f"/agentd/{fleet}/"


def key_of(prefix: str, part: str, name: str) -> str:
    """Return the key of a kernel's route, or of what is kept of a node.

    Raises:
        ValueError: it is not a name.
    """
    return f"{prefix}{part}/{checked(name)}"
