import pytest

from agentd.core.claim.claim import NameHolder
from agentd.core.conditions import Condition
from agentd.core.devices import Withholding
from agentd.errors import StateUnavailable, UnknownEngine
from agentd.plugin_api import Measurement, ProcessUse
from agentd.services.condition_sources import engine_conditions
from agentd.services.engines import MAX_REPORTING, AwaitedEngines
from agentd.services.unclaimed import MIN_USE_S, UnclaimedProcesses
from services.claims.test_claim_service import kernel, spec
from services.node import Rig
from support.fakes import FakeMemory


def engines(rig: Rig, store: FakeMemory, boot: str = "boot-1", wanted="all") -> AwaitedEngines:
    made = AwaitedEngines(rig.devices, store, boot, {"kubernetes": wanted})
    rig.devices.set_withholding(lambda found: Withholding(awaited=made.awaited_devices(found)))
    return made


async def test_devices_wait_for_an_engine_after_each_boot(rig: Rig) -> None:
    store = FakeMemory()
    made = engines(rig, store)
    assert rig.free_gpus == 0
    assert not made.statuses()[0].is_ready
    assert made.report("kubernetes", is_ready=True).is_ready
    assert rig.free_gpus == 2
    engines(rig, store)
    assert rig.free_gpus == 2
    engines(rig, store, "boot-2")
    assert rig.free_gpus == 0


async def test_claims_hold_devices_that_wait_for_an_engine(rig: Rig) -> None:
    """The engine says what it has given before it is ready, and a claim before the boot counts."""
    await rig.claims.create(spec("c1", holder=NameHolder("c1", survives_reboot=True)))
    made = engines(rig, FakeMemory(), "boot-2")
    await rig.claims.create(spec("c2", is_observed=True, devices={"cuda": ("cuda1",)}))
    assert (await rig.service.create(kernel("k1", "c1")))[0].allocation.shares
    assert made.report("kubernetes", is_ready=True).is_ready
    assert rig.free_gpus == 0


async def test_only_named_devices_wait(rig: Rig) -> None:
    made = engines(rig, FakeMemory(), wanted={"cuda": ["cuda1"]})
    assert made.statuses()[0].devices == {"cuda": ("cuda1",)}
    assert rig.free_gpus == 1


async def test_readiness_that_is_not_recorded_changes_nothing(rig: Rig) -> None:
    store = FakeMemory()
    made = engines(rig, store)
    store.is_read_only = True
    with pytest.raises(StateUnavailable):
        made.report("kubernetes", is_ready=True)
    assert rig.free_gpus == 0
    with pytest.raises(UnknownEngine, match="this node has: kubernetes"):
        made.report("slurm", is_ready=True)


async def test_engine_replaces_the_conditions_it_reports(rig: Rig) -> None:
    made = engines(rig, FakeMemory())
    first = [Condition("engine/slurm", "no placeholder", "set an account")]
    status = made.report("slurm", is_ready=False, conditions=first)
    assert (status.is_ready, status.devices) == (False, {})
    assert rig.free_gpus == 0
    assert [*engine_conditions(made)][:1] == first
    assert made.report("slurm", is_ready=True, conditions=[]).is_ready
    assert [row.engine for row in made.statuses()] == ["kubernetes", "slurm"]
    assert [row.about for row in engine_conditions(made)] == ["engine/kubernetes"]
    assert rig.free_gpus == 0
    made.report("kubernetes", is_ready=True, conditions=first)
    made.report("kubernetes", is_ready=True)
    assert [*engine_conditions(made)] == first


async def test_engines_that_report_are_few_and_have_names(rig: Rig) -> None:
    made = engines(rig, FakeMemory())
    for number in range(MAX_REPORTING):
        made.report(f"e{number}", is_ready=True, conditions=[])
    for name in ("one-more", "a b", ""):
        with pytest.raises(UnknownEngine):
            made.report(name, is_ready=True, conditions=[])
    assert made.report("e0", is_ready=False, conditions=[]).is_ready is False


@pytest.mark.parametrize("withholds", [True, False])
async def test_unclaimed_process_counts_after_a_while(rig: Rig, withholds: bool) -> None:
    watch = UnclaimedProcesses(rig.node, rig.plugins, rig.clock.steady, withholds=withholds)
    rig.devices.set_withholding(lambda _: Withholding(busy=watch.busy_reasons))
    device = rig.devices.inventory.by_name["cuda"][0]
    use = Measurement(device.stable_id, processes=[ProcessUse(17)])
    rig.plugins.measured = {"cuda": [use]}
    watch.scan()
    rig.now += MIN_USE_S - 1
    watch.scan()
    assert [*watch.conditions()] == []
    rig.now += 1
    watch.scan()
    reason = "device cuda/cuda0: used by process 17 without a claim"
    assert [*watch.conditions()] == [
        Condition("device/cuda/cuda0", reason, "end it, or claim the device for it")
    ]
    assert rig.free_gpus == (1 if withholds else 2)
    rig.plugins.measured = {}
    watch.scan()
    assert ([*watch.conditions()], rig.free_gpus) == ([], 2)


async def test_process_on_a_held_device_does_not_count(rig: Rig) -> None:
    watch = UnclaimedProcesses(rig.node, rig.plugins, rig.clock.steady, withholds=True)
    await rig.create(cuda_device=2)
    devices = rig.devices.inventory.by_name["cuda"]
    rig.plugins.measured = {
        "cuda": [Measurement(d.stable_id, processes=[ProcessUse(17)]) for d in devices]
    }
    for _ in range(2):
        watch.scan()
        rig.now += MIN_USE_S
    assert watch.pids_by_device == {}
