"""Plugins that deal their devices: what becomes of their answer, and what stands in for it."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitOrder, SplitRules
from agentd.core.slots import ONE
from agentd.services.protocols import PluginListing
from core.machines import gpus
from services.node import CUDA, Rig
from support.fakes import FakeMemory

GPUS = tuple(gpus(1, 1, 1, 1))
CROSSED = PluginAssignment.of({"a": GPUS[::2], "b": GPUS[1::2]}, GPUS)
NOT_READY = "cuda: its plugin is not ready to deal its devices, so no agent has them"
NO_PLUGIN = (
    'auto-split-order is "plugin", but no plugin of this node deals its devices;'
    ' they are dealt as with "id"'
)


def node(
    *listings: PluginListing,
    memory: FakeMemory | None = None,
    agents: Sequence[str] = "ab",
    order: SplitOrder = SplitOrder.PLUGIN,
    pending: Sequence[str] = (),
) -> Rig:
    found = tuple(AgentRule(agent) for agent in agents)
    rules = SplitRules(AllocationMode.AUTO_SPLIT, found, order=order)
    return Rig(memory, rules=rules, pending=pending, listings=listings)


def dealt(rig: Rig) -> list[str]:
    """The digits of each agent's GPUs."""
    return [
        "".join(i.id.removeprefix("cuda") for i in part.devices if i.name == "cuda")
        for part in rig.devices.split.partitions.values()
    ]


def listing(dealing: PluginAssignment | None = CROSSED, devices=GPUS) -> PluginListing:
    return PluginListing("cuda", (CUDA,), devices, dealing)


def remembering(dealing: PluginAssignment = CROSSED) -> FakeMemory:
    memory = FakeMemory()
    memory.devices, memory.dealings = GPUS, {"cuda": dealing}
    return memory


async def test_dealing_decides_the_partition_and_is_remembered() -> None:
    rig = node(listing())
    assert dealt(rig) == ["02", "13"]
    assert rig.memory.dealings == {"cuda": CROSSED}
    assert rig.devices.warnings == ()


async def test_dealing_may_leave_devices_out() -> None:
    rig = node(listing(PluginAssignment.of({"a": GPUS[:1], "b": GPUS[3:]}, GPUS)))
    assert dealt(rig) == ["0", "3"]
    assert rig.devices.split.unassigned == {"cuda": ("cuda1", "cuda2")}
    assert "cuda1, cuda2 are assigned to no agent" in rig.devices.warnings


async def test_dealing_with_a_reason_is_a_warning() -> None:
    rig = node(
        listing(PluginAssignment.of({"a": GPUS[:3], "b": GPUS[3:]}, GPUS, "three are linked"))
    )
    assert dealt(rig) == ["012", "3"]
    assert rig.devices.warnings == (
        "cuda: its plugin deals unequal numbers of devices: three are linked",
    )


async def test_devices_are_dealt_by_id_if_no_plugin_deals() -> None:
    rig = node(listing(None))
    assert dealt(rig) == ["01", "23"]
    assert rig.devices.warnings == (NO_PLUGIN,)


@pytest.mark.parametrize("order", [SplitOrder.ID, SplitOrder.NUMA])
async def test_dealing_is_not_used_and_kept_in_another_order(order: SplitOrder) -> None:
    memory = remembering()
    rig = node(listing(None), memory=memory, order=order)
    assert dealt(rig) == ["01", "23"]
    assert memory.dealings == {"cuda": CROSSED}


async def test_dealing_of_a_plugin_that_deals_no_more_is_forgotten() -> None:
    memory = remembering()
    assert dealt(node(listing(None), memory=memory)) == ["01", "23"]
    assert memory.dealings == {}


async def test_kept_dealing_holds_until_its_plugin_is_ready() -> None:
    rig = node(memory=remembering(), pending=["cuda"])
    assert dealt(rig) == ["02", "13"]
    assert all(device.gone for device in rig.devices.inventory.by_name["cuda"])
    rig.plugins.ready, rig.plugins.pending = [listing()], []
    rig.devices.refresh("cuda")
    assert dealt(rig) == ["02", "13"]


@pytest.mark.parametrize(
    ("memory", "agents"),
    [(remembering(PluginAssignment({}, {})), "ab"), (remembering(), "abc")],
    ids=["of other devices", "to other agents"],
)
async def test_devices_have_no_agent_before_their_plugin_deals(memory, agents) -> None:
    rig = node(memory=memory, agents=agents, pending=["cuda"])
    assert set(dealt(rig)) == {""}
    assert NOT_READY in rig.devices.warnings
    new = PluginAssignment.of(dict.fromkeys(agents, ()) | {"b": GPUS[:1]}, GPUS)
    rig.plugins.ready, rig.plugins.pending = [listing(new)], []
    rig.devices.refresh("cuda")
    assert dealt(rig)[:2] == ["", "0"]
    assert NOT_READY not in rig.devices.warnings
    assert memory.dealings == {"cuda": new}


def restored(devices=GPUS) -> PluginListing:
    return PluginListing("cuda", (CUDA,), devices, is_restored=True)


async def test_kept_dealing_holds_while_its_plugin_is_stopped() -> None:
    memory = remembering()
    rig = node(restored(), memory=memory)
    assert dealt(rig) == ["02", "13"]
    assert memory.dealings == {"cuda": CROSSED}


@pytest.mark.parametrize("agents", ["ac", "abc"])
async def test_agents_changed_while_the_plugin_was_stopped(agents: str) -> None:
    memory = remembering()
    rig = node(restored(), memory=memory, agents=agents)
    assert set(dealt(rig)) == {""}
    assert NOT_READY in rig.devices.warnings
    new = PluginAssignment.of(dict.fromkeys(agents, ()) | {"c": GPUS[:1]}, GPUS)
    rig.plugins.ready = [listing(new)]
    rig.devices.refresh("cuda")
    assert dealt(rig)[-1] == "0"
    assert NOT_READY not in rig.devices.warnings
    assert memory.dealings == {"cuda": new}


async def test_first_listing_after_a_restart_fixes_the_slots() -> None:
    rig = node(restored(), memory=remembering(), agents="a", order=SplitOrder.ID)
    mig = replace(CUDA, name="cuda.device:1g-mig")
    part = replace(GPUS[3], stable_id="MIG-0", slot=mig.name, parent=GPUS[3].stable_id, aliases=())
    rig.plugins.ready = [PluginListing("cuda", (CUDA, mig), (*GPUS[:3], part))]
    rig.devices.refresh("cuda")
    assert rig.devices.split.agent_slots("a")[mig.name] == ONE
    assert not any("restart agentd" in warning for warning in rig.devices.warnings)
