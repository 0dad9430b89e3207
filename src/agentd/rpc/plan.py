"""The JSON of `agentd plan`."""

from __future__ import annotations

from collections.abc import Sequence

from agentd.core.partition.split import Partition, Split
from agentd.core.slots import MEM, SlotKind, format_amount
from agentd.rpc.rendering import device_ids_by_name, format_amounts


def plan_view(split: Split, warnings: Sequence[str]) -> dict[str, object]:
    """Return a partition as `agentd plan --json` prints it, with the node's warnings."""
    return {
        "allocation_mode": split.mode.value,
        "agents": {
            agent_id: {
                "devices": device_ids_by_name(split, agent_id),
                "slots": format_amounts(split.agent_slots(agent_id).items(), split.inventory),
                "scaling_factors": {
                    name: format(factor, "f")
                    for name, factor in split.scaling_factors(agent_id).items()
                },
                **_planned_limits(partition, split),
            }
            for agent_id, partition in split.partitions.items()
        },
        "reserved": {
            "cpu": list(split.reserved_cpu),
            "mem": format_amount(split.reserved_mem, SlotKind.BYTES),
        },
        "unassigned": {
            **{name: list(ids) for name, ids in split.unassigned.items()},
            **({MEM: str(split.unassigned_memory)} if split.unassigned_memory else {}),
        },
        "warnings": list(warnings),
    }


def _planned_limits(partition: Partition, split: Split) -> dict[str, object]:
    if not partition.limits:
        return {}
    return {
        "limits": {
            name: {"limit": str(limit), "guaranteed": name in split.guaranteed}
            for name, limit in partition.limits.items()
        }
    }
