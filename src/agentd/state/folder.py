"""The node's state folder: what is remembered besides the kernels themselves.

    lock            held while a daemon runs; a second one refuses
    node.json       the node id that the kernels here carry, and the runtimes that have some
    devices.json    the last inventory: stable ids, ids, drains
    intents/        creates that an engine was asked for and has not answered yet
    kernels/        process kernels, one folder each (see `process`)

Files are replaced in one step. What cannot be read is set aside and reported; of what a
newer agentd wrote, the members that are known are read, and a copy is kept. A folder that
cannot be written (read-only, full) keeps nobody from being served: only what has to be
remembered before it is done is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from agentd.core.devices import Device
from agentd.errors import StartRefused, StateUnavailable
from agentd.failpoints import hit
from agentd.services.interfaces import Intent
from agentd.state.schemas import (
    SCHEMA,
    UNREADABLE,
    SavedDevice,
    SavedDevices,
    SavedIntent,
    SavedNode,
)

log = structlog.get_logger()
_UNWRITABLE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What passes, or is for an operator to mend, while the node goes on."""
_S = TypeVar("_S", SavedNode, SavedDevices)


class StateDir:
    """One state folder, locked for this daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: list[int] = []
        self._complaints: dict[str, str] = {}
        self._undropped: set[str] = set()

    def open(self) -> None:
        """Make the folder and lock it.

        Raises:
            StartRefused: it is not ours to write, or another daemon uses it.
        """
        try:
            self._make()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise StartRefused(f"state folder {self.folder}: {error.strerror}") from None
            self._complain(str(self.folder), f"cannot be made: {error.strerror}")
        self._lock(self.folder / "lock", f"state folder {self.folder} is used by another agentd")
        for unfinished in (*self.folder.glob(".*.new"), *self._intents.glob(".*.new")):
            with suppress(OSError):
                unfinished.unlink()

    def _make(self) -> None:
        for folder in (self.folder, self._intents, self.kernels):
            mode = 0o711 if folder == self.folder else 0o700
            folder.mkdir(mode=mode, parents=True, exist_ok=True)

    def _complain(self, what: str, why: str) -> None:
        if self._complaints.get(what) != why:
            self._complaints[what] = why
            log.warning("state.trouble", file=what, reason=why)

    def warnings(self) -> Sequence[str]:
        """Return what an operator should know of this folder."""
        return [f"{what} {why}" for what, why in self._complaints.items()]

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
        descriptor = self._lockable(path)
        if descriptor is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise StartRefused(f"{refusal} (pid {holder})") from None
        self._locks.append(descriptor)
        with suppress(OSError):  # who holds it is told to people alone
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _lockable(self, path: Path) -> int | None:
        """Open a file to lock it; None where there is none and none can be made."""
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (*_UNWRITABLE, errno.ENOENT):
                raise StartRefused(f"{path}: {error.strerror}") from None
            self._complain(str(path), f"cannot be written: {error.strerror}")
        with suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def close(self) -> None:
        """Let go of the locks."""
        while self._locks:
            os.close(self._locks.pop())

    @property
    def kernels(self) -> Path:
        return self.folder / "kernels"

    @property
    def _intents(self) -> Path:
        return self.folder / "intents"

    def load_node(self) -> SavedNode | None:
        """Return what stands in node.json; None where nothing does that can be read."""
        return self._load("node.json", SavedNode)

    def save_node(self, node_id: str, runtimes: Sequence[str]) -> None:
        """Remember which runtimes may have kernels of a node."""
        with suppress(StateUnavailable):  # nothing is created either, so it stays true
            self._save("node.json", SavedNode(node_id, sorted(runtimes)), "node", lasting=True)

    def load_devices(self) -> Sequence[Device]:
        saved = self._load("devices.json", SavedDevices)
        return [device.device() for device in saved.devices] if saved else []

    def save_devices(self, devices: Sequence[Device]) -> None:
        saved = SavedDevices([SavedDevice.of(device) for device in devices])
        self._save("devices.json", saved, "devices", lasting=True)

    def load_intents(self) -> Sequence[Intent]:
        return [_intent(path) for path in sorted(self._intents.glob("*.json"))]

    def save_intent(self, intent: Intent) -> None:
        self._undropped.discard(intent.kernel_id)
        self._complaints.pop(str(self._intents / f"{intent.kernel_id}.json"), None)
        saved = SavedIntent(intent.runtime, intent.record)
        self._save(f"intents/{intent.kernel_id}.json", saved, "intent")

    def drop_intent(self, kernel_id: str) -> None:
        path = self._intents / f"{kernel_id}.json"
        try:
            if path.exists():
                hit("intent.before_drop")
                path.unlink(missing_ok=True)
                hit("intent.after_drop")
        except OSError as error:
            self._undropped.add(kernel_id)
            self._complain(str(path), f"is out of date and cannot be removed: {error.strerror}")
        else:
            self._undropped.discard(kernel_id)
            self._complaints.pop(str(path), None)

    def settle(self) -> None:
        """Try again to remove what could not be."""
        for kernel_id in list(self._undropped):
            self.drop_intent(kernel_id)

    def _load(self, name: str, shape: type[_S]) -> _S | None:
        path = self.folder / name
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=shape)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(str(path), f"cannot be read: {error.strerror}")
        except UNREADABLE as error:
            why = f"cannot be read ({type(error).__name__}: {error}); it is set aside as"
            self._complain(str(path), f"{why} {path.name}.unreadable")
            self._set_aside(path)
        else:
            self._keep_newer(path, saved.schema)
            return saved
        return None

    def _keep_newer(self, path: Path, schema: int) -> None:
        if schema > SCHEMA:
            copy = path.with_name(f"{path.name}.schema-{schema}")
            self._complain(str(path), f"is of a newer agentd; it is kept as {copy.name}")
            self._copy(path, copy)

    def _copy(self, path: Path, copy: Path) -> None:
        with suppress(OSError):
            shutil.copyfile(path, copy)

    def _set_aside(self, path: Path) -> None:
        with suppress(OSError):
            path.rename(path.with_name(f"{path.name}.unreadable"))

    def _save(
        self, name: str, content: msgspec.Struct, what: str, *, lasting: bool = False
    ) -> None:
        """Replace a file; one that is `lasting` survives a loss of power.

        Raises:
            StateUnavailable: it could not be.
        """
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.new")
        try:
            self._make()  # somebody may have removed it all
            with temporary.open("wb") as file:
                file.write(msgspec.json.encode(content))
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
            hit(f"{what}.before_replace")
            temporary.replace(path)
            if lasting:
                _flush(path.parent)
            hit(f"{what}.after_replace")
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StateUnavailable(f"{path} cannot be written: {error.strerror}") from error


class ReadOnlyState(StateDir):
    """The same folder, looked at beside a daemon that may be running: writes nothing."""

    def save_devices(self, devices: Sequence[Device]) -> None:
        del devices

    def _set_aside(self, path: Path) -> None:
        del path

    def _copy(self, path: Path, copy: Path) -> None:
        del path, copy


def _flush(folder: Path) -> None:
    """Have a folder's names survive a loss of power; fsync(2) of a file says nothing of them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _intent(path: Path) -> Intent:
    """Read an intent; one that cannot be read is one of which nothing is known but its kernel."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SavedIntent)
    except (OSError, *UNREADABLE) as error:
        return Intent(path.stem, "", f"{type(error).__name__}: {error}")
    return Intent(path.stem, saved.runtime, saved.record)
