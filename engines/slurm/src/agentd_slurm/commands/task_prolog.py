"""`agentd-slurm task-prolog`: let a task start only on GPUs that its job has claimed.

Slurm runs it as the job's user, before each task, and takes lines `export NAME=VALUE` from it. It
names the job's claim and agent to the task. With an exit status other than 0 the task does not
start. That is needed beside the prolog: slurmd runs none for the id of a job that it still knows,
and a slurmctld that was killed gives ids of its last seconds again.

A task is refused where agentd and slurmctld agree that the job runs here on GPUs which it did not
claim. Where one of them cannot be asked, it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentd import stderr
from agentd.errors import AgentdError
from agentd_slurm import controller
from agentd_slurm.claim_ids import claim_ids, jobs_of_kernels
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.gres_map import GresMap, UnusableMap, map_path, read_map
from agentd_slurm.jobs import PLACEHOLDER_NAME, ROOT, UnreadableAnswer
from agentd_slurm.node_client import NodeClient

USERS_SOCKET = "/run/agentd/slurm.sock"
"""The socket that users of Slurm have. A user's own `AGENTD_SOCKET` may be of another agent."""
USERS_SOCKET_VARIABLE = "AGENTD_SLURM_SOCKET"
REFUSED = 1


def main() -> None:
    """Run as Slurm's `TaskProlog=`."""
    stderr.guard()
    sys.exit(run_task_prolog(os.environ))


def run_task_prolog(environ: Mapping[str, str]) -> int:
    """Print the variables of a job with GPUs and return the exit status."""
    job_id = environ.get("SLURM_JOB_ID", "")
    gpus = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS", "")
    if not job_id.isdecimal() or not gpus:
        return 0
    claims: list[Mapping[str, Any]] = []
    unclaimed = None
    try:
        gres_map = read_map(map_path())
        _print(f"export AGENTD_AGENT={gres_map.agent}")
        socket = environ.get(USERS_SOCKET_VARIABLE) or USERS_SOCKET
        if os.access(socket, os.R_OK | os.W_OK):
            node = NodeClient(socket)
            claims = node.claims_of(int(job_id))
            unclaimed = _find_unclaimed(node, claims, gpus, gres_map, environ)
    except (AgentdError, SlurmFailed, UnreadableAnswer, UnusableMap, OSError) as error:
        _print(f"print agentd-slurm task-prolog: {error}")
    claim = claims[0]["claim_id"] if claims else next(claim_ids(int(job_id)))
    _print(f"export AGENTD_CLAIM={claim}")
    if unclaimed is None:
        return 0
    name, missing = unclaimed
    _print(f"print agentd-slurm task-prolog: the job did not claim {missing}: it is sent back")
    if environ.get("SLURM_LOCALID", "0") == "0":
        with suppress(SlurmFailed):
            controller.requeue(name)
    return REFUSED


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _find_unclaimed(
    node: NodeClient,
    claims: Sequence[Mapping[str, Any]],
    gpus: str,
    gres_map: GresMap,
    environ: Mapping[str, str],
) -> tuple[str, str] | None:
    """Return the name of a running job and its GPUs that it did not claim; None if it has all.

    The environment names GPUs of this node in a batch script, and in a step that was given some.
    Another step inherits what its caller had on another node: then slurmctld is asked.

    Raises:
        AgentdError, SlurmFailed, UnreadableAnswer: it cannot be found out.
    """
    job_id = int(environ["SLURM_JOB_ID"])
    is_placeholder = os.getuid() == ROOT and environ.get("SLURM_JOB_NAME") == PLACEHOLDER_NAME
    if is_placeholder or environ.get("SLURM_HET_SIZE"):  # its tasks have the id of their leader
        return None
    claimed = _claimed_devices(claims)
    named_indices = {int(index) for index in gpus.split(",") if index.isdecimal()}
    if _missing_names(named_indices, gres_map, claimed) == "":
        return None
    if not claims and job_id in jobs_of_kernels(node.kernels()):
        return None
    job = controller.get_job(job_id)
    if job is None or job.state != "RUNNING":
        return None
    missing = _missing_names(
        job.gpus.get(environ.get("SLURMD_NODENAME", "")) or (), gres_map, claimed
    )
    return (job.name, missing) if missing else None


def _claimed_devices(claims: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the ids of the devices of claims."""
    return frozenset(
        device
        for claim in claims
        for slots in claim["allocation"].values()
        for amounts in slots.values()
        for device in amounts
    )


def _missing_names(indices: Iterable[int], gres_map: GresMap, claimed: frozenset[str]) -> str:
    """Return the names of the GPUs that are not held, by their index where the map has none."""
    device_by_index = gres_map.devices
    names = (
        device_by_index[i].device_id if i in device_by_index else f"GPU {i}"
        for i in sorted(indices)
    )
    return ", ".join(name for name in names if name not in claimed)
