"""`agentd-slurm task-prolog`: let a task start only on GPUs that its job has claimed.

Slurm runs it as the job's user, before each task, and takes lines `export NAME=VALUE` from it. It
names the job's claim and agent to the task. With exit status 3 the task does not start; the shell
program around it lets a task start after any other. That is needed beside the prolog: slurmd runs
none for the id of a job that it still knows, and a slurmctld that was killed gives ids of its last
seconds again.

A task is refused where agentd and slurmctld agree that the job runs here on GPUs which it did not
claim, or slurmctld does not know that it runs. Where one of them cannot be asked, it starts. The
claim of a shared device is root's, which the job's user does not see: the mark that the prolog left
says that the job has a part of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from agentd import stderr
from agentd.errors import AgentdError
from agentd_slurm import controller
from agentd_slurm.claim_ids import claim_ids, jobs_of_kernels, shared_claim_id
from agentd_slurm.commands.job_environment import (
    RUN_FOLDER,
    RUN_VARIABLE,
    log_line,
    read_mark,
)
from agentd_slurm.controller import SlurmFailed, until_answered
from agentd_slurm.gres_map import GresMap, UnusableMap, map_path, read_map
from agentd_slurm.jobs import PLACEHOLDER_NAME, ROOT, UnreadableAnswer, expand_hosts
from agentd_slurm.node_client import NodeClient
from agentd_slurm.slurm_conf import PATIENCE, prolog_timeout_s

USERS_SOCKET = "/run/agentd/slurm.sock"
"""The socket that users of Slurm have. A user's own `AGENTD_SOCKET` may be of another agent."""
USERS_SOCKET_VARIABLE = "AGENTD_SLURM_SOCKET"
REFUSED = 3


def main() -> None:
    """Run as Slurm's `TaskProlog=`."""
    stderr.guard()
    sys.exit(run_task_prolog(os.environ))


def run_task_prolog(environ: Mapping[str, str]) -> int:
    """Print the variables of a job with GPUs and return the exit status."""
    if not environ.get("SLURM_JOB_ID", "").isdecimal():
        return 0
    is_placeholder = os.getuid() == ROOT and environ.get("SLURM_JOB_NAME") == PLACEHOLDER_NAME
    variables, unclaimed = {"AGENTD_CLAIM": next(claim_ids(int(environ["SLURM_JOB_ID"])))}, None
    try:
        task = _Task(environ, read_map(map_path()))
        _print(f"export AGENTD_AGENT={task.gres_map.agent}")
        socket = environ.get(USERS_SOCKET_VARIABLE) or USERS_SOCKET
        if not is_placeholder and os.access(socket, os.R_OK | os.W_OK):
            node = NodeClient(socket)
            claims = [claim for job_id in task.jobs for claim in node.claims_of(job_id)]
            variables = task.variables(claims)
            unclaimed = task.find_unclaimed(claims, node)
    except (AgentdError, SlurmFailed, UnreadableAnswer, UnusableMap, OSError, ValueError) as error:
        log_line("task-prolog", str(error))  # not into the output of the task
    for variable, value in variables.items():
        _print(f"export {variable}={value}")
    if unclaimed is None:
        return 0
    name, missing = unclaimed
    _print(f"print agentd-slurm task-prolog: the job did not claim {missing}: it is sent back")
    if name:
        with suppress(SlurmFailed):
            controller.requeue(name)
    return REFUSED


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


class _Task:
    """A task on this node, as its environment describes it.

    The environment names GPUs of this node in a batch script, and in a step that was given some.
    Another step inherits what its caller had on another node. The tasks of a job of components
    have the id of their leader: `jobs` are the components on this node.
    """

    def __init__(self, environ: Mapping[str, str], gres_map: GresMap) -> None:
        self.gres_map = gres_map
        self._node = environ.get("SLURMD_NODENAME", "")
        gpus = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS", "")
        self._indices = {int(index) for index in gpus.split(",") if index.isdecimal()}
        components = {
            int(environ[f"SLURM_JOB_ID_HET_GROUP_{number}"]): expand_hosts(
                environ[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]
            )
            for number in range(int(environ.get("SLURM_HET_SIZE", "0")))
        }
        job_id = int(environ["SLURM_JOB_ID"])
        is_component = job_id in components
        self.jobs = [
            job for job, nodes in components.items() if is_component and self._node in nodes
        ] or [job_id]
        folder = Path(environ.get(RUN_VARIABLE) or RUN_FOLDER)
        self._shared = {claim for job in self.jobs for claim in read_mark(folder / str(job))}

    def variables(self, claims: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the variables that name the claim of the task's GPUs, and those of its GPUs."""
        chosen = [claim for claim in claims if not self._missing(self._indices, [claim])] or claims
        if not chosen:
            return {} if self._shared else {"AGENTD_CLAIM": next(claim_ids(self.jobs[0]))}
        claim = chosen[0]
        devices = self.gres_map.devices
        named = {devices[index].device_id for index in self._indices & devices.keys()}
        amounts = [
            (f"{name}={device}", slot, Decimal(amount))
            for name, slots in claim["allocation"].items()
            for slot in slots.keys() & claim["slots"].keys()
            for device, amount in slots[slot].items()
            if device in named
        ]
        sums: dict[str, Decimal] = {}
        for _, slot, amount in amounts:
            sums[slot] = sums.get(slot, Decimal()) + amount
        return {
            "AGENTD_CLAIM": claim["claim_id"],
            "AGENTD_DEVICES": " ".join(device for device, *_ in amounts),
            "AGENTD_SLOTS": " ".join(f"{slot}={amount:f}" for slot, amount in sums.items()),
        }

    def find_unclaimed(
        self, claims: Sequence[Mapping[str, Any]], node: NodeClient
    ) -> tuple[str, str] | None:
        """Return the name of the job and its GPUs that it did not claim; None if it has all.

        slurmctld may be away, or restarted and forgot that the job runs. Then the name is empty,
        and the GPUs are those that the environment names.

        Raises:
            AgentdError, SlurmFailed, UnreadableAnswer: it cannot be found out.
        """
        if not self._missing(self._indices, claims) and (self._indices or self._shared):
            return None
        deadline = time.monotonic() + PATIENCE * prolog_timeout_s()
        users = jobs_of_kernels(node.kernels())
        for job_id in self.jobs:
            if not claims and job_id in users:
                continue
            job = until_answered(partial(controller.get_job, job_id), deadline)
            name, gpus = "", self._indices
            if job is not None and job.state == "RUNNING":
                own, shared = job.gpus.get(self._node), job.shared.get(self._node)
                name, gpus = job.name, {*(own or ()), *(shared or ())}
            if missing := self._missing(gpus, claims):
                return name, missing
        return None

    def _missing(self, indices: Iterable[int], claims: Iterable[Mapping[str, Any]]) -> str:
        """Return the names of the GPUs that are not held, by their index where the map has none."""
        names = []
        claimed = _claimed_devices(claims)
        for index in sorted(indices):
            device = self.gres_map.devices.get(index)
            if device is None:
                names.append(f"GPU {index}")
            elif not (
                device.device_id in claimed or shared_claim_id(device.stable_id) in self._shared
            ):
                names.append(device.device_id)
        return ", ".join(names)


def _claimed_devices(claims: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the ids of the devices of claims."""
    return frozenset(
        device
        for claim in claims
        for slots in claim["allocation"].values()
        for amounts in slots.values()
        for device in amounts
    )
