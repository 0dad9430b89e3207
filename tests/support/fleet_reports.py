"""Reports as nodes with many slot types publish them."""

import random

import msgspec

from agentd.core.slots import SlotKind
from agentd_fleet.view.reports import FreeReport, NodeReport, SlotTypeReport

AGENTS = ("agent-1", "agent-2")
MEMORY = str(512 << 30)


def slot_names(count: int) -> list[str]:
    """Return so many slot names: cpu, mem and accelerators."""
    return ["cpu", "mem", *(f"dev{number}.unit" for number in range(count - 2))]


def slot_types(count: int) -> list[SlotTypeReport]:
    """Return the slot types of those names."""
    kinds = {"mem": SlotKind.BYTES}
    return [
        SlotTypeReport(name, kinds.get(name, SlotKind.COUNT), "1") for name in slot_names(count)
    ]


def node_report(number: int, types: int, url: str = "") -> bytes:
    """Return what there is on a node: 64 of each slot for each of two agents."""
    amounts = _amounts(types)
    return msgspec.json.encode(
        NodeReport(
            install_id=f"i{number}",
            boot_id="b",
            version="0",
            url=url or f"https://node-{number}:6001",
            agents=dict.fromkeys(AGENTS, amounts),
            capacity=amounts,
            slot_types=slot_types(types),
        )
    )


def free_report(types: int, choice: random.Random) -> bytes:
    """Return what is free on a node: cpu, mem and one accelerator are in use, by chance."""
    held = {
        "cpu": str(choice.randrange(64)),
        "mem": str(choice.randrange(512 << 30)),
        "dev0.unit": str(choice.randrange(64)),
    }
    amounts, nothing = _amounts(types) | held, dict.fromkeys(slot_names(types), "0")
    return msgspec.json.encode(
        FreeReport(dict.fromkeys(AGENTS, amounts), dict.fromkeys(AGENTS, nothing), amounts)
    )


def _amounts(types: int) -> dict[str, str]:
    return dict.fromkeys(slot_names(types), "64") | {"mem": MEMORY}
