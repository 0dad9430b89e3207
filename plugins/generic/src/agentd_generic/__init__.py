"""Any accelerator that is a set of device files, from TOML alone.

    [plugins.tpu]
    plugin = "generic"
    devices = ["/dev/vfio/[0-9]*"]       # one device for each file; its number is its id
    pci-vendors = ["1ae0"]               # and only what sysfs says is of this vendor
    companions = ["/dev/vfio/vfio"]      # files that always go along
    per-device = ["/dev/x_ctl{id}"]      # files that go along with their device
    env = { TPU_VISIBLE_CHIPS = "{ids}" }    # {ids}, {paths}, {uuids}, {places}: comma-separated
    hidden-env = { TPU_VISIBLE_CHIPS = "" }  # for kernels without one; this is the default
    mounts = ["/usr/lib/vendor"]         # read-only, at the same place
    groups = ["render"]                  # of this node: a kernel gets their numbers
    model = "TPU v5e"
    memory = "16g"                       # of each device: the slot NAME.mem, in whole MiB
    slot = "device"                      # the slot is NAME.device

`{places}` counts from zero in a container, which sees its own devices alone, and among all
devices of the node in a plain process, which sees them all.

A device's identity is its PCI address, where sysfs tells one that no other file has, else
the path that its file really has. It is healthy as long as its file is there and gone when it
is not. A VFIO group is one device, if all in it is one card's or of these vendors. A file that
is left out is a condition of the node, and so is a card on the PCI bus that has no file.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from agentd.plugin_api import (
    AcceleratorPlugin,
    AllocatedDevice,
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRead,
    DeviceReads,
    Features,
    Mount,
    SettingProblem,
    SlotTypeInfo,
    group_id,
    memory_slot,
    on_pci_bus,
    size_in_bytes,
    unknown_settings,
)
from agentd_generic.sysfs import Sysfs

_LISTS = ("devices", "companions", "per-device", "mounts", "groups", "pci-vendors")
_ENVS = ("env", "hidden-env")
_TEXTS = ("model", "memory", "slot", "sysfs")
_FIELDS = ("ids", "paths", "uuids", "places")
_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([0-9]+)[^0-9]*$")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,100}")
_VFIO_STUBS = ("", "pci-stub")
"""Drivers that leave a VFIO group usable, beside those of VFIO: none, and a stub."""
_COMPANIONS = ("0403", "0c03", "0c80")
"""PCI classes of a GPU's further functions: audio, USB and its type-C ports."""
_SLOT = re.compile(r"[a-z][a-z0-9_-]{0,30}")


class _FileState(msgspec.Struct, frozen=True):
    """The data of sysfs about a device file: PCI devices with their vendors, more of the first."""

    vendor_by_pci: Mapping[str, str]
    numa_node: int | None
    pci_class: str
    driver: str
    problem: str

    @property
    def is_one_card(self) -> bool:
        """Whether all its PCI devices are functions of one."""
        return len({pci.partition(".")[0] for pci in self.vendor_by_pci}) == 1


class _DeviceFile(msgspec.Struct, frozen=True):
    """A device file and its identity; `pci` is its first PCI device."""

    path: str
    number: str
    pci: str | None
    numa_node: int | None
    problem: str

    @property
    def stable_id(self) -> str:
        return self.pci or _path_to_id(self.path)


class GenericPlugin(AcceleratorPlugin):
    """Devices that globs find."""

    needs_table: ClassVar[bool] = True

    @classmethod
    def validate(cls, settings: Mapping[str, Any]) -> list[SettingProblem]:
        problems = unknown_settings(settings, (*_LISTS, *_ENVS, *_TEXTS))
        for key in _LISTS:
            value = settings.get(key, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                problems.append(SettingProblem(key, 'expected a list such as ["/dev/accel*"]'))
            elif key in ("devices", "companions", "per-device", "mounts"):
                problems += [
                    SettingProblem(key, reason)
                    for item in value
                    if (reason := _path_problem(key, item))
                ]
        if not settings.get("devices"):
            problems.append(
                SettingProblem("devices", 'missing, expected a list such as ["/dev/accel[0-9]*"]')
            )
        for key in _ENVS:
            problems += _env_problems(key, settings.get(key, {}))
        for key in _TEXTS:
            if not isinstance(settings.get(key, ""), str):
                problems.append(SettingProblem(key, "expected text"))
        if not _SLOT.fullmatch(str(settings.get("slot", "device"))):
            problems.append(SettingProblem("slot", "expected a-z, then a-z, 0-9, '_', '-'"))
        return problems + _memory_problems(settings)

    def open(self) -> None:
        self._sysfs = Sysfs(Path(self.settings.get("sysfs", "/sys")))
        self._groups = tuple(map(group_id, self.settings.get("groups", ())))
        self._reads = DeviceReads[Path, _FileState]("device", OSError)
        self._found: Sequence[DeviceRead[Path, _FileState]] = ()
        self._vendors = {
            vendor.lower().removeprefix("0x") for vendor in self.settings.get("pci-vendors", ())
        }

    def slot_types(self) -> Sequence[SlotTypeInfo]:
        types = [SlotTypeInfo(self._slot)]
        if "memory" in self.settings:
            types.append(memory_slot(self.name, self._slot))
        return types

    @property
    def _slot(self) -> str:
        return f"{self.name}.{self.settings.get('slot', 'device')}"

    def _find_files(self) -> list[_DeviceFile]:
        """Find the device files, each once, however many names it has."""
        paths = dict.fromkeys(
            path.resolve()
            for pattern in self.settings["devices"]
            for path in sorted(Path("/").glob(pattern.lstrip("/")), key=_natural_key)
            if _is_device(path)
        )
        self._found = self._reads.read(paths, str, self._read_file)
        reads = {read.key: read for read in self._found if self._exclusion_reason(read) is None}
        addresses = {path: self._pci_address(read.state) for path, read in reads.items()}
        numbers = {path: match[1] for path in paths if (match := _NUMBER.search(path.name))}
        device_files = []
        for path, read in reads.items():
            number = numbers.get(path, path.name)
            if [*numbers.values()].count(number) > 1:
                number = f":{_path_to_id(str(path))}"
            is_alone = [*addresses.values()].count(addresses[path]) == 1
            pci = addresses[path] if is_alone else None
            numa_node = read.state.numa_node if read.state else None
            problem = read.problem or (read.state.problem if read.state else "")
            device_files.append(_DeviceFile(str(path), number, pci, numa_node, problem))
        return device_files

    def _read_file(self, path: Path, last: _FileState | None) -> _FileState:
        """Read sysfs; a file keeps what sysfs loses, as it does while a VFIO group is emptied."""
        addresses = self._sysfs.pci_addresses(path)
        if not addresses and last:
            return last
        first = addresses[0] if addresses else ""
        numa_node = self._sysfs.read(first, "numa_node")
        drivers = {pci: self._sysfs.driver(pci) for pci in addresses}
        in_use = [
            f"{pci} has the driver {driver}"
            for pci, driver in drivers.items()
            if path.parent.name == "vfio" and driver not in _VFIO_STUBS and "vfio" not in driver
        ]
        return _FileState(
            {pci: self._sysfs.read(pci, "vendor") for pci in addresses},
            int(numa_node) if numa_node.isdigit() else None,
            self._sysfs.read(first, "class"),
            drivers.get(first, ""),
            f"its VFIO group cannot be opened: {', '.join(in_use)}" if in_use else "",
        )

    def _exclusion_reason(self, read: DeviceRead[Path, _FileState]) -> str | None:
        """Return why a file is not a device, None if it is, empty if it is not meant to be."""
        if not _ID.fullmatch(_path_to_id(read.identity)):
            return "its name is not usable as an id"
        if not self._vendors:
            return None
        state = read.state
        if state is None or not state.vendor_by_pci:
            return read.problem or "sysfs lists no PCI device behind it"
        vendors = state.vendor_by_pci
        foreign = [pci for pci, vendor in vendors.items() if vendor not in self._vendors]
        if foreign and not state.is_one_card and len(foreign) < len(vendors):
            others = ", ".join(f"{pci} ({vendors[pci] or 'unknown'})" for pci in foreign)
            return f"its VFIO group also has devices of other vendors: {others}"
        is_meant = len(foreign) < len(vendors) and not state.pci_class.startswith(_COMPANIONS)
        return None if is_meant else ""

    def _pci_address(self, state: _FileState | None) -> str | None:
        """Return the address that identifies a file; all cards of a VFIO group are one device."""
        if state is None or not (state.is_one_card or (self._vendors and state.vendor_by_pci)):
            return None
        return min(state.vendor_by_pci)

    def conditions(self) -> Sequence[ConditionInfo]:
        reasons = {read.identity: self._exclusion_reason(read) for read in self._found}
        left_out = [
            ConditionInfo(f"{file!r} is left out: {reason}")
            for file, reason in reasons.items()
            if reason
        ]
        return [*left_out, *self._missing_devices()]

    def _missing_devices(self) -> Iterator[ConditionInfo]:
        """Yield what is on the PCI bus like the devices, and has no file; or that there are none.

        A device with another driver is not meant to have such a file.
        """
        patterns = ", ".join(self.settings["devices"])
        found = [read.state for read in self._found if self._exclusion_reason(read) is None]
        if not found:
            yield ConditionInfo(f"no device file matches {patterns}", "load the driver")
        known = {pci for read in self._found if read.state for pci in read.state.vendor_by_pci}
        classes = {state.pci_class for state in found if state and state.pci_class}
        drivers = {"", *(state.driver for state in found if state)}
        for vendor in sorted(self._vendors):
            for pci in on_pci_bus(vendor, [*classes], self._sysfs.root):
                if pci not in known and self._sysfs.driver(pci) in drivers:
                    reason = f"{pci} is on the PCI bus, and has no device file like {patterns}"
                    yield ConditionInfo(reason, "look for its driver in the log of Linux")

    def list_devices(self) -> Sequence[DeviceInfo]:
        memory = self.settings.get("memory")
        secondary = {} if memory is None else {f"{self.name}.mem": str(size_in_bytes(memory))}
        return [
            DeviceInfo(
                id=f"{self.name}{file.number}",
                stable_id=file.stable_id,
                slot=self._slot,
                aliases=[_path_to_id(file.path)] if file.pci else [],
                model=str(self.settings.get("model", "")),
                numa_node=file.numa_node,
                health="unhealthy" if file.problem else "healthy",
                reason=file.problem,
                attributes={"path": file.path},
                secondary=secondary,
                files=[
                    file.path,
                    *(
                        pattern.replace("{id}", file.number)
                        for pattern in self.settings.get("per-device", ())
                        if "{id}" in pattern
                    ),
                ],
            )
            for file in self._find_files()
        ]

    def container_edits(
        self, allocation: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        templates = self.settings.get("env", {})
        if not allocation:
            hidden = {name: "" for name, template in templates.items() if _FIELD.search(template)}
            return ContainerEdits(env=dict(self.settings.get("hidden-env", hidden)))
        file_by_id = {file.stable_id: file for file in self._find_files()}
        if missing := [device.id for device in allocation if device.stable_id not in file_by_id]:
            raise LookupError(f"missing device file of {', '.join(missing)}")
        allocated = [file_by_id[device.stable_id] for device in allocation]
        paths = [file.path for file in allocated]
        for pattern in self.settings.get("per-device", ()):
            paths += [pattern.replace("{id}", file.number) for file in allocated]
        paths += self.settings.get("companions", ())
        values = {
            "ids": [file.number for file in allocated],
            "paths": [file.path for file in allocated],
            "uuids": [device.stable_id for device in allocation],
            "places": [
                str(index if features.runtime == "docker" else [*file_by_id.values()].index(file))
                for index, file in enumerate(allocated)
            ],
        }
        filled = {key: ",".join(items) for key, items in values.items()}
        return ContainerEdits(
            env={
                name: _FIELD.sub(lambda match: filled[match[1]], template)
                for name, template in templates.items()
            },
            device_nodes=tuple(DeviceNode(path, path) for path in dict.fromkeys(paths)),
            mounts=tuple(Mount(path, path) for path in self.settings.get("mounts", ())),
            groups=self._groups,
        )


def _memory_problems(settings: Mapping[str, Any]) -> list[SettingProblem]:
    if "memory" not in settings:
        return []
    try:
        is_enough = size_in_bytes(settings["memory"]) >= 1 << 20
    except ValueError:
        is_enough = False
    problems = []
    if not is_enough:
        reason = f'invalid size {settings["memory"]!r}: expected at least 1 MiB, such as "16g"'
        problems.append(SettingProblem("memory", reason))
    if settings.get("slot") == "mem":
        problems.append(SettingProblem("slot", "mem is the slot of the memory; choose another"))
    return problems


def _natural_key(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _path_problem(key: str, item: str) -> str:
    """Return the problem of a path or pattern in the settings, empty if it is valid."""
    path = Path(item)
    if not path.is_absolute() or ".." in path.parts or not path.name or "\0" in item:
        return f"invalid path {item!r}: expected the absolute path of a file"
    if key == "devices":  # Python 3.13 gives "**foo" and a last "**" another meaning than 3.11
        if path.name == "**" or any("**" in part for part in path.parts if part != "**"):
            return f"invalid pattern {item!r}: expected '**' for folders, as in '/dev/**/accel*'"
    elif set(item) & set("*?["):
        return f"invalid path {item!r}: expected one file, not a pattern"
    if fields := [field for field in _FIELD.findall(item) if (key, field) != ("per-device", "id")]:
        allowed = "{id}" if key == "per-device" else "none"
        return f"unknown field {{{fields[0]}}}; allowed: {allowed}"
    return ""


def _env_problems(key: str, value: object) -> list[SettingProblem]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        return [SettingProblem(key, 'expected a table such as { NAME = "{ids}" }')]
    fields = _FIELDS if key == "env" else ()
    allowed = ", ".join(f"{{{field}}}" for field in fields) or "plain text"
    return [
        *(
            SettingProblem(
                f"{key}.{name}", f"invalid variable name {name!r}: expected no '=' or NUL"
            )
            for name in value
            if not name or "=" in name or "\0" in name
        ),
        *(
            SettingProblem(f"{key}.{name}", f"unknown field {{{field}}}; allowed: {allowed}")
            for name, template in value.items()
            for field in _FIELD.findall(template)
            if field not in fields
        ),
    ]


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _path_to_id(path: str) -> str:
    """Return a path as an identity: it begins with a letter or digit and has no slashes."""
    return path.strip("/").replace("/", ":")
