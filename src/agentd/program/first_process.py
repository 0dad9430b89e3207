"""The first process of a container: the daemon's parent, which reaps orphans.

Linux gives the orphans of a pid namespace to its process 1. Each stays a zombie until that waits
for it. A daemon that waits for any child would take ends from the parts of it that start children.
So process 1 only passes signals on and reaps, and the daemon is its child.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_KEPT_SIGNALS = frozenset(
    {
        signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTIN,
        signal.SIGTTOU, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    }
)  # fmt: skip
"""Signals that are not passed on."""
_PID_VARIABLES = ("LISTEN_PID", "WATCHDOG_PID")
"""They name the process that a manager started (sd_listen_fds(3), sd_watchdog_enabled(3))."""


def leave_first_process() -> None:
    """Continue in a child if this is process 1 of a pid namespace.

    The parent never returns: it ends with the child's exit status. The child leaves the terminal's
    foreground group, so it gets Ctrl-C once, from the parent.
    """
    if os.getpid() != 1:
        return
    passed = signal.valid_signals() - _KEPT_SIGNALS
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    if child := os.fork():
        _supervise(child, passed)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    for name in _PID_VARIABLES:
        if os.environ.get(name) == "1":
            os.environ[name] = str(os.getpid())


def _supervise(child: int, passed: set[signal.Signals]) -> NoReturn:
    """Pass signals on and reap, until the child has ended; then end with its status."""
    while True:
        number = signal.sigwaitinfo(passed | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            os.kill(child, number)  # it may be a zombie, never another process
            continue
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            if ended.si_pid == child:
                is_signal = ended.si_code != os.CLD_EXITED
                os._exit(ended.si_status + (128 if is_signal else 0))
