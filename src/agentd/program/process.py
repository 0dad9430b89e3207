"""The process of a program: its interpreter, and what must not end a daemon.

`python -m` and the installed commands call `prepare_daemon` before they import a library, so that
a signal during the imports is harmless.
"""

from __future__ import annotations

import signal
import sys
import warnings

STRAY_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals that end a process by default, and that no operator sends to end a daemon."""
early_signals: set[int] = set()
"""Those that came before the daemon had handlers of its own."""


def prepare_daemon() -> None:
    """Survive stray signals, and warnings of libraries whatever `PYTHONWARNINGS` is.

    Programs that the daemon starts do not inherit the handlers.
    """
    for number in STRAY_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: early_signals.add(number))
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("ignore")  # as an exception, one would fail a request


def python_command() -> list[str]:
    """Return the command of this interpreter, as isolated from its user as this process is.

    Modules in the working directory are never imported.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P"]
