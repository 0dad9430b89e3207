"""agentd with everything counted that noise cannot touch: `counted.py FILE run …`.

At each SIGUSR1 the counts so far replace those in FILE, in one step.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
import sys
from asyncio.base_events import BaseEventLoop
from collections import Counter
from pathlib import Path
from typing import Any

TURN = BaseEventLoop._run_once.__code__
WRITABLE = os.O_WRONLY | os.O_RDWR
LOG = 2
"""The descriptor of lines that no ceiling is about."""


class Counts:
    """Counts of one process: profiled calls, and what is asked of the system."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._profile = cProfile.Profile()
        self._opened: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def begin(self) -> None:
        """Count from now on, in this thread; what is opened, in all threads."""
        sys.addaudithook(self._audit)
        write, fsync = os.write, os.fsync

        def counted_write(descriptor: int, content: bytes) -> int:
            taken = write(descriptor, content)
            self._written["bytes"] += taken if descriptor != LOG else 0
            return taken

        def counted_fsync(descriptor: int) -> None:
            self._written["fsyncs"] += 1
            fsync(descriptor)

        os.write, os.fsync = counted_write, counted_fsync
        signal.signal(signal.SIGUSR1, lambda *_: self._save())
        self._profile.enable()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path, _, flags = arguments
            self._opened[os.fspath(path)] += 1
            is_ours = Path(path).parent == self._file.parent or "__pycache__" in Path(path).parts
            self._written["files"] += bool(flags & WRITABLE) and not is_ours

    def _save(self) -> None:
        self._profile.disable()
        self._profile.create_stats()
        found = self._profile.getstats()
        content = {
            "calls": sum(entry.callcount for entry in found),
            "turns": sum(entry.callcount for entry in found if entry.code is TURN),
            "opened": self._opened,
            "written": self._written,
            "modules": sorted(sys.modules),
        }
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(content))
        beside.replace(self._file)
        self._profile.enable()


def main() -> None:
    file = Path(sys.argv.pop(1))
    Counts(file).begin()
    from agentd.cli.agentd.main import agentd

    agentd(prog_name="agentd")


if __name__ == "__main__":
    main()
