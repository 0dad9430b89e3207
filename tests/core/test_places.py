"""Places: a card that is replaced moves no other device."""

from msgspec.structs import replace

from agentd.core.device_conditions import device_conditions
from agentd.core.devices import Device, DeviceId, Inventory, Place
from agentd.core.listings import apply_listing
from agentd.core.places import in_places, place_new_devices
from agentd.core.remembered_devices import merge_remembered
from core.machines import gpus, machine


def new_card(n: int, uuid: str, **changes: object) -> Device:
    return replace(gpus(1, 1, 1, 1)[n], stable_id=uuid, **changes)


def order(devices) -> str:
    return " ".join(device.device_id.id for device in in_places(devices))


def part(gpu: int, n: int, uuid: str) -> Device:
    whole = gpus(1, 1)[gpu]
    device_id = DeviceId("cuda", f"cuda{gpu}:{n}")
    changes = {"parent": f"GPU-{uuid}", "parent_aliases": whole.aliases, "aliases": ()}
    return replace(whole, device_id=device_id, stable_id=f"{uuid}-{n}", **changes)


def test_replaced_card_has_the_place_of_the_missing_one() -> None:
    first, second, third, fourth = gpus(1, 1, 1, 1)
    known = merge_remembered([first, new_card(1, "X"), third, fourth], [*gpus(1, 1, 1, 1)])
    assert order(known) == "cuda0 cuda4 cuda2 cuda3"
    inventory = Inventory.of([], known)
    (condition,) = device_conditions(inventory)
    assert condition.reason == "cuda1 is gone: not found on the node; cuda4 has its place"
    again = merge_remembered([first, new_card(1, "Y"), third, fourth], inventory.devices)
    assert order(again) == "cuda0 cuda5 cuda2 cuda3"
    forgotten = [d for d in again if not d.gone]
    assert order(merge_remembered([third, fourth, first, new_card(1, "Y")], forgotten)) == (
        "cuda0 cuda5 cuda2 cuda3"
    )
    assert order(merge_remembered([first, third, fourth], again)) == "cuda0 cuda5 cuda2 cuda3"
    assert order(merge_remembered([first, second, third, fourth], again)) == (
        "cuda0 cuda1 cuda2 cuda3"
    )
    moved = replace(second, aliases=("0000:09:00.0",))
    both = merge_remembered([first, new_card(1, "Y"), third, fourth, moved], again)
    assert order(both) == "cuda0 cuda1 cuda2 cuda3 cuda5"


def test_replaced_card_has_the_place_at_once() -> None:
    before = machine(*gpus(1, 1, 1, 1))
    now, _ = apply_listing(before, "cuda", [*gpus(1), new_card(1, "X"), *gpus(1, 1, 1, 1)[2:]])
    now = place_new_devices(now, before)
    assert now.by_stable_id["X"].taken_place == Place("cuda1", "GPU-cuda-1")
    assert order(now.devices) == "cuda0 cuda4 cuda2 cuda3"


def test_device_known_from_a_record_is_not_new() -> None:
    record = replace(gpus(1, 1)[1], gone=True, is_hearsay=True)
    inventory = machine(*gpus(1), record)
    assert place_new_devices(inventory, inventory) is inventory


def test_card_in_another_slot_or_form_is_new() -> None:
    gone = gpus(1, 1)
    for change in ({"aliases": ()}, {"slot": "cuda.shares"}):
        assert order(merge_remembered([gone[1], new_card(0, "X", **change)], gone)) == (
            "cuda0 cuda1 cuda2"
        )


def test_parts_take_the_places_of_the_parts_before() -> None:
    before = [part(0, 0, "A"), part(0, 1, "A"), part(1, 0, "B")]
    new = [part(0, 0, "C"), part(0, 1, "C"), part(0, 2, "C"), part(1, 0, "B")]
    known = merge_remembered(new, before)
    assert order(known) == "cuda0:2 cuda0:3 cuda0:4 cuda1:0"
