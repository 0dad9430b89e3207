"""The record of a claim: one file of JSON in the state folder, as the record of a kernel is."""

from __future__ import annotations

import msgspec

from agentd.core.claim.claim import Claim, NameHolder
from agentd.core.kernel.record import (
    MissingRecordError,
    RecordError,
    decode_allocation,
    encode_allocation,
    malformed_as_record_error,
    parse_members,
    parse_time,
    seal,
)
from agentd.core.names import is_name


def encode(claim: Claim, node_id: str) -> str:
    """Return a claim's record as one line of JSON."""
    content = msgspec.to_builtins(claim)
    del content["unreadable_reason"]
    content |= {"node_id": node_id, "observed": content.pop("is_observed")}
    content["allocation"] = encode_allocation(claim.allocation)
    return seal(content)


def decode(claim_id: str, text: str) -> Claim:
    """Read the record of a claim.

    Raises:
        RecordError: it is empty, damaged, of a newer schema or of another claim, lacks a member,
            or has one that cannot be right.
    """
    if not text:
        raise MissingRecordError("it is missing, empty or unreadable")
    with malformed_as_record_error():
        raw = parse_members(text)
        members = {
            "created_at": parse_time(raw["created_at"]),
            "allocation": decode_allocation(raw["allocation"]),
            "is_observed": raw.get("observed", False),
            "unreadable_reason": "",
        }
        claim = msgspec.convert(raw | members, Claim)
        if claim.claim_id != claim_id or not is_name(claim.agent_id):
            raise RecordError("it is the record of another claim")
        if not claim.allocation.shares:
            raise RecordError("it holds nothing")
        return claim


def unreadable_claim(claim_id: str, reason: str, now: float) -> Claim:
    """Return the claim of a record that cannot be read; it is to be charged with every device."""
    return Claim(
        claim_id=claim_id,
        agent_id="",
        holder=NameHolder(claim_id, survives_reboot=True),
        request_hash="",
        created_at=now,
        boot_id="",
        unreadable_reason=reason,
    )
