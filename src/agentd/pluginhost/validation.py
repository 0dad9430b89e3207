"""Validation of plugins' answers, and their conversion to the core's values.

An answer is untrusted. Its types are checked as it is decoded. Any other violation (a slot outside
its prefix, a duplicate id, an invalid amount) invalidates the whole listing, and the plugin fails
with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from agentd.core.devices import (
    ID_PATTERN,
    Device,
    DeviceId,
    Health,
    SecondarySlot,
    natural_key,
)
from agentd.core.names import quote_untrusted
from agentd.core.slots import (
    GIB,
    MAX_SLOT_NAME,
    ONE,
    AmountError,
    SlotKind,
    SlotType,
    device_name_of,
    format_amount,
    is_slot_name,
    parse_base_units,
    readable_amount,
)
from agentd.plugin_api import (
    API_VERSION,
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    Measurement,
    ProcessUse,
    SlotTypeInfo,
)
from agentd.pluginhost.output import one_line
from agentd.services.protocols import PluginListing

MAX_DEVICES = 4096
MAX_SLOT_TYPES = 256
MAX_CONDITIONS = 256
MAX_SECONDARY = 7
"""Secondary slots of one device."""
_MAX_UNIT = 32
_MAX_ENV_BYTES = 128 * 1024
"""Maximum bytes of all names and values of a plugin's variables."""
_MAX_VARIABLE_BYTES = 128 * 1024 - 1
"""Maximum bytes of one `NAME=value`: MAX_ARG_STRLEN of Linux, less the NUL (execve(2))."""
_MAX_PATH_BYTES = 4095
"""PATH_MAX of Linux, less the NUL."""
_MAX_NAME_BYTES = 255
"""Maximum bytes of a group, a CDI name, a driver, a device id or a capability."""
_MAX_GROUP_ID = 2**32 - 2
_RESERVED_VARIABLES = {"PATH"}
"""Variables that decide which command a kernel runs."""
_PLAUSIBLE_RANGES: Mapping[str, tuple[float, float]] = {
    "utilization_percent": (0, 100),
    "memory_used_bytes": (0, 2**63 - 1),
    "memory_total_bytes": (0, 2**63 - 1),
    "temperature_c": (-273, 1000),
    "power_w": (0, 1_000_000),
}
"""The smallest and largest plausible value of each number in a measurement."""


class InvalidAnswer(Exception):
    """A plugin's answer breaks the contract; the message is one line of limited length."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def check_version(version: object) -> None:
    """Refuse a plugin with another version of the API."""
    if version != API_VERSION:
        raise InvalidAnswer(f"unsupported plugin API: got {version!r}, expected {API_VERSION}")


def validate_listing(
    name: str,
    slot_infos: Iterable[SlotTypeInfo],
    device_infos: Iterable[DeviceInfo],
    conditions: Sequence[ConditionInfo] = (),
) -> PluginListing:
    """Convert a plugin's listing to the core's values.

    Raises:
        InvalidAnswer: the listing breaks the contract.
    """
    listed = list(slot_infos)
    if len(listed) > MAX_SLOT_TYPES:
        raise InvalidAnswer(f"too many slot types: got {len(listed)}, expected {MAX_SLOT_TYPES}")
    types = {slot.name: slot for slot in (_convert_slot_type(name, info) for info in listed)}
    if len(types) < len(listed):
        raise InvalidAnswer("duplicate slot type")
    types = {slot.name: _join_primary(slot, types) for slot in types.values()}
    infos = list(device_infos)
    if len(infos) > MAX_DEVICES:
        raise InvalidAnswer(f"too many devices: got {len(infos)}, expected at most {MAX_DEVICES}")
    devices = tuple(_convert_device(name, info, types) for info in infos)
    _refuse_duplicates("id", [device.device_id.id for device in devices])
    _refuse_duplicates("stable id", [device.stable_id for device in devices])
    return PluginListing(
        name, tuple(types.values()), devices, conditions=_printable_conditions(conditions)
    )


def _printable_conditions(conditions: Sequence[ConditionInfo]) -> tuple[ConditionInfo, ...]:
    """Return the conditions with texts that can be shown; refuse too many."""
    if len(conditions) > MAX_CONDITIONS:
        raise InvalidAnswer(
            f"too many conditions: got {len(conditions)}, expected at most {MAX_CONDITIONS}"
        )
    return tuple(
        ConditionInfo(one_line(info.reason), one_line(info.remedy), one_line(info.stable_id))
        for info in conditions
        if info.reason.strip()
    )


def _convert_slot_type(name: str, info: SlotTypeInfo) -> SlotType:
    slot = info.name
    if len(slot) > MAX_SLOT_NAME:
        raise InvalidAnswer(
            f"invalid slot {quote_untrusted(slot)}: got {len(slot)} characters,"
            f" expected at most {MAX_SLOT_NAME}"
        )
    if not is_slot_name(slot) or device_name_of(slot) != name:
        raise InvalidAnswer(f"slot {quote_untrusted(slot)} is outside the prefix {name!r}")
    try:
        kind = SlotKind(info.kind)
        quantum = parse_base_units(info.quantum, kind)
    except AmountError as error:
        raise InvalidAnswer(f"invalid quantum of {slot}: {error}") from None
    except ValueError:
        raise InvalidAnswer(
            f"invalid kind {quote_untrusted(info.kind)} of {slot}: expected count, bytes or unique"
        ) from None
    if kind is SlotKind.UNIQUE and quantum != ONE:
        raise InvalidAnswer(
            f"invalid quantum of {slot}: got {info.quantum}, but a unique slot is indivisible"
        )
    largest = GIB if kind is SlotKind.BYTES else ONE
    if not 0 < quantum <= largest:
        raise InvalidAnswer(
            f"invalid quantum of {slot}: got {info.quantum}, expected more than 0,"
            f" at most {readable_amount(largest, kind)}"
        )
    group = info.exclusive_group
    if group is not None and not ID_PATTERN.fullmatch(group):
        raise InvalidAnswer(
            f"invalid exclusive group {one_line(repr(group), 160)} of {slot}:"
            " expected letters, digits, '_.:-'"
        )
    unit = one_line(info.unit, _MAX_UNIT)
    return SlotType(slot, kind, quantum, group, unit, info.is_enforced, info.primary)


def _join_primary(slot: SlotType, types: Mapping[str, SlotType]) -> SlotType:
    """Return a slot type in the exclusive group of its primary slot."""
    if slot.primary is None:
        return slot
    parent = quote_untrusted(slot.primary)
    primary = types.get(slot.primary)
    if primary is None:
        raise InvalidAnswer(f"unlisted primary slot of {slot.name}: {parent}")
    if primary.primary is not None:
        raise InvalidAnswer(
            f"invalid primary slot of {slot.name}: {parent} is a secondary slot of"
            f" {primary.primary}"
        )
    if slot.kind is SlotKind.UNIQUE:
        raise InvalidAnswer(
            f"invalid kind {slot.kind} of {slot.name}, a secondary slot: expected count or bytes"
        )
    if primary.kind is SlotKind.BYTES:
        raise InvalidAnswer(
            f"invalid kind {primary.kind} of {parent}, a primary slot with secondary ones:"
            " expected count or unique"
        )
    return msgspec.structs.replace(slot, exclusive_group=primary.exclusive_group)


def _convert_device(name: str, info: DeviceInfo, types: Mapping[str, SlotType]) -> Device:
    ids = [("id", info.id), ("stable id", info.stable_id)]
    ids += [("parent", info.parent)] if info.parent is not None else []
    ids += [("alias", alias) for alias in (*info.aliases, *info.parent_aliases)]
    for label, value in ids:
        if not ID_PATTERN.fullmatch(value):
            text = one_line(repr(value), 160)
            raise InvalidAnswer(f"invalid {label} {text}: expected letters, digits, '_.:-'")
    if info.slot not in types:
        raise InvalidAnswer(
            f"device {info.id} has the unlisted slot type {quote_untrusted(info.slot)}"
        )
    slot = types[info.slot]
    if slot.primary is not None:
        raise InvalidAnswer(
            f"device {info.id} offers {info.slot} as its primary slot, which is a secondary slot"
            f" of {slot.primary}"
        )
    capacity = _parse_capacity(info.id, info.capacity, slot.kind)
    if slot.kind is SlotKind.UNIQUE and capacity not in (0, ONE):
        raise InvalidAnswer(f"invalid capacity of {info.id} (unique): {info.capacity}")
    if info.health not in set(Health):
        raise InvalidAnswer(f"invalid health of {info.id}: {quote_untrusted(info.health)}")
    if info.numa_node is not None and info.numa_node < 0:
        raise InvalidAnswer(f"invalid NUMA node of {info.id}: {info.numa_node}")
    for file in info.files:
        if not file.startswith("/") or one_line(file) != file:
            raise InvalidAnswer(f"invalid file of {info.id}: {quote_untrusted(file)}")
    return Device(
        device_id=DeviceId(name, info.id),
        stable_id=info.stable_id,
        slot=info.slot,
        kind=slot.kind,
        capacity=capacity,
        numa_node=info.numa_node,
        aliases=tuple(info.aliases),
        parent=info.parent,
        parent_aliases=tuple(info.parent_aliases),
        model=one_line(info.model),
        health=Health(info.health),
        reason=one_line(info.reason),
        attributes={one_line(key): one_line(value) for key, value in info.attributes.items()},
        is_simulated=info.is_simulated,
        secondary=tuple(_convert_secondary(info, types)),
        files=tuple(info.files),
        needs_clear=one_line(info.reason) if info.needs_clear else "",
    )


def _parse_capacity(device_id: str, text: str, kind: SlotKind) -> int:
    try:
        return parse_base_units(text, kind)
    except AmountError as error:
        raise InvalidAnswer(f"invalid capacity of {device_id}: {error}") from None


def _convert_secondary(info: DeviceInfo, types: Mapping[str, SlotType]) -> Iterator[SecondarySlot]:
    """Yield the secondary slots of a device, in natural order."""
    if len(info.secondary) > MAX_SECONDARY:
        raise InvalidAnswer(
            f"too many secondary slots of {info.id}: got {len(info.secondary)},"
            f" expected at most {MAX_SECONDARY}"
        )
    for name in info.secondary:
        if name not in types:
            raise InvalidAnswer(
                f"device {info.id} has the unlisted slot type {quote_untrusted(name)}"
            )
    for name in sorted(info.secondary, key=natural_key):
        slot = types[name]
        if slot.primary != info.slot:
            role = f"a secondary slot of {slot.primary}" if slot.primary else "a primary slot"
            raise InvalidAnswer(f"device {info.id} offers {name} beside {info.slot}: it is {role}")
        capacity = _parse_capacity(info.id, info.secondary[name], slot.kind)
        if capacity < slot.quantum:
            got, quantum = (format_amount(amount, slot.kind) for amount in (capacity, slot.quantum))
            raise InvalidAnswer(
                f"invalid capacity of {info.id}: got {got} of {name}, expected at least its"
                f" quantum, {quantum}; leave the slot out of a device that cannot offer it"
            )
        yield SecondarySlot(name, slot.kind, capacity)


def validate_measurements(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the last measurement of each device, without implausible values."""
    last = {measurement.stable_id: measurement for measurement in measurements}
    return [_correct_measurement(measurement) for measurement in last.values()]


def _correct_measurement(measurement: Measurement) -> Measurement:
    corrections: dict[str, Any] = {
        name: None
        for name in _PLAUSIBLE_RANGES
        if not _is_plausible(name, getattr(measurement, name))
    }
    if measurement.processes is not None:
        corrections["processes"] = [_correct_process(process) for process in measurement.processes]
    return replace(measurement, **corrections) if corrections else measurement


def _correct_process(process: ProcessUse) -> ProcessUse:
    is_plausible = _is_plausible("memory_used_bytes", process.memory_bytes)
    return process if is_plausible else replace(process, memory_bytes=None)


def _is_plausible(name: str, value: float | None) -> bool:
    """Return whether a value is in its range; None is, and NaN is not."""
    low, high = _PLAUSIBLE_RANGES[name]
    return value is None or low <= value <= high


def validate_edits(edits: ContainerEdits) -> ContainerEdits:
    """Return a plugin's container edits, validated.

    Raises:
        InvalidAnswer: a runtime cannot use them, or they exceed a limit.
    """
    ids = [device for request in edits.device_requests for device in request.device_ids]
    capabilities = [text for request in edits.device_requests for text in request.capabilities]
    _check_env(edits.env)
    for node in edits.device_nodes:
        modes = set(node.permissions)
        if not modes or not modes <= set("rwm") or len(modes) < len(node.permissions):
            raise InvalidAnswer(
                f"invalid permissions of {quote_untrusted(node.host_path)}:"
                f" got {quote_untrusted(node.permissions)}, expected some of 'rwm'"
            )
    for path in _edit_paths(edits):
        if (size := _byte_count(path)) > _MAX_PATH_BYTES:
            raise InvalidAnswer(
                f"invalid path {quote_untrusted(path)}: got {size} bytes,"
                f" expected at most {_MAX_PATH_BYTES}"
            )
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise InvalidAnswer(f"invalid path {quote_untrusted(path)}: expected an absolute path")
    drivers = [request.driver for request in edits.device_requests if request.driver]
    _check_names("CDI name", edits.cdi)
    _check_names("driver", drivers)
    _check_names("device id", ids)
    _check_names("capability", capabilities)
    _check_names("group", edits.groups)
    for group in edits.groups:
        if group.isdecimal() and not (group.isascii() and int(group) <= _MAX_GROUP_ID):
            raise InvalidAnswer(
                f"invalid group {quote_untrusted(group)}:"
                f" expected a name, or an id up to {_MAX_GROUP_ID}"
            )
    return edits


def _check_env(env: Mapping[str, str]) -> None:
    if reserved := sorted(_RESERVED_VARIABLES & env.keys()):
        raise InvalidAnswer(f"reserved variable {', '.join(reserved)}")
    total = 0
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidAnswer(
                f"invalid variable {quote_untrusted(name)}: expected no '=' in its name and no NUL"
            )
        size = _byte_count(name) + _byte_count(value)
        if size + len("=") > _MAX_VARIABLE_BYTES:
            raise InvalidAnswer(
                f"invalid variable {quote_untrusted(name)}: got {size + len('=')} bytes"
                f" with its value, expected at most {_MAX_VARIABLE_BYTES}"
            )
        total += size
    if total > _MAX_ENV_BYTES:
        raise InvalidAnswer(
            f"too many bytes of env: got {total}, expected at most {_MAX_ENV_BYTES}"
        )


def _edit_paths(edits: ContainerEdits) -> Iterator[str]:
    for node in edits.device_nodes:
        yield from (node.host_path, node.container_path)
    for mount in edits.mounts:
        yield from (mount.source, mount.target)


def _check_names(label: str, names: Iterable[str]) -> None:
    for name in names:
        if not name or _byte_count(name) > _MAX_NAME_BYTES or not name.isprintable():
            raise InvalidAnswer(
                f"invalid {label} {quote_untrusted(name)}:"
                f" expected 1 to {_MAX_NAME_BYTES} bytes of printable text"
            )


def _byte_count(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _refuse_duplicates(label: str, values: Sequence[str]) -> None:
    if duplicates := sorted(value for value, count in Counter(values).items() if count > 1):
        raise InvalidAnswer(f"duplicate {label} {', '.join(duplicates)}")
