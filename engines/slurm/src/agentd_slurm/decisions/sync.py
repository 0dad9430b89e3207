"""Deciding what keeps Slurm and agentd in step.

A GPU of several agents that Slurm's jobs cannot get is blocked in Slurm by a placeholder job for
exactly that GPU: GRES cannot be reduced on a live node. A placeholder never waits for a job: it is
for a GPU that is idle in Slurm, on a node that takes jobs, and one that Slurm does not start is
ended. A claim of a job ends once the job is over for certain: slurmctld knows no such job here, and
neither a slurmstepd of it nor a process in its cgroup is left. The answer of slurmctld alone proves
nothing: a killed one forgets its last seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentd_slurm.claim_ids import (
    ENGINE,
    is_shared_claim,
    job_of_claim,
    jobs_of_kernels,
    shared_claim_id,
)
from agentd_slurm.decisions.prolog import row_of
from agentd_slurm.gres_map import GresMap
from agentd_slurm.jobs import WAITING, Job
from agentd_slurm.placeholders import CLOSED, OPEN, Placeholder, SlurmNode

BLOCKING = frozenset({"unhealthy", "drained", "gone", "withheld"})
"""States of a device in which agentd gives nothing from it."""
UNTIL_READY = f"until engine {ENGINE} is ready"
"""The reason of a device that waits for the first look after a boot."""
LEAST_LEFT_S = 60.0
"""Seconds before its time limit at which a placeholder is ended."""
MIN_PAUSE_S, MAX_PAUSE_S, ANSWERS_PER_PAUSE = 4.0, 60.0, 20.0
"""Pauses between looks: placeholders follow within 12 s, and Slurm starts jobs 3 s late. A queue
that takes long to read is read less often."""


class StartPlaceholder(NamedTuple):
    """Block a GPU in Slurm."""

    gpu_type: str
    holder: str


class RenamePlaceholder(NamedTuple):
    """Write the present holder into the comment of a placeholder."""

    job_id: int
    holder: str


class EndPlaceholder(NamedTuple):
    """End a placeholder for a reason."""

    job_id: int
    reason: str


class GiveUpPlaceholder(NamedTuple):
    """Report a GPU that cannot be blocked, and end the placeholder that Slurm does not start."""

    job_id: int | None
    gpu_type: str
    reason: str


class EndClaim(NamedTuple):
    """Stop the kernels of an ended job's claim and release it; no job for one of a shared GPU."""

    claim_id: str
    job_id: int | None


class ClaimRunningJob(NamedTuple):
    """Claim the GPUs of a job that runs without a claim, or send it back."""

    job_id: int


SyncAction = (
    StartPlaceholder
    | RenamePlaceholder
    | EndPlaceholder
    | GiveUpPlaceholder
    | EndClaim
    | ClaimRunningJob
)


class SyncFacts(NamedTuple):
    """The facts of one look, read in this order: a job that appears in between changes nothing.

    `alive` are the jobs that may have a slurmstepd or a process in their cgroup on this node, and
    `running` those that have one for certain. `in_reservation` says that placeholders belong to a
    reservation. `postponed` are the types of the GPUs whose placeholders failed just now. `stuck`
    are the claims that `stuck_claims` returned for the look before.
    """

    node: str
    gres_map: GresMap
    claims: Sequence[Mapping[str, Any]]
    kernels: Sequence[Mapping[str, Any]]
    devices: Sequence[Mapping[str, Any]]
    jobs: Sequence[Job]
    alive: frozenset[int]
    running: frozenset[int] = frozenset()
    placeholders: Sequence[Placeholder] = ()
    slurm_node: SlurmNode = SlurmNode(frozenset({"IDLE"}))
    in_reservation: bool = False
    postponed: frozenset[str] = frozenset()
    stuck: frozenset[str] = frozenset()

    @property
    def closed_by(self) -> str:
        """The flags of the node for which it has no placeholders; empty if there are none."""
        flags = self.slurm_node.flags & CLOSED
        return ", ".join(sorted(flags - {"RESERVED"} if self.in_reservation else flags))


def decide_sync(facts: SyncFacts) -> list[SyncAction]:
    """Return what one look does."""
    return [
        *claims_to_end(facts),
        *map(ClaimRunningJob, sorted(unclaimed_jobs(facts))),
        *_placeholder_actions(facts),
    ]


def pause_s(answer_s: float) -> float:
    """Return the seconds until the next look, by those that Slurm's queue took."""
    return min(max(MIN_PAUSE_S, ANSWERS_PER_PAUSE * answer_s), MAX_PAUSE_S)


def unclaimed_jobs(facts: SyncFacts) -> frozenset[int]:
    """Return the jobs that have processes here and GPUs, but no claim.

    Slurm runs no prolog for a job that is started again by hand before the delay after its requeue
    is over (seen with 22.05). While a prolog runs, its job has no processes.
    """
    claimed = {job_of_claim(claim) for claim in facts.claims}
    claimed |= jobs_of_kernels(facts.kernels)  # one may have taken the claim over
    claim_ids = {claim["claim_id"] for claim in facts.claims}
    return frozenset(
        job.job_id
        for job in facts.jobs
        if job.state == "RUNNING" and job.job_id in facts.running
        if (job.gpus.get(facts.node) and job.job_id not in claimed)
        or shared_claims(job, facts) - claim_ids
    )


def shared_claims(job: Job, facts: SyncFacts) -> set[str]:
    """Return the ids of the claims of the GPUs that a job shares with others on this node."""
    devices = facts.gres_map.devices
    indices = job.shared.get(facts.node) or ()
    return {shared_claim_id(devices[index].stable_id) for index in indices if index in devices}


def _placeholder_actions(facts: SyncFacts) -> Iterator[SyncAction]:
    blocked = wanted_placeholders(facts)
    idle = {
        device.gres_type
        for index, device in facts.gres_map.devices.items()
        if index not in facts.slurm_node.used
    }
    present: set[str] = set()
    for row in sorted(facts.placeholders, key=lambda row: row.state != "RUNNING"):
        if reason := _end_reason(row, facts, blocked.keys() - present, idle):
            yield EndPlaceholder(row.job_id, reason)
            continue
        present.add(row.gpu_type)
        if row.state in WAITING and row.reason != "None":
            yield GiveUpPlaceholder(row.job_id, row.gpu_type, row.reason)
        elif row.holder != blocked[row.gpu_type]:
            yield RenamePlaceholder(row.job_id, blocked[row.gpu_type])
    counts = Counter(device.gres_type for device in facts.gres_map.devices.values())
    for gpu_type, holder in blocked.items():
        if counts[gpu_type] > 1:
            yield GiveUpPlaceholder(None, gpu_type, "several GPUs have this type in gres.conf")
        elif gpu_type in idle - present - facts.postponed and facts.slurm_node.flags <= OPEN:
            yield StartPlaceholder(gpu_type, holder)


def _end_reason(
    row: Placeholder, facts: SyncFacts, open_types: Collection[str], idle: Collection[str]
) -> str:
    """Return why a placeholder is ended; empty if it stays."""
    if row.gpu_type not in open_types:
        return facts.closed_by or "its GPU is free or blocked by another one"
    if row.time_left_s < LEAST_LEFT_S:
        return "its time limit is near"
    return "a job has its GPU" if row.state in WAITING and row.gpu_type not in idle else ""


def wanted_placeholders(facts: SyncFacts) -> dict[str, str]:
    """Return the types of the GPUs that placeholders block, with what holds each."""
    return {} if facts.closed_by else blocked_gpus(facts)


def blocked_gpus(facts: SyncFacts) -> dict[str, str]:
    """Return the types of the shared GPUs that Slurm's jobs cannot get, with what holds each."""
    gres_map = facts.gres_map
    own_claims = {
        row["claim_id"]
        for row in facts.claims
        if job_of_claim(row) is not None or is_shared_claim(row)
    } - (stuck_claims(facts).keys() & facts.stuck)
    own_kernels = {row["kernel_id"] for row in facts.kernels if row.get("claim_id") in own_claims}
    rows = {device: row_of(device, facts.devices) for device in gres_map.devices.values()}
    shared = {
        device
        for device, row in rows.items()
        if row is not None and set(row["agents"]) - {gres_map.agent}
    }
    blocked = {}
    for device, row in rows.items():
        if row is None:
            if shared:
                blocked[device.gres_type] = "missing"
        elif device in shared:
            holders = sorted(_foreign_holders(row, own_claims, own_kernels))
            waits_for_us = row["state"] == "withheld" and row["reason"] == UNTIL_READY
            if holders or (row["state"] in BLOCKING and not waits_for_us):
                blocked[device.gres_type] = holders[0] if holders else row["state"]
    return blocked


def stuck_claims(facts: SyncFacts) -> dict[str, int]:
    """Return the claims, with their jobs, of jobs that are over in Slurm but run on here."""
    over = facts.running - {job.job_id for job in facts.jobs if job.is_on(facts.node)}
    jobs = ((row["claim_id"], job_of_claim(row)) for row in facts.claims)
    return {claim_id: job for claim_id, job in jobs if job in over}


def holders_of(request: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return who holds the devices of a request for a claim."""
    rows = (row for row in devices if row["id"] in request["devices"].get(row["device_name"], ()))
    return [holder for row in rows for holder in _foreign_holders(row)]


def _foreign_holders(
    device: Mapping[str, Any], own_claims: Collection[str] = (), own_kernels: Collection[str] = ()
) -> Iterator[str]:
    for holder in device["holders"]:
        claim, kernel = holder.get("claim_id"), holder.get("kernel_id")
        if claim is not None and claim not in own_claims:
            yield claim
        if kernel is not None and kernel not in own_kernels:
            yield kernel


def claims_to_end(facts: SyncFacts) -> Iterator[EndClaim]:
    """Yield the claims whose jobs are over; a process of no job may use any shared GPU."""
    jobs_here = {job.job_id: job for job in facts.jobs if job.is_on(facts.node)}
    in_use = set[str]().union(*(shared_claims(job, facts) for job in jobs_here.values()))
    for claim in facts.claims:
        job_id, claim_id = job_of_claim(claim), claim["claim_id"]
        if job_id is not None and job_id not in jobs_here and job_id not in facts.alive:
            yield EndClaim(claim_id, job_id)
        elif is_shared_claim(claim) and claim_id not in in_use and facts.running <= {*jobs_here}:
            yield EndClaim(claim_id, None)
