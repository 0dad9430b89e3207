"""`agentd-slurm prolog`: claim a job's GPUs before the job starts on this node.

Exit status 0 lets Slurm go on: the GPUs are claimed, or the job was sent back to the queue. 1 makes
Slurm drain the node, which is right when agentd does not answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from agentd import stderr
from agentd.errors import AgentdError, Unavailable
from agentd_slurm import controller
from agentd_slurm.commands.job_environment import InvalidEnvironment, JobEnvironment, log_line
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.decisions.prolog import (
    ClaimDevices,
    FailProlog,
    NothingToClaim,
    PrologFacts,
    RefuseJob,
    decide_prolog,
    indices_to_claim,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import UnclearJob, UnreadableAnswer
from agentd_slurm.node_client import NodeClient, socket_path
from agentd_slurm.processes import find_processes

FAILED = 1


def main() -> None:
    """Run as Slurm's `Prolog=`."""
    stderr.guard()
    sys.exit(run_prolog(os.environ))


def run_prolog(environ: Mapping[str, str]) -> int:
    """Claim the GPUs of the job that the environment names and return the exit status."""
    try:
        environment = JobEnvironment.of(environ)
        if not environment.named_gpus:
            return 0
        environment.leave_mark()
        return _claim(environment, NodeClient(socket_path()))
    except (SlurmFailed, UnreadableAnswer, UnusableMap, InvalidEnvironment, Unavailable) as error:
        log_line("prolog", str(error))
    except OSError as error:
        log_line("prolog", f"{error.filename or 'agentd-slurm'}: {error.strerror}")
    except AgentdError as error:
        log_line("prolog", f"{error.code}: {error}")
    return FAILED


def _claim(environment: JobEnvironment, node: NodeClient) -> int:
    try:
        job = controller.get_job(environment.job_id)
    except UnclearJob as error:  # its user's doing, and no reason to drain the node
        return _requeue(error.job, str(error))
    facts = PrologFacts(environment.job_id, environment.node, environment.user, job)
    if not isinstance(indices_to_claim(job, environment.node), frozenset):
        return _execute(facts, node)
    gres_map = read_map(map_path())
    devices = node.devices()
    with node.locked(environment.job_id):
        has_claim = bool(node.claims_of(environment.job_id))
        has_processes = has_claim and find_processes(environment.node).may_have(environment.job_id)
        facts = facts._replace(gres_map=gres_map, devices=devices, has_processes=has_processes)
        return _execute(facts, node)


def _execute(facts: PrologFacts, node: NodeClient) -> int:
    name = facts.job.name if facts.job else ""
    match decide_prolog(facts):
        case NothingToClaim():
            return 0
        case FailProlog(reason):
            log_line("prolog", reason)
            return FAILED
        case RefuseJob(reason):
            return _requeue(name, reason)
        case ClaimDevices(agent, request):
            try:
                node.create_claim(facts.job_id, agent, request)
            except Unavailable:
                raise
            except AgentdError as error:
                return _requeue(name, f"{error.code}: {error}")
    return 0


def _requeue(name: str, reason: str) -> int:
    log_line("prolog", f"job {name} is sent back: {reason}")
    controller.requeue_with_reason(name, reason)
    return 0
