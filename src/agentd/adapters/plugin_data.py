"""What plugins say, checked and turned into the core's values.

A plugin's answer is foreign data. Whatever does not hold (a slot outside its prefix, the
same id twice, an amount that is none) makes the whole listing a lie, and the plugin fails
with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentd.core.devices import ID_PATTERN, Device, DeviceId, Health
from agentd.core.slots import (
    ONE,
    AmountError,
    SlotKind,
    SlotType,
    device_name_of,
    is_slot_name,
    parse_base_units,
)
from agentd.plugin_api import (
    API_VERSION,
    AcceleratorPlugin,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRequest,
    Mount,
    SlotTypeInfo,
)
from agentd.services.interfaces import PluginListing


class PluginLie(Exception):
    """A plugin's answer breaks the contract; the message says how."""


def check_class(loaded: object) -> type[AcceleratorPlugin]:
    """Return what an entry point loaded, if it is a plugin this version can call."""
    if not (isinstance(loaded, type) and issubclass(loaded, AcceleratorPlugin)):
        raise PluginLie(f"its entry point is no AcceleratorPlugin but {loaded!r}")
    if loaded.api_version != API_VERSION:
        raise PluginLie(
            f"it speaks plugin API {loaded.api_version}; this agentd speaks {API_VERSION}"
        )
    return loaded


def checked_listing(
    name: str, slot_infos: Iterable[SlotTypeInfo], device_infos: Iterable[DeviceInfo]
) -> PluginListing:
    """Return what a plugin offers, in the core's values.

    Raises:
        PluginLie: some of it breaks the contract.
    """
    types = tuple(_slot_type(name, info) for info in slot_infos)
    kinds = {slot.name: slot.kind for slot in types}
    if len(kinds) < len(types):
        raise PluginLie("it lists a slot type twice")
    devices = tuple(_device(name, info, kinds) for info in device_infos)
    _refuse_twice("id", [device.device_id.id for device in devices])
    _refuse_twice("stable id", [device.stable_id for device in devices])
    return PluginListing(name, types, devices)


def _slot_type(name: str, info: SlotTypeInfo) -> SlotType:
    _expect(info, SlotTypeInfo)
    slot = str(info.name)
    if not is_slot_name(slot) or device_name_of(slot) != name:
        raise PluginLie(f"its slot {slot!r} is outside its prefix {name!r}")
    try:
        kind = SlotKind(info.kind)
        quantum = parse_base_units(info.quantum, kind)
    except AmountError as error:
        raise PluginLie(f"the quantum of {slot}: {error}") from None
    except ValueError:
        raise PluginLie(
            f"{slot} is of kind {info.kind!r}; there are count, bytes, unique"
        ) from None
    if info.exclusive_group is not None:
        _expect_texts(f"{slot}: its exclusive group", [info.exclusive_group])
    largest = 1 if kind is SlotKind.BYTES else ONE
    if not 0 < quantum <= largest:
        raise PluginLie(f"the quantum of {slot} is {info.quantum}; allowed: more than 0, at most 1")
    return SlotType(slot, kind, quantum, info.exclusive_group, str(info.unit))


def _device(name: str, info: DeviceInfo, kinds: dict[str, SlotKind]) -> Device:
    _expect(info, DeviceInfo)
    for label, value in (("id", info.id), ("stable id", info.stable_id)):
        if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
            raise PluginLie(f"its {label} {value!r} is none; allowed: letters, digits, '_.:-'")
    if info.slot not in kinds:
        raise PluginLie(f"device {info.id} offers {info.slot!r}, which is no slot type of it")
    try:
        capacity = parse_base_units(info.capacity, kinds[info.slot])
    except AmountError as error:
        raise PluginLie(f"the capacity of {info.id}: {error}") from None
    if kinds[info.slot] is SlotKind.UNIQUE and capacity not in (0, ONE):
        raise PluginLie(f"{info.id} offers {info.capacity} of a unique slot")
    if info.health not in set(Health):
        raise PluginLie(f"the health of {info.id} is {info.health!r}")
    _expect_texts(f"{info.id}: its aliases", info.aliases)
    if info.parent is not None:
        _expect_texts(f"{info.id}: its parent", [info.parent])
    node = info.numa_node
    if node is not None and not (isinstance(node, int) and node >= 0 and node is not True):
        raise PluginLie(f"the NUMA node of {info.id} is {node!r}")
    if not isinstance(info.attributes, Mapping):
        raise PluginLie(f"the attributes of {info.id} are {info.attributes!r}")
    return Device(
        device_id=DeviceId(name, info.id),
        stable_id=info.stable_id,
        slot=info.slot,
        kind=kinds[info.slot],
        capacity=capacity,
        numa_node=info.numa_node,
        aliases=tuple(str(alias) for alias in info.aliases),
        parent=info.parent,
        model=str(info.model),
        health=Health(info.health),
        reason=str(info.reason),
        attributes={str(key): str(value) for key, value in info.attributes.items()},
    )


def _expect(value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise PluginLie(f"it lists {value!r} where {wanted.__name__} belongs")


def _expect_texts(label: str, values: object) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise PluginLie(f"{label}: {values!r} where text belongs")


def checked_edits(edits: object) -> ContainerEdits:
    """Return a plugin's container edits, if they are what a runtime can use.

    Raises:
        PluginLie: they are not.
    """
    if not isinstance(edits, ContainerEdits):
        raise PluginLie(f"it answered {edits!r} for container edits")
    if not isinstance(edits.env, Mapping):
        raise PluginLie(f"its variables are {edits.env!r}")
    _expect_texts("its variables", [*edits.env, *edits.env.values()])
    for name in edits.env:
        if not name or "=" in name or "\0" in name + edits.env[name]:
            raise PluginLie(f"{name!r} is no name of a variable")
    for label, values in (("CDI names", edits.cdi), ("groups", edits.groups)):
        _expect_texts(f"its {label}", values)
    for node in edits.device_nodes:
        _expect(node, DeviceNode)
    for mount in edits.mounts:
        _expect(mount, Mount)
    for request in edits.device_requests:
        _expect(request, DeviceRequest)
    return edits


def _refuse_twice(label: str, values: Sequence[str]) -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise PluginLie(f"it lists the {label} {', '.join(twice)} twice")
