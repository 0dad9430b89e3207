"""Views of devices: a device that can give nothing says why."""

from agentd.core.allocation.ledger import Ledger
from agentd.core.partition.rules import AgentRule, AllocationMode, Ids, Size, SplitRules
from agentd.core.partition.split import split
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
