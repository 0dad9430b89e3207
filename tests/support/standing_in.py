"""The engine of `benchmarks/stand_in.py` in a process of its own, for tests that count."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "stand_in.py"
START_TIMEOUT_S = 30


@contextmanager
def standing_in(socket: Path) -> Iterator[None]:
    """Run the engine until the end of the context."""
    process = subprocess.Popen([sys.executable, PROGRAM, socket])
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            assert process.poll() is None, "the stand-in ended"
            assert time.monotonic() < until, "the stand-in does not listen"
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10)
