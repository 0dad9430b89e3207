"""Names of keys in etcd; see the table in docs/reference/fleet.md."""

from __future__ import annotations

from agentd.core.names import validate_name


def fleet_prefix(fleet: str) -> str:
    """Return the prefix of all keys of a fleet."""
    return f"/agentd/{fleet}/"


def fleet_key(prefix: str, part: str, name: str) -> str:
    """Return the key of a kernel's route, or of a node's part.

    Raises:
        ValueError: the name is invalid.
    """
    return f"{prefix}{part}/{validate_name(name)}"
