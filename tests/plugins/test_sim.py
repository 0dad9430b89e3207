import pytest

from agentd.config.plugins import PluginTable
from agentd.core.slots import ONE
from agentd.plugin_api import Features
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.host import PluginHost
from agentd_sim import SimPlugin
from support.fakes import FakeMemory


async def listing(name: str = "cuda", **settings):
    table = PluginTable(name=name, plugin="sim", settings=settings)
    rules = AssignmentRules(("a", "b"), FakeMemory())
    host = PluginHost([table], features=Features("process"), dealing_rules=rules)
    await host.open(5)
    assert host.problems() == []
    (found,) = host.listings()
    await host.close()
    return found


async def test_the_settings_of_the_design() -> None:
    found = await listing(count=5, mode="device", memory="80g", **{"numa-nodes": 2})
    assert [d.device_id.id for d in found.devices] == [f"cuda{n}" for n in range(5)]
    assert [d.numa_node for d in found.devices] == [0, 0, 0, 1, 1]
    assert {d.attributes["memory"] for d in found.devices} == {str(80 * 2**30)}
    (slot,) = found.slot_types
    assert (slot.name, slot.quantum) == ("cuda.device", ONE)
    shares = await listing(count=1, mode="shares")
    assert (shares.slot_types[0].name, shares.slot_types[0].quantum) == ("cuda.shares", ONE // 100)
    finer = await listing(count=1, mode="shares", quantum="0.001")
    assert finer.slot_types[0].quantum == 1000


async def test_devices_one_by_one() -> None:
    entries = [{"id": "a0", "capacity": "0.05", "numa-node": 0}, {"id": "a1", "stable-id": "X"}]
    found = await listing(mode="shares", devices=entries)
    assert [(d.device_id.id, d.capacity, d.numa_node) for d in found.devices] == [
        ("a0", ONE // 20, 0),
        ("a1", ONE, None),
    ]
    assert found.devices[1].stable_id == "X"


@pytest.mark.parametrize("mode", ["device", "shares"])
async def test_memory_slot_is_offered_in_any_mode(mode: str) -> None:
    entries = [{"id": "a0"}, {"id": "a1", "memory": "40g"}]
    settings = {"memory-slot": True, "memory-quantum": "1g"}
    found = await listing(mode=mode, devices=entries, memory="80g", **settings)
    slot = found.slot_types[1]
    assert (slot.name, slot.primary, slot.quantum) == ("cuda.mem", f"cuda.{mode}", 1 << 30)
    assert [d.capacity_of("cuda.mem") >> 30 for d in found.devices] == [80, 40]
    assert [d.attributes["memory"] for d in found.devices] == [str(80 << 30), str(40 << 30)]


async def test_a_link_to_an_unknown_device_is_not_taken() -> None:
    table = PluginTable(name="cuda", plugin="sim", settings={"count": 2, "links": [["x", "cuda1"]]})
    host = PluginHost([table], features=Features("process"))
    await host.open(5)
    reasons = {status.name: status.reason for status in host.statuses()}
    assert "ValueError: links: unknown devices x" in reasons["cuda"]
    await host.close()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "count"),
        ({"count": 1, "devices": []}, "count"),
        ({"count": -1}, "count"),
        ({"count": True}, "count"),
        ({"count": 1, "mode": "half"}, "mode"),
        ({"count": 1, "quantum": "2"}, "quantum"),
        ({"count": 1, "memory-slot": True}, "memory-slot"),
        ({"count": 1, "memory-slot": True, "memory": "1k"}, "memory-slot"),
        ({"count": 1, "memory-slot": 1, "memory": "1g"}, "memory-slot"),
        (
            {"devices": [{"id": "a", "memory": "1g"}, {"id": "b"}], "memory-slot": True},
            "memory-slot",
        ),
        ({"devices": [{"id": "a", "memory": "x"}]}, "devices.0.memory"),
        ({"count": 1, "links": "a0"}, "links"),
        ({"count": 1, "links": [["a0"]]}, "links"),
        ({"count": 1, "quantum": "0.0000001"}, "quantum"),
        ({"devices": [{"id": "a"}, {"id": "a"}]}, "devices"),
        ({"devices": [{"id": "a", "capacity": "1e3"}]}, "devices.0.capacity"),
        ({"count": 1, "memory": "many"}, "memory"),
        ({"count": 1, "numa-nodes": 0}, "numa-nodes"),
        ({"count": 1, "cuont": 2}, "cuont"),
        ({"devices": "a"}, "devices"),
        ({"devices": [{"id": "a b"}]}, "devices.0.id"),
        ({"devices": [{}]}, "devices.0.id"),
        ({"devices": [{"id": "a", "numa": 0}]}, "devices.0.numa"),
    ],
)
def test_wrong_settings_are_named(settings, key) -> None:
    assert key in [problem.key for problem in SimPlugin.validate(settings)]
