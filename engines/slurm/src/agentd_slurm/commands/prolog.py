"""`agentd-slurm prolog`: claim a job's GPUs before the job starts on this node.

Exit status 0 lets Slurm go on: the GPUs are claimed, or the job was sent back to the queue. 1 makes
Slurm drain the node, which is right when agentd does not answer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial

from agentd import stderr
from agentd.errors import AgentdError, Unavailable
from agentd_slurm import controller
from agentd_slurm.commands.job_environment import InvalidEnvironment, JobEnvironment, log_line
from agentd_slurm.controller import SlurmFailed, until_answered
from agentd_slurm.decisions.prolog import (
    ClaimDevices,
    GpuIndices,
    NothingToClaim,
    PrologFacts,
    RefuseJob,
    decide_prolog,
    describe_holders,
    indices_to_claim,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import UnclearJob, UnreadableAnswer
from agentd_slurm.node_client import NodeClient, socket_path
from agentd_slurm.processes import find_processes
from agentd_slurm.slurm_conf import PATIENCE, prolog_timeout_s

FAILED = 1


def main() -> None:
    """Run as Slurm's `Prolog=`."""
    stderr.guard()
    os.umask(0o022)  # task prologs, which users run, read the mark
    sys.exit(run_prolog(os.environ))


def run_prolog(environ: Mapping[str, str]) -> int:
    """Claim the GPUs of the job that the environment names and return the exit status."""
    try:
        environment = JobEnvironment.of(environ)
        if not environment.named_gpus:
            return 0
        environment.leave_mark()
        return _Prolog(environment, NodeClient(socket_path())).claim()
    except (SlurmFailed, UnreadableAnswer, UnusableMap, InvalidEnvironment, Unavailable) as error:
        log_line("prolog", str(error))
    except OSError as error:
        log_line("prolog", f"{error.filename or 'agentd-slurm'}: {error.strerror}")
    except AgentdError as error:
        log_line("prolog", f"{error.code}: {error}")
    return FAILED


class _Prolog:
    """The prolog of one job; slurmctld is asked until most of Slurm's time for it is over."""

    def __init__(self, environment: JobEnvironment, node: NodeClient) -> None:
        self._environment = environment
        self._node = node
        self._deadline = time.monotonic() + PATIENCE * prolog_timeout_s()

    def claim(self) -> int:
        """Claim the GPUs of the job, or send it back, and return the exit status."""
        job_id, node_name, user, *_ = self._environment
        try:
            job = until_answered(partial(controller.get_job, job_id), self._deadline)
        except UnclearJob as error:  # its user's doing, and no reason to drain the node
            return self._requeue(error.job, str(error))
        facts = PrologFacts(job_id, node_name, user, job)
        indices = indices_to_claim(job, node_name)
        if not isinstance(indices, GpuIndices):
            return self._execute(facts)
        gres_map = read_map(map_path())
        devices = self._node.devices()
        with self._node.locked(job_id, is_shared=bool(indices.shared)):
            has_claim = bool(self._node.claims_of(job_id))
            has_processes = has_claim and find_processes(node_name).may_have(job_id)
            facts = facts._replace(gres_map=gres_map, devices=devices, has_processes=has_processes)
            return self._execute(facts)

    def _execute(self, facts: PrologFacts) -> int:
        name = facts.job.name if facts.job else ""
        match decide_prolog(facts):
            case NothingToClaim():
                return 0
            case RefuseJob(reason):
                return self._requeue(name, reason)
            case ClaimDevices() as action:
                try:
                    self._create_claims(action)
                except Unavailable:
                    raise
                except AgentdError as error:
                    reason = f"{error.code}: {self._explain(action) or error}"
                    return self._requeue(name, reason)
        return 0

    def _create_claims(self, action: ClaimDevices) -> None:
        """Create the claims of the job; the epilog of a job that is sent back ends the first."""
        if action.request:
            self._node.create_claim(self._environment.job_id, action.agent, action.request)
        if action.shared:
            self._environment.write_mark(request["claim_id"] for request in action.shared)
        for request in action.shared:
            self._node.create_shared_claim(action.agent, request)

    def _explain(self, action: ClaimDevices) -> str:
        requests = [request for request in (action.request, *action.shared) if request]
        return describe_holders(requests, self._node.devices())

    def _requeue(self, name: str, reason: str) -> int:
        log_line("prolog", f"job {name} is sent back: {reason}")
        send_back = partial(controller.requeue_with_reason, name, reason)
        until_answered(send_back, self._deadline)
        return 0
