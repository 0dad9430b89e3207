"""Devices of before: the ids that they keep, and their places while they are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from agentd.core.devices import Device, Health, assign_free_ids
from agentd.core.places import take_places
from agentd.core.slots import CPU, MEM

MAX_FORMER = 64
"""Former stable ids of one device."""


def merge_remembered(
    listed: Iterable[Device],
    remembered: Iterable[Device],
    late: Mapping[str, str] = MappingProxyType({}),
    plugins: Collection[str] | None = None,
) -> list[Device]:
    """Restore the former ids of listed devices, and add missing ones as `gone`.

    The id of a missing device is never reused; a new device whose suggested id is taken gets the
    next free number. If a missing device is listed in another form now (the GPU instead of its
    part, or by another plugin), its stable id becomes a `former` one of that. A missing device
    whose plugin may still list it (`late`: why) has unknown health. `plugins` are the existing ones
    (None: all).
    """
    past = {device.stable_id: device for device in remembered}
    listed = _add_former_ids([*listed], past)
    present = {device.stable_id for device in listed}
    present |= {former for device in listed for former in device.former}
    missing = [device for device in past.values() if device.stable_id not in present]
    taken = {device.device_id for device in missing}
    result = [_mark_gone(device, late, plugins) for device in missing]
    added = []
    for device in listed:
        before = past.get(device.stable_id)
        if before is None or before.device_id.name != device.device_id.name:
            added.append(replace(device, drained=before is not None and before.drained))
            continue
        taken.add(before.device_id)
        kept = {"device_id": before.device_id, "taken_place": before.taken_place}
        result.append(replace(device, drained=before.drained, **kept))
    return result + take_places(assign_free_ids(added, taken), result)


def _mark_gone(device: Device, late: Mapping[str, str], plugins: Collection[str] | None) -> Device:
    name = device.device_id.name
    if (reason := late.get(name)) is not None:
        return replace(device, gone=True, health=Health.UNKNOWN, reason=reason)
    reason = "not found on the node"
    if plugins is not None and name not in plugins and name not in (CPU, MEM):
        reason = f"no plugin {name} is installed and allowed"
    return replace(device, gone=True, health=Health.HEALTHY, reason=reason)


def _add_former_ids(listed: list[Device], remembered: Mapping[str, Device]) -> list[Device]:
    """Add the former stable ids to each listed device."""
    owners = {key: device for device in listed for key in (device.stable_id, *device.aliases)}
    former: dict[str, list[str]] = {}
    for stable_id, device in remembered.items():
        current = owners.get(stable_id) or _find_other_form(device, owners)
        if current is not None:
            former_ids = [*device.former, *([] if current.stable_id == stable_id else [stable_id])]
            former.setdefault(current.stable_id, []).extend(former_ids)
    return [
        replace(device, former=tuple(dict.fromkeys(former[device.stable_id]))[-MAX_FORMER:])
        if device.stable_id in former
        else device
        for device in listed
    ]


def _find_other_form(device: Device, owners: Mapping[str, Device]) -> Device | None:
    """Return the listed device that a missing one has become.

    Under the same plugin an alias alone proves nothing: another GPU may be in the same PCI slot.
    """
    for key in (device.parent, *device.aliases, *device.parent_aliases):
        current = owners.get(key or "")
        if current is not None and (
            current.stable_id == key or current.device_id.name != device.device_id.name
        ):
            return current
    return None
