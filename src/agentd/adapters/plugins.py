"""Finding accelerator plugins and calling them, whatever they do.

Every call runs in a thread of its own with a deadline; a call that raises, hangs or
lies makes that plugin `failed`, with the reason, and touches nothing else. A plugin that
is merely late stays `pending` and joins when it opens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar

from importlib_metadata import EntryPoint, entry_points

from agentd.adapters.plugin_data import PluginLie, check_class, checked_edits, checked_listing
from agentd.core.allocation import Allocation
from agentd.core.devices import DeviceId
from agentd.core.edits import ContainerEdits, merged
from agentd.core.slots import CPU, MEM, format_amount
from agentd.errors import PluginUnavailable, Problem
from agentd.plugin_api import (
    ENTRY_POINT_GROUP,
    AcceleratorPlugin,
    AllocatedDevice,
    Features,
)
from agentd.services.interfaces import PluginListing, PluginState, PluginStatus

CALL_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class Table(Protocol):
    """One plugin's table, as the configuration gives it."""

    @property
    def name(self) -> str: ...
    @property
    def plugin(self) -> str: ...
    @property
    def required(self) -> bool: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


@dataclass
class _Instance:
    """One plugin under one device name."""

    name: str
    plugin: str
    entry_point: EntryPoint | None
    settings: Mapping[str, Any]
    has_table: bool
    required: bool
    state: PluginState = PluginState.PENDING
    reason: str = ""
    problems: list[Problem] = field(default_factory=list)
    loaded: type[AcceleratorPlugin] | None = None
    opened: AcceleratorPlugin | None = None
    listing: PluginListing | None = None
    hiding: ContainerEdits = field(default_factory=ContainerEdits)

    def fail(self, reason: str) -> None:
        self.state, self.reason = PluginState.FAILED, " ".join(reason.split())


def installed() -> dict[str, EntryPoint]:
    """Return the entry points of the group `agentd.accelerators`, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


class PluginHost:
    """All plugin instances of this daemon."""

    def __init__(
        self,
        tables: Sequence[Table],
        allow: Sequence[str] = (),
        block: Sequence[str] = (),
        *,
        features: Features,
        points: Mapping[str, EntryPoint] | None = None,
    ) -> None:
        points = installed() if points is None else points
        self._features = features
        self._instances = list(_instances(tables, set(allow), set(block), points))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_late = False
        self._late: asyncio.Queue[str] = asyncio.Queue()

    async def load(self, timeout_s: float) -> None:
        """Import every plugin and check its table."""
        tasks = [asyncio.create_task(self._load(instance)) for instance in self._instances]
        self._tasks = dict(zip((i.name for i in self._instances), tasks, strict=True))
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def problems(self) -> list[Problem]:
        """Return what is wrong with the plugins' tables."""
        return [problem for instance in self._instances for problem in instance.problems]

    async def open(self, timeout_s: float) -> None:
        """Open and list every plugin in parallel, waiting no longer than `timeout_s`."""
        tasks = {
            instance.name: asyncio.create_task(self._open(instance, self._tasks[instance.name]))
            for instance in self._instances
        }
        self._tasks = tasks
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        for instance in self._instances:
            if instance.state is PluginState.PENDING:
                instance.reason = f"has not opened within {timeout_s:g} s"
        self._is_late = True

    def failed_required(self) -> list[str]:
        """Return one line for each plugin that the start depends on and that is not ready."""
        return [
            f"plugin {i.name} is required and {i.state.value}: {i.reason}"
            for i in self._instances
            if i.required and i.state is not PluginState.READY
        ]

    def statuses(self, *, everything: bool = False) -> list[PluginStatus]:
        """Return how each instance does; with `everything`, those that wait for a table too."""
        return [
            PluginStatus(
                i.name,
                i.plugin,
                i.state,
                i.reason,
                tuple(slot.name for slot in i.listing.slot_types) if i.listing else (),
            )
            for i in self._instances
            if everything or i.has_table or not _needs_table(i)
        ]

    def listings(self) -> list[PluginListing]:
        return [i.listing for i in self._instances if i.listing is not None]

    async def late(self) -> AsyncIterator[str]:
        while True:
            yield await self._late.get()

    async def container_edits(
        self, allocation: Allocation, stable_ids: Mapping[DeviceId, str]
    ) -> ContainerEdits:
        names = dict.fromkeys(share.device_id.name for share in allocation.shares)
        giving = [
            await self._edits_of(name, _allocated(allocation, name, stable_ids))
            for name in names
            if name not in (CPU, MEM)
        ]
        hiding = [i.hiding for i in self._instances if i.listing and i.name not in names]
        return merged(hiding, giving)

    async def close(self) -> None:
        """Close what is open, and give up on what is not."""
        for task in self._tasks.values():
            task.cancel()
        for instance in self._instances:
            if instance.opened is not None and instance.state is PluginState.READY:
                try:
                    await _call(instance.opened.close, timeout_s=2.0)
                except Exception as error:  # noqa: BLE001 - the call into a plugin
                    instance.fail(f"close: {_said(error)}")

    async def _edits_of(self, name: str, devices: list[AllocatedDevice]) -> ContainerEdits:
        plugin = next((i.opened for i in self._instances if i.name == name and i.listing), None)
        if plugin is None:
            raise PluginUnavailable(f"plugin {name} is not ready")
        try:
            return checked_edits(await _call(plugin.container_edits, devices, self._features))
        except Exception as error:
            raise PluginUnavailable(
                f"plugin {name} does not say what its devices need: {_said(error)}"
            ) from error

    async def _load(self, instance: _Instance) -> None:
        if instance.state is not PluginState.PENDING:
            return
        if instance.entry_point is None:
            instance.fail(instance.reason)
            return
        try:
            loaded = check_class(await _call(instance.entry_point.load, timeout_s=None))
            instance.loaded = loaded
            if _needs_table(instance) and not instance.has_table:
                instance.state = PluginState.BLOCKED
                instance.reason = (
                    f'needs a table of its own, such as [plugins.cuda] plugin = "{instance.plugin}"'
                )
                return
            wrong = await _call(lambda: list(loaded.validate(instance.settings)))
            instance.problems = [
                Problem(f"plugins.{instance.name}.{item.key}", item.why) for item in wrong
            ]
            if instance.problems:
                instance.fail("; ".join(str(problem) for problem in instance.problems))
        except Exception as error:  # noqa: BLE001 - the call into a plugin
            instance.fail(f"import: {_said(error)}")

    async def _open(self, instance: _Instance, loading: asyncio.Task[None]) -> None:
        await loading
        if instance.state is not PluginState.PENDING or instance.loaded is None:
            return
        step = "open"
        try:
            plugin = await _call(instance.loaded, instance.name, instance.settings, timeout_s=None)
            await _call(plugin.open, timeout_s=None)
            step = "list"
            types = await _call(lambda: list(plugin.slot_types()))
            instance_listing = checked_listing(
                instance.name, types, await _call(lambda: list(plugin.list_devices()))
            )
            step = "hiding edits"
            hiding = checked_edits(await _call(plugin.container_edits, [], self._features))
        except Exception as error:  # noqa: BLE001 - the call into a plugin
            instance.fail(f"{step}: {_said(error)}")
        else:
            instance.opened, instance.listing = plugin, instance_listing
            instance.hiding = replace(ContainerEdits(), env=hiding.env)
            instance.state, instance.reason = PluginState.READY, ""
        if self._is_late:
            self._late.put_nowait(instance.name)


def _needs_table(instance: _Instance) -> bool:
    return instance.loaded is not None and instance.loaded.needs_table


def _instances(
    tables: Sequence[Table], allow: set[str], block: set[str], points: Mapping[str, EntryPoint]
) -> Iterable[_Instance]:
    def wanted(plugin: str) -> bool:
        return plugin not in block and (not allow or plugin in allow)

    for table in tables:
        point = points.get(table.plugin)
        reason = "" if point else _not_installed(table.plugin, points)
        instance = _Instance(
            table.name, table.plugin, point, table.settings, has_table=True, required=table.required
        )
        instance.reason = reason
        if not wanted(table.plugin):
            instance.state = PluginState.BLOCKED
            instance.reason = (
                f"entry point {table.plugin} is blocked by plugins.allow or plugins.block"
            )
        yield instance
    named = {table.name for table in tables}
    for plugin in sorted(points):
        if plugin not in named and wanted(plugin):
            yield _Instance(plugin, plugin, points[plugin], {}, has_table=False, required=False)


def _not_installed(plugin: str, points: Mapping[str, EntryPoint]) -> str:
    near = get_close_matches(plugin, points, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    have = ", ".join(sorted(points)) or "none"
    return f"no entry point {plugin!r} is installed; {hint}installed: {have}"


def _allocated(
    allocation: Allocation, name: str, stable_ids: Mapping[DeviceId, str]
) -> list[AllocatedDevice]:
    return [
        AllocatedDevice(
            share.device_id.id,
            stable_ids[share.device_id],
            share.slot,
            format_amount(share.amount, share.kind),
        )
        for share in allocation.devices_of(name)
    ]


async def _call(
    function: Callable[..., _T], *arguments: object, timeout_s: float | None = CALL_TIMEOUT_S
) -> _T:
    """Call foreign code in a thread that nobody waits for once the time is over."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - a plugin may raise SystemExit too
            settable = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if settable else PluginLie(_said(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="plugin-call", daemon=True).start()
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise PluginLie(f"no answer within {timeout_s:g} s") from None


def _said(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, PluginLie) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
