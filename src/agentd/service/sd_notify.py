"""Telling systemd how the service does: one datagram for each message (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping

PATIENCE_S = 1.0
"""How long a manager that does not read holds up the daemon."""


class Notifier:
    """The socket in $NOTIFY_SOCKET; does nothing if the variable is not set."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() and is_ours else None

    @property
    def is_heard(self) -> bool:
        """Whether a manager listens."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Start-up is over."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The configuration is read again; `ready` follows."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def status(self, text: str) -> None:
        """Say how it goes, in one line; where nobody reads, it is not said."""
        self._send(f"STATUS={text}", patience_s=0)

    def stopping(self) -> None:
        """Shutting down has begun."""
        self._send("STOPPING=1\nSTATUS=stopping; kernels go on")

    def alive(self) -> None:
        """Keep the watchdog (WatchdogSec=) quiet."""
        self._send("WATCHDOG=1")

    async def keep_alive_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, and meanwhile keep the watchdog quiet, if one watches."""
        while not stop.is_set():
            try:
                async with asyncio.timeout(self.watchdog_s / 2 if self.watchdog_s else None):
                    await stop.wait()
            except TimeoutError:
                self.alive()

    def _send(self, message: str, patience_s: float = PATIENCE_S) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(patience_s)
            try:
                sender.connect(self._address)
                sender.send(message.encode())
            except OSError:
                return  # a manager that does not listen must not stop the daemon
