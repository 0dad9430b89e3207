"""Status messages to systemd, one datagram each (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from agentd.core.printable import printable_line

_SOCKET_TYPE = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
SEND_TIMEOUT_S = 1.0
"""Seconds that a manager which does not read may block the daemon."""


class Notifier:
    """The socket in $NOTIFY_SOCKET; does nothing if the variable is not set."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() and is_ours else None

    @property
    def is_enabled(self) -> bool:
        """Whether there is a manager to notify."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Report the end of the start."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Report a reload; `ready` follows."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def status(self, text: str) -> None:
        """Send a one-line status; dropped if the manager does not read."""
        self._send(f"STATUS={printable_line(text)}", patience_s=0)

    def stopping(self) -> None:
        """Report the beginning of a stop."""
        self._send("STOPPING=1\nSTATUS=stopping; kernels continue")

    def alive(self) -> None:
        """Reset the watchdog (WatchdogSec=)."""
        self._send("WATCHDOG=1")

    async def keep_alive_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, and reset the watchdog meanwhile if there is one."""
        while not stop.is_set():
            try:
                async with asyncio.timeout(self.watchdog_s / 2 if self.watchdog_s else None):
                    await stop.wait()
            except TimeoutError:
                self.alive()

    def _send(self, message: str, patience_s: float = SEND_TIMEOUT_S) -> None:
        if not self._address:
            return
        # without a descriptor, or a manager that listens, the daemon goes on
        with suppress(OSError), socket.socket(socket.AF_UNIX, _SOCKET_TYPE) as sender:
            sender.settimeout(patience_s)
            sender.connect(self._address)
            sender.send(message.encode(errors="replace"))
