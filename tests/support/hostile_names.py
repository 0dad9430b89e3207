"""Processes with names that no decoder likes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = (b"\xff", "12345678901234\u00e9".encode(), b"\rUid:\t4711", b") R 1 (\n")
"""Not UTF-8, one that Linux cuts within a character, a forged line, a forged end of the name."""


def command(name: bytes) -> list[str]:
    """Return the command of a process that takes a name, says so and sleeps."""
    octal = "".join(f"\\{byte:03o}" for byte in name)
    script = 'printf "$0" >/proc/$$/comm; echo named; while :; do sleep 1000; done'
    return ["sh", "-c", script, octal]


@contextmanager
def named(name: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this name."""
    with subprocess.Popen(command(name), stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"named\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
