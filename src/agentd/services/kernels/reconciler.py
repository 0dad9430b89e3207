"""Reconciliation: keeping the node's state equal to the state of its runtimes.

`agentd.core.kernel.reconcile` decides; this module applies its decisions. It never stops, restarts
or removes a kernel that ever ran. An unavailable runtime is a state of that runtime and delays no
other. An observation counts only if the kernel did not change meanwhile; otherwise the kernel is
requeued and observed alone, under its lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

import structlog
from msgspec.structs import replace

from agentd.concurrency import is_being_cancelled
from agentd.core.kernel.adoption import KernelUpdate, adopt, resolve_devices
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.reconcile import Action, MarkAbsent, RemoveUnstarted, reconcile
from agentd.core.kernel.states import PRESENT, Kernel, KernelRef, ObservedState
from agentd.errors import AgentdError, Conflict, RuntimeUnavailable
from agentd.failpoints import hit, hit_async
from agentd.services.claims.records import resolve_claim_devices
from agentd.services.kernels.log import log_observation
from agentd.services.kernels.pending_creates import UNRESOLVED_GRACE_S
from agentd.services.node import Node
from agentd.services.protocols import Clock, Plugins, Runtime
from agentd.services.state import RuntimeState
from agentd.state.folder import StateFolder

log = structlog.get_logger()

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
RETRY_PAUSE_S = 1.0
REOBSERVE_PAUSE_S = 10.0
"""Seconds between observations of kernels that are unreadable, or listed with few details."""
MAX_OBSERVATIONS = 16


class Reconciler:
    """Compares the node's state with every runtime."""

    def __init__(
        self,
        node: Node,
        runtimes: Mapping[str, Runtime],
        default_runtime_name: str,
        store: StateFolder,
        clock: Clock,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._runtimes = runtimes
        self._default_runtime_name = default_runtime_name
        self._store = store
        self._clock = clock
        self._first_lists = {name: asyncio.Event() for name in runtimes}
        self._watched_runtimes: set[str] = set()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._queued_once: set[str] = set()
        """Kernels among them that were known when queued and have had no other event since."""
        self._observation_slots = asyncio.Semaphore(MAX_OBSERVATIONS)
        self._to_reobserve: set[str] = set()
        self._partial_retry_at = 0.0
        self._devices.on_relisted(self._recharge_devices)

    def _recharge_devices(self) -> None:
        """Charge kernels and claims to devices that were known only from their records so far."""
        for claim in list(self._state.claims.values()):
            if (relocated := resolve_claim_devices(claim, self._devices)) is not claim:
                self._state.put_claim(relocated)
        for kernel in list(self._state):
            allocation, missing = resolve_devices(kernel.allocation, self._devices.inventory)
            self._devices.add_missing(missing)
            if allocation != kernel.allocation:
                self._state.put_kernel(replace(kernel, allocation=allocation))

    async def wait_first_lists(self) -> None:
        """Wait until every runtime has returned its first list or failed to."""
        for listed in self._first_lists.values():
            await listed.wait()

    def mark_unanswered(self, reason: str) -> None:
        """Mark runtimes that have not answered yet as unavailable."""
        for name, listed in self._first_lists.items():
            if not listed.is_set():
                self.mark_unavailable(name, reason)

    def mark_unavailable(self, name: str, reason: str) -> None:
        """Mark a runtime as unavailable; its kernels stay as they are."""
        if name not in self._state.runtimes:
            return
        if self._state.runtime(name).state is not RuntimeState.UNAVAILABLE:
            log.warning("runtime.unavailable", runtime=name, reason=reason)
        self._state.mark_unavailable(name, reason)
        if name in self._first_lists:
            self._first_lists[name].set()

    async def relist(self, runtime: Runtime) -> None:
        """Compare the full list of a runtime with the node's state.

        Raises:
            RuntimeUnavailable: the list was incomplete; nothing changed.
        """
        state = self._state
        snapshot = state.snapshot()
        await hit_async("adopt.before_list")
        try:
            listing = await runtime.list_kernels()
            kernels = [*listing.kernels, *await self._find_unlisted(runtime, listing.kernels)]
        except RuntimeUnavailable as error:
            self.mark_unavailable(runtime.name, str(error))
            raise
        await hit_async("adopt.after_list")
        known = {kernel.kernel_id: kernel for kernel in state if kernel.runtime == runtime.name}
        observed = {item.kernel_id: item for item in kernels if not self._is_duplicate(item)}
        changed = {k for k in known.keys() | observed if not state.is_unchanged(k, snapshot)}
        now = self._clock.steady()
        actions = reconcile(
            {kernel_id: known[kernel_id] for kernel_id in known.keys() - changed},
            [item for kernel_id, item in observed.items() if kernel_id not in changed],
            self._devices.inventory,
            expired=[k for k, create in state.unresolved.items() if create.until <= now],
            now=self._clock.wall(),
        )
        await self._apply_actions(actions)
        self._to_reobserve |= {i.kernel_id for i in kernels if i.is_partial or i.is_unreadable}
        for kernel_id in changed:
            self.requeue(kernel_id)
        if state.runtime(runtime.name).state is not RuntimeState.AVAILABLE:
            log.info("runtime.listed", runtime=runtime.name, kernels=len(kernels))
        state.mark_available(runtime.name, listing.ignored, runtime.unready_reason)
        self._first_lists[runtime.name].set()

    def _is_duplicate(self, item: ObservedKernel) -> bool:
        """Return whether another runtime has a kernel with this id; the observed one is ignored."""
        is_second = self._state.is_duplicate_id(item.kernel_id, item.runtime)
        if is_second:
            log.error("kernel.duplicate_id", kernel_id=item.kernel_id, handle=item.handle)
        return is_second

    async def _find_unlisted(
        self, runtime: Runtime, listed: Iterable[ObservedKernel]
    ) -> list[ObservedKernel]:
        """Look up kernels that a list lacks by handle: a missing name proves nothing."""
        names = {item.kernel_id for item in listed}
        missing = [
            kernel.ref
            for kernel in self._state
            if kernel.runtime == runtime.name
            and kernel.state in PRESENT
            and kernel.handle is not None
            and kernel.kernel_id not in names
        ]
        return [item for ref in missing if (item := await runtime.find(ref)) is not None]

    def set_watched(self, name: str, *, is_following: bool) -> None:
        """Record whether a runtime's events arrive; without them its list is not current."""
        (self._watched_runtimes.add if is_following else self._watched_runtimes.discard)(name)

    async def wait_next(self) -> str:
        """Wait for the next kernel to observe."""
        return await self._queue.get()

    def requeue(self, kernel_id: str) -> None:
        """Queue a kernel for observation.

        The observation is skipped if the kernel is removed meanwhile and had no other event: the
        event was its removal.
        """
        if kernel_id in self._queued:
            self._queued_once.discard(kernel_id)
            return
        if kernel_id in self._state.kernels:
            self._queued_once.add(kernel_id)
        self._queued.add(kernel_id)
        self._queue.put_nowait(kernel_id)

    async def observe(self, kernel_id: str) -> None:
        """Observe one kernel after an event, once no other task works on it."""
        async with self._state.kernel_lock(kernel_id), self._observation_slots:
            self._queued.discard(kernel_id)
            known = self._state.kernels.get(kernel_id)
            all_names = [] if kernel_id in self._queued_once else list(self._state.runtimes)
            self._queued_once.discard(kernel_id)
            names = [known.runtime] if known else all_names
            for name in names:
                if name in self._runtimes:
                    await self._observe_on(self._runtimes[name], kernel_id, known)

    async def _observe_on(self, runtime: Runtime, kernel_id: str, known: Kernel | None) -> None:
        await hit_async("reconcile.before_find")
        try:
            observed = await runtime.find(known.ref if known else KernelRef(kernel_id))
        except RuntimeUnavailable as error:
            self.mark_unavailable(runtime.name, str(error))
            return
        await hit_async("reconcile.after_find")
        if self._state.kernels.get(kernel_id) is not known:
            self.requeue(kernel_id)
            return
        before = {kernel_id: known} if known else {}
        items = [observed] if observed and not self._is_duplicate(observed) else []
        if observed and observed.is_unreadable:
            self._to_reobserve.add(kernel_id)
        inventory, now = self._devices.inventory, self._clock.wall()
        await self._apply_actions(reconcile(before, items, inventory, now=now), is_locked=True)
        await hit_async("reconcile.after_settle")

    async def retry(self) -> None:
        """Retry unavailable runtimes and creates with an unknown outcome."""
        self._devices.retry()
        names = self._watched_runtimes & self._state.runtimes.keys()
        for name in names:
            status, reason = self._state.runtime(name), self._runtimes[name].unready_reason
            if status.state is RuntimeState.AVAILABLE and status.reason != reason:
                self._state.mark_available(name, status.ignored, reason)
        await asyncio.gather(*(self._retry_runtime(name) for name in names))
        if self._to_reobserve and self._clock.steady() >= self._partial_retry_at:
            self._partial_retry_at = self._clock.steady() + REOBSERVE_PAUSE_S
            partial, self._to_reobserve = self._to_reobserve, set()
            for kernel_id in partial:
                self.requeue(kernel_id)

    async def _retry_runtime(self, name: str) -> None:
        is_down = self._state.runtime(name).state is RuntimeState.UNAVAILABLE
        if is_down or self._state.unresolved:
            with suppress(RuntimeUnavailable):
                await self.relist(self._runtimes[name])

    async def forget_runtime(self, name: str) -> None:
        """Permanently forget the kernels of an unavailable runtime.

        The default runtime itself stays, and is listed again when it answers.

        Raises:
            UnknownRuntime: the runtime does not exist.
            Conflict: the runtime answers, or an operation on one of its kernels is in progress.
        """
        self._state.runtime(name)
        try:
            if name in self._runtimes:
                await self._runtimes[name].list_kernels()
                raise Conflict(f"runtime {name} is available; remove its kernels one by one")
        except RuntimeUnavailable as error:
            self.mark_unavailable(name, str(error))
        kernels = [kernel.kernel_id for kernel in self._state if kernel.runtime == name]
        if busy := [kernel_id for kernel_id in kernels if self._state.is_busy(kernel_id)]:
            raise Conflict(f"operations in progress on {', '.join(busy)}; retry later")
        for kernel_id in kernels:
            log.warning("kernel.forgotten", kernel_id=kernel_id, runtime=name)
            self._state.drop_kernel(kernel_id)
        if name != self._default_runtime_name:
            self._state.forget_runtime(name)
        self._store.save_runtimes(sorted(self._state.runtimes))

    async def _apply_actions(self, actions: Iterable[Action], *, is_locked: bool = False) -> None:
        removals = []
        for action in actions:
            match action:
                case KernelUpdate(kernel, missing):
                    before = self._state.kernels.get(kernel.kernel_id)
                    self._devices.add_missing(missing)
                    self._state.put_kernel(kernel)
                    self._state.mark_resolved(kernel.kernel_id)
                    log_observation(before, kernel)
                case MarkAbsent(kernel_id):
                    self._mark_absent(self._state.kernel(kernel_id))
                case RemoveUnstarted(observed):
                    removals.append(observed)
            hit("adopt.after_action")
        for observed in removals:
            if is_locked:
                await self._remove_unstarted(observed)
            else:  # the list is out of date by now: observe the kernel again, alone
                await self.observe(observed.kernel_id)

    def _mark_absent(self, kernel: Kernel) -> None:
        create = self._state.unresolved.get(kernel.kernel_id)
        if create is None:
            reason = "removed outside of agentd"
            self._state.put_kernel(kernel.with_observation(ObservedState.ABSENT, reason=reason))
            log.warning("kernel.lost", kernel_id=kernel.kernel_id)
            return
        if create.keep_failure:
            reason = "removed before it ran"
            self._state.put_kernel(kernel.with_observation(ObservedState.ABSENT, reason=reason))
            self._state.mark_resolved(kernel.kernel_id)
        else:
            self._state.drop_kernel(kernel.kernel_id)
        log.info("kernel.create_discarded", kernel_id=kernel.kernel_id)

    async def _remove_unstarted(self, observed: ObservedKernel) -> None:
        """Remove the remains of an interrupted create; its share stays held until then."""
        kernel_id = observed.kernel_id
        adoption = adopt(observed, self._devices.inventory, now=self._clock.wall())
        self._devices.add_missing(adoption.missing)
        self._state.put_kernel(adoption.kernel)
        self._state.mark_unresolved(kernel_id, self._clock.steady() + UNRESOLVED_GRACE_S)
        await hit_async("adopt.before_discard")
        try:
            is_gone = await self._runtimes[observed.runtime].remove(observed.ref, unless_alive=True)
        except AgentdError as error:
            log.warning("kernel.orphan_remove_failed", kernel_id=kernel_id, reason=str(error))
            return
        await hit_async("adopt.after_discard")
        if is_gone:
            self._state.drop_kernel(kernel_id)
            log.info("kernel.orphan_removed", kernel_id=kernel_id)
        else:
            self.requeue(kernel_id)


class ReconcilerLoops:
    """The background loops; a loop that fails is logged and continues."""

    def __init__(
        self,
        reconciler: Reconciler,
        node: Node,
        runtimes: Mapping[str, Runtime],
        plugins: Plugins,
    ) -> None:
        self._reconciler = reconciler
        self._state, self._devices = node.state, node.devices
        self._runtimes = runtimes
        self._plugins = plugins

    async def run(self) -> None:
        """Follow runtimes and plugins and process the queue, until cancelled."""
        for name in self._state.runtimes.keys() - self._runtimes.keys():
            self._reconciler.mark_unavailable(name, "the runtime is not configured")
        async with asyncio.TaskGroup() as group:
            for name, runtime in self._runtimes.items():
                group.create_task(self._watch_runtime(runtime), name=f"follow-{name}")
            group.create_task(self._run_forever(lambda: self._process_queue(group)), name="work")
            group.create_task(self._run_forever(self._retry), name="retry")
            watching = self._run_forever(self._watch_plugins)
            group.create_task(watching, name="watch-plugins")

    async def _watch_plugins(self) -> None:
        async for name in self._plugins.changes():
            self._devices.refresh(name)

    async def _run_forever(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except (Exception, asyncio.CancelledError):
                if is_being_cancelled():
                    raise
                log.exception("reconciler.failed")
                await asyncio.sleep(MAX_PAUSE_S)

    async def _watch_runtime(self, runtime: Runtime) -> None:
        pause_s = FIRST_PAUSE_S
        while runtime.name in self._state.runtimes:
            try:
                async for kernel_id in runtime.watch_events():
                    if kernel_id:
                        self._reconciler.requeue(kernel_id)
                    else:
                        self._reconciler.set_watched(runtime.name, is_following=True)
                        await self._reconciler.relist(runtime)
                        pause_s = FIRST_PAUSE_S
                reason = "its event stream ended"
            except RuntimeUnavailable as error:
                reason = str(error)
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    raise
                log.exception("reconciler.failed", runtime=runtime.name)
                reason = f"{type(error).__name__}: {error}"
            self._reconciler.set_watched(runtime.name, is_following=False)
            self._reconciler.mark_unavailable(runtime.name, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _process_queue(self, group: asyncio.TaskGroup) -> None:
        while True:
            group.create_task(self._observe_or_requeue(await self._reconciler.wait_next()))

    async def _observe_or_requeue(self, kernel_id: str) -> None:
        try:
            await self._reconciler.observe(kernel_id)
        except (Exception, asyncio.CancelledError):
            if is_being_cancelled():
                raise
            log.exception("reconciler.failed", kernel_id=kernel_id)
            await asyncio.sleep(MAX_PAUSE_S)
            self._reconciler.requeue(kernel_id)

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._reconciler.retry()
