"""The map from Slurm's indices to agentd's devices.

Slurm names a GPU by its position in gres.conf. The map is written together with gres.conf, and
nothing else says which device a position is.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

DEFAULT_MAP = "/etc/agentd/slurm-gres.json"
MAP_VARIABLE = "AGENTD_SLURM_MAP"
_REFUSED_IN_TYPE = re.compile(r"[^A-Za-z0-9_.-]")
_DIGITS = re.compile(r"([0-9]+)")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


class UnusableMap(Exception):
    """The map file is missing, unreadable or malformed."""


class GresDevice(NamedTuple):
    """A device as agentd names it; `type` is its type in Slurm if that is not its own id."""

    device_id: str
    stable_id: str
    type: str = ""

    @property
    def gres_type(self) -> str:
        """The `Type=` of the device in gres.conf; several devices of one model may share it."""
        return self.type or as_type(self.device_id)


class GresMap(NamedTuple):
    """The agent that Slurm's GPUs belong to, and the device of each index."""

    agent: str
    devices: Mapping[int, GresDevice]

    @classmethod
    def of(cls, agent: str, devices: Iterable[GresDevice]) -> GresMap:
        """Return the map of devices, type by type, in the order that Slurm counts them.

        Types and the devices of each are in natural order, in which cuda2 precedes cuda10.
        """
        ordered = sorted(devices, key=lambda device: natural_key(device.device_id))
        types = list(dict.fromkeys(device.gres_type for device in ordered))
        ordered.sort(key=lambda device: types.index(device.gres_type))
        return cls(agent, dict(enumerate(ordered)))

    def as_json(self) -> dict[str, Any]:
        """Return the content of the map file."""
        devices = {
            str(index): {"id": device.device_id, "stable_id": device.stable_id}
            | ({"type": device.type} if device.type else {})
            for index, device in self.devices.items()
        }
        return {"agent": self.agent, "devices": devices}


def as_type(text: str) -> str:
    """Return text without characters that Slurm refuses in a type."""
    return _REFUSED_IN_TYPE.sub("_", text)


def natural_key(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in text by their value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(text) if part
    ]


def parse_map(text: str) -> GresMap:
    """Read the content of a map file.

    Raises:
        UnusableMap: it is malformed.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableMap(f"invalid JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("devices"), dict):
        raise UnusableMap('expected {"agent": NAME, "devices": {INDEX: {"id", "stable_id"}}}')
    agent = content.get("agent")
    if not _is_name(agent):
        raise UnusableMap(f"invalid agent: got {reprlib.repr(agent)}, expected a name")
    return GresMap(
        agent, dict(_parse_entry(key, value) for key, value in content["devices"].items())
    )


def _parse_entry(key: str, value: object) -> tuple[int, GresDevice]:
    if not _INDEX.fullmatch(key):
        raise UnusableMap(f"invalid index: got {reprlib.repr(key)}, expected a number such as 0")
    if isinstance(value, dict):
        device_id, stable_id = value.get("id"), value.get("stable_id")
        gres_type = value.get("type", "-")
        is_type = _is_name(gres_type) and not _REFUSED_IN_TYPE.search(gres_type)
        if is_type and _is_name(device_id) and _is_name(stable_id):
            return int(key), GresDevice(device_id, stable_id, value.get("type", ""))
    got = reprlib.repr(value)
    raise UnusableMap(f'invalid device {key}: got {got}, expected {{"id", "stable_id", "type"?}}')


def _is_name(value: object) -> TypeGuard[str]:
    """Return whether a value is text that a request and a line of a log can carry."""
    return isinstance(value, str) and bool(value) and value.isprintable()


def map_path() -> Path:
    """Return the path of the map file."""
    return Path(os.environ.get(MAP_VARIABLE) or DEFAULT_MAP)


def read_map(path: Path) -> GresMap:
    """Read the map file.

    Raises:
        UnusableMap: it cannot be read or is malformed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = f"{error.strerror}; create it with: agentctl slurm gres --json"
        raise UnusableMap(f"{path}: {reason}") from None
    try:
        return parse_map(raw.decode("utf-8-sig"))
    except (UnusableMap, UnicodeDecodeError) as error:
        raise UnusableMap(f"{path}: {error}") from None
