"""`agentd plan` as text, and the devices that running kernels would hold with `--live`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from agentd.cli.output import print_text
from agentd.cli.tables import compact_ids, human_amount, limit_text, print_rows
from agentd.client import Client
from agentd.core.devices import DeviceId
from agentd.core.partition.split import Split
from agentd.core.slots import MEM, device_name_of
from agentd.views import ClaimView, KernelView


def holdings_under(split: Split, socket_path: Path) -> list[dict[str, Any]]:
    """Return the devices that kernels and claims would hold under another partition."""
    client = Client(socket_path, retry_s=0)
    devices = client.devices()
    kernels = {kernel["kernel_id"]: kernel for kernel in client.kernels()}
    claims = {claim["claim_id"]: claim for claim in client.claims()}
    rows = []
    for view in devices:
        device = split.inventory.by_stable_id.get(view["stable_id"])
        device_id = device.device_id if device else DeviceId(view["device_name"], view["id"])
        for holder in view["holders"]:
            owner: KernelView | ClaimView | None
            if "claim_id" in holder:
                owner, ids = claims.get(holder["claim_id"]), {"claim_id": holder["claim_id"]}
            else:
                owner, ids = kernels.get(holder["kernel_id"]), {"kernel_id": holder["kernel_id"]}
            if owner is None:  # it has ended since, or the caller may not see it
                continue
            allocated = owner["allocation"].get(view["device_name"], {})
            slot = next((s for s, ids in allocated.items() if view["id"] in ids), view["slot"])
            agents = split.owners(device_id)
            if device is None or device.gone:
                reason = "the device is missing"
            elif device.slot != slot:
                reason = f"holds {slot}; the device would offer {device.slot}"
            elif (held := holder["amounts"].keys()) - (offered := set(device.slot_names)) and (
                offered - held
            ):
                slot = " and ".join(held)
                reason = f"holds {slot}; the device would offer {' and '.join(device.slot_names)}"
            elif owner["agent_id"] not in agents and view["device_name"] != MEM:
                reason = f"the device would belong to {', '.join(agents) or 'no agent'}"
            else:
                continue
            agent = {"agent_id": owner["agent_id"]}
            rows.append({"device": str(device_id), **ids, **agent, "slot": slot, "reason": reason})
    return rows


def _within_limits(planned: Mapping[str, Any]) -> dict[str, str]:
    """Return the slots of a planned agent, at most its limits.

    A limit has a device name. It is left out where several slots have that device name.
    """
    limits = {name: limit["limit"] for name, limit in planned.get("limits", {}).items()}
    slots = Counter(map(device_name_of, planned["slots"]))
    return {
        slot: min(total, limits[name], key=Decimal)
        if (name := device_name_of(slot)) in limits and slots[name] == 1
        else total
        for slot, total in planned["slots"].items()
    }


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a partition: the devices and slots of each agent, and the unassigned rest."""
    print_text(f"allocation mode: {plan['allocation_mode']}")
    names = list(next(iter(plan["agents"].values()))["devices"])
    rows = [
        {
            "agent": agent,
            **{name: compact_ids(planned["devices"][name]) for name in names},
            "slots": _within_limits(planned),
            "scaling_factors": planned["scaling_factors"],
        }
        for agent, planned in plan["agents"].items()
    ]
    print_rows(rows, ["agent", *names, "slots", "scaling_factors"])
    reserved = plan["reserved"]
    print_text(
        f"reserved: cpu {compact_ids(reserved['cpu'])}, mem {human_amount('mem', reserved['mem'])}"
    )
    for name, unassigned in plan["unassigned"].items():
        is_amount = isinstance(unassigned, str)  # of memory; others are ids
        text = human_amount(name, unassigned) if is_amount else compact_ids(unassigned)
        print_text(f"unassigned: {name} {text}")
    for agent, planned in plan["agents"].items():
        for name, limit in planned.get("limits", {}).items():
            print_text(f"limit: {agent} {limit_text(name, limit)}")
    for warning in plan["warnings"]:
        print_text(f"warning: {warning}")
    for row in plan.get("held", ()):
        holder = row.get("kernel_id") or f"claim {row['claim_id']}"
        print_text(f"held: {row['device']} by {holder} of {row['agent_id']}: {row['reason']}")
