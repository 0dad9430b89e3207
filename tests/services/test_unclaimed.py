from structlog.testing import capture_logs

from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.plugin_api import Measurement, ProcessUse
from agentd.services.protocols import PluginListing
from agentd.services.unclaimed import MAX_SHOWN, MIN_USE_S, UnclaimedProcesses
from core.machines import gpus
from services.node import Rig


async def test_unclaimed_device_counts_whichever_pid_uses_it(rig: Rig) -> None:
    watch = UnclaimedProcesses(rig.node, rig.plugins, rig.clock.steady, withholds=False)
    device = rig.devices.inventory.by_name["cuda"][0]
    for pid in (17, 18, 19):
        use = Measurement(device.stable_id, processes=[ProcessUse(pid)])
        rig.plugins.measured = {"cuda": [use]}
        watch.scan()
        rig.now += 6
    assert watch.pids_by_device == {device.device_id: (19,)}


async def test_many_unclaimed_processes_are_counted_not_listed(rig: Rig) -> None:
    watch = UnclaimedProcesses(rig.node, rig.plugins, rig.clock.steady, withholds=False)
    device = rig.devices.inventory.by_name["cuda"][0]
    uses = [ProcessUse(pid) for pid in range(1, 30_001)]
    rig.plugins.measured = {"cuda": [Measurement(device.stable_id, processes=uses)]}
    with capture_logs() as logged:
        for _ in range(2):
            watch.scan()
            rig.now += MIN_USE_S
    (condition,) = watch.conditions()
    assert condition.reason.endswith("7, 8 and 29992 more without a claim")
    (line,) = logged
    assert (line["pids"], line["count"]) == ([*range(1, MAX_SHOWN + 1)], 30_000)


async def test_process_on_a_partly_held_device_does_not_count() -> None:
    shares = SlotType("cuda.shares", SlotKind.COUNT, ONE // 100)
    gpu = PluginListing("cuda", (shares,), tuple(gpus(1, slot="cuda.shares")))
    rig = Rig(listings=[gpu])
    await rig.relist()
    watch = UnclaimedProcesses(rig.node, rig.plugins, rig.clock.steady, withholds=True)
    await rig.create(cuda_shares="0.01")
    (device,) = rig.devices.inventory.by_name["cuda"]
    use = Measurement(device.stable_id, processes=[ProcessUse(17)])
    rig.plugins.measured = {"cuda": [use]}
    for _ in range(2):
        watch.scan()
        rig.now += MIN_USE_S
    assert watch.pids_by_device == {}
