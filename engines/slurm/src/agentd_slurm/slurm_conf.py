"""The time that slurm.conf gives to a prolog: slurmctld, which knows it, may be away."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

DEFAULT_CONF = "/etc/slurm/slurm.conf"
NO_LIMIT_S = 300
"""Seconds in which slurmctld restarts or hands over, where slurm.conf sets no limit."""
PATIENCE = 0.75
"""The part of that time after which an answer of slurmctld would be too late."""
NO_VALUE = 65534
MAX_DEPTH = 8
_INCLUDE = re.compile(r"include\s+(\S+)", re.IGNORECASE)
_TIMEOUT = re.compile(r"\bPrologEpilogTimeout\s*=\s*([0-9]{1,9})", re.IGNORECASE)


def prolog_timeout_s() -> int:
    """Return the seconds after which Slurm ends a prolog or an epilog."""
    *_, timeout_s = 0, *_timeouts(Path(os.environ.get("SLURM_CONF") or DEFAULT_CONF), MAX_DEPTH)
    return timeout_s if 0 < timeout_s < NO_VALUE else NO_LIMIT_S


def _timeouts(path: Path, depth: int) -> Iterator[int]:
    """Yield each value in a file and in those that it includes; none if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        text = line.partition("#")[0].strip()
        if (include := _INCLUDE.match(text)) and depth:
            yield from _timeouts(path.parent / include[1], depth - 1)
        elif timeout := _TIMEOUT.search(text):
            yield int(timeout[1])
