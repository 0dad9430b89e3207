"""The names of keys in etcd; see the table in docs/reference/fleet.md."""

from __future__ import annotations


def prefix_of(fleet: str) -> str:
    """Return what all keys of a fleet begin with."""
    return f"/agentd/{fleet}/"
