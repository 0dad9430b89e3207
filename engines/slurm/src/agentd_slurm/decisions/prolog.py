"""Deciding what a prolog does: claim all GPUs of the job on this node, or refuse the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from agentd_slurm.claim_ids import claim_ids, labels_of
from agentd_slurm.gres_map import GresDevice, GresMap
from agentd_slurm.jobs import Job


class NothingToClaim(NamedTuple):
    """The job starts without a claim."""

    reason: str


class ClaimDevices(NamedTuple):
    """Create a claim, once those of earlier runs have ended."""

    agent: str
    request: Mapping[str, Any]


class RefuseJob(NamedTuple):
    """The job goes back to the queue; the node stays in service."""

    reason: str


class FailProlog(NamedTuple):
    """The job must not start and the node must not get others: Slurm drains it."""

    reason: str


class PrologFacts(NamedTuple):
    """The facts of a prolog. `job` is None where slurmctld does not know the job.

    `has_processes` says that an earlier run left a claim and processes on this node.
    """

    job_id: int
    node: str
    user: str
    job: Job | None
    gres_map: GresMap | None = None
    devices: Sequence[Mapping[str, Any]] = ()
    has_processes: bool = False


PrologAction = NothingToClaim | ClaimDevices | RefuseJob | FailProlog


def indices_to_claim(
    job: Job | None, node: str
) -> frozenset[int] | NothingToClaim | RefuseJob | FailProlog:
    """Return the indices of the job's GPUs on this node, or why there is nothing to claim.

    Slurm's own variable is not a source: of a job that names two types it has the last one alone.
    """
    if job is None:
        return FailProlog("slurmctld does not know the job, which has GPUs here")
    if job.is_placeholder:
        return NothingToClaim("the job is a placeholder")
    if not job.is_on(node):
        return NothingToClaim(f"the job is not on node {node} any more")
    indices = job.gpus.get(node, frozenset[int]())
    if indices is None:
        return RefuseJob("Slurm names no indices of the job's GPUs: gres.conf needs File=")
    return indices or NothingToClaim("the job has no GPUs here")


def decide_prolog(facts: PrologFacts) -> PrologAction:
    """Return what the prolog does."""
    indices = indices_to_claim(facts.job, facts.node)
    if not isinstance(indices, frozenset):
        return indices
    assert facts.gres_map is not None  # noqa: S101 - a job with GPUs was found, so it was read
    assert facts.job is not None  # noqa: S101 - the same
    if facts.has_processes:
        return RefuseJob("processes of an earlier run of the job are left on the node")
    rows = []
    for index in sorted(indices):
        row = find_device(index, facts.gres_map, facts.devices)
        if isinstance(row, str):
            return RefuseJob(row)
        rows.append(row)
    request = {
        "slots": amounts(rows),
        "devices": ids_by_name(rows),
        "holder": {"name": next(claim_ids(facts.job_id))},
        "owner_uid": facts.job.user_id,
        "labels": {**labels_of(facts.job_id), "user": facts.user},
    }
    return ClaimDevices(facts.gres_map.agent, request)


def find_device(
    index: int, gres_map: GresMap, devices: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any] | str:
    """Return the device of an index as `/v1/devices` lists it, or why there is none."""
    device = gres_map.devices.get(index)
    if device is None:
        return f"GPU {index} of Slurm is missing from the map of devices"
    row = row_of(device, devices)
    if row is None or row["state"] == "gone":
        return f"device {device.device_id} ({device.stable_id}) is missing"
    if gres_map.agent not in row["agents"]:
        return f"device {device.device_id} does not belong to agent {gres_map.agent}"
    return row


def row_of(device: GresDevice, devices: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of a device in `/v1/devices`; None if it is not listed."""
    return next((row for row in devices if row["stable_id"] == device.stable_id), None)


def amounts(devices: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the slots of whole devices, summed."""
    sums: dict[str, Decimal] = {}
    for device in devices:
        sums[device["slot"]] = sums.get(device["slot"], Decimal()) + Decimal(device["capacity"])
    return {slot: f"{amount:f}" for slot, amount in sums.items()}


def ids_by_name(devices: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the ids of devices by their device name."""
    ids: dict[str, list[str]] = {}
    for device in devices:
        ids.setdefault(device["device_name"], []).append(device["id"])
    return ids
