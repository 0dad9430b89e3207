"""The node's state folder: what is remembered besides the kernels themselves.

    lock            held while a daemon runs; a second one refuses
    node.json       the node id that the kernels here carry, and the runtimes that have some
    devices.json    the last inventory: stable ids, ids, drains
    intents/        creates that an engine was asked for and has not answered yet
    kernels/        process kernels, one folder each (see `process`)

Files are replaced in one step. What cannot be read is set aside and reported.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentd.core.devices import Device, DeviceId, Health
from agentd.core.slots import SlotKind
from agentd.errors import StartRefused
from agentd.failpoints import hit
from agentd.services.interfaces import Intent

log = structlog.get_logger()
SCHEMA = 1
_T = TypeVar("_T")


class StateDir:
    """One state folder, locked for this daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: list[int] = []

    def open(self) -> None:
        """Make the folder and lock it.

        Raises:
            StartRefused: it cannot be written, or another daemon uses it.
        """
        try:
            for folder in (self.folder, self.folder / "intents", self.kernels):
                folder.mkdir(
                    mode=0o711 if folder == self.folder else 0o700, parents=True, exist_ok=True
                )
        except OSError as error:
            raise StartRefused(f"state folder {self.folder}: {error.strerror}") from None
        self._lock(self.folder / "lock", f"state folder {self.folder} is used by another agentd")

    def lock_node(self, node_id: str, folder: Path) -> None:
        """Refuse a second daemon with this node id.

        Raises:
            StartRefused: one runs.
        """
        with suppress(OSError):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._lock(
            folder / f"node-{node_id}.lock",
            f"another agentd serves node id {node_id} on this machine",
        )

    def _lock(self, path: Path, refusal: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartRefused(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise StartRefused(f"{refusal} (pid {holder})") from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._locks.append(descriptor)

    def close(self) -> None:
        """Let go of the locks."""
        while self._locks:
            os.close(self._locks.pop())

    @property
    def kernels(self) -> Path:
        return self.folder / "kernels"

    def load_node(self) -> Mapping[str, Any]:
        """Return what stands in node.json; empty where nothing does."""
        return self._load("node.json", dict) or {}

    def save_node(self, node_id: str, runtimes: Sequence[str]) -> None:
        content = {"schema": SCHEMA, "node_id": node_id, "runtimes": sorted(runtimes)}
        self._save("node.json", content, "node")

    def load_devices(self) -> Sequence[Device]:
        return self._load("devices.json", _devices) or ()

    def save_devices(self, devices: Sequence[Device]) -> None:
        content = {"schema": SCHEMA, "devices": [_to_json(d) for d in devices]}
        self._save("devices.json", content, "devices")

    def load_intents(self) -> Sequence[Intent]:
        paths = sorted((self.folder / "intents").glob("*.json"))
        loaded = (self._load(f"intents/{path.name}", lambda raw: Intent(**raw)) for path in paths)
        return [intent for intent in loaded if intent is not None]

    def save_intent(self, intent: Intent) -> None:
        content = {
            "kernel_id": intent.kernel_id,
            "runtime": intent.runtime,
            "record": intent.record,
        }
        self._save(f"intents/{intent.kernel_id}.json", content, "intent")

    def drop_intent(self, kernel_id: str) -> None:
        path = self.folder / "intents" / f"{kernel_id}.json"
        if path.exists():
            hit("intent.before_drop")
            path.unlink(missing_ok=True)
            hit("intent.after_drop")

    def _load(self, name: str, read: Callable[[Any], _T]) -> _T | None:
        path = self.folder / name
        try:
            return read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            log.warning("state.unreadable", file=str(path), reason=error.strerror)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("state.unreadable", file=str(path), reason=why)
            self._set_aside(path)
            return None

    def _set_aside(self, path: Path) -> None:
        with suppress(OSError):
            path.rename(path.with_name(f"{path.name}.unreadable"))

    def _save(self, name: str, content: Mapping[str, Any], what: str) -> None:
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        hit(f"{what}.before_replace")
        temporary.replace(path)
        hit(f"{what}.after_replace")


class ReadOnlyState(StateDir):
    """The same folder, looked at beside a daemon that may be running: writes nothing."""

    def save_devices(self, devices: Sequence[Device]) -> None:
        del devices

    def _set_aside(self, path: Path) -> None:
        del path


def _to_json(device: Device) -> dict[str, object]:
    return {
        "name": device.device_id.name,
        "id": device.device_id.id,
        "stable_id": device.stable_id,
        "slot": device.slot,
        "kind": device.kind.value,
        "capacity": device.capacity,
        "numa_node": device.numa_node,
        "aliases": list(device.aliases),
        "parent": device.parent,
        "model": device.model,
        "drained": device.drained,
        "former": list(device.former),
    }


def _devices(raw: Mapping[str, Any]) -> list[Device]:
    return [
        Device(
            device_id=DeviceId(item["name"], item["id"]),
            stable_id=item["stable_id"],
            slot=item["slot"],
            kind=SlotKind(item["kind"]),
            capacity=int(item["capacity"]),
            numa_node=item["numa_node"],
            aliases=tuple(item["aliases"]),
            parent=item["parent"],
            model=item["model"],
            health=Health.UNKNOWN,
            drained=bool(item["drained"]),
            former=tuple(item.get("former", ())),
        )
        for item in raw["devices"]
    ]
