"""One plugin under one device name, over the life of the daemon.

pending ──────────> ready <──────> failed (lost; retried)
│  retried
└──> failed for good (no such hardware, wrong settings, contract broken), or blocked

Each of them becomes stopped when an operator stops the plugin, and pending when it is started.

`run` starts the plugin's process, follows it, and restarts it with a growing backoff when it is
lost, or failed for a temporary reason. Its first listing fixes its slots; later listings update the
health of its devices. An operator can retry any plugin at once. `stop` requires that `run` was
cancelled, and ends the process: it may be the last client of a driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from agentd.concurrency import complete_shielded, wait_event
from agentd.core.conditions import Condition
from agentd.core.kernel.edits import ContainerEdits
from agentd.errors import Conflict, PluginUnavailable, Problem
from agentd.failpoints import hit_async
from agentd.plugin_api import AllocatedDevice, Features, KernelEvent, Measurement
from agentd.pluginhost.assignment import AssignmentRules, device_infos, validate_assignment
from agentd.pluginhost.output import one_line
from agentd.pluginhost.process import PluginAbsent, PluginLost, PluginProcess, PluginRefused
from agentd.pluginhost.protocol import DeviceListing, PluginFacts
from agentd.pluginhost.validation import (
    InvalidAnswer,
    check_version,
    validate_edits,
    validate_listing,
    validate_measurements,
)
from agentd.services.protocols import PluginListing, PluginState, PluginStatus

log = structlog.get_logger()

LOAD_TIMEOUT_S, OPEN_TIMEOUT_S, CLOSE_TIMEOUT_S = 60.0, 120.0, 2.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
BACKOFF_RESET_S = 60.0
"""Uptime in seconds after which the restart backoff is reset."""
MAX_EVENTS_WAITING = 16
"""Maximum kernel events that wait for a slow plugin; further ones are dropped."""
MAX_WAKES = 8
"""Maximum listings in a row that a plugin can request; then it is listed at the usual interval."""
MAX_ABANDONED = 2
"""No further process is started while this many of one plugin cannot be killed."""
_THROTTLED_REASON = "it reports changes all the time; listed once in each health-interval"


class PluginSpec(msgspec.Struct, frozen=True):
    """A plugin to run: its device name, entry point and table."""

    name: str
    plugin: str
    target: str
    settings: Mapping[str, Any] = {}
    has_table: bool = False
    required: bool = False


class PluginTimeouts(msgspec.Struct, frozen=True):
    """Time limits of calls, the interval of listings (seconds), and the memory limit of a process.

    A process beyond `max_memory_bytes` of resident memory is restarted.
    """

    call_timeout_s: float = 10.0
    health_interval_s: float = 10.0
    max_memory_bytes: int = 1 << 30


class Backoff:
    """The backoff between attempts, which an operator can cut short."""

    def __init__(self) -> None:
        self.next_s = MIN_BACKOFF_S
        self._is_cut = asyncio.Event()
        self._last_reason = ""

    @property
    def is_first(self) -> bool:
        """Whether the next backoff is the first one since a reset."""
        return self.next_s == MIN_BACKOFF_S

    def reset(self) -> None:
        self.next_s = MIN_BACKOFF_S

    def cut_short(self) -> None:
        self._is_cut.set()

    def is_new(self, reason: str) -> bool:
        """Return whether a reason differs from the previous one."""
        previous, self._last_reason = self._last_reason, reason
        return reason != previous

    async def wait(self, *, for_good: bool = False) -> None:
        """Wait for the backoff, or until it is cut short, also beforehand."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if for_good else self.next_s):
                await self._is_cut.wait()
        self._is_cut.clear()
        self.next_s = min(2 * self.next_s, MAX_BACKOFF_S)


class PluginInstance:
    """A plugin under a device name, and its process."""

    def __init__(
        self,
        spec: PluginSpec,
        features: Features,
        timeouts: PluginTimeouts,
        on_change: Callable[[str], None],
        dealing_rules: AssignmentRules | None = None,
        with_table: PluginInstance | None = None,
    ) -> None:
        """Create an instance; `with_table` is one of the same plugin that has a table."""
        self.spec = spec
        self._with_table = with_table
        self._dealing_rules = dealing_rules
        self.state = PluginState.PENDING
        self.reason = ""
        self.problems: list[Problem] = []
        self.attempts = self.ended_attempts = 0
        self.listed_at: float | None = None
        self.listing: PluginListing | None = None
        self.hiding: ContainerEdits | None = None
        self.measurements: Sequence[Measurement] = ()
        self.state_entered = asyncio.Event()
        self._loaded = asyncio.Event()
        """Set once the plugin has been imported, or an attempt has ended without that."""
        self.validation = asyncio.Event()
        """Set once `validate` has answered, or an attempt has ended without that."""
        self._is_validated = False
        self._step = ""
        self._features = features
        self._timeouts = timeouts
        self._on_change = on_change
        self._facts: PluginFacts | None = None
        self._process: PluginProcess | None = None
        self._abandoned: list[PluginProcess] = []
        self._change_reported = asyncio.Event()
        self._backoff = Backoff()
        self._ready_since: float | None = None
        self._events_waiting = 0
        self._is_throttled = self._is_serving = False
        self._measure_failure = self._unprepared = ""

    @property
    def status(self) -> PluginStatus:
        slots = tuple(slot.name for slot in self.listing.slot_types) if self.listing else ()
        values = (self.spec.name, self.spec.plugin, self.state, self.reason, slots)
        return PluginStatus(*values, self.spec.has_table, self._is_serving)

    @property
    def _is_listed(self) -> bool:
        """Whether it has listed its devices since the start of agentd."""
        return self.listing is not None and not self.listing.is_restored

    @property
    def is_silent(self) -> bool:
        """Whether it lacks a table of its own, which is not worth a warning."""
        return self._facts is not None and self._facts.needs_table and not self.spec.has_table

    @property
    def unvalidated_reason(self) -> str:
        """Why `validate` has not judged the table, empty if it has.

        It is empty, too, for a plugin that cannot be imported or finds no hardware: the table is
        not the reason.
        """
        if self._is_validated or self.state in (PluginState.BLOCKED, PluginState.ABSENT):
            return ""
        if not self.validation.is_set():
            return f"{self._step}: no answer yet"
        return self._unprepared or self.reason if self._step == "settings" else ""

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions of its process; its state and listing are known elsewhere."""
        about, name = f"plugin/{self.spec.name}", self.spec.name
        if self._process is not None and (failure := self._process.watch_failure):
            interval = f"found every {self._timeouts.health_interval_s:g} s only"
            reason = f"plugin {name} cannot wait for events, and changes are {interval}: {failure}"
            yield Condition(about, reason)
        if self.state is PluginState.READY and self._is_throttled:
            yield Condition(about, f"plugin {name}: {_THROTTLED_REASON}")
        if self.state is PluginState.READY and self._measure_failure:
            yield Condition(about, f"plugin {name} cannot measure: {self._measure_failure}")
        if self.state is PluginState.STOPPED and self.hiding is None:
            words = self._unprepared or "it has not told how to hide them"
            yield Condition(about, f"kernels may see the devices of plugin {name}: {words}")

    def enter_state(self, state: PluginState, reason: str) -> None:
        """Enter a state that other parts may rely on."""
        self.state, self.reason = state, " ".join(reason.split())
        self.ended_attempts = self.attempts
        self.state_entered.set()
        self._loaded.set()
        self.validation.set()

    async def run(self) -> None:
        """Keep the plugin running until cancelled, or until it has failed for good.

        One that is stopped since an earlier run of agentd is only prepared.
        """
        if self.state is PluginState.STOPPED:
            await self._prepare()
            return
        while True:
            self._ready_since = None
            self.attempts += 1
            try:
                await self._bring_up()
                await self._poll_devices()
            except (PluginAbsent, InvalidAnswer) as error:
                if self.listing is None:
                    is_absent = isinstance(error, PluginAbsent)
                    state = PluginState.ABSENT if is_absent else PluginState.FAILED
                    await self._end_attempt(str(error), state)
                    self._on_change(self.spec.name)
                    await self._backoff.wait(for_good=True)
                    continue
                await self._end_attempt(str(error))
            except (PluginRefused, PluginLost) as error:
                await self._end_attempt(str(error))
            except Exception as error:
                log.exception("plugin.failed", plugin=self.spec.name)
                await self._end_attempt(f"{type(error).__name__}: {error}")
            if self.is_silent:
                return
            if self._ready_since and time.monotonic() - self._ready_since > BACKOFF_RESET_S:
                self._backoff.reset()
            if self._backoff.is_new(self.reason):
                log.warning("plugin.lost", plugin=self.spec.name, reason=self.reason)
            self._on_change(self.spec.name)
            await self._backoff.wait()

    async def wait_loaded(self) -> PluginFacts | None:
        """Wait for the import of the plugin; return its facts, None if it failed."""
        await self._loaded.wait()
        return self._facts

    async def retry(self, timeout_s: float) -> None:
        """Retry at once, and wait at most `timeout_s` for the end of a new attempt."""
        self._backoff.cut_short()
        await self.wait_attempt(timeout_s)

    async def wait_attempt(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of a new attempt."""
        attempts_before = self.attempts
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (
                    self.state is not PluginState.READY and self.ended_attempts <= attempts_before
                ):
                    self.state_entered.clear()
                    await self.state_entered.wait()

    async def _prepare(self) -> None:
        """Check the table of a stopped plugin, and get the edits that hide its devices.

        It is not opened, so the driver stays released, and its process ends at once.
        """
        try:
            self._process = process = await self._start_process()
            await self._load(process)
        except (PluginRefused, InvalidAnswer, PluginLost, OSError) as error:
            self._unprepared = f"{self._step}: {error}"
        finally:
            await complete_shielded(self._end_process(f"the plugin is {self.reason}", 0))
        if self.is_silent:
            self._settle_without_table()
        else:
            self.enter_state(PluginState.STOPPED, self.reason)

    async def _start_process(self) -> PluginProcess:
        self._step, self._unprepared, spec = "import", "", self.spec
        return await PluginProcess.start(
            spec.name, spec.target, spec.settings, self._change_reported.set
        )

    async def _load(self, process: PluginProcess) -> None:
        """Import the plugin, check its table and get its hiding edits, unless it is silent."""
        self._facts = await process.call("load", timeout_s=LOAD_TIMEOUT_S)
        self._loaded.set()
        check_version(self._facts.api_version)
        await hit_async("plugin.after_load")
        if self.is_silent:
            return
        self._step = "settings"
        setting_problems = await process.call("validate", timeout_s=self._timeouts.call_timeout_s)
        self._is_validated = True
        self.validation.set()
        table = f"plugins.{self.spec.name}"
        self.problems = [
            Problem(f"{table}.{one_line(item.key)}", one_line(item.why))
            for item in setting_problems
        ]
        if self.problems:
            raise InvalidAnswer("; ".join(map(str, self.problems)))
        self._step = "hiding edits"
        with contextlib.suppress(PluginRefused, InvalidAnswer):
            self.hiding = await self._hiding_edits(process)

    async def _bring_up(self) -> None:
        if self._with_table is not None and self._facts is None:
            self._facts = await self._with_table.wait_loaded()
            if self.is_silent:
                self._settle_without_table()
                return
        stuck = self.stuck_reason()
        if len(self._abandoned) >= MAX_ABANDONED:
            raise PluginLost(stuck)
        self._process = process = await self._start_process()
        try:
            await self._load(process)
            if self.is_silent:
                self._settle_without_table()
                await self.close()
                return
            self._step = "open"
            await process.call("open", timeout_s=OPEN_TIMEOUT_S)
            await hit_async("plugin.after_open")
            self._step = "list"
            listing = await self._list_devices_twice(process)
            await hit_async("plugin.after_list")
            if self._facts is not None and self._facts.has_partition and not self._is_listed:
                self._step = "partition"
                listing = await self._with_dealing(process, listing)
            self._step = "hiding edits"
            self.hiding = await self._hiding_edits(process)
        except (PluginRefused, InvalidAnswer, PluginLost) as error:
            raise type(error)(f"{self._step}: {error}") from None
        self._apply_listing(listing)
        self._ready_since, self._is_serving = time.monotonic(), True
        self.enter_state(PluginState.READY, "")
        self._on_change(self.spec.name)

    def _settle_without_table(self) -> None:
        example = f'[plugins.cuda] plugin = "{self.spec.plugin}"'
        self.enter_state(PluginState.BLOCKED, f"needs a table of its own, such as {example}")

    async def _hiding_edits(self, process: PluginProcess) -> ContainerEdits:
        """Return the edits that hide the plugin's devices, also before it is open."""
        timeout_s = self._timeouts.call_timeout_s
        edits = await process.call("container_edits", [], self._features, timeout_s=timeout_s)
        return ContainerEdits(env=validate_edits(edits).env)

    async def _list_devices(self, process: PluginProcess) -> PluginListing:
        answer: DeviceListing = await process.call(
            "listing", timeout_s=self._timeouts.call_timeout_s
        )
        listing = validate_listing(
            self.spec.name, answer.slot_types, answer.devices, answer.conditions
        )
        self.listed_at = time.monotonic()
        return listing

    async def _list_devices_twice(self, process: PluginProcess) -> PluginListing:
        """List, and list again before an invalid answer counts: devices may change meanwhile."""
        with contextlib.suppress(InvalidAnswer):
            return await self._list_devices(process)
        return await self._list_devices(process)

    async def _with_dealing(self, process: PluginProcess, listing: PluginListing) -> PluginListing:
        """Return the listing with the plugin's dealing, if plugins deal and none is kept."""
        if (rules := self._dealing_rules) is None:
            return listing
        known = rules.known_devices(listing)
        dealing = rules.load_assignment(listing.name, known)
        if dealing is None:
            timeout_s, agents = self._timeouts.call_timeout_s, list(rules.agents)
            answer = await process.call(
                "partition", device_infos(known), agents, timeout_s=timeout_s
            )
            dealing = validate_assignment(answer, known, agents)
        return replace(listing, assignment=dealing)

    async def _poll_devices(self) -> None:
        """List the devices periodically, and at once when the plugin reports a change."""
        process, wake_count = self._process, 0
        while process is not None and self.state is PluginState.READY:
            is_woken = await wait_event(self._change_reported, self._timeouts.health_interval_s)
            wake_count = wake_count + 1 if is_woken else 0
            self._is_throttled = wake_count > MAX_WAKES
            if self._is_throttled:
                if wake_count == MAX_WAKES + 1:
                    log.warning("plugin.throttled", plugin=self.spec.name, reason=_THROTTLED_REASON)
                await wait_event(process.lost, self._timeouts.health_interval_s)
            self._change_reported.clear()
            if process.lost.is_set():
                raise PluginLost(process.reason)
            if (used := process.memory_bytes()) > self._timeouts.max_memory_bytes:
                raise PluginLost(f"it uses {used >> 20} MiB of memory")
            await self._update_listing(process)

    async def _update_listing(self, process: PluginProcess) -> None:
        try:
            listing = await self._list_devices(process)
        except (PluginRefused, InvalidAnswer) as error:
            raise PluginLost(f"list: {error}") from None
        if self._apply_listing(listing):
            self._on_change(self.spec.name)
        if self._facts is not None and self._facts.has_measurements:
            try:
                timeout_s = self._timeouts.call_timeout_s
                measured = await process.call("measure", timeout_s=timeout_s)
                self.measurements = validate_measurements(measured)
                self._measure_failure = ""
            except (PluginRefused, InvalidAnswer) as error:
                self.measurements = ()
                if self._measure_failure != str(error):
                    log.warning("plugin.measure_failed", plugin=self.spec.name, reason=str(error))
                self._measure_failure = str(error)

    def _apply_listing(self, listing: PluginListing) -> bool:
        """Take over a listing, except its slots after the first one; return whether it is new."""
        before = self.listing
        fixed = before if before is not None and self._is_listed else listing
        self.listing = replace(fixed, devices=listing.devices, conditions=listing.conditions)
        return self.listing != before

    async def _end_attempt(self, reason: str, state: PluginState | None = None) -> None:
        """End the process with a reason; a plugin that may still become ready is pending."""
        process, self._process = self._process, None
        if process is not None:
            await complete_shielded(self._kill(process, reason))
            if process.is_alive:
                reason = reason if f"process {process.pid}" in reason else process.reason
        self._is_serving &= self._ready_since is not None and self._backoff.is_first
        never_ready = self.listing is None
        self._drop_findings()
        self.enter_state(
            state or (PluginState.PENDING if never_ready else PluginState.FAILED), reason
        )

    def _drop_findings(self) -> None:
        """Drop what only a running process knows; its devices stay known."""
        self.measurements, self._measure_failure, self._is_throttled = (), "", False
        if self.listing is not None:
            self.listing = replace(self.listing, conditions=())

    async def _call(self, method: str, *arguments: object) -> Any:
        if self._process is None:
            raise PluginLost(self.reason)
        timeout_s = self._timeouts.call_timeout_s
        try:
            async with asyncio.timeout(2 * timeout_s):
                return await self._process.call(method, *arguments, timeout_s=timeout_s)
        except TimeoutError:
            raise PluginLost(f"busy with other calls for over {2 * timeout_s:g} s") from None

    async def container_edits(
        self, devices: Sequence[AllocatedDevice], features: Features
    ) -> ContainerEdits:
        """Return the edits that a kernel needs for these devices.

        Raises:
            PluginUnavailable: the plugin does not answer.
        """
        name = self.spec.name
        if self.state is not PluginState.READY:
            raise PluginUnavailable(f"plugin {name} is {self.status.text}")
        try:
            return validate_edits(await self._call("container_edits", list(devices), features))
        except (PluginRefused, InvalidAnswer, PluginLost) as error:
            raise PluginUnavailable(
                f"plugin {name} returned no edits for its devices: {error}"
            ) from None

    async def clear(self, stable_ids: Sequence[str]) -> None:
        """Clear what waits for an operator about a device, and list the devices again.

        Raises:
            PluginUnavailable: the plugin does not answer, or failed to clear it.
        """
        name = self.spec.name
        if self.state is not PluginState.READY or self._process is None:
            raise PluginUnavailable(f"plugin {name} is {self.status.text}")
        try:
            await self._call("clear", [*stable_ids])
            self._apply_listing(await self._list_devices(self._process))
        except (PluginRefused, InvalidAnswer, PluginLost) as error:
            raise PluginUnavailable(f"plugin {name} did not clear it: {error}") from None

    def notify(self, event: KernelEvent) -> None:
        """Notify the plugin of an event in a kernel's life; the outcome is ignored."""
        if self._process is None or self._facts is None or not self._facts.hears_kernels:
            return
        if self._events_waiting >= MAX_EVENTS_WAITING:
            log.warning("plugin.event_dropped", plugin=self.spec.name, step=event.step)
            return
        timeout_s = self._timeouts.call_timeout_s
        self._events_waiting += 1
        self._process.queue_call("kernel_event", event, timeout_s=timeout_s).add_done_callback(
            self._on_event_done
        )

    def _on_event_done(self, call: asyncio.Task[None]) -> None:
        self._events_waiting -= 1
        if not call.cancelled() and (error := call.exception()) is not None:
            log.warning("plugin.event_failed", plugin=self.spec.name, reason=str(error))

    async def close(self) -> None:
        """Close the plugin within a short time, and end its process."""
        is_open = self.state is PluginState.READY
        await self._end_process("the daemon is stopping", CLOSE_TIMEOUT_S if is_open else 0)

    async def stop(self, reason: str) -> None:
        """Close the plugin after its present call, and end its process; `run` is cancelled.

        Raises:
            Conflict: the process cannot be ended.
        """
        is_open = self.state is PluginState.READY
        self._is_serving = False
        self._drop_findings()
        self.enter_state(PluginState.STOPPED, reason)
        self._on_change(self.spec.name)
        patience_s = self._timeouts.call_timeout_s + CLOSE_TIMEOUT_S
        await self._end_process(f"the plugin is {reason}", patience_s if is_open else 0)
        if stuck := self.stuck_reason():
            self.enter_state(PluginState.FAILED, stuck)
            raise Conflict(f"plugin {self.spec.name} cannot be stopped: {stuck}")

    def stuck_reason(self) -> str:
        """Return which processes cannot be ended, empty if there are none."""
        self._abandoned = [process for process in self._abandoned if process.is_alive]
        pids = ", ".join(str(process.pid) for process in self._abandoned)
        is_one = len(self._abandoned) == 1
        return f"process{'' if is_one else 'es'} {pids} cannot be killed" if pids else ""

    async def _end_process(self, reason: str, patience_s: float) -> None:
        """End the process; with `patience_s`, call `close` before."""
        process, self._process = self._process, None
        if process is None:
            return
        if patience_s:
            try:
                async with asyncio.timeout(patience_s):
                    await process.call("close", timeout_s=CLOSE_TIMEOUT_S)
            except (PluginRefused, InvalidAnswer, PluginLost, TimeoutError) as error:
                failure = str(error) or "it is busy"
                log.warning("plugin.close_failed", plugin=self.spec.name, reason=failure)
        await self._kill(process, reason)

    async def _kill(self, process: PluginProcess, reason: str) -> None:
        await process.kill(reason)
        if process.is_alive:
            self._abandoned.append(process)
