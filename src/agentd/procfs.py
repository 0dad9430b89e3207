"""Reading the text files of /proc and of cgroups.

Users choose names in them: of processes, cgroups and mount points. Any byte but a newline may
stand in such a name, so nothing is decoded strictly and only a newline ends a line.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_lines(file: str | Path) -> list[str]:
    """Return the lines of a file, with bytes that are not UTF-8 as surrogates (`os.fsdecode`).

    Raises:
        OSError: the file cannot be read.
    """
    text = os.fsdecode(Path(file).read_bytes())
    return text.removesuffix("\n").split("\n") if text else []


def read_uids(pid: int) -> set[int]:
    """Return the real, effective, saved and file system user ids of a process.

    There are none of one that has ended, or may not be read.
    """
    try:
        lines = read_lines(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}
