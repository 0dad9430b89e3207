"""What plugins say, checked and turned into the core's values.

A plugin's answer is foreign data. Its types are checked as it is decoded; whatever else
does not hold (a slot outside its prefix, the same id twice, an invalid amount) makes
the whole listing a lie, and the plugin fails with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

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
    ContainerEdits,
    DeviceInfo,
    Measurement,
    SlotTypeInfo,
)
from agentd.pluginhost.output import one_line
from agentd.services.protocols import PluginListing

MAX_DEVICES = 4096
MAX_SLOT_TYPES = 256
_MAX_ALIASES, _MAX_ATTRIBUTES, _MAX_UNIT = 16, 64, 32
_MAX_VARIABLES, _MAX_ENV_CHARACTERS = 1024, 128 * 1024
_NEVER_SET = {"PATH"}
"""Variables that decide which command a kernel runs."""
_NOT_NEGATIVE = ("utilization_percent", "memory_used_bytes", "memory_total_bytes", "power_w")


class InvalidAnswer(Exception):
    """A plugin's answer breaks the contract; the message says how."""


def check_version(version: object) -> None:
    """Refuse a plugin that speaks another version of the API."""
    if version != API_VERSION:
        raise InvalidAnswer(f"it speaks plugin API {version!r}; this agentd speaks {API_VERSION}")


def checked_listing(
    name: str, slot_infos: Iterable[SlotTypeInfo], device_infos: Iterable[DeviceInfo]
) -> PluginListing:
    """Return what a plugin offers, in the core's values.

    Raises:
        InvalidAnswer: some of it breaks the contract.
    """
    offered = list(slot_infos)
    if len(offered) > MAX_SLOT_TYPES:
        raise InvalidAnswer(f"it lists {len(offered)} slot types; allowed: up to {MAX_SLOT_TYPES}")
    types = tuple(_slot_type(name, info) for info in offered)
    kinds = {slot.name: slot.kind for slot in types}
    if len(kinds) < len(types):
        raise InvalidAnswer("it lists a slot type twice")
    infos = list(device_infos)
    if len(infos) > MAX_DEVICES:
        raise InvalidAnswer(f"it lists {len(infos)} devices; allowed: up to {MAX_DEVICES}")
    devices = tuple(_device(name, info, kinds) for info in infos)
    _refuse_twice("id", [device.device_id.id for device in devices])
    _refuse_twice("stable id", [device.stable_id for device in devices])
    return PluginListing(name, types, devices)


def _slot_type(name: str, info: SlotTypeInfo) -> SlotType:
    slot = info.name
    if not is_slot_name(slot) or device_name_of(slot) != name:
        raise InvalidAnswer(f"its slot {slot!r} is outside its prefix {name!r}")
    try:
        kind = SlotKind(info.kind)
        quantum = parse_base_units(info.quantum, kind)
    except AmountError as error:
        raise InvalidAnswer(f"the quantum of {slot}: {error}") from None
    except ValueError:
        raise InvalidAnswer(
            f"invalid kind {info.kind!r} of {slot}: expected count, bytes or unique"
        ) from None
    if kind is SlotKind.UNIQUE and quantum != ONE:
        raise InvalidAnswer(
            f"the quantum of {slot} is {info.quantum}; a unique slot is given whole"
        )
    largest = 1 if kind is SlotKind.BYTES else ONE
    if not 0 < quantum <= largest:
        raise InvalidAnswer(
            f"the quantum of {slot} is {info.quantum}; expected more than 0, at most 1"
        )
    group = info.exclusive_group
    if group is not None and not ID_PATTERN.fullmatch(group):
        raise InvalidAnswer(
            f"invalid exclusive group {one_line(repr(group), 160)} of {slot}:"
            " expected letters, digits, '_.:-'"
        )
    unit = one_line(info.unit, _MAX_UNIT)
    return SlotType(slot, kind, quantum, group, unit, info.is_enforced)


def _device(name: str, info: DeviceInfo, kinds: dict[str, SlotKind]) -> Device:
    names = [("id", info.id), ("stable id", info.stable_id)]
    names += [("parent", info.parent)] if info.parent is not None else []
    names += [("alias", alias) for alias in info.aliases[:_MAX_ALIASES]]
    for label, value in names:
        if not ID_PATTERN.fullmatch(value):
            shown = one_line(repr(value), 160)
            raise InvalidAnswer(f"invalid {label} {shown}: expected letters, digits, '_.:-'")
    if info.slot not in kinds:
        raise InvalidAnswer(
            f"device {info.id} offers {info.slot!r}, which is not in its slot types"
        )
    try:
        capacity = parse_base_units(info.capacity, kinds[info.slot])
    except AmountError as error:
        raise InvalidAnswer(f"the capacity of {info.id}: {error}") from None
    if kinds[info.slot] is SlotKind.UNIQUE and capacity not in (0, ONE):
        raise InvalidAnswer(f"{info.id} offers {info.capacity} of a unique slot")
    if info.health not in set(Health):
        raise InvalidAnswer(f"the health of {info.id} is {info.health!r}")
    if info.numa_node is not None and info.numa_node < 0:
        raise InvalidAnswer(f"the NUMA node of {info.id} is {info.numa_node}")
    return Device(
        device_id=DeviceId(name, info.id),
        stable_id=info.stable_id,
        slot=info.slot,
        kind=kinds[info.slot],
        capacity=capacity,
        numa_node=info.numa_node,
        aliases=tuple(info.aliases[:_MAX_ALIASES]),
        parent=info.parent,
        model=one_line(info.model),
        health=Health(info.health),
        reason=one_line(info.reason),
        attributes={
            one_line(key): one_line(value)
            for key, value in islice(info.attributes.items(), _MAX_ATTRIBUTES)
        },
        is_simulated=info.is_simulated,
    )


def checked_measurements(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return what a plugin measured; a figure that cannot be one (NaN, -1 bytes) is not known.

    Raises:
        InvalidAnswer: it measured more than a plugin has devices.
    """
    if len(measurements) > MAX_DEVICES:
        raise InvalidAnswer(
            f"it measures {len(measurements)} devices; allowed: up to {MAX_DEVICES}"
        )
    return [_measurement(measurement) for measurement in measurements]


def _measurement(said: Measurement) -> Measurement:
    figures = {name: getattr(said, name) for name in (*_NOT_NEGATIVE, "temperature_c")}
    wrong: dict[str, Any] = {
        name: None
        for name, figure in figures.items()
        if figure is not None
        and (not math.isfinite(figure) or (figure < 0 and name in _NOT_NEGATIVE))
    }
    return replace(said, **wrong) if wrong else said


def checked_edits(edits: ContainerEdits) -> ContainerEdits:
    """Return a plugin's container edits, checked.

    Raises:
        InvalidAnswer: a runtime cannot use them.
    """
    size = sum(len(name) + len(value) for name, value in edits.env.items())
    if len(edits.env) > _MAX_VARIABLES or size > _MAX_ENV_CHARACTERS:
        raise InvalidAnswer(
            f"it sets {len(edits.env)} variables of {size} characters;"
            f" allowed: up to {_MAX_VARIABLES} of {_MAX_ENV_CHARACTERS} together"
        )
    if refused := sorted(_NEVER_SET & edits.env.keys()):
        raise InvalidAnswer(f"it sets {', '.join(refused)}, which is the kernel's own")
    for name, value in edits.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidAnswer(
                f"invalid variable {name!r}: expected no '=' in its name and no NUL"
            )
    for node in edits.device_nodes:
        if not set(node.permissions) <= set("rwm") or not node.permissions:
            raise InvalidAnswer(f"the permissions of {node.host_path} are {node.permissions!r}")
    paths = [node.host_path for node in edits.device_nodes]
    paths += [node.container_path for node in edits.device_nodes]
    paths += [path for mount in edits.mounts for path in (mount.source, mount.target)]
    for path in paths:
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise InvalidAnswer(f"invalid path {path!r}: expected an absolute path")
    return edits


def _refuse_twice(label: str, values: Sequence[str]) -> None:
    if twice := sorted(value for value, count in Counter(values).items() if count > 1):
        raise InvalidAnswer(f"it lists the {label} {', '.join(twice)} twice")
