"""Processes that stay although they are killed, as one that waits in a driver does.

A thread that is traced and has ended stays until its tracer has looked (ptrace(2), wait(2)),
and a process does not end before its threads. It needs a second thread to hold.
"""

import ctypes
import os
from pathlib import Path

_SEIZE = 0x4206
_WALL = 0x40000000
_held: dict[int, int] = {}


def hold(pid: int) -> None:
    """Keep a process, even killed, until `let_go`."""
    thread = max(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    assert thread != pid, "it has only one thread"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_SEIZE, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _held[pid] = thread


def let_go(pid: int) -> None:
    """Resume a killed process, so that it ends."""
    os.waitpid(_held.pop(pid), _WALL)
