"""Any accelerator that is a set of device files, from TOML alone.

    [plugins.tpu]
    plugin = "generic"
    devices = ["/dev/vfio/[0-9]*"]       # one device for each file; its number is its id
    pci-vendors = ["1ae0"]               # and only what sysfs says is of this vendor
    companions = ["/dev/vfio/vfio"]      # files that always go along
    per-device = ["/dev/x_ctl{id}"]      # files that go along with their device
    env = { TPU_VISIBLE_CHIPS = "{ids}" }    # {ids}, {paths}, {uuids}, {places}: comma-separated
    hidden-env = { TPU_VISIBLE_CHIPS = "" }  # for kernels without one
    mounts = ["/usr/lib/vendor"]         # read-only, at the same place
    groups = ["render"]
    model = "TPU v5e"
    slot = "device"                      # the slot is NAME.device

A device's identity is its PCI address, where sysfs tells one, else its path. It is
healthy as long as its file is there and gone when it is not.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentd.plugin_api import (
    AcceleratorPlugin,
    AllocatedDevice,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    Features,
    Mount,
    SettingProblem,
    SlotTypeInfo,
    unknown_settings,
)
from agentd_generic.sysfs import Sysfs

_LISTS = ("devices", "companions", "per-device", "mounts", "groups", "pci-vendors")
_ENVS = ("env", "hidden-env")
_TEXTS = ("model", "slot", "sysfs")
_FIELDS = ("ids", "paths", "uuids", "places")
_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([0-9]+)[^0-9]*$")
_SLOT = re.compile(r"[a-z][a-z0-9_-]{0,30}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A device file, and what tells it from others."""

    path: str
    number: str
    pci: str | None
    numa_node: int | None


class GenericPlugin(AcceleratorPlugin):
    """Device files that globs find."""

    needs_table: ClassVar[bool] = True

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, (*_LISTS, *_ENVS, *_TEXTS))
        for key in _LISTS:
            value = settings.get(key, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                problems.append(SettingProblem(key, 'allowed: a list such as ["/dev/accel*"]'))
            elif key in ("devices", "companions", "per-device", "mounts"):
                problems += [
                    SettingProblem(key, f"{item!r} is no absolute path")
                    for item in value
                    if not item.startswith("/") or ".." in item.split("/")
                ]
        if not settings.get("devices"):
            problems.append(SettingProblem("devices", 'is missing; such as ["/dev/accel[0-9]*"]'))
        for key in _ENVS:
            problems += _env_problems(key, settings.get(key, {}))
        for key in _TEXTS:
            if not isinstance(settings.get(key, ""), str):
                problems.append(SettingProblem(key, "allowed: text"))
        if not _SLOT.fullmatch(str(settings.get("slot", "device"))):
            problems.append(SettingProblem("slot", "allowed: a-z, then a-z, 0-9, '_', '-'"))
        return problems

    def open(self) -> None:
        self._sysfs = Sysfs(Path(self.settings.get("sysfs", "/sys")))

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        return [SlotTypeInfo(self._slot)]

    @property
    def _slot(self) -> str:
        return f"{self.name}.{self.settings.get('slot', 'device')}"

    def _found(self) -> Iterator[_Found]:
        vendors = {
            vendor.lower().removeprefix("0x") for vendor in self.settings.get("pci-vendors", ())
        }
        seen = set()
        for pattern in self.settings["devices"]:
            for path in sorted(Path("/").glob(pattern.lstrip("/"))):
                if path in seen or not _is_device(path):
                    continue
                seen.add(path)
                pci = self._sysfs.pci_address(path)
                if vendors and (pci is None or self._sysfs.vendor(pci) not in vendors):
                    continue
                match = _NUMBER.search(path.name)
                number = match[1] if match else path.name
                node = self._sysfs.numa_node(pci) if pci else None
                yield _Found(str(path), number, pci, node)

    def list_devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo(
                id=f"{self.name}{found.number}",
                stable_id=found.pci or _as_id(found.path),
                slot=self._slot,
                aliases=[_as_id(found.path)] if found.pci else [],
                model=str(self.settings.get("model", "")),
                numa_node=found.numa_node,
                attributes={"path": found.path},
            )
            for found in self._found()
        ]

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        del features
        if not allocation:
            return ContainerEdits(env=dict(self.settings.get("hidden-env", {})))
        there = {found.pci or _as_id(found.path): found for found in self._found()}
        if missing := [device.id for device in allocation if device.stable_id not in there]:
            raise LookupError(f"the device file of {', '.join(missing)} is not there")
        given = [there[device.stable_id] for device in allocation]
        paths = [found.path for found in given]
        for pattern in self.settings.get("per-device", ()):
            paths += [pattern.replace("{id}", found.number) for found in given]
        paths += self.settings.get("companions", ())
        values = {
            "ids": [found.number for found in given],
            "paths": [found.path for found in given],
            "uuids": [device.stable_id for device in allocation],
            "places": [str(place) for place in range(len(given))],
        }
        filled = {key: ",".join(items) for key, items in values.items()}
        return ContainerEdits(
            env={
                name: _FIELD.sub(lambda match: filled[match[1]], template)
                for name, template in self.settings.get("env", {}).items()
            },
            device_nodes=tuple(DeviceNode(path, path) for path in dict.fromkeys(paths)),
            mounts=tuple(Mount(path, path) for path in self.settings.get("mounts", ())),
            groups=tuple(self.settings.get("groups", ())),
        )


def _env_problems(key: str, value: object) -> list[SettingProblem]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        return [SettingProblem(key, 'allowed: a table such as { NAME = "{ids}" }')]
    return [
        SettingProblem(
            f"{key}.{name}", f"{{{field}}} is unknown; allowed: {{{'}, {'.join(_FIELDS)}}}"
        )
        for name, template in value.items()
        for field in _FIELD.findall(template)
        if field not in _FIELDS
    ]


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _as_id(path: str) -> str:
    """Return a path as an identity: letters and digits first, no slashes."""
    return path.strip("/").replace("/", ":")
