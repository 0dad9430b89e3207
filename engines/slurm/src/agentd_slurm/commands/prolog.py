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
from agentd_slurm.commands.job_environment import InvalidEnvironment, JobEnvironment, note
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.decisions.prolog import (
    ClaimDevices,
    FailProlog,
    NothingToClaim,
    PrologAction,
    PrologFacts,
    RefuseJob,
    claim_id,
    decide_prolog,
    indices_to_claim,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import UnreadableAnswer
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
        here = JobEnvironment.of(environ)
        node = NodeClient(socket_path())
        return _prolog(here, node)
    except (SlurmFailed, UnreadableAnswer, UnusableMap, InvalidEnvironment, Unavailable) as error:
        note("prolog", str(error))
    except OSError as error:
        note("prolog", f"{error.filename or 'agentd-slurm'}: {error.strerror}")
    except AgentdError as error:
        note("prolog", f"{error.code}: {error}")
    return FAILED


def _prolog(here: JobEnvironment, node: NodeClient) -> int:
    job = controller.job(here.job_id)
    indices = indices_to_claim(job, here.node, here.named_gpus)
    facts = PrologFacts(here.job_id, here.node, here.user, job, here.named_gpus)
    if not isinstance(indices, frozenset):
        return _carry_out(here, node, decide_prolog(facts))
    gres_map = read_map(map_path())
    devices = node.devices()
    with node.locked(here.job_id):
        has_claim = node.has_claim(claim_id(here.job_id))
        action = decide_prolog(
            PrologFacts(
                here.job_id,
                here.node,
                here.user,
                job,
                gres_map=gres_map,
                devices=devices,
                has_claim=has_claim,
                has_processes=has_claim and find_processes(here.node).of(here.job_id),
            )
        )
        return _carry_out(here, node, action)


def _carry_out(here: JobEnvironment, node: NodeClient, action: PrologAction) -> int:
    match action:
        case NothingToClaim():
            return 0
        case FailProlog(reason):
            note("prolog", reason)
            return FAILED
        case RefuseJob(reason):
            return _send_back(here, reason)
        case ClaimDevices(agent, request, ends_earlier):
            if ends_earlier:
                node.release(claim_id(here.job_id))
            try:
                node.create_claim(agent, request)
            except Unavailable:
                raise
            except AgentdError as error:
                return _send_back(here, f"{error.code}: {error}")
    return 0


def _send_back(here: JobEnvironment, reason: str) -> int:
    note("prolog", f"job {here.job_id} is sent back: {reason}")
    controller.send_back(here.job_id, reason)
    return 0
