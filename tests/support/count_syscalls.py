"""agentd with what it asks of the system counted: `count_syscalls.py FILE run …`.

At each SIGUSR1 the counts so far replace those in FILE, in one step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

WRITABLE = os.O_WRONLY | os.O_RDWR


class Counts:
    """The files that one process opened, and its fsyncs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._own = file.parents[1]
        self._opened: Counter[str] = Counter()
        self._files = 0
        self._fsyncs = 0

    def begin(self) -> None:
        """Count from now on, in all threads."""
        sys.addaudithook(self._audit)
        fsync = os.fsync

        def counted_fsync(descriptor: int) -> None:
            self._fsyncs += 1
            fsync(descriptor)

        os.fsync = counted_fsync
        signal.signal(signal.SIGUSR1, lambda *_: self._save())

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path, _, flags = arguments
            self._opened[os.fspath(path)] += 1
            is_own = Path(path).is_relative_to(self._own)
            is_count = Path(path).parent == self._file.parent
            self._files += is_own and not is_count and bool(flags & WRITABLE)

    def _save(self) -> None:
        """Write the counts: what other daemons left outside of the node's folder is left out."""
        content = {"opened": self._opened, "files": self._files, "fsyncs": self._fsyncs}
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(content))
        beside.replace(self._file)


def main() -> None:
    file = Path(sys.argv.pop(1))
    Counts(file).begin()
    from agentd.cli.agentd.main import agentd

    agentd(prog_name="agentd")


if __name__ == "__main__":
    main()
