"""The description of a job in the environment of a prolog or an epilog.

There is no PATH, HOME or LANG in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agentd.stderr import LOST

MAX_LINE = 2000
RUN_FOLDER = "/run/agentd-slurm"
RUN_VARIABLE = "AGENTD_SLURM_RUN"


class InvalidEnvironment(Exception):
    """A variable of Slurm's is missing or malformed."""


class JobEnvironment(NamedTuple):
    """A job on this node; `named_gpus` is Slurm's own, incomplete list of its GPUs.

    `mark` is the file of a job that may have a claim. The environment of an epilog does not prove
    that there is none: jobs that ran while slurmctld restarted have no GPUs in it.
    """

    job_id: int
    node: str
    user: str
    named_gpus: str
    mark: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> JobEnvironment:
        """Read the environment.

        Raises:
            InvalidEnvironment: Slurm did not run this.
        """
        job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
        if not job_id.isdecimal() or not int(job_id):
            raise InvalidEnvironment(f"SLURM_JOB_ID: got {job_id!r}, expected the id of a job")
        if not node:
            raise InvalidEnvironment("SLURMD_NODENAME is not set: expected to be run by slurmd")
        user = environ.get("SLURM_JOB_USER") or environ.get("SLURM_JOB_UID") or "unknown"
        mark = Path(environ.get(RUN_VARIABLE) or RUN_FOLDER) / job_id
        return cls(int(job_id), node, user, environ.get("SLURM_JOB_GPUS", ""), mark)

    def leave_mark(self) -> None:
        """Create the mark if that can be; agentd-slurm sync ends the claim of an epilog without."""
        with suppress(OSError):
            self.mark.parent.mkdir(mode=0o755, exist_ok=True)
            self.mark.touch(mode=0o600)


def log_line(command: str, text: str) -> None:
    """Write one line to standard error, which slurmd logs."""
    line = " ".join(text.split())[:MAX_LINE]
    _write(command, line)
    LOST.report(lambda lines, why: _write(command, f"lines lost from this log: {lines} ({why})"))


def _write(command: str, line: str) -> None:
    sys.stderr.write(f"agentd-slurm {command}: {line}\n")
