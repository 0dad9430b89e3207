"""Views of devices: a device that can give nothing says why."""

import pytest

from agentd.core.allocation.ledger import Allocation, ClaimRef, Holder, Ledger, Share
from agentd.core.devices import DeviceId
from agentd.core.partition.rules import AgentRule, AllocationMode, Ids, Size, SplitRules
from agentd.core.partition.split import split
from agentd.core.slots import ONE, SlotKind
from agentd.rpc.rendering import device_view
from core.machines import GIB, cores, gpus, machine, memory


def test_device_of_no_agent_says_why_it_gives_nothing() -> None:
    inventory = machine(*cores(2), *gpus(1, 1), memory())
    agents = (AgentRule("a1", Ids(("1",)), Size(GIB), {"cuda": Ids(("cuda0",))}, described=True),)
    node = split(inventory, SplitRules(AllocationMode.MANUAL, agents, reserved_cpu=1, align=1))
    views = {
        device.device_id.id: device_view(device, node, Ledger())
        for device in node.inventory.devices
    }
    reasons = {name: view["reason"] for name, view in views.items() if view["free"] == "0"}
    assert reasons["0"] == "reserved for the system"
    assert reasons["cuda1"] == "assigned to no agent"
    assert (views["cuda0"]["reason"], views["cuda0"]["free"]) == ("", "1")


@pytest.mark.parametrize(
    ("holder", "agent", "seen", "reason"),
    [
        ("k1", "before", True, "kernel k1 of agent before holds 1"),
        (ClaimRef("c1"), "before", True, "claim c1 of agent before holds 1"),
        ("k1", "", True, "kernel k1 of agent unknown holds 1"),
        ("k1", "before", False, "kernel other holds 1"),
        ("k1", "now", True, ""),
    ],
)
def test_device_that_moved_names_who_still_holds_it(
    holder: Holder, agent: str, seen: bool, reason: str
) -> None:
    inventory = machine(*cores(2), *gpus(1), memory())
    rule = AgentRule("now", Ids(("0", "1")), Size(GIB), {"cuda": Ids(("cuda0",))}, described=True)
    node = split(inventory, SplitRules(AllocationMode.MANUAL, (rule,), align=1))
    gpu = Share(DeviceId("cuda", "cuda0"), "GPU-0", "cuda.device", SlotKind.COUNT, ONE)
    ledger = Ledger().with_holding(holder, agent, Allocation((gpu,)))
    (device,) = node.inventory.by_name["cuda"]
    view = device_view(device, node, ledger, lambda _: seen)
    assert (view["state"], view["free"], view["reason"]) == ("ok", "0", reason)
