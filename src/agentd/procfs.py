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
