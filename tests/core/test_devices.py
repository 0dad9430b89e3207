from dataclasses import replace

import pytest

from agentd.core.devices import DeviceId, natural_key, served_once, with_remembered
from core.machines import gpus


def ids(devices) -> dict[str, str]:
    return {d.stable_id: d.device_id.id for d in devices if not d.gone}


def test_natural_order() -> None:
    names = ["cuda10", "cuda2", "cuda", "a1b2", "a1b10", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "a1b2", "a1b10", "cuda", "cuda2", "cuda10"]


def test_a_device_keeps_its_id_whatever_order_the_driver_lists() -> None:
    before = gpus(1, 1, 1)
    a, b, c = before
    swapped = [replace(a, device_id=c.device_id), b, replace(c, device_id=a.device_id)]
    assert ids(with_remembered(swapped, before)) == ids(before)


def test_a_missing_device_stays_as_gone_and_its_id_is_not_given_away() -> None:
    before = gpus(1, 1)
    new = replace(before[0], stable_id="GPU-new")
    result = with_remembered([new, before[1]], before)
    gone = [d for d in result if d.gone]
    assert [(d.stable_id, d.device_id.id) for d in gone] == [("GPU-cuda-0", "cuda0")]
    assert ids(result) == {"GPU-new": "cuda2", "GPU-cuda-1": "cuda1"}


def test_a_drain_is_remembered_with_the_physical_device() -> None:
    before = [replace(gpus(1)[0], drained=True)]
    renamed = [replace(gpus(1)[0], device_id=DeviceId("gpu", "gpu0"))]
    (device,) = with_remembered(renamed, before)
    assert device.drained
    assert device.device_id == ("gpu", "gpu0")


@pytest.mark.parametrize(
    "change",
    [
        {"stable_id": "GPU-cuda-0"},
        {"stable_id": "other", "aliases": ("0000:00:00.0",)},
        {"stable_id": "other", "aliases": (), "parent": "GPU-cuda-0"},
    ],
)
def test_a_physical_device_that_two_plugins_offer_is_served_by_the_first(change) -> None:
    mine = gpus(1)
    other = [replace(gpus(1)[0], device_id=DeviceId("gpu", "gpu0"), **change)]
    kept, warnings = served_once([mine, other])
    assert kept == mine
    assert "gpu/gpu0 is the same device as cuda/cuda0" in warnings[0]


def test_parts_of_one_parent_under_one_plugin_are_different_devices() -> None:
    parts = [replace(d, parent="GPU-x", aliases=()) for d in gpus(1, 1)]
    assert served_once([parts]) == (parts, [])
