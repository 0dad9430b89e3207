"""Paths of systemd: of units on D-Bus, and of the folder of a user's manager."""

from __future__ import annotations

import os
from pathlib import Path

UNIT_PATH = "/org/freedesktop/systemd1/unit/"


def unit_of_path(path: str) -> str:
    """Return the unit of an object path."""
    head, *escaped = path.removeprefix(UNIT_PATH).split("_")
    raw = head.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in escaped)
    return raw.decode(errors="replace")


def unit_exists(load: str, active: str) -> bool:
    """Return whether a unit exists, from its states.

    A unit whose file is missing, or unreadable after a reload, may still be running.
    """
    return load == "loaded" or active != "inactive"


def user_runtime_folder() -> Path:
    """Return the folder in which this user's manager has its socket and its transient units."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
