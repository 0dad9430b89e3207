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
from collections.abc import Iterable, Mapping
from contextlib import suppress

from agentd import stderr
from agentd.errors import AgentdError, UnknownClaim
from agentd_slurm import controller
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.decisions.prolog import claim_id
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
    try:
        gres_map = read_map(map_path())
    except UnusableMap as error:
        _say(f"print agentd-slurm task-prolog: {error}")
        return 0
    _say(f"export AGENTD_CLAIM={claim_id(int(job_id))}")
    _say(f"export AGENTD_AGENT={gres_map.agent}")
    is_placeholder = os.getuid() == ROOT and environ.get("SLURM_JOB_NAME") == PLACEHOLDER_NAME
    if is_placeholder or environ.get("SLURM_HET_SIZE"):  # its tasks have the id of their leader
        return 0
    try:
        missing = _unclaimed(int(job_id), gpus, gres_map, environ)
    except (AgentdError, SlurmFailed, UnreadableAnswer, OSError) as error:
        _say(f"print agentd-slurm task-prolog: {error}")
        return 0
    if not missing:
        return 0
    _say(f"print agentd-slurm task-prolog: the job did not claim {missing}: it is sent back")
    if environ.get("SLURM_LOCALID", "0") == "0":
        with suppress(SlurmFailed):
            controller.requeue(int(job_id))
    return REFUSED


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _unclaimed(job_id: int, gpus: str, gres_map: GresMap, environ: Mapping[str, str]) -> str:
    """Return the GPUs of a running job that its claim does not hold; empty if it has them all.

    The environment names GPUs of this node in a batch script, and in a step that was given some.
    Another step inherits what its caller had on another node: then slurmctld is asked.

    Raises:
        AgentdError, SlurmFailed, UnreadableAnswer: it cannot be found out.
    """
    socket = environ.get(USERS_SOCKET_VARIABLE, USERS_SOCKET)
    if not os.access(socket, os.R_OK | os.W_OK):
        return ""
    held = _held(NodeClient(socket), claim_id(job_id))
    named = {int(index) for index in gpus.split(",") if index.isdecimal()}
    if held is None or _missing(named, gres_map, held) == "":
        return ""
    job, node = controller.job(job_id), environ.get("SLURMD_NODENAME", "")
    if job is None or job.state != "RUNNING":
        return ""
    return _missing(job.gpus.get(node) or (), gres_map, held)


def _held(node: NodeClient, claim: str) -> frozenset[str] | None:
    """Return the ids of a claim's devices, none if there is no claim.

    None where a kernel took them all over.
    """
    try:
        allocation = node.claim(claim)["allocation"]
    except UnknownClaim:
        return None if node.kernels(claim) else frozenset()
    return frozenset(
        device for slots in allocation.values() for amounts in slots.values() for device in amounts
    )


def _missing(indices: Iterable[int], gres_map: GresMap, held: frozenset[str]) -> str:
    """Return the names of the GPUs that are not held, by their index where the map has none."""
    known = gres_map.devices
    names = (known[i].device_id if i in known else f"GPU {i}" for i in sorted(indices))
    return ", ".join(name for name in names if name not in held)
