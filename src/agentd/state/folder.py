"""The node's state folder.

    lock                    held while a daemon runs; a second one refuses
    node.json               the node id of the kernels here, and the runtimes that have some
    devices.json            the last inventory: stable ids, ids, drains; dealings and stops
    engines.json            the engines that are ready in this boot
    intents/ID.json         the record of a kernel whose create is in progress
    records/ID.json         the record of a live kernel
    ended/ID.json           the record of a kernel that has ended and is not removed yet
    claims/ID.json          the record of a claim
    kernels/ID/             the bundle of a process kernel (see `agentd.runtimes.process.bundle`)
    units/ID/               the bundle of a systemd kernel (`agentd.runtimes.systemd.unit_bundle`)
    docker/last_seen.json   the time of the engine's last event (`agentd.runtimes.docker.last_seen`)

Files are replaced atomically, from a file `.NAME.new` beside them, and only their owner can read
them. An unreadable file is set aside and reported. Of a file written by a newer agentd, the known
members are read and a copy is kept. A folder that is not writable (read-only, full) does not stop
the service: only changes that must be saved beforehand are refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from agentd.core.conditions import Condition
from agentd.core.devices import Health
from agentd.core.kernel.record import is_of_other_node, read_members, seal
from agentd.core.names import is_name, validate_name
from agentd.errors import StartRefused, StateUnavailable
from agentd.failpoints import hit
from agentd.os_errors import OsErrorKind, os_error_kind
from agentd.state.locks import Locks
from agentd.state.schemas import (
    SCHEMA,
    Phase,
    SavedDevices,
    SavedEngines,
    SavedNode,
    SavedRecord,
)
from agentd.tomlfile.folders import write_problem
from agentd.tomlfile.regular_files import MissingFile, UnusableFile, read_regular

log = structlog.get_logger()
_MAX_STATE_BYTES = 64 << 20
_PROBE_FILES, _PROBE_BYTES = 8, 8 << 10
"""More than a create writes, so that a folder without room for one does not seem to have some."""
_FOLDERS = {Phase.INTENT: "intents", Phase.LIVE: "records", Phase.ENDED: "ended"}
_LASTING, _UNTIL_REBOOT = 0o600, 0o400
"""Modes of records: of those that are flushed to the disk, and of claims that a reboot ends."""
_S = TypeVar("_S", SavedEngines, SavedNode, SavedDevices)


class StateFolder:
    """One state folder: locked for this daemon once it is open, before that only read."""

    def __init__(self, folder: Path, node_id: str = "") -> None:
        self.folder = folder
        self._node_id = node_id
        self._folders = {phase: folder / name for phase, name in _FOLDERS.items()}
        self._claims = folder / "claims"
        self._locks = Locks()
        self._node_lock = Path()
        self._access_errors: dict[str, str] = {}
        self._phases: dict[str, Phase] = {}
        self._failed_saves: dict[str, tuple[Callable[[], None], ...]] = {}
        """The steps by which each late record is saved."""
        self._is_open = False

    @property
    def runtime_folders(self) -> Mapping[str, Path]:
        """The bundles of runtimes without a store of their own, by runtime."""
        return {
            "process": self.folder / "kernels",
            "systemd": self.folder / "units",
            "docker": self.folder / "docker",
        }

    def open(self, lock_folder: Path) -> None:
        """Create the folder, and lock it and the node id.

        Raises:
            StartRefused: the folder is not writable, or another daemon uses it or the node id.
        """
        try:
            self._create_folders()
        except OSError as error:
            if os_error_kind(error) is not OsErrorKind.DISK:
                raise StartRefused(f"state folder {error.filename}: {error.strerror}") from None
            self._warn_once(self.folder, f"cannot be created: {error.strerror}")
        try:
            self.hold_locks(lock_folder)
        except OSError as error:
            raise StartRefused(f"{error.filename}: {error.strerror}") from None
        try:
            folders = (self._claims, *self.runtime_folders.values(), *self._folders.values())
            for folder in (self.folder, *folders):
                with suppress(OSError):  # bundles that cannot be listed are their runtime's affair
                    for unfinished in folder.glob(".*.new"):
                        unfinished.unlink()
            claims, kernels = self._claim_paths(), self._record_paths()
        except OSError as error:  # holders that are unknown must not be forgotten
            raise StartRefused(f"{error.filename} cannot be read: {error.strerror}") from None
        booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        for claim_id, path in claims.items():
            with suppress(OSError):
                if _is_emptied(path, booted_at):
                    path.unlink()
                    log.info("claim.record_lost", claim_id=claim_id)
        self._phases = {kernel_id: phase for kernel_id, (phase, _) in kernels.items()}
        self._is_open = True

    def open_problem(self) -> str:
        """Return why `open` would be refused, empty if it would not; changes nothing."""
        folders = (
            self.folder,
            self._claims,
            *self.runtime_folders.values(),
            *self._folders.values(),
        )
        for folder in folders:
            error = write_problem(folder)
            if error is not None and os_error_kind(error) is not OsErrorKind.DISK:
                return str(error.strerror)
        lock = self.folder / "lock"
        if lock.is_symlink() or (lock.exists() and not lock.is_file()):
            return f"{lock} is not a regular file"
        return ""

    def hold_locks(self, lock_folder: Path) -> None:
        """Lock the folder and the node id, again if a lock's file was removed or replaced.

        A file that cannot be locked is a condition: a second daemon goes unnoticed.

        Raises:
            StartRefused: another daemon has locked one.
            OSError: the folder cannot be locked, and is not open yet.
        """
        path = self.folder / "lock"
        try:
            self._lock(path, f"state folder {self.folder} is in use by another agentd")
        except OSError as error:
            if not self._is_open:
                raise
            self._warn_once(path, f"cannot be locked: {error.strerror}")
        with suppress(OSError):
            mode = 0o700 if os.geteuid() else 0o755
            lock_folder.mkdir(mode, parents=True, exist_ok=True)
        reason = f"another agentd serves node id {self._node_id} on this host"
        path = lock_folder / f"node-{self._node_id}.lock"
        if path != self._node_lock:  # the folder is another one, as after a logout
            self._access_errors.pop(str(self._node_lock), None)
            self._node_lock = path
        try:
            self._lock(path, reason)
        except OSError as error:
            self._warn_once(path, f"cannot be locked: {error.strerror}")

    def _lock(self, path: Path, refusal: str) -> None:
        if warning := self._locks.acquire(path, refusal):
            self._warn_once(path, warning)
        elif os.access(path, os.W_OK):
            self._access_errors.pop(str(path), None)

    def close(self) -> None:
        """Release the locks."""
        self._locks.close()

    def _create_folders(self) -> None:
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        for folder in (self._claims, *self.runtime_folders.values(), *self._folders.values()):
            folder.mkdir(mode=0o700, exist_ok=True)

    def _warn_once(self, file: Path | str, reason: str) -> None:
        if self._access_errors.get(str(file)) != reason:
            self._access_errors[str(file)] = reason
            log.warning("state.access_failed", file=str(file), reason=reason)

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions of its folders, and of its files, which may be named by kernels."""
        folders = (self._claims, *self.runtime_folders.values(), *self._folders.values())
        for file, reason in [*self._access_errors.items()]:
            agents = None if Path(file) in (self.folder, *folders) else ()
            yield Condition("state-dir", f"{file} {reason}", agents=agents)

    def runtimes_with_folders(self) -> set[str]:
        """Return the runtimes that have bundles here, or may have some."""
        runtimes = set()
        for name, folder in self.runtime_folders.items():
            try:
                if any(path.is_dir() for path in folder.iterdir()):
                    runtimes.add(name)
            except FileNotFoundError:
                continue
            except OSError:
                runtimes.add(name)
        return runtimes

    def load_node(self) -> SavedNode | None:
        """Return the content of node.json, None if it is missing or unreadable."""
        return self._load("node.json", SavedNode)

    def save_runtimes(self, names: Sequence[str]) -> None:
        """Save which runtimes may have kernels of this node; if that fails, `retry` does."""
        saved = SavedNode(self._node_id, list(names))
        self._run_steps("the node", lambda: self._save_lasting("node", saved))

    def load_devices(self) -> SavedDevices:
        """Return the last inventory, without what each start finds out.

        Devices of a stopped plugin keep their files, which nothing else can tell meanwhile.
        """
        saved = self._load("devices.json", SavedDevices) or SavedDevices(())
        saved.devices = [
            replace(
                device,
                health=Health.UNKNOWN,
                reason="",
                withheld="",
                awaited="",
                busy="",
                files=device.files if device.device_id.name in saved.stopped else (),
                unserved="",
                is_excluded=False,
            )
            for device in saved.devices
        ]
        return saved

    def save_devices(self, saved: SavedDevices) -> None:
        """Save an inventory, if the folder is open.

        Raises:
            StateUnavailable: the previous ones are still saved.
        """
        if self._is_open:
            self._save_lasting("devices", saved)

    def load_ready_engines(self) -> Mapping[str, str]:
        """Return the boot in which each engine was last ready."""
        saved = self._load("engines.json", SavedEngines)
        return saved.ready if saved else {}

    def save_ready_engines(self, ready: Mapping[str, str]) -> None:
        """Save these in place of the previous ones.

        Raises:
            StateUnavailable: the previous ones are still saved.
        """
        self._save_lasting("engines", SavedEngines(dict(ready)))

    def load_records(self) -> Sequence[SavedRecord]:
        """Return the record of every kernel of this node that was not removed.

        Those of an earlier node id stay, and are loaded again if the id is restored.
        """
        with _errors_as_unavailable():
            saved = self._record_paths()
        records = (SavedRecord(i, phase, _read_text(path)) for i, (phase, path) in saved.items())
        return [record for record in records if not is_of_other_node(record.text, self._node_id)]

    def _record_paths(self) -> dict[str, tuple[Phase, Path]]:
        """Return the path of each record; one found twice, during a move, where it began."""
        path_by_kernel: dict[str, tuple[Phase, Path]] = {}
        for phase in Phase:
            with suppress(FileNotFoundError, NotADirectoryError):
                for path in sorted(self._folders[phase].iterdir()):
                    if path.suffix == ".json" and is_name(path.stem):
                        path_by_kernel.setdefault(path.stem, (phase, path))
        return path_by_kernel

    def save_intent(self, kernel_id: str, text: str) -> None:
        """Save a create before the runtime is called.

        Raises:
            StateUnavailable: the record cannot be saved.
        """
        if self._failed_saves.pop(kernel_id, None):  # of an earlier kernel of that name
            for phase in Phase:
                with suppress(OSError):
                    _remove(self._record_path(kernel_id, phase))
        self._phases[kernel_id] = Phase.INTENT
        self._write(self._record_path(kernel_id, Phase.INTENT), text.encode(), "intent")

    def save_phase(self, kernel_id: str, phase: Phase, text: Callable[[], str]) -> None:
        """Save the phase of a kernel; `text` is called only if there is no record yet.

        If that fails, `retry` tries again.
        """
        before = self._phases.get(kernel_id)
        if before is phase:
            return
        self._phases[kernel_id] = phase
        self._run_steps(kernel_id, lambda: self._move_record(kernel_id, before, phase, text))

    def _move_record(
        self, kernel_id: str, before: Phase | None, phase: Phase, text: Callable[[], str]
    ) -> None:
        path = self._record_path(kernel_id, phase)
        try:
            if before is None:
                raise FileNotFoundError
            hit("record.before_move")
            _replace(self._record_path(kernel_id, before), path)
            hit("record.after_move")
        except FileNotFoundError:
            self._write(path, text().encode(), "record")

    def save_record(self, kernel_id: str, text: str) -> None:
        """Replace the record of a kernel; if that fails, `retry` tries again."""
        path = self._record_path(kernel_id, self._phases[kernel_id])
        self._run_steps(kernel_id, lambda: self._write(path, text.encode(), "record"))

    def drop_record(self, kernel_id: str) -> None:
        """Remove the record of a kernel; if that fails, `retry` tries again."""
        if (phase := self._phases.pop(kernel_id, None)) is not None:
            self._run_steps(kernel_id, lambda: self._remove_record(kernel_id, phase))

    def load_claims(self) -> dict[str, str]:
        """Return the record of each claim by its id; empty text where it cannot be read."""
        with _errors_as_unavailable():
            paths = self._claim_paths()
        return {claim_id: _read_text(path) for claim_id, path in paths.items() if is_name(claim_id)}

    def _claim_paths(self) -> dict[str, Path]:
        """Return the path of each claim's record."""
        with suppress(FileNotFoundError, NotADirectoryError):  # reported where one is written
            paths = sorted(self._claims.iterdir())
            return {p.stem: p for p in paths if p.suffix == ".json" and not p.name.startswith(".")}
        return {}

    def save_claim(self, claim_id: str, text: str, *, is_lasting: bool) -> None:
        """Put a record in its place; a lasting one survives a loss of power.

        Raises:
            StateUnavailable: the record there before is still there.
        """
        path = self._claim_path(claim_id)
        try:
            mode = _LASTING if is_lasting else _UNTIL_REBOOT
            self._write(path, text.encode(), "claim", is_lasting=is_lasting, mode=mode)
        except StateUnavailable:
            if is_lasting:  # written once; it may be in its place, and only its name not lasting
                with suppress(OSError):
                    path.unlink()
            raise

    def drop_claim(self, claim_id: str) -> None:
        """Remove a record; one that is not there is removed.

        Raises:
            StateUnavailable: it is still there.
        """
        path = self._claim_path(claim_id)
        try:
            hit("claim.before_drop")
            _remove(path)
            hit("claim.after_drop")
        except OSError as error:
            raise StateUnavailable(f"{path} cannot be removed: {error.strerror}") from error

    def _claim_path(self, claim_id: str) -> Path:
        return self._claims / f"{validate_name(claim_id)}.json"

    def _remove_record(self, kernel_id: str, phase: Phase) -> None:
        hit("record.before_drop")
        _remove(self._record_path(kernel_id, phase))
        hit("record.after_drop")

    def _run_steps(self, kernel_id: str, *steps: Callable[[], None]) -> None:
        """Save a change after those that are late; what fails is reported and kept for `retry`."""
        subject = f"{self.folder}/record of {kernel_id}"
        steps = (*self._failed_saves.pop(kernel_id, ()), *steps)
        try:
            for step in steps:
                step()
        except (OSError, StateUnavailable) as error:
            self._failed_saves[kernel_id] = steps
            self._warn_once(subject, f"is outdated and cannot be written: {error}")
        else:
            self._access_errors.pop(subject, None)

    def retry(self) -> None:
        """Retry the saves that failed, and writing to the folders where nothing else would."""
        for kernel_id in list(self._failed_saves):
            self._run_steps(kernel_id)
        if self._access_errors:
            with suppress(OSError):  # missing ones, of a start that could not
                self._create_folders()
        for folder in [path for path in map(Path, [*self._access_errors]) if path.is_dir()]:
            self._probe(folder)

    def probe_bundles(self, runtime: str) -> None:
        """Look whether bundles can be written, after a runtime could not write one."""
        folder = self.runtime_folders[runtime]
        self._probe(folder if folder.is_dir() else self.folder)

    def _probe(self, folder: Path) -> None:
        """Write to a folder as much as a create does; `retry` repeats it while that fails."""
        probes = [folder / f".probe{number}.new" for number in range(_PROBE_FILES)]
        try:
            for probe in probes:
                _write_new_file(probe, bytes(_PROBE_BYTES), is_lasting=False, mode=_LASTING)
            self._access_errors.pop(str(folder), None)
        except OSError as error:
            if str(folder) not in self._access_errors:
                self._warn_once(folder, f"cannot be written: {error.strerror}")
        for probe in probes:
            with suppress(OSError):
                probe.unlink()

    def _record_path(self, kernel_id: str, phase: Phase) -> Path:
        return self._folders[phase] / f"{validate_name(kernel_id)}.json"

    def _load(self, name: str, shape: type[_S]) -> _S | None:
        path = self.folder / name
        try:
            text = read_regular(path, _MAX_STATE_BYTES).content.decode()
            saved = msgspec.convert(read_members(text), type=shape)
        except MissingFile:
            return None
        except UnusableFile as error:
            self._warn_once(path, str(error))
        except ValueError as error:
            copy = path.with_name(f"{path.name}.unreadable")
            reason = f"cannot be read ({type(error).__name__}: {error}); set aside as {copy.name}"
            self._warn_once(path, reason)
            self._set_aside(Path.rename, path, copy)
        else:
            if saved.schema > SCHEMA:
                copy = path.with_name(f"{path.name}.schema-{saved.schema}")
                self._warn_once(path, f"was written by a newer agentd; copied to {copy.name}")
                self._set_aside(shutil.copyfile, path, copy)
            return saved
        return None

    def _set_aside(self, transfer: Callable[[Path, Path], object], path: Path, copy: Path) -> None:
        """Keep a file, which will be replaced, under another name."""
        if self._is_open:
            with suppress(OSError):
                transfer(path, copy)

    def _save_lasting(self, name: str, content: msgspec.Struct) -> None:
        path = self.folder / f"{name}.json"
        text = seal(msgspec.to_builtins(content))
        self._write(path, text.encode(), name, is_lasting=True)

    def _write(
        self,
        path: Path,
        content: bytes,
        step: str,
        *,
        is_lasting: bool = False,
        mode: int = _LASTING,
    ) -> None:
        """Replace a file; `is_lasting` makes it survive a power failure.

        Raises:
            StateUnavailable: the file cannot be written.
        """
        temporary = path.with_name(f".{path.name}.new")
        try:
            try:
                _write_new_file(temporary, content, is_lasting=is_lasting, mode=mode)
            except FileNotFoundError:  # the folder was removed
                self._create_folders()
                _write_new_file(temporary, content, is_lasting=is_lasting, mode=mode)
            hit(f"{step}.before_replace")
            _replace(temporary, path)
            if is_lasting:
                _sync_folder(path.parent)
            hit(f"{step}.after_replace")
            self._access_errors.pop(str(path.parent), None)
        except OSError as error:
            self._warn_once(path.parent, f"cannot be written: {error.strerror}")
            with suppress(OSError):
                temporary.unlink()
            raise StateUnavailable(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _errors_as_unavailable() -> Iterator[None]:
    """Raise `StateUnavailable` if a folder cannot be listed: records in it are not gone."""
    try:
        yield
    except OSError as error:
        raise StateUnavailable(f"{error.filename} cannot be read: {error.strerror}") from error


def _is_emptied(path: Path, booted_at: float) -> bool:
    """Return whether a loss of power emptied the record of a claim that a reboot ends.

    A lasting one is never emptied by that, and one of this boot by nothing that agentd does: those
    are kept.
    """
    status = path.lstat()
    is_of_earlier_boot = (
        stat.S_IMODE(status.st_mode) == _UNTIL_REBOOT and status.st_mtime < booted_at
    )
    with suppress(UnusableFile):
        return is_of_earlier_boot and not _read(path).strip(b"\0")
    return False


def _write_new_file(path: Path, content: bytes, *, is_lasting: bool, mode: int) -> None:
    """Write a new private file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if is_lasting:
            file.flush()
            os.fsync(file.fileno())


def _read_text(path: Path) -> str:
    """Return a record's text, empty if it is unreadable."""
    with suppress(UnusableFile):
        return _read(path).decode(errors="replace")
    return ""


def _read(path: Path) -> bytes:
    """Return the content of a record.

    Raises:
        UnusableFile: it is not a regular file, too large, or cannot be read.
    """
    return read_regular(path, follows_links=False).content


def _replace(source: Path, path: Path) -> None:
    """Move a file to a path; a folder in its place is set aside.

    Raises:
        OSError: it is not there.
    """
    try:
        source.replace(path)
    except IsADirectoryError:
        _remove(path)
        source.replace(path)


def _remove(path: Path) -> None:
    """Remove a record; a folder in its place is set aside.

    Raises:
        OSError: it is still there.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        aside = path.with_name(f"{path.name}.unreadable")
        if not aside.is_dir():
            aside.unlink(missing_ok=True)  # a damaged file that was set aside before
        path.rename(aside)


def _sync_folder(folder: Path) -> None:
    """Make a folder's names survive a power failure; fsync(2) of a file does not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
