"""The claims of the state folder, as they are when the daemon starts."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from agentd.core.claim.claim import Claim
from agentd.core.claim.record import decode, unreadable_claim
from agentd.core.kernel.adoption import quarantine_allocation, resolve_devices
from agentd.core.kernel.record import RecordError
from agentd.services.devices import NodeDevices
from agentd.services.state import NodeState


def restore_claims(
    state: NodeState, devices: NodeDevices, records: Mapping[str, str], now: float
) -> list[Claim]:
    """Charge every recorded claim to the physical devices, and return the claims.

    One whose record cannot be read holds every device.
    """
    claims = []
    for claim_id, text in records.items():
        try:
            claim = decode(claim_id, text)
        except RecordError as error:
            claim = unreadable_claim(claim_id, f"its record cannot be read: {error}", now)
        claim = resolve_claim_devices(claim, devices)
        state.put_claim(claim)
        claims.append(claim)
    return claims


def resolve_claim_devices(claim: Claim, devices: NodeDevices) -> Claim:
    """Return a claim charged to the devices of now; missing ones join the inventory."""
    if claim.unreadable_reason:
        allocation = quarantine_allocation(devices.inventory)
    else:
        allocation, missing = resolve_devices(claim.allocation, devices.inventory)
        devices.add_missing(missing)
    return claim if allocation == claim.allocation else replace(claim, allocation=allocation)
