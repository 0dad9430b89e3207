"""The paths of systemd's units on D-Bus: all but letters and digits of a name is encoded."""

from __future__ import annotations

UNIT_PATH = "/org/freedesktop/systemd1/unit/"


def path_of(unit: str) -> str:
    """Return the path of a unit's object: what is no letter or digit is written in hexadecimal."""
    written = "".join(
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"_{byte:02x}"
        for byte in unit.encode()
    )
    return UNIT_PATH + written


def unit_of(path: str) -> str:
    """Return the unit whose object has a path."""
    first, *rest = path.removeprefix(UNIT_PATH).split("_")
    raw = first.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in rest)
    return raw.decode(errors="replace")
