"""The conditions of a node's devices.

There is one for each device that is missing or unhealthy, and one for all devices of a name that
are withheld for the same reason. A device that a plugin without a listing serves has none: its
plugin has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentd.core.conditions import Condition
from agentd.core.devices import Device, Health, Inventory, named_devices
from agentd.core.groups import group, join_first
from agentd.core.slots import CPU, MEM


def about_device(device: Device) -> str:
    """Return the subject of a condition of a device."""
    return f"device/{device.device_id}"


def about_name(name: str) -> str:
    """Return the subject of a condition of all devices of a device name."""
    return "host" if name in (CPU, MEM) else f"plugin/{name}"


def device_conditions(inventory: Inventory) -> Iterator[Condition]:
    """Yield the conditions of all devices."""
    holders = {(d.device_id.name, d.place): d for d in inventory.devices if not d.gone}
    withheld: list[tuple[tuple[str, str], Device]] = []
    for device in inventory.devices:
        if trouble := _trouble(device, holders.get((device.device_id.name, device.place))):
            state, reason, remedy = trouble
            if state == "withheld":
                withheld.append(((device.device_id.name, reason), device))
            else:
                yield Condition(
                    about_device(device), f"{_label(device)} is {state}: {reason}", remedy
                )
    for (name, reason), devices in group(withheld).items():
        labels = [_label(device) for device in devices]
        if len(devices) == 1:
            yield Condition(about_device(devices[0]), f"{labels[0]} is withheld: {reason}")
        else:
            text = f"{len(devices)} devices of {name} are withheld ({join_first(labels)})"
            yield Condition(about_name(name), f"{text}: {reason}")


def _label(device: Device) -> str:
    return str(device.device_id) if device.device_id.name in (CPU, MEM) else device.device_id.id


def _trouble(device: Device, holder: Device | None) -> tuple[str, str, str] | None:
    """Return the state of a device that is missed, the reason and the remedy.

    `holder` is the present device that has its place.
    """
    if device.is_excluded:
        return None
    if device.gone and device.health is not Health.UNKNOWN:
        remedy = f"if it does not return: agentctl forget {device.device_id.id}"
        place = f"{holder.device_id.id} has its place" if holder else "its place is kept"
        return "gone", f"{device.reason}; {place}", remedy
    if device.health is Health.UNHEALTHY and not device.gone:
        remedy = (
            f"after a check: agentctl clear {device.device_id.id}" if device.needs_clear else ""
        )
        return "unhealthy", device.reason, remedy
    if device.withheld:
        return "withheld", device.withheld, ""
    return None


def unmatched_exclusions(
    inventory: Inventory, name: str, exclude: Iterable[str]
) -> Iterator[Condition]:
    """Yield the entries of `exclude` of a plugin's table that match no device."""
    for entry in exclude:
        if not named_devices(inventory.by_name.get(name, ()), [entry]):
            reason = f"{entry} in exclude of [plugins.{name}] matches no device of this node"
            yield Condition(about_name(name), reason)
