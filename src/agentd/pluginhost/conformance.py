"""The conformance suite: every requirement of `agentd.plugin_api`, checked on a real plugin.

The plugin runs in its own process with the same deadlines as under the daemon. A check that depends
on a failed one is skipped.
"""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from agentd.core.devices import Device, Inventory
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.slots import format_amount
from agentd.plugin_api import AllocatedDevice, Features, KernelEvent
from agentd.pluginhost.assignment import device_infos, validate_assignment
from agentd.pluginhost.instance import (
    CLOSE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    PluginSpec,
    PluginTimeouts,
)
from agentd.pluginhost.process import PluginLost, PluginProcess, PluginRefused
from agentd.pluginhost.protocol import PluginFacts
from agentd.pluginhost.validation import (
    InvalidAnswer,
    check_version,
    validate_edits,
    validate_listing,
)
from agentd.services.protocols import PluginListing

_T = TypeVar("_T")
_AGENTS = ("first", "second")
_FEATURES = (Features("process"), Features("docker", device_requests=True))


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; `detail` is the reason of a failure, or an observation.

    A check that was not `tried` has neither passed nor failed.
    """

    check: str
    passed: bool
    detail: str = ""
    tried: bool = True


class _CheckFailed(Exception):
    """A check failed, so the checks after it are skipped."""


class Conformance:
    """One run of the suite on one plugin."""

    def __init__(self, spec: PluginSpec, timeouts: PluginTimeouts) -> None:
        self._spec = spec
        self._timeout_s = timeouts.call_timeout_s
        self.findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """Run all checks and return the findings."""
        spec = self._spec
        process = await PluginProcess.start(spec.name, spec.target, spec.settings, lambda: None)
        try:
            await self._run(process)
        except _CheckFailed:
            pass
        finally:
            await process.kill("the check is over")
        return self.findings

    async def _run(self, process: PluginProcess) -> None:
        facts = await self._check("it is imported", lambda: self._load(process))
        self._record("it imports agentd.plugin_api alone", ", ".join(facts.imports_of_agentd))
        await self._check("its settings are valid", lambda: self._validate(process))
        await self._check("it opens", lambda: process.call("open", timeout_s=OPEN_TIMEOUT_S))
        listing = await self._check("it lists slots and devices", lambda: self._list(process))
        again = await self._check("it lists them again", lambda: self._list(process))
        self._record("ids are the same in two listings", _changed_ids(listing, again))
        difference = "" if listing.slot_types == again.slot_types else "they are others"
        self._record("slot types are the same in two listings", difference)
        waiting = [d.device_id.id for d in listing.devices if d.needs_clear and not facts.has_clear]
        undefined = f"{', '.join(waiting)} needs_clear, and clear is not defined"
        self._record("it clears what waits for a clear", undefined if waiting else "")
        if facts.has_partition:
            known = Inventory.of(listing.slot_types, listing.devices).devices
            dealing = await self._check(
                "it deals its devices",
                lambda: self._deal(process, known, known),
            )
            other = await self._check(
                "it deals them again",
                lambda: self._deal(process, known, known[::-1]),
            )
            self._record(
                "it deals the same way in another order",
                _reassigned(dealing, other),
            )
        await self._check(
            "it says how to hide its devices",
            lambda: self._ask_edits(process, [], _FEATURES[0]),
        )
        devices = [_allocate_whole(device) for device in listing.devices]
        if not devices:
            skipped = Finding(
                "its devices' needs", passed=True, detail="it lists none", tried=False
            )
            self.findings.append(skipped)
        for features in _FEATURES if devices else ():
            edits = await self._check(
                f"it says what its devices need ({features.runtime})",
                partial(self._ask_edits, process, devices, features),
            )
            self._record(
                f"what they need is there ({features.runtime})",
                ", ".join(find_missing_files(edits)),
            )
        if facts.has_measurements:
            await self._check("it measures", lambda: self._measure(process, listing))
        if facts.hears_kernels and devices:
            await self._check("it hears of kernels", lambda: self._notify(process, devices))
        await self._check("it closes", lambda: process.call("close", timeout_s=CLOSE_TIMEOUT_S))

    async def _check(self, check: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        try:
            result = await attempt()
        except (PluginRefused, InvalidAnswer, PluginLost) as error:
            self.findings.append(Finding(check, passed=False, detail=str(error)))
            raise _CheckFailed from None
        self.findings.append(Finding(check, passed=True))
        return result

    def _record(self, check: str, problem: str) -> None:
        self.findings.append(Finding(check, passed=not problem, detail=problem))

    async def _load(self, process: PluginProcess) -> PluginFacts:
        facts: PluginFacts = await process.call("load", timeout_s=LOAD_TIMEOUT_S)
        check_version(facts.api_version)
        return facts

    async def _validate(self, process: PluginProcess) -> None:
        problems = await process.call("validate", timeout_s=self._timeout_s)
        if problems:
            raise InvalidAnswer("; ".join(f"{item.key}: {item.why}" for item in problems))

    async def _list(self, process: PluginProcess) -> PluginListing:
        listing = await process.call("listing", timeout_s=self._timeout_s)
        return validate_listing(self._spec.name, listing.slot_types, listing.devices)

    async def _deal(
        self, process: PluginProcess, known: Sequence[Device], order: Sequence[Device]
    ) -> PluginAssignment:
        """Ask the plugin to deal devices, in the order of `order`."""
        agents, devices = list(_AGENTS), device_infos(order)
        call = process.call("partition", devices, agents, timeout_s=self._timeout_s)
        return validate_assignment(await call, known, agents)

    async def _ask_edits(
        self, process: PluginProcess, devices: list[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        call = process.call("container_edits", devices, features, timeout_s=self._timeout_s)
        edits = validate_edits(await call)
        if not devices and edits != ContainerEdits(env=edits.env):
            raise InvalidAnswer("expected only variables: hiding needs no files, mounts or names")
        return edits

    async def _notify(self, process: PluginProcess, devices: list[AllocatedDevice]) -> None:
        for step in ("before-create", "after-start", "before-stop", "after-stop"):
            event = KernelEvent(step, "check", devices[:1])
            await process.call("kernel_event", event, timeout_s=self._timeout_s)

    async def _measure(self, process: PluginProcess, listing: PluginListing) -> None:
        measurements = await process.call("measure", timeout_s=self._timeout_s)
        known = {d.stable_id for d in listing.devices} | {d.parent for d in listing.devices}
        if unlisted := sorted({item.stable_id for item in measurements} - known):
            raise InvalidAnswer(f"measurements of unlisted devices: {', '.join(unlisted)}")


def find_missing_files(edits: ContainerEdits) -> Iterator[str]:
    """Yield the device files and mount sources of edits that are missing on this node."""
    for node in edits.device_nodes:
        try:
            mode = Path(node.host_path).stat().st_mode
        except OSError as error:
            yield f"{node.host_path}: {error.strerror}"
        else:
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                yield f"{node.host_path}: not a device"
    for mount in edits.mounts:
        if not Path(mount.source).exists():
            yield f"{mount.source}: No such file or directory"


def _allocate_whole(device: Device) -> AllocatedDevice:
    """Return a device as a kernel gets it that holds all of it."""
    amounts = {offer.slot: format_amount(offer.capacity, offer.kind) for offer in device.slots}
    primary = amounts[device.slot]
    return AllocatedDevice(device.device_id.id, device.stable_id, device.slot, primary, amounts)


def _changed_ids(first: PluginListing, second: PluginListing) -> str:
    """Describe the ids that differ between two listings."""
    before = {d.stable_id: (d.device_id.id, d.slot_names) for d in first.devices}
    after = {d.stable_id: (d.device_id.id, d.slot_names) for d in second.devices}
    differing = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return ", ".join(sorted(differing))


def _reassigned(first: PluginAssignment, other: PluginAssignment) -> str:
    """Return the devices that the second dealing gives to another agent."""
    owners = [
        {name: agent for agent, names in dealing.devices.items() for name in names}
        for dealing in (first, other)
    ]
    return ", ".join(sorted({name for name, _ in owners[0].items() ^ owners[1].items()}))
