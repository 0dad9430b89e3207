"""Which daemon of this machine serves which accelerator: each is served by one.

Root's daemons decide it among themselves, and users' among themselves and below root's:

    /run/agentd/serving/              root's alone; locked while it is decided
    /run/agentd/serving/NODE.lock     held while that daemon runs
    /run/agentd/served/NODE.json      what it serves, for everybody to read
    /tmp/agentd-served-UID/NODE.json  what a user's daemon serves; decided under a lock on /tmp

Root's daemons believe root's files alone, so that no user can keep a device from them. A file
stays when its daemon dies: what kernels hold then is served by nobody else before that
daemon is back, or the machine restarts.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from agentd.core.devices import ID_PATTERN
from agentd.host.processes import Proc, read_stat
from agentd.services.interfaces import Neighbour, Served

log = structlog.get_logger()
_MOST_BYTES, _MOST_FILES = 1 << 20, 64
_LOCK_WAIT_S, _LOCK_PAUSE_S = 1.0, 0.01
_OTHERS_MAY_WRITE = 0o022


class _Published(msgspec.Struct):
    """The content of a NODE.json; a file of an earlier boot says nothing."""

    node_id: str
    boot_id: str
    pid: int
    start_time: int
    served: Served


@dataclass(frozen=True)
class Places:
    """Where the daemons of one user publish and decide, and whom they believe besides."""

    uid: int
    own: Path
    lock: Path
    root: Path | None = None
    users: Path | None = None

    @classmethod
    def of(cls, uid: int, run: Path = Path("/run/agentd"), tmp: Path = Path("/tmp")) -> Places:  # noqa: S108 - the folder that every user can write
        if uid == 0:
            return cls(uid, run / "served", run / "serving")
        return cls(uid, tmp / f"agentd-served-{uid}", tmp, run / "served", tmp)

    def folders(self) -> Iterator[tuple[Path, int]]:
        """Yield every folder to look into, with the user whose it must be."""
        if self.root is not None:
            yield self.root, 0
        if self.users is None:
            yield self.own, self.uid
            return
        for folder in sorted(self.users.glob("agentd-served-*")):
            _, _, owner = folder.name.rpartition("-")
            if owner.isdecimal():
                yield folder, int(owner)


@dataclass
class MachineNeighbours:
    """The other daemons of this machine, as one of them sees them; `open` before the rest."""

    node_id: str
    boot_id: str
    places: Places
    _complaint: str = field(default="", init=False)
    _alive: int | None = field(default=None, init=False)
    _published: bytes = field(default=b"", init=False)

    def open(self) -> None:
        """Make the folders, and be seen to run."""
        try:
            self.places.own.mkdir(mode=0o755, parents=True, exist_ok=True)
            if self.places.root is None:
                self.places.lock.mkdir(mode=0o700, exist_ok=True)
                with self.deciding():
                    self._alive = _open_lock(self._lock_of(self.node_id), os.O_CREAT)
                    fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._complaint = self._not_mine()
        except OSError as error:
            self._complaint = f"{error.filename or self.places.lock}: {error.strerror}"
        if self._complaint:
            log.warning("neighbours.not_told", reason=self._complaint)

    def warnings(self) -> list[str]:
        """Return why others may serve what this daemon does, if they may."""
        why = self._complaint
        return [f"other daemons of this machine are not told what is served: {why}"] * bool(why)

    def close(self) -> None:
        """Be seen to have ended; what was published last stays."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    @contextmanager
    def deciding(self) -> Iterator[bool]:
        """Keep others of the same rank from deciding meanwhile; False if one does for long."""
        try:
            descriptor = os.open(self.places.lock, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # nobody can decide there: `open` has complained
            yield True
            return
        try:
            yield _locked(descriptor)
        finally:
            os.close(descriptor)

    def own(self) -> Served | None:
        """Return what this node published last, in this boot."""
        content = self._read(self._file, self.places.uid)
        return content.served if content else None

    def others(self) -> list[Neighbour]:
        """Return what the others serve; of those that ended, what they published last."""
        found = []
        for folder, uid in self.places.folders():
            if _is_of(folder, uid):
                for path in sorted(folder.glob("[!.]*.json"))[:_MOST_FILES]:
                    content = self._read(path, uid)
                    if content is not None and not self._is_own(content, uid):
                        found.append(self._neighbour(content, uid))
        return found

    def publish(self, served: Served) -> None:
        """Say what this node serves now; without any device, nothing."""
        path = self._file
        me = read_stat(os.getpid())
        content = msgspec.json.encode(
            _Published(self.node_id, self.boot_id, os.getpid(), me.start_time if me else 0, served)
        )
        try:
            self.places.own.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._complaint = self._not_mine()
            if self._complaint:
                return
            if not served.devices and not served.cores:
                path.unlink(missing_ok=True)
            elif content != self._published or not path.exists():
                _replace(path, content)
            else:
                os.utime(path)  # what is used is not cleaned away, as old files of /tmp are
            self._published = content
        except OSError as error:
            self._complaint = f"{path}: {error.strerror}"

    def _is_own(self, content: _Published, uid: int) -> bool:
        return content.node_id == self.node_id and uid == self.places.uid

    def _read(self, path: Path, uid: int) -> _Published | None:
        text = _text(path, uid)
        try:
            content = msgspec.json.decode(text, type=_Published) if text else None
        except (msgspec.MsgspecError, RecursionError):
            return None
        if content is None or content.boot_id != self.boot_id:
            return None
        return content if ID_PATTERN.fullmatch(content.node_id) else None

    def _neighbour(self, content: _Published, uid: int) -> Neighbour:
        with_lock = uid == 0 and self.places.root is None
        is_alive = (
            _is_held(self._lock_of(content.node_id))
            if with_lock
            else _may_run(Proc(content.pid, content.start_time))
        )
        return Neighbour(content.node_id, _user_name(uid), content.pid, is_alive, content.served)

    @property
    def _file(self) -> Path:
        return self.places.own / f"{self.node_id}.json"

    def _not_mine(self) -> str:
        own = self.places.own
        return "" if _is_of(own, self.places.uid) else f"{own} is somebody else's to write"

    def _lock_of(self, node_id: str) -> Path:
        return self.places.lock / f"{node_id}.lock"


def _locked(descriptor: int) -> bool:
    end = time.monotonic() + _LOCK_WAIT_S
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
    """Tell whether a daemon of root runs; asked while nobody else decides, and so starts."""
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
    """Tell whether a process runs; also if all that is told of it is that its number is taken."""
    if process.pid <= 0:
        return False
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
    """Tell whether what is in a folder can only have been written by one user, or by root."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == uid
        and not (found.st_mode & _OTHERS_MAY_WRITE)
    )


def _text(path: Path, uid: int) -> bytes:
    """Return the content of a regular file of a user; empty if it is none, or too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        found = os.fstat(descriptor)
        is_theirs = stat.S_ISREG(found.st_mode) and found.st_uid == uid
        return os.read(descriptor, _MOST_BYTES) if is_theirs else b""
    except OSError:
        return b""
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


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
