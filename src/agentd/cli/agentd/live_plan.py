"""The part of `agentd plan --live` about devices that running kernels would hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentd.client import Client
from agentd.core.devices import DeviceId
from agentd.core.partition.split import Split
from agentd.core.slots import MEM
from agentd.views import ClaimView, KernelView


def held_under(split: Split, socket_path: Path) -> list[dict[str, Any]]:
    """Return the devices that kernels and claims would hold under another partition."""
    client = Client(socket_path, retry_s=0)
    devices = client.devices()
    kernels = {kernel["kernel_id"]: kernel for kernel in client.kernels()}
    claims = {claim["claim_id"]: claim for claim in client.claims()}
    held = []
    for row in devices:
        device = split.inventory.by_stable_id.get(row["stable_id"])
        device_id = device.device_id if device else DeviceId(row["device_name"], row["id"])
        for holder in row["holders"]:
            owner: KernelView | ClaimView | None
            if "claim_id" in holder:
                owner, named = claims.get(holder["claim_id"]), {"claim_id": holder["claim_id"]}
            else:
                owner, named = kernels.get(holder["kernel_id"]), {"kernel_id": holder["kernel_id"]}
            if owner is None:  # it has ended since, or the caller may not see it
                continue
            slots = owner["allocation"].get(row["device_name"], {})
            slot = next((s for s, ids in slots.items() if row["id"] in ids), row["slot"])
            agents = split.agents_of(device_id)
            if device is None or device.gone:
                reason = "the device is missing"
            elif device.slot != slot:
                reason = f"holds {slot}; the device would offer {device.slot}"
            elif (offered := set(device.slot_names)) - (had := holder["amounts"].keys()) and (
                had - offered
            ):
                slot = " and ".join(had)
                reason = f"holds {slot}; the device would offer {' and '.join(device.slot_names)}"
            elif owner["agent_id"] not in agents and row["device_name"] != MEM:
                reason = f"the device would belong to {', '.join(agents) or 'no agent'}"
            else:
                continue
            held.append(
                {
                    "device": str(device_id),
                    **named,
                    "agent_id": owner["agent_id"],
                    "slot": slot,
                    "reason": reason,
                }
            )
    return held
