"""The record of a claim: one file of JSON in the state folder, with a schema number.

A reader accepts its own schema and older ones, and ignores members that it does not know.
"""

from __future__ import annotations

import json

import msgspec

from agentd.core.allocation.ledger import Allocation
from agentd.core.claim.claim import Claim, ClaimOwner, EditsFor, NameHolder
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.record import (
    MissingRecordError,
    RecordError,
    malformed_as_record_error,
    parse_members,
    parse_time,
    read_allocation,
    written_allocation,
)
from agentd.core.names import is_name

SCHEMA = 1


class _Recorded(msgspec.Struct, frozen=True):
    """The members of a record besides the allocation."""

    schema: int
    node_id: str
    claim_id: str
    agent_id: str
    holder: ClaimOwner
    request_hash: str
    boot_id: str
    slots: dict[str, str]
    edits_for: EditsFor
    edits: ContainerEdits
    labels: dict[str, str]
    created_by: str
    owner_uid: int | None = None
    observed: bool = False


def encode(claim: Claim, node_id: str) -> str:
    """Return a claim's record as one line of JSON."""
    recorded = _Recorded(
        schema=SCHEMA,
        node_id=node_id,
        claim_id=claim.claim_id,
        agent_id=claim.agent_id,
        holder=claim.holder,
        request_hash=claim.request_hash,
        boot_id=claim.boot_id,
        slots=dict(claim.slots),
        edits_for=claim.edits_for,
        edits=claim.edits,
        labels=dict(claim.labels),
        created_by=claim.created_by,
        owner_uid=claim.owner_uid,
        observed=claim.is_observed,
    )
    content = msgspec.to_builtins(recorded)
    content["created_at"] = claim.created_at
    content["allocation"] = written_allocation(claim.allocation)
    return json.dumps(content, separators=(",", ":"))


def decode(claim_id: str, text: str) -> Claim:
    """Read the record of a claim.

    Raises:
        RecordError: it is empty, not JSON, of a newer schema or of another claim, lacks a member,
            or has one of another shape.
    """
    if not text:
        raise MissingRecordError("it is missing, empty or unreadable")
    with malformed_as_record_error():
        raw = parse_members(text, SCHEMA)
        found = msgspec.convert(raw, _Recorded)
        if found.claim_id != claim_id or not is_name(found.agent_id):
            raise RecordError("it is the record of another claim")
        return Claim(
            claim_id=claim_id,
            agent_id=found.agent_id,
            holder=found.holder,
            request_hash=found.request_hash,
            created_at=parse_time(raw["created_at"]),
            boot_id=found.boot_id,
            slots=found.slots,
            allocation=read_allocation(raw["allocation"]),
            edits_for=found.edits_for,
            edits=found.edits,
            labels=found.labels,
            created_by=found.created_by,
            owner_uid=found.owner_uid,
            is_observed=found.observed,
        )


def unreadable(claim_id: str, why: str, held: Allocation, now: float) -> Claim:
    """Return the claim of a record that cannot be read: it may hold any device."""
    return Claim(
        claim_id=claim_id,
        agent_id="",
        holder=NameHolder(claim_id, survives_reboot=True),
        request_hash="",
        created_at=now,
        boot_id="",
        allocation=held,
        problem=why,
    )
