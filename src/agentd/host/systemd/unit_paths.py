"""Units as D-Bus shows them: their paths, and whether there is one."""

from __future__ import annotations

UNIT_PATH = "/org/freedesktop/systemd1/unit/"


def unit_of(path: str) -> str:
    """Return the unit whose object has a path."""
    first, *rest = path.removeprefix(UNIT_PATH).split("_")
    raw = first.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in rest)
    return raw.decode(errors="replace")


def is_there(load: str, active: str) -> bool:
    """Tell from a unit's states whether there is one.

    A unit whose file is gone, or cannot be read any more after a reload, may run all the same.
    """
    return load == "loaded" or active != "inactive"
