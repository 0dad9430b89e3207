"""Deciding what keeps Slurm and agentd in step.

A GPU that Slurm's jobs cannot get is blocked in Slurm by a placeholder job for exactly that GPU:
GRES cannot be reduced on a live node. A claim of a job ends once the job is over for certain:
slurmctld knows no such job here, and neither a slurmstepd of it nor a process in its cgroup is
left. The answer of slurmctld alone proves nothing: a killed one forgets its last seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentd_slurm.claim_ids import job_of_claim, jobs_of_kernels
from agentd_slurm.decisions.prolog import row_of
from agentd_slurm.gres_map import GresMap
from agentd_slurm.jobs import ON_NODE, PLACEHOLDER, WAITING, Job

BLOCKING = frozenset({"unhealthy", "drained", "gone", "withheld"})
"""States of a device in which agentd gives nothing from it."""


class StartPlaceholder(NamedTuple):
    """Block a GPU in Slurm."""

    gpu_type: str
    holder: str


class RenamePlaceholder(NamedTuple):
    """Write the present holder into the comment of a placeholder."""

    job_id: int
    holder: str


class EndPlaceholder(NamedTuple):
    """Give a GPU back to Slurm."""

    job_id: int


class EndClaim(NamedTuple):
    """Stop the kernels of an ended job's claims and release them."""

    job_id: int


class ClaimRunningJob(NamedTuple):
    """Claim, as observed, the GPUs of a job that runs without a claim."""

    job_id: int


SyncAction = StartPlaceholder | RenamePlaceholder | EndPlaceholder | EndClaim | ClaimRunningJob


class SyncFacts(NamedTuple):
    """The facts of one round, read in this order: a job that appears in between changes nothing.

    `alive` are the jobs that may have a slurmstepd or a process in their cgroup on this node, and
    `running` those that have one for certain. `unclaimed` are the jobs that `unclaimed_jobs`
    returned for the round before.
    """

    node: str
    gres_map: GresMap
    claims: Sequence[Mapping[str, Any]]
    kernels: Sequence[Mapping[str, Any]]
    devices: Sequence[Mapping[str, Any]]
    jobs: Sequence[Job]
    alive: frozenset[int]
    running: frozenset[int] = frozenset()
    unclaimed: frozenset[int] = frozenset()


def decide_sync(facts: SyncFacts) -> list[SyncAction]:
    """Return what one round does."""
    unclaimed_twice = sorted(unclaimed_jobs(facts) & facts.unclaimed)
    return [
        *_claims_to_end(facts),
        *map(ClaimRunningJob, unclaimed_twice),
        *_placeholder_actions(facts),
    ]


def unclaimed_jobs(facts: SyncFacts) -> frozenset[int]:
    """Return the jobs that run here on GPUs without a claim.

    Slurm runs no prolog for a job that is started again by hand before the delay after its requeue
    is over (seen with 22.05). A prolog may not be done yet, so a job counts in the second round.
    """
    claimed = {job_of_claim(claim) for claim in facts.claims}
    claimed |= jobs_of_kernels(facts.kernels)  # one may have taken the claim over
    return frozenset(
        job.job_id
        for job in facts.jobs
        if job.state == "RUNNING"
        and not job.is_placeholder
        and job.gpus.get(facts.node)
        and job.job_id in facts.running - claimed
    )


def _placeholder_actions(facts: SyncFacts) -> Iterator[SyncAction]:
    blocked = blocked_gpus(facts)
    present: set[str] = set()
    for job in sorted(_own_placeholders(facts), key=lambda job: job.state != "RUNNING"):
        holder = blocked.get(job.gpu_type)
        if holder is None or job.gpu_type in present:
            yield EndPlaceholder(job.job_id)
            continue
        present.add(job.gpu_type)
        if job.comment != PLACEHOLDER + holder:
            yield RenamePlaceholder(job.job_id, holder)
    for gpu_type, holder in blocked.items():
        if gpu_type not in present:
            yield StartPlaceholder(gpu_type, holder)


def _own_placeholders(facts: SyncFacts) -> Iterator[Job]:
    """Yield the placeholders of this node that were not ended yet."""
    for job in facts.jobs:
        is_open = job.state in WAITING or (job.state in ON_NODE and job.state != "COMPLETING")
        if job.is_placeholder and is_open and facts.node in (job.required_nodes, *job.nodes):
            yield job


def blocked_gpus(facts: SyncFacts) -> dict[str, str]:
    """Return the types of the GPUs that Slurm's jobs cannot get, with what holds each."""
    own_claims = {claim["claim_id"] for claim in facts.claims if job_of_claim(claim) is not None}
    own_kernels = {row["kernel_id"] for row in facts.kernels if row.get("claim_id") in own_claims}
    blocked = {}
    for device in facts.gres_map.devices.values():
        row = row_of(device, facts.devices)
        holders = (
            [] if row is None else sorted(_foreign_holders(row["holders"], own_claims, own_kernels))
        )
        if holders:
            blocked[device.gres_type] = holders[0]
        elif row is None or row["state"] in BLOCKING:
            blocked[device.gres_type] = "missing" if row is None else row["state"]
    return blocked


def _foreign_holders(
    holders: Sequence[Mapping[str, Any]], own_claims: set[str], own_kernels: set[str]
) -> Iterator[str]:
    for holder in holders:
        claim, kernel = holder.get("claim_id"), holder.get("kernel_id")
        if claim is not None and claim not in own_claims:
            yield claim
        if kernel is not None and kernel not in own_kernels:
            yield kernel


def _claims_to_end(facts: SyncFacts) -> Iterator[EndClaim]:
    jobs_here = {job.job_id for job in facts.jobs if job.is_on(facts.node)}
    for job in dict.fromkeys(map(job_of_claim, facts.claims)):
        if job is not None and job not in jobs_here and job not in facts.alive:
            yield EndClaim(job)
