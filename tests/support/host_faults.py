"""A host at fault: a mount that hangs, a process that cannot be killed, hostile process names.

The log of a program can be a pipe, whose reader stops and comes back.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until

HOSTILE_NAMES = (b"\xff", "12345678901234\u00e9".encode(), b"\rUid:\t4711", b") R 1 (\n")
"""Not UTF-8, one that Linux cuts within a character, a forged line, a forged end of the name."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_MNT_DETACH = 2
_PTRACE_SEIZE = 0x4206
_WALL = 0x40000000
_traced_threads: dict[int, int] = {}


@contextmanager
def hung_mount(folder: Path, *, user: int = 0, is_dead: bool = False) -> Iterator[None]:
    """Mount a file system that gives no answer: FUSE, whose server reads nothing, or is dead.

    Only its user can open it. Linux asks over /dev/fuse (Documentation/filesystems/fuse.rst);
    closing that ends all waits.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={device},rootmode=40000,user_id={user},group_id={user}".encode()
        if _LIBC.mount(b"hung", bytes(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), f"mount on {folder}")
        if is_dead:
            os.close(device)
        try:
            yield
        finally:
            _LIBC.umount2(bytes(folder), _MNT_DETACH)
    finally:
        if not is_dead:
            os.close(device)


def make_unkillable(pid: int) -> None:
    """Make a process stay when it is killed, as one does that waits in a driver.

    A thread that is traced and has ended stays until its tracer has waited for it (ptrace(2)), and
    a process does not end before its threads. It needs a second thread to trace.
    """
    thread = max(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    assert thread != pid, "it has only one thread"
    if _LIBC.ptrace(_PTRACE_SEIZE, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _traced_threads[pid] = thread


def make_killable(pid: int) -> None:
    """Release an unkillable process, which ends if it was killed."""
    os.waitpid(_traced_threads.pop(pid), _WALL)


def named_command(name: bytes) -> list[str]:
    """Return the command of a process that takes a name, says so and sleeps."""
    octal = "".join(f"\\{byte:03o}" for byte in name)
    script = 'printf "$0" >/proc/$$/comm; echo named; while :; do sleep 1000; done'
    return ["sh", "-c", script, octal]


@contextmanager
def named_process(name: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of this name."""
    with subprocess.Popen(
        named_command(name), stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"named\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class LogPipe:
    """A FIFO in the place of a log file."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.reader: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def end_reader(self) -> None:
        """Close the only reader: writes fail with EPIPE."""
        if self.reader is not None:
            os.close(self.reader)
        self.reader = None

    def close(self) -> None:
        """End the reader, and leave the place to a file."""
        self.end_reader()
        self.path.unlink()

    def fill(self) -> None:
        """Fill the pipe, whose reader reads nothing: writes would wait."""
        writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            while True:
                os.write(writer, b"x" * 4096)
        except BlockingIOError:
            pass
        finally:
            os.close(writer)

    def read(self) -> str:
        """Return what has arrived, through a new reader if there is none."""
        if self.reader is None:
            self.reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        parts = []
        try:
            while part := os.read(self.reader, 1 << 16):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts).decode()

    async def until(self, text: str) -> str:
        """Read until a text arrives."""
        parts: list[str] = []

        def read() -> str:
            parts.append(self.read())
            return "".join(parts)

        return await until(read, lambda log: text in log, text=f"{text!r} in the log")
