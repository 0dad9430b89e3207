"""Deciding what a prolog does: claim all GPUs of the job on this node, or refuse the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from agentd_slurm.claim_ids import SHARED_LABELS, claim_ids, labels_of, shared_claim_id
from agentd_slurm.gres_map import GresDevice, GresMap
from agentd_slurm.jobs import ROOT, Job


class NothingToClaim(NamedTuple):
    """The job starts without a claim."""

    reason: str


class ClaimDevices(NamedTuple):
    """Create a claim, once those of earlier runs have ended.

    `request` is empty where the job has no GPU of its own. `shared` are the requests for claims of
    devices that the job shares with other jobs.
    """

    agent: str
    request: Mapping[str, Any]
    shared: Sequence[Mapping[str, Any]] = ()


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


class GpuIndices(NamedTuple):
    """The indices of a job's GPUs on this node: its own, and those that it shares with others."""

    own: frozenset[int]
    shared: frozenset[int]


def indices_to_claim(
    job: Job | None, node: str
) -> GpuIndices | NothingToClaim | RefuseJob | FailProlog:
    """Return the indices of the job's GPUs on this node, or why there is nothing to claim.

    Slurm's own variable is not a source: of a job that names two types it has the last one alone.
    """
    if job is None:
        return FailProlog("slurmctld does not know the job, which has GPUs here")
    if job.is_placeholder:
        return NothingToClaim("the job is a placeholder")
    if not job.is_on(node):
        return NothingToClaim(f"the job is not on node {node} any more")
    own, shared = job.gpus.get(node, frozenset()), job.shared.get(node, frozenset())
    if own is None or shared is None:
        return RefuseJob("Slurm names no indices of the job's GPUs: gres.conf needs File=")
    if not own | shared:
        return NothingToClaim("the job has no GPUs here")
    return GpuIndices(own, shared)


def decide_prolog(facts: PrologFacts) -> PrologAction:
    """Return what the prolog does."""
    indices = indices_to_claim(facts.job, facts.node)
    if not isinstance(indices, GpuIndices):
        return indices
    assert facts.gres_map is not None  # noqa: S101 - a job with GPUs was found, so it was read
    assert facts.job is not None  # noqa: S101 - the same
    if facts.has_processes:
        return RefuseJob("processes of an earlier run of the job are left on the node")
    own, shared = (_find_devices(facts, facts.job, part) for part in indices)
    if isinstance(own, str) or isinstance(shared, str):
        return RefuseJob(own if isinstance(own, str) else str(shared))
    labels = {**labels_of(facts.job_id), "user": facts.user}
    request = claim_request(next(claim_ids(facts.job_id)), own, facts.job.user_id, labels)
    return ClaimDevices(
        facts.gres_map.agent, request if own else {}, tuple(map(_shared_request, shared))
    )


def claim_request(
    holder: str, rows: Sequence[Mapping[str, Any]], owner_uid: int, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the request for a claim of whole devices."""
    return {
        "slots": amounts(rows),
        "devices": ids_by_name(rows),
        "holder": {"name": holder},
        "owner_uid": owner_uid,
        "labels": labels,
    }


def _shared_request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    claim_id = shared_claim_id(row["stable_id"])
    return {"claim_id": claim_id, **claim_request(claim_id, [row], ROOT, SHARED_LABELS)}


def _find_devices(
    facts: PrologFacts, job: Job, indices: Iterable[int]
) -> list[Mapping[str, Any]] | str:
    """Return the devices of indices as `/v1/devices` lists them, or why one is none."""
    assert facts.gres_map is not None  # noqa: S101 - as above
    rows = []
    for index in sorted(indices):
        row = contradiction(index, facts.gres_map, job.types.get(facts.node, {})) or find_device(
            index, facts.gres_map, facts.devices
        )
        if isinstance(row, str):
            return row
        rows.append(row)
    return rows


def contradiction(index: int, gres_map: GresMap, types: Mapping[int, str]) -> str:
    """Return what Slurm and the map say about the type of a GPU; empty if they agree."""
    device, gres_type = gres_map.devices.get(index), types.get(index)
    if device is None or gres_type is None or gres_type.lower() == device.gres_type.lower():
        return ""
    return (
        f"GPU {index} is of type {gres_type} in Slurm, but the map has {device.device_id} of type"
        f" {device.gres_type}: write the map again"
    )


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


def describe_holders(
    requests: Iterable[Mapping[str, Any]], devices: Iterable[Mapping[str, Any]]
) -> str:
    """Return who holds the devices of requests, and which of them cannot be had."""
    texts = []
    for row in devices:
        if any(row["id"] in request["devices"].get(row["device_name"], ()) for request in requests):
            holders = ", ".join(
                f"{kind} {holder[member]}"
                for holder in row["holders"]
                for kind, member in (("kernel", "kernel_id"), ("claim", "claim_id"))
                if holder.get(member)
            )
            if holders:
                texts.append(f"{row['id']} is held by {holders}")
            elif row["state"] != "ok":
                texts.append(f"{row['id']} is {row['state']}")
    return "; ".join(texts)
