"""The conditions of a node's devices.

There is one for each device that is missing, unhealthy or withheld. A device that a plugin without
a listing serves has none: its plugin has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentd.core.conditions import Condition
from agentd.core.devices import Device, Health, Inventory, group
from agentd.core.slots import CPU, MEM

MAX_CONDITIONS = 64
"""Devices of one device name in one state that get their own conditions; others are counted."""


def about_device(device: Device) -> str:
    """Return the subject of a condition of a device."""
    return f"device/{device.device_id}"


def about_name(name: str) -> str:
    """Return the subject of a condition of all devices of a device name."""
    return "host" if name in (CPU, MEM) else f"plugin/{name}"


def device_conditions(inventory: Inventory) -> Iterator[Condition]:
    """Yield the conditions of all devices."""
    troubled = [(device, trouble) for device in inventory.devices if (trouble := _trouble(device))]
    by_state = group(
        ((device.device_id.name, trouble[0]), (device, trouble)) for device, trouble in troubled
    )
    for (name, state), pairs in by_state.items():
        for device, (_, reason, remedy) in pairs[:MAX_CONDITIONS]:
            label = device.device_id if name in (CPU, MEM) else device.device_id.id
            yield Condition(about_device(device), f"{label} is {state}: {reason}", remedy)
        if (unnamed := len(pairs) - MAX_CONDITIONS) > 0:
            yield Condition(about_name(name), f"{unnamed} more devices of {name} are {state}")


def _trouble(device: Device) -> tuple[str, str, str] | None:
    """Return the state of a device that is missed, the reason and the remedy."""
    if device.is_excluded:
        return None
    if device.gone and device.health is not Health.UNKNOWN:
        remedy = f"if it does not return: agentctl forget {device.device_id.id}"
        return "gone", f"{device.reason}; its place is kept", remedy
    if device.health is Health.UNHEALTHY and not device.gone:
        return "unhealthy", device.reason, ""
    if device.withheld:
        return "withheld", device.withheld, ""
    return None


def unmatched_exclusions(
    inventory: Inventory, name: str, exclude: Iterable[str]
) -> Iterator[Condition]:
    """Yield the entries of `exclude` of a plugin's table that match no device."""
    for entry in exclude:
        if not any(device.is_named([entry]) for device in inventory.by_name.get(name, ())):
            reason = f"{entry} in exclude of [plugins.{name}] matches no device of this node"
            yield Condition(about_name(name), reason)
