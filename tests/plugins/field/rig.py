"""Driver states of the field, for any plugin.

A rig is a plugin over a substitute of its driver, with three devices. `bring` puts the second
device into a state by its name. To run the table of `test_states.py` against another plugin, add a
rig to `RIGS` there.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from agentd.plugin_api import AllocatedDevice, ContainerEdits, DeviceInfo, Features, Measurement
from agentd.pluginhost.process import PluginProcess
from agentd.pluginhost.protocol import DeviceListing

TIMEOUT_S = 20.0
HEALTH_INTERVAL_S = 1.0


class Rig(Protocol):
    """A plugin, and a driver that can be brought into the states of the field."""

    name: str
    """Device name of the plugin."""
    target: str
    """Entry point, as `module:Class`."""
    settings: Mapping[str, Any]
    stable_ids: tuple[str, str, str]
    words: Mapping[str, str]
    """The states that the driver knows, with the driver's words about each."""

    def bring(self, state: str = "") -> None:
        """Bring the second device into a state, or all into none."""


class OpenPlugin:
    """The process of an open plugin, called as by the daemon."""

    def __init__(self, name: str, process: PluginProcess, changed: asyncio.Event) -> None:
        self.name = name
        self.process = process
        self.changed = changed

    @classmethod
    async def start(cls, rig: Rig, **settings: object) -> "OpenPlugin":
        changed = asyncio.Event()
        process = await PluginProcess.start(
            rig.name, rig.target, {**rig.settings, **settings}, changed.set
        )
        plugin = cls(rig.name, process, changed)
        await plugin.call("load")
        assert await plugin.call("validate") == []
        await plugin.call("open")
        return plugin

    async def call(self, method: str, *arguments: object) -> Any:
        return await self.process.call(method, *arguments, timeout_s=TIMEOUT_S)

    async def listing(self) -> DeviceListing:
        return await self.call("listing")

    async def devices(self) -> dict[str, DeviceInfo]:
        return {device.stable_id: device for device in (await self.listing()).devices}

    async def conditions(self) -> list[str]:
        return [condition.reason for condition in (await self.listing()).conditions]

    async def health(self) -> dict[str, str]:
        """The reason of each device, empty if it is healthy."""
        devices = (await self.devices()).values()
        return {d.stable_id: "" if d.health == "healthy" else d.reason for d in devices}

    async def until(self, holds: Callable[[DeviceListing], bool]) -> DeviceListing:
        """List with each change that the plugin reports, and each second, until it holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                self.changed.clear()
                if holds(listing := await self.listing()):
                    return listing
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), HEALTH_INTERVAL_S)

    async def edits(self, *stable_ids: str, runtime: str = "docker") -> ContainerEdits:
        listed = await self.devices()
        given = [AllocatedDevice(listed[n].id, n, listed[n].slot, "1") for n in stable_ids]
        return await self.call("container_edits", given, Features(runtime))

    async def measure(self) -> list[Measurement]:
        return await self.call("measure")


def add_to_bus(sysfs: Path, address: str, vendor: str, driver: str) -> Path:
    """Put a GPU on the PCI bus of a substitute for sysfs, and return its folder."""
    folder = sysfs / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"0x{vendor}\n")
    (folder / "class").write_text("0x030200\n")
    (folder / "numa_node").write_text("0\n")
    bound = sysfs / "bus/pci/drivers" / driver
    bound.mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(bound)
    return folder
