"""The first process of a container: the daemon's parent, which reaps orphans.

Linux gives the orphans of a pid namespace to its process 1. Each stays a zombie until that waits
for it. A daemon that waits for any child would take ends from the parts of it that start children.
So process 1 only passes signals on and reaps, and the daemon is its child.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_SIGNALS = {
    signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1,
    signal.SIGUSR2,
}  # fmt: skip
"""Signals that process 1 waits for; all but SIGCHLD are passed on."""


def leave_first_process() -> None:
    """Continue in a child if this is process 1 of a pid namespace.

    The parent never returns: it ends with the child's exit status. The child leaves the terminal's
    foreground group, so it gets Ctrl-C once, from the parent.
    """
    if os.getpid() != 1:
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if child := os.fork():
        _supervise(child)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    if os.environ.get("LISTEN_PID") == "1":  # sd_listen_fds(3)
        os.environ["LISTEN_PID"] = str(os.getpid())


def _supervise(child: int) -> NoReturn:
    """Pass signals on and reap, until the child has ended; then end with its status."""
    while True:
        number = signal.sigwaitinfo(_SIGNALS).si_signo
        if number != signal.SIGCHLD:
            os.kill(child, number)  # it may be a zombie, never another process
            continue
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            if ended.si_pid == child:
                is_signal = ended.si_code != os.CLD_EXITED
                os._exit(ended.si_status + (128 if is_signal else 0))
