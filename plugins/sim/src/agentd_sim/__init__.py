"""Simulated accelerators: any number of devices under any name, from settings alone.

`health-file` names a file of lines such as `cuda0 unhealthy it coughs` or `cuda1 gone`, read at
every listing; devices that it does not name are healthy. A device that is `latched` is unhealthy
until an operator clears it. `agentd_sim.faults` makes the plugin misbehave.

Stable ids derive from the node id, the table's name and the device's id, so those of two daemons
never collide. They do not depend on the mode, so a change from whole devices to shares is a change
of slot on the same physical device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentd.plugin_api import (
    API_VERSION,
    MODE_KEYS,
    NODE_ID_VARIABLE,
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    Features,
    Measurement,
    PartitionInfo,
    SettingProblem,
    SlotTypeInfo,
    dealt_by_slots,
    memory_offered,
    memory_slots,
    mode_problems,
    mode_slots,
    primary_slot,
    size_in_bytes,
    unknown_settings,
)
from agentd_sim import faults

_KEYS = (
    *("count", "memory", "numa-nodes", "devices", "links", "health-file", "files"),
    *MODE_KEYS,
    *faults.KEYS,
)
_DEVICE_KEYS = ("id", "stable-id", "capacity", "numa-node", "memory")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_AMOUNT = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6}0*)?")
_MAX_COUNT = 4096
_MAX_ID = 128


class SimPlugin(AcceleratorPlugin):
    """Devices that exist only in the configuration."""

    needs_table: ClassVar[bool] = True

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, _KEYS)
        if ("count" in settings) == ("devices" in settings):
            problems.append(SettingProblem("count", "set either count or devices"))
        problems += _check_number(settings, "count", 0, _MAX_COUNT)
        problems += _check_number(settings, "numa-nodes", 1, 64)
        problems += mode_problems(settings)
        problems += _check_size(settings)
        if not isinstance(settings.get("health-file", ""), str):
            problems.append(SettingProblem("health-file", "expected the path of a file"))
        files = settings.get("files", [])
        if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
            problems.append(SettingProblem("files", 'expected a list such as ["/dev/sim/{id}"]'))
        links = settings.get("links", [])
        if not isinstance(links, list) or not all(map(_is_link, links)):
            reason = 'expected lists of two or more ids, such as [["a0", "a3"]]'
            problems.append(SettingProblem("links", reason))
        problems += faults.problems(settings)
        if not problems:
            faults.Faults(settings).trigger("import")
        problems += _check_devices(settings.get("devices", []))
        return problems + ([] if problems else _check_memory(settings))

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name, settings)
        self._faults = faults.Faults(settings)
        self._cleared: dict[str, str] = {}
        """By id, the reason of the latched trouble that an operator cleared."""
        if settings.get("lie") == "other-api":
            self.api_version = API_VERSION + 1  # type: ignore[misc]

    def open(self) -> None:
        self._faults.trigger("open")
        known = [device.id for device in self._devices()]
        linked = {name for link in self.settings.get("links", []) for name in link}
        if unknown := sorted(linked.difference(known)):
            raise ValueError(f"links: unknown devices {', '.join(unknown)}")

    def close(self) -> None:
        self._faults.trigger("close")

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        primary, *memory = mode_slots(self.name, self.settings)
        if self.settings.get("lie") == "prefix":
            primary = replace(primary, name="cpu")
        return [primary, *memory]

    def list_devices(self) -> Sequence[DeviceInfo]:
        self._faults.trigger("list")
        state_by_id = self._read_health_file()
        devices = [
            replace(device, health=state, reason=reason, needs_clear=needs_clear)
            for device in self._devices()
            for state, reason, needs_clear in [
                self._apply_latch(device.id, *state_by_id.get(device.id, ("healthy", "")))
            ]
            if state != "gone"
        ]
        return faults.apply_lie(self.settings.get("lie"), devices)

    def _read_health_file(self) -> dict[str, tuple[str, str]]:
        """Return the content of the health file: state and reason by id."""
        file = self.settings.get("health-file")
        if file is None or not Path(file).exists():
            return {}
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        words = [line.split(maxsplit=2) for line in lines if line.strip()]
        return {
            device_id: (state, " ".join(reason_words)) for device_id, state, *reason_words in words
        }

    def _apply_latch(self, device_id: str, state: str, reason: str) -> tuple[str, str, bool]:
        if state != "latched":
            return state, reason, False
        if self._cleared.get(device_id) == reason:
            return "healthy", "", False
        return "unhealthy", f"{reason}; waits for agentctl clear", True

    def clear(self, device_ids: Sequence[str]) -> None:
        self._faults.trigger("clear")
        state_by_id = self._read_health_file()
        for device in self._devices():
            if device.stable_id in device_ids and device.id in state_by_id:
                self._cleared[device.id] = state_by_id[device.id][1]

    def _devices(self) -> Sequence[DeviceInfo]:
        entries = self.settings.get("devices")
        if entries is None:
            entries = [{"id": f"{self.name}{n}"} for n in range(self.settings["count"])]
        nodes, memory = self.settings.get("numa-nodes"), self.settings.get("memory", 0)
        return [
            DeviceInfo(
                id=entry["id"],
                stable_id=entry.get("stable-id", self._stable_id(entry["id"])),
                aliases=[] if "stable-id" in entry else [f"SIM-{self.name}-{entry['id']}"],
                slot=self._slot,
                capacity=str(entry.get("capacity", "1")),
                model="simulated",
                numa_node=entry.get("numa-node", n * nodes // len(entries) if nodes else None),
                attributes={"memory": str(size)}
                if (size := size_in_bytes(entry.get("memory", memory)))
                else {},
                is_simulated=True,
                secondary=memory_offered(self.name, self.settings, size),
                files=[
                    name.replace("{id}", entry["id"]) for name in self.settings.get("files", [])
                ],
            )
            for n, entry in enumerate(entries)
        ]

    def _stable_id(self, device_id: str) -> str:
        suffix = f"-{self.name}-{device_id}"
        node = f"-{os.environ.get(NODE_ID_VARIABLE, '')}"[: _MAX_ID - len("SIM" + suffix)]
        return f"SIM{node.rstrip('-')}{suffix}"

    def partition(
        self, devices: Sequence[DeviceInfo], agents: Sequence[str]
    ) -> PartitionInfo | None:
        self._faults.trigger("partition")
        if self.settings.get("lie") == "unequal":
            return PartitionInfo({agents[0]: [device.id for device in devices]})
        linked = self.settings.get("links")
        if linked is None:
            return None
        stable_ids = {device.id: device.stable_id for device in self._devices()}
        groups = _join_links([[stable_ids[name] for name in link] for link in linked])
        return dealt_by_slots(devices, agents, groups)

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        del features
        if allocation:
            self._faults.trigger("edits")
        variable = f"{self.name.upper().replace('-', '_')}_VISIBLE_DEVICES"
        return ContainerEdits(env={variable: ",".join(device.id for device in allocation)})

    def measure(self) -> Sequence[Measurement]:
        self._faults.trigger("measure")
        return [
            Measurement(
                device.stable_id,
                utilization_percent=0.0,
                memory_used_bytes=0,
                memory_total_bytes=int(device.attributes.get("memory", 0)),
            )
            for device in self._devices()
        ]

    @property
    def _slot(self) -> str:
        return primary_slot(self.name, self.settings)


def _check_number(
    settings: Mapping[str, Any], key: str, minimum: int, maximum: int
) -> list[SettingProblem]:
    value = settings.get(key, minimum)
    if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
        return []
    return [SettingProblem(key, f"invalid value {value!r}: expected {minimum} to {maximum}")]


def _check_size(table: Mapping[str, Any]) -> list[SettingProblem]:
    memory = table.get("memory", 0)
    try:
        size_in_bytes(memory)
    except ValueError:
        reason = f'invalid size {memory!r}: expected one such as "80g"'
        return [SettingProblem("memory", reason)]
    return []


def _check_memory(settings: Mapping[str, Any]) -> list[SettingProblem]:
    """Return a problem if there is a memory slot and a device without memory for it."""
    tables = [{**settings, **entry} for entry in settings.get("devices", [{}])]
    sizes = [size_in_bytes(table.get("memory", 0)) for table in tables]
    slots = memory_slots("", "", settings)
    if any(size < int(slot.quantum) for slot in slots for size in sizes):
        reason = 'needs memory = "80g" in the table or in each entry of devices'
        return [SettingProblem("memory-slot", reason)]
    return []


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, str, float)) and _AMOUNT.fullmatch(str(value)) is not None


def _is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(n, str) for n in value)


def _join_links(links: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return for each linked device the first one of its group; links may be chained."""
    groups: dict[str, list[str]] = {}
    for link in links:
        linked = [name for member in link for name in groups.get(member, [member])]
        groups |= dict.fromkeys(linked, linked)
    return {name: group[0] for name, group in groups.items()}


def _check_devices(entries: object) -> list[SettingProblem]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return [
            SettingProblem("devices", 'expected a list such as [{ id = "a0", capacity = "1" }]')
        ]
    problems = []
    for index, entry in enumerate(entries):
        member = f"devices.{index}"
        problems += [
            SettingProblem(f"{member}.{problem.key}", problem.why)
            for problem in (
                *unknown_settings(entry, _DEVICE_KEYS),
                *(_check_number(entry, "numa-node", 0, 1023) if "numa-node" in entry else ()),
                *_check_size(entry),
            )
        ]
        for key in ("id", "stable-id"):
            value = entry.get(key, "a" if key == "stable-id" else None)
            if not isinstance(value, str) or not _ID.fullmatch(value):
                reason = f"invalid id {value!r}: expected letters, digits, and '_', '.', ':', '-'"
                problems.append(SettingProblem(f"{member}.{key}", reason))
        if not _is_amount(entry.get("capacity", "1")):
            reason = (
                f'invalid amount {entry["capacity"]!r}: expected a decimal such as "1" or "0.05"'
            )
            problems.append(SettingProblem(f"{member}.capacity", reason))
    for key in ("id", "stable-id"):
        values = [entry[key] for entry in entries if isinstance(entry.get(key), str)]
        if duplicates := sorted({value for value in values if values.count(value) > 1}):
            problems.append(SettingProblem("devices", f"duplicate {key} {', '.join(duplicates)}"))
    return problems
