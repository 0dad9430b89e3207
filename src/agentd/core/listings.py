"""Listings: what a plugin reports about the devices of one device name, applied to an inventory.

Slots and capacities are fixed. A physical device is in the inventory once, whatever plugins list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from agentd.core.devices import (
    Device,
    DeviceId,
    Health,
    Inventory,
    SecondarySlot,
    assign_free_ids,
    natural_key,
)
from agentd.core.groups import MAX_NAMED, join_first
from agentd.core.slots import SlotName, is_slot_of_parts


def apply_listing(
    inventory: Inventory, name: str, listed: Iterable[Device]
) -> tuple[Inventory, list[str]]:
    """Return the inventory with the current listing of one device name, and warnings.

    If nothing changed, it is the same inventory. Slots and capacities are fixed: a device that
    is not listed any more, or lists another primary slot, is missing until it returns. Other
    secondary slots are a warning. A new device is added if its slots are known and no other
    plugin serves it. An unhealthy one keeps its last form, and may tell its aliases later: if
    these are a device of another plugin, it is missing.
    """
    known_forms = (d for d in inventory.by_name.get(name, ()) if not d.is_hearsay)
    listed = restore_last_form([*listed], known_forms, inventory.slot_types)
    listed_by_id = {device.stable_id: device for device in listed}
    current = [d for d in inventory.devices if not (d.is_hearsay and d.stable_id in listed_by_id)]
    others = [device for device in current if device.device_id.name != name]
    known = {device.stable_id: device for device in current if device.device_id.name == name}
    added = [device for device in listed_by_id.values() if device.stable_id not in known]
    parents = {device.parent for device in listed}
    unusable = {
        device.stable_id: reason
        for device in added
        if (reason := _unusable_reason(inventory, device, has_parts=device.stable_id in parents))
    }
    usable = [device for device in added if device.stable_id not in unusable]
    served, warnings = deduplicate_devices([others, usable])
    reasons = [
        f"{d.device_id} ({d.stable_id}) {unusable[d.stable_id]}; restart agentd to use it"
        for d in added
        if d.stable_id in unusable
    ]
    warnings += _first_reasons(reasons, f"more devices of {name} are new")
    owners = {key: d.device_id for d in reversed(others) for key in d.physical_keys()}
    updated = [
        _unless_served(_listed_form(inventory, d, listed_by_id.get(d.stable_id)), d, owners)
        for d in known.values()
    ]
    warnings += _secondary_warnings(updated, listed_by_id)
    new = (device for device in served if device.device_id.name == name)
    added = assign_free_ids(new, {device.device_id for device in current})
    return inventory.with_devices([*others, *updated, *added]), warnings


def _first_reasons(reasons: Sequence[str], others: str) -> Iterator[str]:
    """Yield the reasons of the first devices, and the number of the others."""
    yield from reasons[:MAX_NAMED]
    if len(reasons) > MAX_NAMED:
        yield f"{len(reasons) - MAX_NAMED} {others}"


def _unusable_reason(inventory: Inventory, device: Device, *, has_parts: bool) -> str:
    """Return why a listed device is not added before a restart; empty if it is.

    A driver in trouble may list a device instead of its parts, or beside them.
    """
    if slots := _unknown_slots(inventory, device):
        return f"is new and offers {slots}"
    is_doubtful = has_parts or device.health is not Health.HEALTHY
    return (
        "is listed beside its parts" if is_doubtful and device.stable_id in inventory.parts else ""
    )


def _unknown_slots(inventory: Inventory, device: Device) -> str:
    """Return the slots of a listed device that no slot type describes."""
    return ", ".join(slot for slot in device.slot_names if slot not in inventory.slot_types)


def _listed_form(inventory: Inventory, device: Device, listed: Device | None) -> Device:
    if listed is None:
        reason = "not listed by its plugin any more"
        return replace(device, gone=True, health=Health.HEALTHY, reason=reason)
    if listed.slot != device.slot:
        reason = f"offers {listed.slot} now; restart agentd to use it"
        return replace(device, gone=True, health=Health.HEALTHY, reason=reason)
    secondary = device.secondary
    if _unknown_slots(inventory, device):  # remembered from a time with other slots
        secondary = tuple(offer for offer in listed.secondary if offer.slot in inventory.slot_types)
    return replace(
        device,
        gone=False,
        health=listed.health,
        reason=listed.reason,
        secondary=secondary,
        aliases=listed.aliases or device.aliases,
        parent_aliases=listed.parent_aliases or device.parent_aliases,
        files=listed.files,
        needs_clear=listed.needs_clear,
    )


def _unless_served(form: Device, device: Device, owners: Mapping[str, DeviceId]) -> Device:
    """Return the listed form, missing while it names a device of another plugin as itself.

    The new names are not kept, so the other plugin's next listing does not meet them.
    """
    named = sorted(form.physical_keys() - device.physical_keys())
    if (owner := next((owners[key] for key in named if key in owners), None)) is None:
        return form
    return replace(device, gone=True, health=Health.HEALTHY, reason=_same_device(owner))


def _same_device(owner: DeviceId) -> str:
    return f"is the same device as {owner}, which serves it; withheld"


def _secondary_warnings(
    devices: Iterable[Device], listed_by_id: Mapping[str, Device]
) -> Iterator[str]:
    """Yield a warning about devices that list other secondary slots than before."""
    changed = [
        device.device_id.id
        for device in devices
        if (listed := listed_by_id.get(device.stable_id)) is not None
        and not device.gone
        and set(listed.slot_names) != set(device.slot_names)
    ]
    if changed:
        are = "lists" if len(changed) == 1 else "list"
        yield f"{join_first(changed)} {are} other secondary slots now; restart agentd to use them"


def deduplicate_devices(plugins: Sequence[Sequence[Device]]) -> tuple[list[Device], list[str]]:
    """Drop devices that an earlier plugin lists, too; return the rest, and warnings.

    Two devices are the same physical device if they share a stable id, an alias (UUID, PCI address)
    or a parent. Parts of one parent under one plugin are different devices.
    """
    served: list[Device] = []
    owners: dict[str, DeviceId] = {}
    warnings: list[str] = []
    for devices in plugins:
        keys_of_plugin: dict[str, DeviceId] = {}
        duplicates: dict[str, list[str]] = {}
        for device in devices:
            keys = device.physical_keys()
            if owner := next((owners[key] for key in sorted(keys) if key in owners), None):
                reason = f"{device.device_id} {_same_device(owner)}"
                duplicates.setdefault(device.device_id.name, []).append(reason)
                continue
            served.append(device)
            keys_of_plugin.update(dict.fromkeys(keys, device.device_id))
        owners.update(keys_of_plugin)
        for name, texts in duplicates.items():
            warnings += _first_reasons(
                texts, f"more devices of {name} are served by others; withheld"
            )
    return served, warnings


def restore_last_form(
    listed: Sequence[Device], last_listing: Iterable[Device], slots: Collection[SlotName]
) -> list[Device]:
    """Return a listing in which unhealthy devices are what they were last, with `slots` at most.

    A driver that fails hides whether a GPU is in MIG mode, and how much memory it has. So an
    unhealthy device does not prove that its slots changed, and one that was in parts stands for
    its parts. What waits for a clear still does, as a plugin that has started again forgot it.
    """
    last_listing = [*last_listing]
    kept = {form.stable_id: form.needs_clear for form in last_listing}
    present = {device.stable_id for device in listed}
    forms: dict[tuple[str, str | None], list[Device]] = {}
    for form in last_listing:
        # A plugin derives the slots of parts from the parts that answer.
        if form.slot in slots or is_slot_of_parts(form.slot):
            forms.setdefault((form.device_id.name, form.stable_id), []).append(form)
            if form.stable_id not in present:
                forms.setdefault((form.device_id.name, form.parent), []).append(form)
    result = []
    for device in listed:
        last_forms = forms.get((device.device_id.name, device.stable_id))
        if device.health is not Health.UNHEALTHY or last_forms is None:
            result.append(device)
            continue
        result += [
            replace(
                form,
                gone=False,
                health=device.health,
                reason=device.reason,
                needs_clear=device.needs_clear,
                secondary=_merge_secondary(form, device, slots),
                files=device.files if form.stable_id == device.stable_id else form.files,
            )
            for form in [form for form in last_forms if not form.gone] or last_forms
        ]
    return [_until_cleared(device, kept.get(device.stable_id, "")) for device in result]


def _until_cleared(device: Device, kept: str) -> Device:
    """Return a listed device, unhealthy as before if what `kept` it so is not cleared."""
    if not kept or device.needs_clear:
        return device
    reason = f"{device.reason}; {kept}" if device.health is Health.UNHEALTHY else kept
    return replace(device, health=Health.UNHEALTHY, reason=reason, needs_clear=kept)


def _merge_secondary(
    form: Device, device: Device, slots: Collection[SlotName]
) -> tuple[SecondarySlot, ...]:
    """Return the secondary slots of a device's last form, and those that it offers only now."""
    offers = {offer.slot: offer for offer in form.secondary if offer.slot in slots}
    if form.slot == device.slot:
        offers = {offer.slot: offer for offer in device.secondary} | offers
    return tuple(offers[slot] for slot in sorted(offers, key=natural_key))
