import pytest
from msgspec.structs import replace

from agentd.core.conditions import Condition
from agentd.core.device_conditions import device_conditions, unmatched_exclusions
from agentd.core.devices import (
    Device,
    DeviceId,
    Health,
    Inventory,
    SecondarySlot,
    Withholding,
    natural_key,
    with_shared_health,
)
from agentd.core.groups import MAX_NAMED
from agentd.core.listings import apply_listing, deduplicate_devices, restore_last_form
from agentd.core.remembered_devices import merge_remembered
from agentd.core.slots import ONE, SlotKind, SlotType
from core.machines import cores, gpus, machine
from core.several_slots import GPU_MEMORY, MIB, SHARES, gpu


def ids(devices) -> dict[str, str]:
    return {d.stable_id: d.device_id.id for d in devices if not d.gone}


def test_natural_order() -> None:
    names = ["cuda10", "cuda2", "cuda", "a1b2", "a1b10", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a1b2", "a1b10", "cuda", "cuda2", "cuda10"]


def test_missing_device_stays_gone_and_keeps_its_id() -> None:
    before = gpus(1, 1)
    new = replace(before[0], stable_id="GPU-new")
    result = merge_remembered([new, before[1]], before)
    gone = [d for d in result if d.gone]
    assert [(d.stable_id, d.device_id.id) for d in gone] == [("GPU-cuda-0", "cuda0")]
    assert ids(result) == {"GPU-new": "cuda2", "GPU-cuda-1": "cuda1"}


def test_missing_device_names_its_missing_plugin() -> None:
    before = [*cores(1), *gpus(1, 1)]
    for plugins, reason in (({"cuda"}, "not found"), (set(), "no plugin cuda is installed")):
        result = {d.device_id.id: d for d in merge_remembered([], before, plugins=plugins)}
        assert reason in result["cuda0"].reason
        assert result["0"].reason == "not found on the node"
        assert result["cuda0"].gone


def test_a_drain_is_remembered_with_the_physical_device() -> None:
    before = [replace(gpus(1)[0], drained=True)]
    renamed = [replace(gpus(1)[0], device_id=DeviceId("gpu", "gpu0"))]
    (device,) = merge_remembered(renamed, before)
    assert device.drained
    assert device.device_id == ("gpu", "gpu0")


def part(n: int, uuid: str = "MIG") -> Device:
    whole = gpus(1)[0]
    return replace(
        whole,
        device_id=DeviceId("cuda", f"cuda0:{n}"),
        stable_id=f"{uuid}-{n}",
        parent=whole.stable_id,
        aliases=(),
    )


def test_a_gpu_that_was_parts_answers_for_them() -> None:
    (gpu,) = merge_remembered(gpus(1), [part(0), part(1)])
    assert (gpu.device_id.id, gpu.former) == ("cuda0", ("MIG-0", "MIG-1"))
    (again,) = merge_remembered(gpus(1), [gpu])
    assert again.former == gpu.former
    inventory = Inventory.of([], [again])
    assert inventory.by_identity["MIG-1"] is again


SICK = {"health": Health.UNHEALTHY, "reason": "no answer: GPU is lost"}


def test_unhealthy_device_has_the_slots_of_its_settings() -> None:
    """Its last slots count as long as its plugin offers them."""
    before, sick = gpu(0), replace(gpu(0, None), **SICK)
    shares, memory = "cuda.shares", "cuda.mem"

    def slots(now: Device, past: Device, *offered: str) -> tuple[str, ...]:
        (found,) = restore_last_form([now], [past], offered)
        return found.slot_names

    assert slots(sick, before, shares, memory) == (shares, memory)
    assert slots(sick, before, shares) == (shares,)
    assert slots(replace(gpu(0), **SICK), gpu(0, None), shares, memory) == (shares, memory)
    whole = replace(gpu(0, None), slot="cuda.device")
    assert slots(replace(whole, **SICK), before, "cuda.device") == ("cuda.device",)


def test_a_device_that_another_plugin_serves_now_is_one_device() -> None:
    other = replace(gpus(1)[0], device_id=DeviceId("gpu", "gpu0"), stable_id="0000:00:00.0")
    (device,) = merge_remembered(gpus(1), [other])
    assert (device.device_id.id, device.former) == ("cuda0", ("0000:00:00.0",))


def test_new_parts_are_named_as_parts() -> None:
    found = merge_remembered([part(0, "NEW")], [part(0), part(1)])
    assert [d.device_id.id for d in found if not d.gone] == ["cuda0:2"]


def test_device_of_a_late_plugin_has_unknown_health() -> None:
    late, gone = merge_remembered([], [*gpus(1), part(0)], {})[0], merge_remembered([], gpus(1))[0]
    assert late.health is gone.health is Health.HEALTHY
    (late,) = merge_remembered([], gpus(1), {"cuda": "plugin cuda is pending"})
    assert (late.gone, late.health, late.reason) == (True, Health.UNKNOWN, "plugin cuda is pending")


@pytest.mark.parametrize(
    "change",
    [
        {"stable_id": "GPU-cuda-0"},
        {"stable_id": "other", "aliases": ("0000:00:00.0",)},
        {"stable_id": "other", "aliases": (), "parent": "GPU-cuda-0"},
        {"stable_id": "p0", "aliases": (), "parent": "p", "parent_aliases": ("0000:00:00.0",)},
    ],
)
def test_device_of_two_plugins_is_served_by_the_first(change) -> None:
    mine = gpus(1)
    other = [replace(gpus(1)[0], device_id=DeviceId("gpu", "gpu0"), **change)]
    kept, warnings = deduplicate_devices([mine, other])
    assert kept == mine
    assert "gpu/gpu0 is the same device as cuda/cuda0" in warnings[0]


def test_device_that_names_its_alias_late_is_served_once() -> None:
    mine = gpus(1)[0]
    named = replace(mine, device_id=DeviceId("gpu", "gpu0"), stable_id="serial-7")
    nameless = replace(named, aliases=(), health=Health.UNHEALTHY)
    assert deduplicate_devices([[mine], [named]])[0] == [mine]
    inventory = Inventory.of([SlotType(mine.slot, SlotKind.COUNT, ONE)], [mine, nameless])
    for name, listed in (("gpu", named), ("cuda", mine), ("gpu", named)):
        inventory, _ = apply_listing(inventory, name, [listed])
        kept, other = inventory.devices
        assert (kept, other.offered_capacities) == (mine, (0,))
        assert other.reason == "is the same device as cuda/cuda0, which serves it; withheld"
    inventory, _ = apply_listing(inventory, "gpu", [replace(named, aliases=())])
    assert [d.offered_capacities for d in inventory.devices] == [(ONE,), (ONE,)]


def test_devices_that_two_plugins_offer_are_few_warnings() -> None:
    mine = gpus(*[1] * 500)
    other = [replace(d, device_id=DeviceId("gpu", d.device_id.id)) for d in mine]
    kept, warnings = deduplicate_devices([mine, other])
    assert kept == mine
    assert len(warnings) == MAX_NAMED + 1
    assert warnings[-1] == "496 more devices of gpu are served by others; withheld"


def test_withheld_devices_are_one_condition_for_each_reason() -> None:
    simulated = [replace(d, is_simulated=True, device_id=DeviceId("sim", "0")) for d in gpus(1)]
    inventory = Inventory.of([], [*cores(2), *simulated, *gpus(*[1] * 300)])
    withheld = inventory.with_withheld(Withholding("served by agentd other"))
    assert [*withheld.with_withheld(Withholding()).devices] == [*inventory.devices]
    (condition,) = device_conditions(withheld)
    reason = "300 devices of cuda are withheld (cuda0, cuda1, cuda2, cuda3 and 296 more)"
    assert condition == Condition("plugin/cuda", f"{reason}: served by agentd other")
    (condition,) = device_conditions(
        Inventory.of([], gpus(1)).with_withheld(Withholding("served by other"))
    )
    assert condition == Condition("device/cuda/cuda0", "cuda0 is withheld: served by other")


@pytest.mark.parametrize("entry", ["GPU-cuda-0", "0000:00:00.0", "cuda0"])
@pytest.mark.parametrize("was_whole", [True, False])
def test_every_name_of_a_gpu_excludes_its_parts(entry: str, was_whole: bool) -> None:
    gpu, other = gpus(1, 1)
    known = replace(gpu, gone=True) if was_whole else replace(other, stable_id="N", aliases=())
    parts = [replace(part(n), parent_aliases=gpu.aliases) for n in range(2)]
    inventory = Inventory.of([], [known, *parts]).with_excluded({"cuda": [entry]})
    excluded = [d.device_id.id for d in inventory.devices if d.is_excluded]
    assert excluded == ["cuda0"] * was_whole + ["cuda0:0", "cuda0:1"]


def test_id_of_another_gpu_is_no_name_of_a_part() -> None:
    other = replace(gpus(1)[0], stable_id="GPU-other")
    inventory = Inventory.of([], [other, part(0)]).with_excluded({"cuda": ["cuda0"]})
    assert [d.device_id.id for d in inventory.devices if d.is_excluded] == ["cuda0"]


@pytest.mark.parametrize("entry", ["cuda1", "GPU-cuda-1", "0000:01:00.0", "GPU-whole"])
def test_device_is_excluded_by_any_of_its_names(entry: str) -> None:
    first, second = gpus(1, 1)
    second = replace(second, aliases=("0000:01:00.0",), parent="GPU-whole", health=Health.UNHEALTHY)
    inventory = Inventory.of([], [first, second]).with_excluded({"cuda": (entry,)})
    assert [d.withheld_reason for d in inventory.devices] == ["", "excluded in [plugins.cuda]"]
    assert [*device_conditions(inventory)] == []
    (unmatched,) = unmatched_exclusions(inventory, "cuda", (entry, "cuda9"))
    reason = "cuda9 in exclude of [plugins.cuda] matches no device of this node"
    assert unmatched == Condition("plugin/cuda", reason)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ([], "not listed by its plugin any more"),
        (gpus(1, slot="cuda.shares"), "offers cuda.shares now; restart agentd to use it"),
    ],
)
def test_device_that_left_while_its_plugin_was_stopped_is_gone(now, reason: str) -> None:
    inventory = Inventory.of([], gpus(1)).with_health_unknown("cuda", "plugin cuda: stopped by ann")
    inventory, _ = apply_listing(inventory, "cuda", now)
    (condition,) = device_conditions(inventory)
    assert condition.reason.startswith(f"cuda0 is gone: {reason}")
    assert inventory.devices[0].health is not Health.UNKNOWN  # or nobody could forget it


def test_a_troubled_device_is_a_condition_with_a_remedy() -> None:
    healthy, sick, lost, unknown = gpus(1, 1, 1, 1)
    inventory = Inventory.of(
        [],
        [
            healthy,
            replace(sick, health=Health.UNHEALTHY, reason="Xid 79"),
            replace(lost, gone=True, reason="not found on the node"),
            replace(unknown, gone=True, health=Health.UNKNOWN, reason="plugin cuda is pending"),
        ],
    )
    assert [*device_conditions(inventory)] == [
        Condition("device/cuda/cuda1", "cuda1 is unhealthy: Xid 79"),
        Condition(
            "device/cuda/cuda2",
            "cuda2 is gone: not found on the node; its place is kept",
            "if it does not return: agentctl forget cuda2",
        ),
    ]


def test_parts_of_one_parent_are_different_devices() -> None:
    parts = [replace(d, parent="GPU-x", aliases=()) for d in gpus(1, 1)]
    assert deduplicate_devices([parts]) == (parts, [])


def listed(*ids: str, **changes: object) -> list[Device]:
    devices = [replace(d, **changes) for d in gpus(1, 1, 1)]
    return [d for d in devices if d.device_id.id in ids]


def test_a_listing_changes_health_and_presence_and_nothing_else() -> None:
    inventory = Inventory.of([], [*cores(1), *gpus(1, 1)])
    same, news = apply_listing(inventory, "cuda", listed("cuda0", "cuda1"))
    assert (same is inventory, news) == (True, [])
    sick, _ = apply_listing(
        inventory, "cuda", listed("cuda0", health=Health.UNHEALTHY, reason="hot", capacity=7)
    )
    core, first, second = sick.devices
    assert core.health is Health.HEALTHY
    assert (first.health, first.reason, first.capacity) == (Health.UNHEALTHY, "hot", ONE)
    assert (second.gone, second.reason) == (True, "not listed by its plugin any more")
    back, _ = apply_listing(sick, "cuda", listed("cuda0", "cuda1"))
    assert back.devices == inventory.devices


def test_device_files_are_those_of_the_present_listing() -> None:
    inventory = Inventory.of([], gpus(1))
    first, _ = apply_listing(inventory, "cuda", listed("cuda0", files=("/dev/nvidia0",)))
    sick = listed("cuda0", files=("/dev/nvidia1",), health=Health.UNHEALTHY)
    renumbered, _ = apply_listing(first, "cuda", sick)
    found = [device.files for changed in (first, renumbered) for device in changed.devices]
    assert found == [("/dev/nvidia0",), ("/dev/nvidia1",)]


def test_new_device_is_added_when_its_slot_is_known() -> None:
    inventory = Inventory.of([], gpus(1, 1))
    same, news = apply_listing(inventory, "cuda", listed("cuda0", "cuda1", "cuda2"))
    assert same is inventory
    (warning,) = news
    assert warning.startswith("cuda/cuda2 (GPU-cuda-2) is new and offers cuda.device; restart")
    knows = machine(*gpus(1, 1))
    three = listed("cuda0", "cuda1", "cuda2")
    more, news = apply_listing(knows, "cuda", three)
    assert [d.device_id.id for d in more.by_name["cuda"]] == ["cuda0", "cuda1", "cuda2"]
    assert news == []
    again, _ = apply_listing(more, "cuda", three)
    assert again is more
    less, _ = apply_listing(more, "cuda", listed("cuda0", "cuda1"))
    assert less.by_name["cuda"][2].gone
    clash = replace(three[1], stable_id="X", aliases=())
    twin, _ = apply_listing(knows, "cuda", [*three[:2], clash])
    assert twin.by_stable_id["X"].device_id.id == "cuda2"
    other, _ = apply_listing(inventory, "cuda", listed("cuda0", "cuda1", slot="cuda.shares"))
    assert {d.reason for d in other.devices} == {"offers cuda.shares now; restart agentd to use it"}


def test_unknown_health_keeps_capacity_and_known_trouble() -> None:
    inventory = Inventory.of([], gpus(1)).with_health_unknown("cuda", "plugin cuda: lost")
    (device,) = inventory.devices
    assert (device.health, device.reason, device.is_usable) == (
        Health.UNKNOWN, "plugin cuda: lost", True
    )  # fmt: skip
    sick = [replace(gpus(1)[0], health=Health.UNHEALTHY, reason="Xid 79")]
    inventory = Inventory.of([], sick).with_health_unknown("cuda", "plugin cuda: lost")
    assert inventory.devices[0].reason == "Xid 79"


@pytest.mark.parametrize(
    ("sick", "health", "reason"),
    [(0, "xx.", "cuda/cuda0: Xid 79"), (1, ".x.", "Xid 79"), (2, "..x", "")],
    ids=["whole", "part", "other"],
)
def test_health_belongs_to_a_device_and_its_parts(sick: int, health: str, reason: str) -> None:
    whole, other = gpus(1, 1)
    devices = [whole, part(0), other]
    devices[sick] = replace(devices[sick], health=Health.UNHEALTHY, reason="Xid 79")
    shared = with_shared_health(devices)
    marks = ["x" if device.health is Health.UNHEALTHY else "." for device in shared]
    assert ("".join(marks), shared[1].reason) == (health, reason)
    siblings = with_shared_health([replace(part(0), health=Health.UNHEALTHY), part(1)])
    assert siblings[1].health is Health.HEALTHY


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize("beside", [True, False])
def test_whole_device_never_appears_beside_its_parts(health: Health, beside: bool) -> None:
    slots = [SlotType(d.slot, d.kind, ONE) for d in (part(0), *gpus(1))]
    inventory = Inventory.of(slots, [part(0), part(1), gpus(1, 1)[1]])
    whole = replace(gpus(1)[0], health=health, reason="no answer")
    listing = [*([part(0), part(1)] if beside else []), whole, gpus(1, 1)[1]]
    after, warnings = apply_listing(inventory, "cuda", listing)
    has_left_its_parts = health is Health.HEALTHY and not beside
    new = {DeviceId("cuda", "cuda0")} if has_left_its_parts else set()
    assert after.by_id.keys() - inventory.by_id.keys() == new
    is_restored = health is Health.UNHEALTHY and not beside
    named = "cuda/cuda0 (GPU-cuda-0) is listed beside its parts; restart agentd to use it"
    assert warnings == ([] if is_restored or has_left_its_parts else [named])


def with_memory(gib: int | None, *, is_gone: bool = False) -> Inventory:
    devices = [gpu(0, gib, gone=is_gone), gpu(1, gib)]
    return Inventory.of([SHARES, *([GPU_MEMORY] if gib else [])], devices)


def test_other_secondary_slots_in_a_listing_are_a_warning() -> None:
    inventory = with_memory(80)
    for listed in ([gpu(0, None), gpu(1)], [gpu(0, 40), gpu(1)]):
        after, _ = apply_listing(inventory, "cuda", listed)
        assert after is inventory, "slots and capacities stay as first listed"
    assert apply_listing(inventory, "cuda", [gpu(0), gpu(1)])[1] == []
    _, warnings = apply_listing(inventory, "cuda", [gpu(0, None), gpu(1)])
    assert warnings == ["cuda0 lists other secondary slots now; restart agentd to use them"]
    _, warnings = apply_listing(inventory, "cuda", [gpu(0, None), gpu(1, None)])
    assert warnings == ["cuda0, cuda1 list other secondary slots now; restart agentd to use them"]


@pytest.mark.parametrize(
    ("listed", "warnings"),
    [
        (gpu(0, None), []),
        (gpu(0), ["cuda0 lists other secondary slots now; restart agentd to use them"]),
    ],
    ids=["disabled", "listed"],
)
def test_missing_device_never_returns_with_an_untyped_slot(listed, warnings) -> None:
    off = Inventory.of([SHARES], [gpu(0, gone=True), gpu(1, None)])
    back, said = apply_listing(off, "cuda", [listed, gpu(1, None)])
    assert back.by_name["cuda"][0].slot_names == ("cuda.shares",)
    assert said == warnings


def test_a_new_device_with_an_unknown_slot_waits_for_a_restart() -> None:
    inventory = with_memory(None)
    after, (warning,) = apply_listing(inventory, "cuda", [gpu(0, None), gpu(1, None), gpu(2)])
    assert after is inventory
    assert warning.endswith("is new and offers cuda.mem; restart agentd to use it")


def test_usable_capacity_is_rounded_down_to_the_quantum() -> None:
    odd = replace(
        gpu(0), capacity=ONE - 1, secondary=(SecondarySlot("cuda.mem", SlotKind.BYTES, 10**9),)
    )
    inventory = Inventory.of([SHARES, GPU_MEMORY], [odd])
    usable = [measure.usable for measure in inventory.measures[odd.device_id].values()]
    assert usable == [99 * ONE // 100, 953 * MIB]
