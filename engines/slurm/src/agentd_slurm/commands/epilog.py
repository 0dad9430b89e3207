"""`agentd-slurm epilog`: release a job's GPUs once nothing of the job is left on this node.

The kernels that the job ran are stopped and deleted first. A job whose slurmstepd was killed may
leave processes behind. Its claim stays, and `agentd-slurm sync` ends it when they are gone. A claim
stays too if agentd does not answer. The exit status is 0 in each case: a drained node helps nobody.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from agentd import stderr
from agentd.errors import AgentdError
from agentd_slurm.commands.job_environment import (
    InvalidEnvironment,
    JobEnvironment,
    log_line,
    read_mark,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.node_client import NodeClient, socket_path
from agentd_slurm.processes import find_processes

LAST_PROCESSES_S = 2.0
"""Seconds for killed processes to disappear."""
PAUSE_S = 0.1


def main() -> None:
    """Run as Slurm's `Epilog=`."""
    stderr.guard()
    sys.exit(run_epilog(os.environ))


def run_epilog(environ: Mapping[str, str]) -> int:
    """Release the claim of the job that the environment names and return the exit status."""
    try:
        job = JobEnvironment.of(environ)
        if job.named_gpus or job.mark.exists():
            _release(job, NodeClient(socket_path()))
    except InvalidEnvironment as error:
        log_line("epilog", str(error))
        return 1
    except AgentdError as error:
        log_line("epilog", f"left to agentd-slurm sync: {error.code}: {error}")
    except OSError as error:
        log_line("epilog", f"left to agentd-slurm sync: {error.filename or ''} {error.strerror}")
    return 0


def _release(job: JobEnvironment, node: NodeClient) -> None:
    with node.locked(job.job_id, is_shared=bool(read_mark(job.mark))):
        claims = node.claims_of(job.job_id)
        agents = {claim["agent_id"] for claim in claims}
        with suppress(UnusableMap):
            agents.add(read_map(map_path()).agent)
        has_ended = _wait_ended(job)
        node.delete_kernels(job.job_id, agents)
        if not has_ended:
            log_line("epilog", f"job {job.job_id} left processes; agentd-slurm sync ends its claim")
            return
        for claim in claims:
            node.release(claim)
        for claim_id in job.take_mark():
            node.release_id(claim_id)


def _wait_ended(job: JobEnvironment) -> bool:
    """Return whether nothing of the job runs here any more."""
    deadline = time.monotonic() + LAST_PROCESSES_S
    while job.job_id in find_processes(job.node).jobs:
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
    return True
