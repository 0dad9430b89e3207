"""Listings of plugins, merged with the devices that the node knows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from agentd.core.devices import Device, Inventory, with_shared_health
from agentd.core.listings import deduplicate_devices
from agentd.core.remembered_devices import merge_remembered
from agentd.core.slots import ONE, SlotType, device_name_of, is_slot_of_parts
from agentd.services.protocols import PluginListing, PluginState, PluginStatus


def _not_ready_reasons(statuses: Iterable[PluginStatus]) -> dict[str, str]:
    """Return why a plugin's devices may only seem to be missing, by plugin."""
    return {
        status.name: f"plugin {status.name} is {status.text}"
        for status in statuses
        if status.state in (PluginState.PENDING, PluginState.FAILED, PluginState.STOPPED)
    }


def unlisted_reasons(
    statuses: Iterable[PluginStatus], missed: Collection[str], listed: Collection[str]
) -> dict[str, str]:
    """Return why a needed plugin has no listing, by plugin."""
    return {
        status.name: f"plugin {status.text}"
        for status in statuses
        if status.name not in listed
        and (status.name in missed or (status.has_table and status.state is not PluginState.ABSENT))
    }


def merge_devices(
    known: Iterable[Device],
    listings: Sequence[PluginListing],
    *,
    names: Collection[str] | None,
    remembered: Iterable[Device],
    statuses: Sequence[PluginStatus],
) -> list[Device]:
    """Merge listings with known devices, each physical device once.

    Devices of `names` (None: all) get their saved ids; all others stay unchanged.
    """
    unchanged = [d for d in known if names is None or d.device_id.name not in names]
    served, _ = deduplicate_devices([unchanged, *(listing.devices for listing in listings)])
    listed = with_shared_health(served)
    not_ready, plugins = _not_ready_reasons(statuses), {status.name for status in statuses}
    late = [d for d in listed if names is None or d.device_id.name in names]
    others = [d for d in listed if names is not None and d.device_id.name not in names]
    return [*others, *merge_remembered(late, remembered, not_ready, plugins)]


def missing_slot_types(
    devices: Iterable[Device], types: Sequence[SlotType], names: Collection[str]
) -> list[SlotType]:
    """Return the slot types of parts that are all missing or unhealthy, for some device names.

    A plugin derives them from the parts that answer. They exclude the same slots as its other
    ones.
    """
    known = {slot.name for slot in types}
    groups = {device_name_of(slot.name): slot.exclusive_group for slot in types}
    return [
        SlotType(device.slot, device.kind, ONE, groups.get(device.device_id.name))
        for device in devices
        if device.device_id.name in names
        and is_slot_of_parts(device.slot)
        and device.slot not in known
    ]


def devices_to_save(inventory: Inventory, names: Collection[str] | None = None) -> list[Device]:
    """Return the devices of an inventory, or of some device names, that are saved."""
    return [
        device
        for device in inventory.devices
        if not device.is_hearsay and (names is None or device.device_id.name in names)
    ]
