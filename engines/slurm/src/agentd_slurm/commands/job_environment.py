"""The description of a job in the environment of a prolog or an epilog.

There is no PATH, HOME or LANG in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agentd.stderr import LOST

MAX_LINE = 2000
RUN_FOLDER = "/run/agentd-slurm"
RUN_VARIABLE = "AGENTD_SLURM_RUN"
GPU_VARIABLES = ("SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")
"""Lists of a job's GPUs, shared ones too."""


class InvalidEnvironment(Exception):
    """A variable of Slurm's is missing or malformed."""


class JobEnvironment(NamedTuple):
    """A job on this node; `named_gpus` is Slurm's own, incomplete list of its GPUs.

    `mark` is the file of a job that may have a claim. The environment of an epilog does not prove
    that there is none: jobs that ran while slurmctld restarted have no GPUs in it. Its lines are
    the claims of devices that the job shares with others.
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
        named_gpus = "".join(environ.get(name, "") for name in GPU_VARIABLES)
        return cls(int(job_id), node, user, named_gpus, mark)

    def leave_mark(self) -> None:
        """Create the mark if that can be; agentd-slurm sync ends the claim of an epilog without."""
        with suppress(OSError):
            self.write_mark(())

    def write_mark(self, shared_claims: Iterable[str]) -> None:
        """Create or replace the mark.

        Raises:
            OSError: it cannot be written.
        """
        self.mark.parent.mkdir(mode=0o755, exist_ok=True)
        self.mark.write_text("".join(f"{claim}\n" for claim in shared_claims))

    def take_mark(self) -> set[str]:
        """Remove the mark and return the claims that only this job shared.

        Raises:
            OSError: the marks cannot be read.
        """
        claims = read_mark(self.mark)
        self.mark.unlink(missing_ok=True)
        others = self.mark.parent.iterdir() if claims else ()
        return claims.difference(*map(read_mark, others))


def known_node() -> str:
    """Return the name that slurmd gave this node in its last prolog; empty if there was none."""
    with suppress(OSError):
        file = Path(os.environ.get(RUN_VARIABLE) or RUN_FOLDER) / "node"
        return file.read_text(errors="replace").strip()
    return ""


def read_mark(mark: Path) -> set[str]:
    """Return the claims of devices that a job shares; none if it has no mark."""
    try:
        return {*mark.read_text(errors="replace").split()}
    except FileNotFoundError:
        return set()


def log_line(command: str, text: str) -> None:
    """Write one line to standard error, which slurmd logs."""
    line = " ".join(text.split())[:MAX_LINE]
    _write(command, line)
    LOST.report(lambda lines, why: _write(command, f"lines lost from this log: {lines} ({why})"))


def _write(command: str, line: str) -> None:
    sys.stderr.write(f"agentd-slurm {command}: {line}\n")
