"""Coordination with other daemons on the host: each accelerator is served by one.

Daemons of root decide among themselves; daemons of users decide among themselves, below root's:

/run/agentd/serving/              root's alone; locked during decisions
/run/agentd/serving/NODE.lock     held while that daemon runs
/run/agentd/served/NODE.json      its devices, readable by all
/tmp/agentd-served-UID/NODE.json  devices of a user's daemon; decided under a lock on /tmp

Root's daemons trust only root's files, so no user can keep a device from them. A file stays when
its daemon dies: no other daemon serves the devices that kernels hold before that daemon is back, or
the host reboots.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from agentd.core.devices import ID_PATTERN
from agentd.host.processes import Proc, read_stat
from agentd.services.protocols import Peer, Served

log = structlog.get_logger()
MOST_PIDS = 1 << 22
"""The largest process id of Linux (proc(5), pid_max)."""
_MOST_BYTES, _MOST_FILES, _MOST_FOLDERS = 128 << 10, 4, 64
_MOST_MEMORY = 1 << 62
_LOCK_PAUSE_S = 0.01
_OTHERS_MAY_WRITE = 0o022
_FOLDER, _DIGITS = "agentd-served-", 11


class _Published(msgspec.Struct):
    """The content of a NODE.json; a file of an earlier boot is ignored."""

    node_id: str
    boot_id: str
    pid: Annotated[int, msgspec.Meta(gt=0, le=MOST_PIDS)]
    start_time: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    served: Served


@dataclass(frozen=True)
class PeerPaths:
    """The paths where the daemons of one user publish and decide, and whose files they trust."""

    uid: int
    own: Path
    lock: Path
    root: Path | None = None
    users: Path | None = None

    @classmethod
    def of(cls, uid: int, run: Path = Path("/run/agentd"), tmp: Path = Path("/tmp")) -> PeerPaths:  # noqa: S108 - the folder that every user can write
        if uid == 0:
            return cls(uid, run / "served", run / "serving")
        return cls(uid, tmp / f"{_FOLDER}{uid}", tmp, run / "served", tmp)

    def folders(self) -> Iterator[tuple[Path, int]]:
        """Yield every folder to read, with its required owner."""
        if self.root is not None:
            yield self.root, 0
        if self.users is None:
            yield self.own, self.uid
            return
        names = (name for name in os.listdir(self.users) if name.startswith(_FOLDER))  # noqa: PTH208 - only names are needed
        for name in islice(sorted(names), _MOST_FOLDERS):
            owner = name.removeprefix(_FOLDER)
            if len(owner) < _DIGITS and owner.isdecimal() and str(int(owner)) == owner:
                yield self.users / name, int(owner)


@dataclass
class HostPeers:
    """The other daemons on this host, seen by one of them; call `open` first."""

    node_id: str
    boot_id: str
    places: PeerPaths
    _complaint: str = field(default="", init=False)
    _alive: int | None = field(default=None, init=False)
    _unread: str = field(default="", init=False)
    _published: bytes = field(default=b"", init=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def open(self) -> None:
        """Create the folders and take the lock that proves this daemon's life."""
        try:
            self._be_seen()
        except OSError as error:
            self._complaint = f"{error.filename or self.places.lock}: {error.strerror}"
        if self._complaint:
            log.warning("peers.publish_failed", reason=self._complaint)

    def _be_seen(self) -> None:
        """Create missing folders and locks, whatever the umask is."""
        own = self.places.own
        own.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._complaint = self._not_mine()
        if self._complaint:
            return
        if self.places.root is not None:
            own.chmod(0o755)
            return
        for folder in (own.parent, own):
            if folder.stat().st_uid == self.places.uid:
                folder.chmod(folder.stat().st_mode | 0o755)
        self.places.lock.mkdir(mode=0o700, exist_ok=True)
        mine = self._lock_of(self.node_id)
        if self._alive is None or not _is_same(self._alive, mine):
            self._let_go()
            self._alive = _open_lock(mine, os.O_CREAT)
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def warnings(self) -> list[str]:
        """Return why other daemons may serve the same devices, if they may."""
        said = []
        if self._complaint:
            why = self._complaint
            said.append(f"cannot publish the served devices to other daemons on this host: {why}")
        if self._unread:
            said.append(f"cannot read the devices of other daemons on this host: {self._unread}")
        return said

    def close(self) -> None:
        """Release the lock; the published file stays."""
        if self._alive is not None:
            with self.deciding(1):
                if _is_same(self._alive, self._lock_of(self.node_id)):
                    self._lock_of(self.node_id).unlink(missing_ok=True)
                self._let_go()

    def _let_go(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    @contextmanager
    def deciding(self, patience_s: float) -> Iterator[bool]:
        """Hold the lock for decisions; yields False if it stays taken."""
        try:
            descriptor = os.open(self.places.lock, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # no daemon can decide there: `open` has warned
            yield True
            return
        try:
            yield _locked(descriptor, patience_s)
        finally:
            os.close(descriptor)

    def own(self) -> Served | None:
        """Return what this node published last, in this boot."""
        content = self._read(self._file, self.places.uid)
        return content.served if content else None

    def others(self) -> list[Peer]:
        """Return the other daemons, with what the ended ones published last."""
        found = []
        self._unread = ""
        for folder, uid in self.places.folders():
            for path in self._files(folder, uid):
                content = self._read(path, uid)
                if content is not None and not self._is_own(content, uid):
                    found.append(self._peer(content, uid))
        return found

    def _files(self, folder: Path, uid: int) -> list[Path]:
        try:
            if not _is_of(folder, uid):
                return []
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))  # noqa: PTH208 - see above
        except FileNotFoundError:
            return []
        except OSError as error:
            if uid == 0:  # root's files count; another user who hides files only harms itself
                self._unread = f"{folder}: {error.strerror}"
            return []
        most = len(names) if uid == 0 else _MOST_FILES
        return [folder / name for name in names[:most] if not name.startswith(".")]

    def publish(self, served: Served) -> None:
        """Publish what this node serves; without any device, remove the file."""
        path = self._file
        content = msgspec.json.encode(
            _Published(self.node_id, self.boot_id, os.getpid(), self._start_time, served)
        )
        with self._writing:
            self._publish(path, served, content)

    @cached_property
    def _start_time(self) -> int:
        me = read_stat(os.getpid())
        return me.start_time if me else 0

    def _publish(self, path: Path, served: Served, content: bytes) -> None:
        try:
            self._be_seen()
            if self._complaint:
                return
            if not served.devices and not served.cores:
                path.unlink(missing_ok=True)
            elif content != self._published or not path.exists():
                _replace(path, content)
            else:
                os.utime(path)  # old files of /tmp are deleted
            self._published = content
        except OSError as error:
            self._complaint = f"{path}: {error.strerror}"

    def _is_own(self, content: _Published, uid: int) -> bool:
        return content.node_id == self.node_id and uid == self.places.uid

    def _read(self, path: Path, uid: int) -> _Published | None:
        try:
            text = _text(path, uid)
        except OSError as error:
            if uid == 0:  # see `_files`
                self._unread = f"{path}: {error.strerror}"
            return None
        try:
            content = msgspec.json.decode(text, type=_Published) if text else None
        except (msgspec.MsgspecError, RecursionError):
            return None
        if content is None or content.boot_id != self.boot_id:
            return None
        is_sound = ID_PATTERN.fullmatch(content.node_id) and (
            0 <= content.served.memory < _MOST_MEMORY
        )
        return content if is_sound else None

    def _peer(self, content: _Published, uid: int) -> Peer:
        with_lock = uid == 0 and self.places.root is None
        is_alive = (
            _is_held(self._lock_of(content.node_id))
            if with_lock
            else _may_run(Proc(content.pid, content.start_time))
        )
        user = f"user {uid}" if uid else "root"  # its name may be one that nobody answers for
        return Peer(content.node_id, user, content.pid, is_alive, content.served)

    @property
    def _file(self) -> Path:
        return self.places.own / f"{self.node_id}.json"

    def _not_mine(self) -> str:
        own = self.places.own
        return "" if _is_of(own, self.places.uid) else f"{own} is writable by another user"

    def _lock_of(self, node_id: str) -> Path:
        return self.places.lock / f"{node_id}.lock"


def _locked(descriptor: int, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True


def _open_lock(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _is_held(lock: Path) -> bool:
    """Return whether a daemon of root runs; call it under the lock for decisions."""
    try:
        descriptor = _open_lock(lock)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _may_run(process: Proc) -> bool:
    """Return whether a process runs; also if only its pid is known to be taken."""
    if read_stat(process.pid) is not None:
        return process.is_alive()
    try:
        os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_of(folder: Path, uid: int) -> bool:
    """Return whether only one user, or root, can have written the files in a folder."""
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == uid
        and not (found.st_mode & _OTHERS_MAY_WRITE)
    )


def _is_same(descriptor: int, path: Path) -> bool:
    """Return whether a path still names an open file."""
    try:
        there, held = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _text(path: Path, uid: int) -> bytes:
    """Return a user's regular file, empty if it is missing, another kind or too large.

    Raises:
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    try:
        found = os.fstat(descriptor)
        is_theirs = stat.S_ISREG(found.st_mode) and found.st_uid == uid
        is_theirs = is_theirs and (uid == 0 or found.st_size <= _MOST_BYTES)
        return os.read(descriptor, found.st_size) if is_theirs else b""
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    temporary.replace(path)
