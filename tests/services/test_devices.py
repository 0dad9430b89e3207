from fractions import Fraction

import pytest
from msgspec.structs import replace

from agentd.core.claim.claim import ClaimSpec, NameHolder
from agentd.core.conditions import Condition
from agentd.core.devices import Device, DeviceId, Health, Inventory, Withholding
from agentd.core.listings import restore_last_form
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.partition.rules import (
    AgentRule,
    AllocationMode,
    Amount,
    Count,
    Percent,
    Size,
    SplitOrder,
    SplitRules,
)
from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.errors import Conflict, InsufficientResource, PluginUnavailable, UnknownDevice
from agentd.plugin_api import ConditionInfo
from agentd.services.protocols import PluginListing
from core.machines import gpus
from services.node import CUDA, Rig
from support.fakes import FakeMemory


async def test_a_late_plugin_takes_nothing_from_the_one_that_serves(rig: Rig) -> None:
    """The same holds if its plugin comes first; the next start decides again."""
    await rig.create(cuda_device=2)
    npu = SlotType("npu.device", SlotKind.COUNT, ONE)
    same = [replace(d, device_id=DeviceId("npu", d.device_id.id)) for d in gpus(1, 1)]
    new = replace(same[0], device_id=DeviceId("npu", "npu9"), stable_id="N", aliases=())
    rig.plugins.ready.insert(0, PluginListing("npu", (npu,), (*same, new)))
    rig.devices.refresh("npu")
    assert [d.stable_id for d in rig.devices.inventory.by_name["npu"]] == ["N"]
    assert len(rig.devices.inventory.by_name["cuda"]) == 2
    assert rig.free_gpus == 0
    assert sum("withheld" in warning for warning in rig.devices.warnings) == 2
    rig.devices.refresh("npu")
    assert not any(" is new" in warning for warning in rig.devices.warnings)
    again = Rig(rig.memory, listings=rig.plugins.ready)
    again.runtime = rig.runtime
    again.service.runtimes = {"fake": rig.runtime}
    await again.reconciler.relist(rig.runtime)
    served = again.devices.inventory.by_name["npu"]
    assert [d.stable_id for d in served] == ["GPU-cuda-0", "GPU-cuda-1", "N"]
    ledger = again.state.ledger
    assert all(ledger.holders(device.device_id) for device in served[:2])
    with pytest.raises(InsufficientResource):
        await again.create("k2", npu_device=2)


async def test_a_plugin_reports_conditions_of_itself_and_its_devices(rig: Rig) -> None:
    rig.plugins.ready[0] = replace(
        rig.plugins.ready[0],
        conditions=(
            ConditionInfo("7 of 8 GPUs answer", "look at the kernel log"),
            ConditionInfo("nobody watches cuda1", stable_id="GPU-cuda-1"),
        ),
    )
    assert [*rig.devices.conditions()] == [
        Condition("plugin/cuda", "7 of 8 GPUs answer", "look at the kernel log"),
        Condition("device/cuda/cuda1", "nobody watches cuda1"),
    ]
    rig.plugins.failed["npu"] = "no driver"
    *_, last = rig.devices.conditions()
    retry = "to retry at once: agentctl plugins retry npu"
    assert last == Condition("plugin/npu", "plugin npu is failed: no driver", retry)
    assert rig.devices.warnings[0] == "7 of 8 GPUs answer (look at the kernel log)"


async def test_failing_peer_changes_nothing(rig: Rig) -> None:
    rig.plugins.failed["bad"] = "it was killed"
    extra = replace(gpus(1)[0], device_id=DeviceId("cuda", "cuda9"), stable_id="X", aliases=())
    ready = rig.plugins.ready[0]
    rig.plugins.ready[0] = replace(ready, devices=(*ready.devices, extra))
    before = rig.devices.generation
    for _ in range(3):
        rig.devices.refresh("bad")
    assert (rig.devices.generation, len(rig.devices.inventory.by_name["cuda"])) == (before, 2)


async def test_whole_gpus_that_are_parts_now_hold_back_their_parts(rig: Rig) -> None:
    kernel = await rig.create(cuda_device=1)
    held = kernel.allocation.shares_by_device_name("cuda")[0].device_id.id
    mig = SlotType("cuda.device:1g-mig", SlotKind.UNIQUE, ONE)
    first, second = gpus(1, 1)
    taken = next(d for d in (first, second) if d.device_id.id == held)
    parts = tuple(
        replace(
            taken, device_id=DeviceId("cuda", f"{held}:{n}"), stable_id=f"MIG-{n}", slot=mig.name,
            kind=SlotKind.UNIQUE, parent=taken.stable_id, aliases=(),
        )
        for n in range(2)
    )  # fmt: skip
    again = Rig(rig.memory, listings=[PluginListing("cuda", (CUDA, mig), parts)])
    again.service.runtimes = {"fake": rig.runtime}
    await again.reconciler.relist(rig.runtime)
    spec = replace(rig.spec("k2"), slots={"cuda.device:1g-mig": 1}, spec_hash="other")
    with pytest.raises(InsufficientResource):
        await again.service.create(spec)


async def test_withholding_that_changed_is_applied_in_two_passes(rig, monkeypatch) -> None:
    """Each build is of every device of the node."""
    built: list[int] = []
    build = Inventory.of
    reasons: dict[DeviceId, str] = {}
    rig.devices.set_withholding(lambda _: Withholding(busy=reasons))
    monkeypatch.setattr(Inventory, "of", lambda *args: built.append(1) or build(*args))
    before = rig.devices.generation
    rig.devices.update_withholding()
    assert (rig.devices.generation, rig.free_gpus) == (before, 2)
    built.clear()
    reasons[DeviceId("cuda", "cuda0")] = "pid 7"
    rig.devices.update_withholding()
    assert (rig.devices.generation, rig.free_gpus, len(built)) == (before + 1, 1, 2)


async def test_listing_raises_the_generation_only_when_it_changes(rig) -> None:
    await rig.create(cuda_device=1)
    first, second = gpus(1, 1)
    before = rig.devices.generation
    rig.devices.refresh("cuda")
    assert rig.devices.generation == before
    sick = replace(second, health=Health.UNHEALTHY, reason="Xid 79")
    third = replace(second, device_id=DeviceId("cuda", "cuda7"), stable_id="GPU-new")
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (first, sick, third))]
    rig.devices.refresh("cuda")
    assert (rig.devices.generation, rig.free_gpus) == (before + 1, 1)
    assert rig.devices.find("cuda", "GPU-new").device_id.id == "cuda7"
    await rig.create("k7", cuda_device=1)
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (first, second))]
    rig.devices.refresh("cuda")
    assert rig.free_gpus == 1
    gone = rig.devices.find("cuda", "cuda7")
    assert (gone.gone, gone.reason) == (True, "not listed by its plugin any more")
    assert list(rig.state.ledger.holders(gone.device_id)) == ["k7"]


async def test_new_device_has_no_agent_outside_shared_mode() -> None:
    agents = (AgentRule("a"), AgentRule("b"))
    rig = Rig(rules=SplitRules(AllocationMode.AUTO_SPLIT, agents))
    third = replace(gpus(1)[0], device_id=DeviceId("cuda", "cuda7"), stable_id="N", aliases=())
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (*gpus(1, 1), third))]
    rig.devices.refresh("cuda")
    assert rig.devices.split.unassigned == {"cuda": ("cuda7",)}
    assert "cuda7 is new; restart agentd to assign it" in rig.devices.warnings
    assert [p.members & {third.device_id} for p in rig.devices.split.partitions.values()] == [
        frozenset(), frozenset(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rules",
    [
        SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b"))),
        SplitRules(
            AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b")), order=SplitOrder.PLUGIN
        ),
        SplitRules(
            AllocationMode.MANUAL,
            tuple(
                AgentRule(name, Count(1), Size(2**30), {"cuda": rule}, described=True)
                for name, rule in (("a", Percent(Fraction(50))), ("b", Count(2)))
            ),
        ),
    ],
    ids=["auto-split", "plugin", "manual"],
)
@pytest.mark.parametrize("is_hot", [True, False])
async def test_replaced_card_moves_no_other_device(rules: SplitRules, is_hot: bool) -> None:
    cards = gpus(1, 1, 1, 1)
    dealing = PluginAssignment.of({"a": cards[:2], "b": cards[2:]}, cards)
    memory = FakeMemory()
    rig = Rig(memory, rules=rules, listings=[PluginListing("cuda", (CUDA,), (*cards,), dealing)])
    new = replace(cards[1], stable_id="GPU-new")
    now = PluginListing("cuda", (CUDA,), (cards[0], new, *cards[2:]), dealing)

    def owners() -> list[str]:
        parts = rig.devices.split.partitions.values()
        return [" ".join(d.id for d in part.devices if d.name == "cuda") for part in parts]

    if is_hot:
        rig.plugins.ready = [now]
        rig.devices.refresh("cuda")
        assert owners() == ["cuda0 cuda1", "cuda2 cuda3"]
        rig.devices.forget("cuda", "cuda1", holders=())
    for _ in range(2):
        rig = Rig(memory, rules=rules, listings=[now])
        assert owners() == ["cuda0 cuda4", "cuda2 cuda3"]
    if not is_hot:
        rig.devices.forget("cuda", "cuda1", holders=())
        assert owners() == ["cuda0 cuda4", "cuda2 cuda3"]
        rig = Rig(memory, rules=rules, listings=[now])
        assert owners() == ["cuda0 cuda4", "cuda2 cuda3"]


async def test_many_that_appear_are_one_warning() -> None:
    rig = Rig(rules=SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b"))))
    listed = tuple(gpus(*[1] * 302))
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), listed)]
    rig.devices.refresh("cuda")
    told = [warning for warning in rig.devices.warnings if "restart agentd" in warning]
    first = "cuda2, cuda3, cuda4, cuda5"
    assert told == [f"{first} and 296 more are new; restart agentd to assign them"]


async def test_plugins_hear_of_each_step_of_a_kernel_once(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    await rig.service.stop("k1")
    await rig.service.remove("k1")
    assert rig.plugins.told == [
        ("before-create", "k1"),
        ("after-start", "k1"),
        ("before-stop", "k1"),
        ("after-stop", "k1"),
    ]


def late(rig: Rig, *names: str) -> None:
    for name in names:
        slot = SlotType(f"{name}.device", SlotKind.COUNT, ONE)
        device = replace(
            gpus(1)[0], device_id=DeviceId(name, f"{name}0"), stable_id=f"S-{name}",
            slot=slot.name, aliases=(),
        )  # fmt: skip
        rig.plugins.pending.remove(name)
        rig.plugins.ready.append(PluginListing(name, (slot,), (device,)))


async def test_two_plugins_that_open_late_together_both_join() -> None:
    limits = {"npu": Amount("1"), "tpu": Amount("1")}
    rig = Rig(
        rules=SplitRules(AllocationMode.SHARED, (AgentRule("a", limits=limits),)),
        pending=("npu", "tpu"),
    )
    late(rig, "npu", "tpu")
    for name in ("npu", "tpu"):
        rig.devices.refresh(name)
    assert set(rig.devices.partition("a").limits) == {"npu", "tpu"}
    assert not any("does not fit" in warning for warning in rig.devices.warnings)


async def test_only_a_trouble_that_ends_is_cleared(rig: Rig) -> None:
    with pytest.raises(Conflict, match="cuda/cuda0 is not unhealthy; there is nothing to clear"):
        await rig.devices.clear("cuda", "cuda0")
    first, second = gpus(1, 1)
    sick = replace(first, health=Health.UNHEALTHY, reason="Xid 13")
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (sick, second))]
    rig.devices.refresh("cuda")
    cleared = await rig.devices.clear("cuda", first.stable_id)
    assert (cleared.device_id.id, cleared.health) == ("cuda0", Health.HEALTHY)
    with pytest.raises(UnknownDevice):
        await rig.devices.clear("cuda", "cuda9")


async def test_trouble_that_needs_a_clear_outlives_the_plugin(rig: Rig) -> None:
    first, second = gpus(1, 1)
    text = "Xid 79; waits for agentctl clear"
    xid = replace(first, health=Health.UNHEALTHY, reason=text, needs_clear=text)
    other = replace(second, health=Health.UNHEALTHY, reason=text, needs_clear=text)

    def list_now(*devices: Device) -> str:
        rig.plugins.ready = [PluginListing("cuda", (CUDA,), devices)]
        rig.devices.refresh("cuda")
        return rig.devices.find("cuda", "cuda0").reason

    assert list_now(xid, other) == text
    assert list_now(first, second) == text
    lost = replace(first, health=Health.UNHEALTHY, reason="GPU is lost")
    assert list_now(lost, second) == f"GPU is lost; {text}"
    saved = rig.devices._store.load_devices()
    kept = restore_last_form([first], saved.devices, [first.slot])
    assert [(device.health, device.reason) for device in kept] == [(Health.UNHEALTHY, text)]
    list_now(first, second)
    await rig.devices.clear("cuda", "cuda0")
    health = [device.health for device in rig.devices.inventory.by_name["cuda"]]
    assert health == [Health.HEALTHY, Health.UNHEALTHY]
    assert [d.needs_clear for d in rig.devices.inventory.by_name["cuda"]] == ["", text]


async def test_clear_waits_for_a_plugin_that_is_not_ready() -> None:
    text = "Xid 79; waits for agentctl clear"
    xid = replace(gpus(1)[0], health=Health.UNHEALTHY, reason=text, needs_clear=text)
    rig = Rig(listings=[PluginListing("cuda", (CUDA,), (xid,))])
    await rig.devices.stop_plugin("cuda", "ann")
    with pytest.raises(PluginUnavailable, match="plugin cuda is stopped by ann"):
        await rig.devices.clear("cuda", "cuda0")
    late = Rig(rig.memory, listings=[], pending=["cuda"])
    with pytest.raises(PluginUnavailable, match="plugin cuda is pending"):
        await late.devices.clear("cuda", "cuda0")


async def test_missing_device_is_cleared_for_its_return() -> None:
    (healthy,) = gpus(1)
    text = "Xid 79; waits for agentctl clear"
    xid = replace(healthy, health=Health.UNHEALTHY, reason=text, needs_clear=text)
    rig = Rig(listings=[PluginListing("cuda", (CUDA,), (xid,))])
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), ())]
    rig.devices.refresh("cuda")
    assert (await rig.devices.clear("cuda", "cuda0")).gone
    with pytest.raises(Conflict, match="there is nothing to clear"):
        await rig.devices.clear("cuda", "cuda0")
    again = Rig(rig.memory, listings=[PluginListing("cuda", (CUDA,), (healthy,))])
    assert again.devices.find("cuda", "cuda0").is_usable


def test_clear_of_a_part_ends_what_its_whole_has() -> None:
    first, second, other = gpus(1, 1, 1)
    parts = [
        replace(part, parent="GPU-1", needs_clear=text)
        for part, text in ((first, "Xid 79"), (second, "Xid 79"), (other, "Xid 48"))
    ]
    cleared = Inventory.of([CUDA], parts).with_cleared(parts[0])
    assert [device.needs_clear for device in cleared.devices] == ["", "", "Xid 48"]


async def test_device_known_from_a_record_returns_when_listed(rig: Rig) -> None:
    (gpu,) = gpus(1)
    hearsay = replace(
        gpu, device_id=DeviceId("cuda", "cuda9"), stable_id="N", aliases=(), capacity=ONE // 4,
        gone=True, is_hearsay=True,
    )  # fmt: skip
    rig.devices.add_missing([hearsay])
    assert rig.devices.find("cuda", "N").gone
    real = replace(hearsay, capacity=ONE, gone=False, is_hearsay=False)
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (*gpus(1, 1), real))]
    rig.devices.refresh("cuda")
    found = rig.devices.find("cuda", "N")
    assert (found.capacity, found.gone, found.is_hearsay) == (ONE, False, False)
    assert found.device_id in rig.devices.partition("a").members


@pytest.mark.parametrize("is_claimed", [False, True], ids=["kernel", "claim"])
async def test_started_plugin_gives_no_gpu_that_is_held(is_claimed: bool, rig: Rig) -> None:
    """The plugin was stopped, and the saved devices are lost."""
    if is_claimed:
        spec = ClaimSpec("c1", "a", NameHolder("c1"), "c1", slots={"cuda.device": 1})
        await rig.claims.create(spec)
    else:
        await rig.create(cuda_device=1)
    rig.memory.devices = ()
    again = Rig(rig.memory, listings=[], pending=["cuda"])
    again.recall()
    again.plugins.pending = []
    again.plugins.ready = rig.plugins.ready
    await again.devices.start_plugin("cuda")
    assert again.free_gpus == 1


async def test_plugin_in_another_mode_that_no_rule_fits_is_refused() -> None:
    """It was stopped, and changed its slots, before agentd started again."""
    limits = {"cuda": Amount("0.5")}
    rules = SplitRules(AllocationMode.SHARED, (AgentRule("a", limits=limits),))
    shares = SlotType("cuda.shares", SlotKind.COUNT, 10000)
    before = tuple(replace(device, slot="cuda.shares") for device in gpus(1, 1))
    stopped = PluginListing("cuda", (shares,), before, is_restored=True)
    rig = Rig(rules=rules, listings=[stopped])
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), tuple(gpus(1, 1)))]
    await rig.devices.start_plugin("cuda")
    for _ in range(2):
        rig.devices.refresh("cuda")
        (refusal,) = [c for c in rig.devices.conditions() if "opened late" in c.reason]
        assert (refusal.about, refusal.agents) == ("plugin/cuda", ("a",))
    reason = "offers cuda.device now; restart agentd to use it"
    assert [d.reason for d in rig.devices.inventory.by_name["cuda"]] == [reason] * 2
    rig.plugins.ready = [replace(stopped, is_restored=False)]
    rig.devices.refresh("cuda")
    assert [*rig.devices.conditions()] == []


async def test_second_plugin_of_a_device_is_a_condition_until_it_stops() -> None:
    npu = SlotType("npu.device", SlotKind.COUNT, ONE)
    same = replace(gpus(1)[0], device_id=DeviceId("npu", "npu0"), slot=npu.name)
    both = [PluginListing("cuda", (CUDA,), tuple(gpus(1))), PluginListing("npu", (npu,), (same,))]
    rig = Rig(listings=both)
    reason = "npu/npu0 is the same device as cuda/cuda0, which serves it; withheld"
    for _ in range(2):
        assert [*rig.devices.conditions()] == [Condition("plugin/npu", reason)]
        rig.devices.refresh("npu")
    rig.plugins.ready = [both[0], replace(both[1], devices=())]
    rig.devices.refresh("npu")
    assert [*rig.devices.conditions()] == []


async def test_gpu_that_tells_its_address_late_is_excluded() -> None:
    first, second = gpus(1, 1)
    lost = replace(first, aliases=(), health=Health.UNHEALTHY, reason="no answer")
    rules = SplitRules(
        AllocationMode.AUTO_SPLIT, (AgentRule("a"),), exclude={"cuda": first.aliases}
    )
    rig = Rig(rules=rules, listings=[PluginListing("cuda", (CUDA,), (lost, second))])
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (first, second))]
    rig.devices.refresh("cuda")
    assert rig.devices.find("cuda", "cuda0").withheld_reason == "excluded in [plugins.cuda]"
    assert (rig.devices.split.owners(first.device_id), rig.free_gpus) == ([], 1)
    assert rig.devices.split.unassigned == {}
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (lost, second))]
    rig.devices.refresh("cuda")
    assert rig.devices.find("cuda", "cuda0").is_excluded, "its last address counts"


async def test_a_device_that_a_plugin_says_is_absent_can_be_forgotten(rig: Rig) -> None:
    again = Rig(rig.memory)
    again.plugins.ready, again.plugins.absent = [], {"cuda": "no GPU on the bus"}
    again.devices.discover()
    assert again.devices.find("cuda", "cuda0").gone
    again.devices.forget("cuda", "cuda0", holders=())
    with pytest.raises(UnknownDevice):
        again.devices.find("cuda", "cuda0")
    again.plugins.absent, again.plugins.failed = {}, {"cuda": "it lies"}
    again.devices.discover()
    with pytest.raises(Conflict, match="it is unknown whether"):
        again.devices.forget("cuda", "cuda1", holders=())
