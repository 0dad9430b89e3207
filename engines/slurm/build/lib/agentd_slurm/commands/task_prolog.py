"""`agentd-slurm task-prolog`: name the job's claim and agent in the environment of its tasks.

Slurm runs it as the job's user, before each task, and takes lines `export NAME=VALUE` from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from agentd_slurm.gres_map import UnusableMap, map_path, read_map


def main() -> None:
    """Run as Slurm's `TaskProlog=`."""
    sys.exit(run_task_prolog(os.environ))


def run_task_prolog(environ: Mapping[str, str]) -> int:
    """Print the variables of a job with GPUs and return the exit status."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id.isdecimal() or not environ.get("SLURM_JOB_GPUS"):
        return 0
    try:
        agent = read_map(map_path()).agent
    except UnusableMap as error:
        sys.stdout.write(f"print agentd-slurm task-prolog: {error}\n")
        return 0
    sys.stdout.write(f"export AGENTD_CLAIM=slurm-{job_id}\nexport AGENTD_AGENT={agent}\n")
    return 0
