"""D-Bus object paths and load states of units."""

from __future__ import annotations

UNIT_PATH = "/org/freedesktop/systemd1/unit/"


def unit_of(path: str) -> str:
    """Return the unit of an object path."""
    head, *escaped = path.removeprefix(UNIT_PATH).split("_")
    raw = head.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in escaped)
    return raw.decode(errors="replace")


def is_there(load: str, active: str) -> bool:
    """Return whether a unit exists, from its states.

    A unit whose file is missing, or unreadable after a reload, may still be running.
    """
    return load == "loaded" or active != "inactive"
