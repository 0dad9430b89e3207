"""Unix sockets: checks of their paths and groups, and binding."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path

import msgspec

from agentd.errors import StartRefused
from agentd.tomlfile.folders import write_problem
from agentd.tomlfile.regular_files import kind_of

SOCKET_MODE, OWNER_MODE = 0o660, 0o600
_UCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""


class SocketPeer(msgspec.Struct, frozen=True):
    """The process at the other end of a unix socket, as it was when it connected."""

    socket: str
    """The path of the socket."""
    pid: int
    uid: int


def read_peer(transport: asyncio.BaseTransport) -> SocketPeer | None:
    """Return the client of a unix socket, None over TCP."""
    path = transport.get_extra_info("sockname")
    if not isinstance(path, str):
        return None
    client_socket = transport.get_extra_info("socket")
    credentials = client_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    return SocketPeer(path, pid, uid)


def socket_path_problem(path: Path) -> str:
    """Return why a socket cannot be created at a path, empty if it can; changes nothing.

    An existing socket is fine: a daemon may be listening on it, or have left it behind.
    """
    if error := write_problem(path.parent):
        return f"{path}: {error.strerror}"
    kind = _non_socket_kind(path)
    return f"{path} is {kind}, expected a socket or nothing" if kind else ""


def socket_group_problem(group: str, group_id: int | None) -> str:
    """Return why a socket cannot be given to a group, empty if it can."""
    if os.geteuid() != 0 and group_id not in {os.getegid(), *os.getgroups()}:
        return f"agentd is not root and not a member of group {group!r}"
    return ""


def _non_socket_kind(path: Path) -> str:
    """Return the kind of a non-socket file at a path, empty if there is none."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(mode):
        return "" if path.is_socket() else "a link"
    return "" if stat.S_ISSOCK(mode) else kind_of(mode)


def bind_unix_socket(path: Path, group: str | None) -> socket.socket:
    """Bind a unix socket, replacing one without a listener.

    Its mode is 0660. One with a `group` has mode 0600 until it is given to that.

    Raises:
        StartRefused: the socket is in use or cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind := _non_socket_kind(path):
            raise StartRefused(f"socket {path} is {kind}, expected a socket or nothing")
        if path.is_socket():
            _refuse_in_use(path)
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous_umask = os.umask(0o777 & ~(SOCKET_MODE if group is None else OWNER_MODE))
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous_umask)
    except OSError as error:
        raise StartRefused(f"socket {path}: {error.strerror}") from None
    return listener


def socket_identity(path: Path) -> tuple[int, int]:
    """Return the device and the inode of the file of a socket that was just bound."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def give_socket(path: Path, identity: tuple[int, int], group_id: int) -> None:
    """Give a socket to its group; follows no link, and changes no file but that of the socket.

    Raises:
        StartRefused: its file was removed or replaced, or agentd may not give it.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode) or (status.st_dev, status.st_ino) != identity:
                raise StartRefused(f"socket {path} was replaced by another file")
            opened = Path(f"/proc/self/fd/{descriptor}")
            os.chown(opened, -1, group_id)
            opened.chmod(SOCKET_MODE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StartRefused(f"socket {path}: {error.strerror}") from None


def _refuse_in_use(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise StartRefused(f"socket {path} is in use by another process")
