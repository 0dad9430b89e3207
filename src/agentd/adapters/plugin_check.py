"""The conformance suite for plugins: each promise of `agentd.plugin_api`, tried on a real one.

The plugin runs in a process of its own as it does under the daemon, with the same deadlines.
A check that cannot be tried because an earlier one failed is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agentd.adapters.plugin_data import PluginLie, check_version, checked_edits, checked_listing
from agentd.adapters.plugin_instance import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Pace, Wanted
from agentd.adapters.plugin_process import PluginLost, PluginProcess, PluginRefused
from agentd.adapters.plugin_wire import Facts
from agentd.core.edits import ContainerEdits
from agentd.core.slots import format_amount
from agentd.plugin_api import AllocatedDevice, Features
from agentd.services.interfaces import PluginListing

_T = TypeVar("_T")
_ENGINES = (Features("process"), Features("docker", device_requests=True))


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check; `detail` says why it failed, or what was seen."""

    check: str
    passed: bool
    detail: str = ""


class _Failed(Exception):
    """A check failed, and those after it cannot be tried."""


class Conformance:
    """One run of the suite over one plugin."""

    def __init__(self, wanted: Wanted, pace: Pace) -> None:
        self._wanted = wanted
        self._timeout_s = pace.call_timeout_s
        self.findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """Try everything, and return what was found."""
        wanted = self._wanted
        process = await PluginProcess.start(
            wanted.name, wanted.target, wanted.settings, lambda: None
        )
        try:
            await self._run(process)
        except _Failed:
            pass
        finally:
            await process.end("the check is over")
        return self.findings

    async def _run(self, process: PluginProcess) -> None:
        facts = await self._tried("it is imported", lambda: self._load(process))
        self._say("it imports agentd.plugin_api alone", ", ".join(facts.imports_of_agentd))
        await self._tried("its settings are valid", lambda: self._validate(process))
        await self._tried("it opens", lambda: process.call("open", timeout_s=OPEN_TIMEOUT_S))
        listing = await self._tried("it lists slots and devices", lambda: self._listed(process))
        again = await self._tried("it lists them again", lambda: self._listed(process))
        self._say("ids are the same in two listings", _moved(listing, again))
        await self._tried(
            "it says how to hide its devices", lambda: self._edits(process, [], _ENGINES[0])
        )
        devices = [
            AllocatedDevice(d.device_id.id, d.stable_id, d.slot, format_amount(d.capacity, d.kind))
            for d in listing.devices
        ]
        for features in _ENGINES if devices else ():
            await self._tried(
                f"it says what its devices need ({features.runtime})",
                partial(self._edits, process, devices, features),
            )
        if facts.has_measurements:
            await self._tried("it measures", lambda: self._measure(process, listing))
        await self._tried("it closes", lambda: process.call("close", timeout_s=CLOSE_TIMEOUT_S))

    async def _tried(self, check: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        try:
            result = await attempt()
        except (PluginRefused, PluginLie, PluginLost) as error:
            self.findings.append(Finding(check, passed=False, detail=str(error)))
            raise _Failed from None
        self.findings.append(Finding(check, passed=True))
        return result

    def _say(self, check: str, wrong: str) -> None:
        self.findings.append(Finding(check, passed=not wrong, detail=wrong))

    async def _load(self, process: PluginProcess) -> Facts:
        facts: Facts = await process.call("load", timeout_s=OPEN_TIMEOUT_S)
        check_version(facts.api_version)
        return facts

    async def _validate(self, process: PluginProcess) -> None:
        wrong = await process.call("validate", timeout_s=self._timeout_s)
        if wrong:
            raise PluginLie("; ".join(f"{item.key}: {item.why}" for item in wrong))

    async def _listed(self, process: PluginProcess) -> PluginListing:
        found = await process.call("listing", timeout_s=self._timeout_s)
        return checked_listing(self._wanted.name, found.slot_types, found.devices)

    async def _edits(
        self, process: PluginProcess, devices: list[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        call = process.call("container_edits", devices, features, timeout_s=self._timeout_s)
        edits = checked_edits(await call)
        if not devices and edits != ContainerEdits(env=edits.env):
            raise PluginLie("more than variables; hiding takes no files, mounts or names")
        return edits

    async def _measure(self, process: PluginProcess, listing: PluginListing) -> None:
        measured = await process.call("measure", timeout_s=self._timeout_s)
        known = {d.stable_id for d in listing.devices} | {d.parent for d in listing.devices}
        if strange := sorted({item.stable_id for item in measured} - known):
            raise PluginLie(f"it measures {', '.join(strange)}, which it does not list")


def _moved(first: PluginListing, second: PluginListing) -> str:
    """Say which ids mean something else in the second listing."""
    before = {d.stable_id: (d.device_id.id, d.slot) for d in first.devices}
    after = {d.stable_id: (d.device_id.id, d.slot) for d in second.devices}
    return ", ".join(sorted(name for name in before if before[name] != after.get(name)))
