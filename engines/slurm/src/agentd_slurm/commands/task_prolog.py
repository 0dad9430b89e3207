"""`agentd-slurm task-prolog`: let a task start only on GPUs that its job has claimed.

Slurm runs it as the job's user, before each task, and takes lines `export NAME=VALUE` from it. It
names the job's claim and agent to the task. With an exit status other than 0 the task does not
start. That is needed beside the prolog: slurmd runs none for the id of a job that it still knows,
and a slurmctld that was killed gives ids of its last seconds again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from agentd.errors import AgentdError, Unavailable, UnknownClaim
from agentd_slurm import controller
from agentd_slurm.decisions.prolog import claim_id
from agentd_slurm.gres_map import GresMap, UnusableMap, map_path, read_map
from agentd_slurm.jobs import PLACEHOLDER_NAME, ROOT
from agentd_slurm.node_client import SOCKET_VARIABLE, NodeClient

USERS_SOCKET = "/run/agentd/slurm.sock"
"""The socket that users of Slurm have, unless `AGENTD_SOCKET` names another."""
REFUSED = 1


def main() -> None:
    """Run as Slurm's `TaskProlog=`."""
    sys.exit(run_task_prolog(os.environ))


def run_task_prolog(environ: Mapping[str, str]) -> int:
    """Print the variables of a job with GPUs and return the exit status."""
    job_id, gpus = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_GPUS", "")
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
    reason = "" if is_placeholder else _unclaimed(int(job_id), gpus, gres_map, environ)
    if reason:
        _say(f"print agentd-slurm task-prolog: {reason}; the job is sent back")
        _send_back(int(job_id))
        return REFUSED
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _unclaimed(job_id: int, gpus: str, gres_map: GresMap, environ: Mapping[str, str]) -> str:
    """Return why a job may not start on its GPUs; empty if it may, or if nobody can be asked."""
    socket = environ.get(SOCKET_VARIABLE, USERS_SOCKET)
    if not os.access(socket, os.R_OK | os.W_OK):
        return ""
    try:
        claim = NodeClient(socket).claim(claim_id(job_id))
    except UnknownClaim:
        return "the job has no claim"
    except Unavailable:
        return "agentd does not answer"
    except AgentdError:
        return ""
    held = {
        device
        for slots in claim["allocation"].values()
        for amounts in slots.values()
        for device in amounts
    }
    indices = [int(index) for index in gpus.split(",") if index.isdecimal()]
    devices = [gres_map.devices[index] for index in indices if index in gres_map.devices]
    missing = [device.device_id for device in devices if device.device_id not in held]
    if missing or len(devices) < len(indices):
        return f"its claim does not hold {', '.join(missing) or 'all of its GPUs'}"
    return ""


def _send_back(job_id: int) -> None:
    with suppress(controller.SlurmFailed):
        controller.requeue(job_id)
