"""All accelerator plugins of this node.

Entry points are found by their metadata alone. No plugin code is ever imported here: each instance
runs in a process of its own (`instance`, `process`, `child`), so one that raises, hangs or dies
affects nothing else. A temporary failure is `pending` and retried; a permanent one is `failed`,
with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType

import structlog
from importlib_metadata import EntryPoint

from agentd.config.plugins import PluginTable
from agentd.core.allocation.ledger import Allocation
from agentd.core.conditions import Condition
from agentd.core.kernel.edits import ContainerEdits, merge_edits
from agentd.core.slots import CPU, MEM, format_amount
from agentd.errors import Conflict, PluginUnavailable, Problem, UnknownPlugin
from agentd.plugin_api import (
    AllocatedDevice,
    Features,
    KernelEvent,
    Measurement,
)
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.descendants import kill_orphans
from agentd.pluginhost.entry_points import EntryPoints, installed_entry_points
from agentd.pluginhost.instance import PluginInstance, PluginSpec, PluginTimeouts
from agentd.services.protocols import PluginListing, PluginState, PluginStatus, PluginVitals

log = structlog.get_logger()

RETRY_WAIT_S = 10.0
"""Seconds that an operator's retry waits for the outcome; the attempt itself continues."""


class PluginHost:
    """All plugin instances of this daemon."""

    def __init__(
        self,
        tables: Sequence[PluginTable],
        allow: Sequence[str] = (),
        block: Sequence[str] = (),
        *,
        features: Features,
        timeouts: PluginTimeouts | None = None,
        points: Sequence[EntryPoint] | None = None,
        dealing_rules: AssignmentRules | None = None,
        stopped: Mapping[str, tuple[str, PluginListing | None]] = MappingProxyType({}),
    ) -> None:
        """Create the instances, none started.

        `stopped` has the plugins that an operator stopped, by device name, with the reason and the
        last listing.
        """
        self._points = EntryPoints(installed_entry_points() if points is None else points)
        self._tables = tuple(tables)
        self._named_by_operator = {"allow": tuple(allow), "block": tuple(block)}
        self._changed: asyncio.Queue[str] = asyncio.Queue()
        self._instances: dict[str, PluginInstance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_open = False
        with_table: dict[str, PluginInstance] = {}
        for spec, state, reason in _plugin_specs(tables, set(allow), set(block), self._points):
            instance = PluginInstance(
                spec,
                features,
                timeouts or PluginTimeouts(),
                self._on_change,
                dealing_rules,
                with_table.get(spec.plugin),
            )
            if spec.has_table:
                with_table.setdefault(spec.plugin, instance)
            if state is not PluginState.PENDING:
                instance.enter_state(state, reason)
            elif spec.name in stopped:
                stop_reason, instance.listing = stopped[spec.name]
                instance.state, instance.reason = PluginState.STOPPED, stop_reason
            self._instances[spec.name] = instance

    def plugin_spec(self, name: str) -> PluginSpec:
        """Return the plugin that would run under a device name.

        Raises:
            LookupError: there is none; the message lists the existing ones.
        """
        instance = self._instances.get(name)
        if instance is None:
            names = ", ".join(self._instances) or "none"
            raise LookupError(f"unknown plugin {name!r} (this node has: {names})")
        if not instance.spec.target:
            raise LookupError(instance.reason)
        return instance.spec

    def _on_change(self, name: str) -> None:
        if self._is_open:
            self._changed.put_nowait(name)

    async def open(self, timeout_s: float) -> None:
        """Start all plugins concurrently, and wait at most `timeout_s`.

        Stopped ones are prepared without being opened.
        """
        await kill_orphans()
        instances = [i for i in self._instances.values() if not i.state_entered.is_set()]
        for instance in instances:
            self._supervise(instance)
        await _wait_for_all((instance.state_entered for instance in instances), timeout_s)
        for instance in instances:
            if instance.state is PluginState.PENDING and not instance.state_entered.is_set():
                instance.reason = f"not open within {timeout_s:g} s"
        self._is_open = True

    def _supervise(self, instance: PluginInstance) -> None:
        name = instance.spec.name
        task = asyncio.create_task(instance.run(), name=f"plugin-{name}")
        task.add_done_callback(partial(self._on_supervision_end, instance))
        self._tasks[name] = task

    async def _end_supervision(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait([task])

    def _on_supervision_end(self, instance: PluginInstance, task: asyncio.Task[None]) -> None:
        """Mark a plugin as failed after its supervision ended with an error."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        name, end_reason = instance.spec.name, f"{type(error).__name__}: {error}"
        instance.enter_state(
            PluginState.FAILED, f"supervision ended ({end_reason}); restart agentd"
        )
        self._on_change(name)
        log.error("plugin.supervision_ended", plugin=name, reason=end_reason, exc_info=error)

    def problems(self) -> list[Problem]:
        """Return the problems of the plugins' tables."""
        clashes = [
            Problem(f"plugins.{table.name}.plugin", clash)
            for table in self._tables
            if (clash := self._points.clashes.get(table.plugin))
        ]
        return [*clashes, *(problem for i in self._instances.values() for problem in i.problems)]

    def missing_entry_points(self) -> list[Problem]:
        """Return the entry points that the configuration names and that are not installed.

        They do not prevent a start: a configuration may be shared by nodes of different kinds.
        """
        names_by_key = [(f"plugins.{table.name}.plugin", table.plugin) for table in self._tables]
        for key, names in self._named_by_operator.items():
            names_by_key += [(f"plugins.{key}", name) for name in names]
        return [
            Problem(member, self._points.not_installed_reason(name))
            for member, name in names_by_key
            if name not in self._points
        ]

    async def unvalidated_problems(self, timeout_s: float) -> list[Problem]:
        """Return the tables that their plugins have not validated, after at most `timeout_s`.

        A plugin that cannot be imported, or finds no hardware, is not one of them.
        """
        instances = [i for i in self._instances.values() if i.spec.has_table]
        await _wait_for_all((instance.validation for instance in instances), timeout_s)
        return [
            Problem(f"plugins.{i.spec.name}", f"the table is not validated: {reason}")
            for i in instances
            if (reason := i.unvalidated_reason)
        ]

    def required_failures(self) -> dict[str, str]:
        """Return the reason for each required plugin that is not ready, by device name."""
        return {
            name: f"plugin {name} is required and {i.status.text}"
            for name, i in self._instances.items()
            if i.spec.required and i.state not in (PluginState.READY, PluginState.STOPPED)
        }

    def statuses(self, *, everything: bool = False) -> list[PluginStatus]:
        """Return the status of each instance; `everything` includes those that need a table."""
        instances = self._instances.values()
        return [i.status for i in instances if everything or not i.is_silent]

    def vitals(self) -> dict[str, PluginVitals]:
        now = time.monotonic()
        return {
            name: PluginVitals(i.attempts - 1, now - i.listed_at if i.listed_at else None)
            for name, i in self._instances.items()
            if i.attempts
        }

    def conditions(self) -> Iterator[Condition]:
        for missing in self.missing_entry_points():
            yield Condition("host", f"{missing.where}: {missing.why}")
        for instance in self._instances.values():
            yield from instance.conditions()

    async def retry(self, name: str) -> PluginStatus:
        instance = self._startable(name)
        if instance.state is PluginState.STOPPED:
            remedy = f"start it with agentctl plugins start {name}"
            raise Conflict(f"plugin {name} is {instance.reason}; {remedy}")
        await instance.retry(RETRY_WAIT_S)
        return instance.status

    async def stop(self, name: str, reason: str) -> PluginStatus:
        instance = self._startable(name)
        if stuck := instance.stuck_reason():
            raise Conflict(f"plugin {name} cannot be stopped: {stuck}")
        await self._end_supervision(name)
        try:
            await instance.stop(reason)
        except Conflict:
            self._supervise(instance)
            raise
        return instance.status

    async def start(self, name: str) -> PluginStatus:
        instance = self._startable(name)
        if instance.state is PluginState.STOPPED:
            await self._end_supervision(name)
            instance.state, instance.reason = PluginState.PENDING, "it is starting"
            self._supervise(instance)
            await instance.wait_attempt(RETRY_WAIT_S)
        return instance.status

    async def clear(self, name: str, stable_ids: Sequence[str]) -> None:
        await self._startable(name).clear(stable_ids)

    def _startable(self, name: str) -> PluginInstance:
        """Return an instance that can have a process.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked.
        """
        instance = self._instances.get(name)
        if instance is None:
            names = ", ".join(self._instances) or "none"
            raise UnknownPlugin(f"unknown plugin {name!r} (this node has: {names})")
        if not instance.spec.target or instance.state is PluginState.BLOCKED:
            raise Conflict(f"plugin {name} is blocked: {instance.reason}")
        return instance

    def listings(self) -> list[PluginListing]:
        return [i.listing for i in self._instances.values() if i.listing is not None]

    def measurements(self) -> dict[str, Sequence[Measurement]]:
        """Return the latest measurements, by device name."""
        return {name: i.measurements for name, i in self._instances.items() if i.measurements}

    async def changes(self) -> AsyncIterator[str]:
        while True:
            yield await self._changed.get()

    async def container_edits(self, allocation: Allocation, features: Features) -> ContainerEdits:
        names = dict.fromkeys(share.device_id.name for share in allocation.shares)
        device_edits = {
            name: await self._device_edits(name, _allocated_devices(allocation, name), features)
            for name in names
            if name not in (CPU, MEM)
        }
        instances = self._instances.items()
        hiding_edits = [i.hiding for name, i in instances if i.hiding and name not in names]
        return merge_edits(hiding_edits, device_edits)

    async def _device_edits(
        self, name: str, devices: list[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        if name not in self._instances:
            raise PluginUnavailable(f"plugin {name} is not loaded")
        return await self._instances[name].container_edits(devices, features)

    def notify(self, step: str, kernel_id: str, allocation: Allocation) -> None:
        for name in {share.device_id.name for share in allocation.shares} & {*self._instances}:
            devices = _allocated_devices(allocation, name)
            self._instances[name].notify(KernelEvent(step, kernel_id, devices))

    async def close(self) -> None:
        """Close open plugins and abandon the others."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(instance.close() for instance in self._instances.values()))


async def _wait_for_all(events: Iterable[asyncio.Event], timeout_s: float) -> None:
    """Wait until all events are set, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()


def _plugin_specs(
    tables: Sequence[PluginTable], allow: set[str], block: set[str], points: EntryPoints
) -> Iterable[tuple[PluginSpec, PluginState, str]]:
    """Yield the plugins to run, and the blocked ones with the reason."""
    for table in tables:
        plugin, target = table.plugin, points.target(table.plugin)
        spec = PluginSpec(table.name, plugin, target, table.settings, True, table.required)
        if plugin not in points and plugin not in block:
            yield spec, PluginState.FAILED, points.not_installed_reason(plugin)
        elif reason := _blocked_reason(plugin, allow, block):
            yield spec, PluginState.BLOCKED, reason
        elif not target:
            yield spec, PluginState.FAILED, points.missing_target_reason(plugin)
        else:
            yield spec, PluginState.PENDING, ""
    table_names = {table.name for table in tables}
    for plugin in sorted(points):
        if plugin in table_names or _blocked_reason(plugin, allow, block):
            continue
        spec = PluginSpec(plugin, plugin, points.target(plugin))
        if plugin in (CPU, MEM):
            reason = f"invalid entry point name {plugin}: these devices are built in"
            spec = PluginSpec(f"{plugin} (entry point)", plugin, "")
            yield spec, PluginState.FAILED, reason
        elif not spec.target:
            yield spec, PluginState.FAILED, points.missing_target_reason(plugin)
        else:
            yield spec, PluginState.PENDING, ""


def _blocked_reason(plugin: str, allow: set[str], block: set[str]) -> str:
    """Return why the operator's settings block an entry point, empty if they do not."""
    if plugin in block:
        return f"entry point {plugin} is blocked by plugins.block"
    if allow and plugin not in allow:
        return f"entry point {plugin} is not in plugins.allow"
    return ""


def _allocated_devices(allocation: Allocation, name: str) -> list[AllocatedDevice]:
    return [
        AllocatedDevice(
            share.device_id.id,
            share.stable_id,
            share.slot,
            format_amount(share.amount, share.kind),
            {slot: format_amount(amount, kind) for slot, kind, amount in share.amounts},
        )
        for share in allocation.shares_by_device_name(name)
    ]
