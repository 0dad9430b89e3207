"""The log of a program as a pipe, whose reader a test ends, stops and brings back."""

import asyncio
import os
from pathlib import Path


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
        found = ""
        async with asyncio.timeout(20):
            while text not in found:
                found += self.read()
                await asyncio.sleep(0.02)
        return found
