"""Creating, stopping and removing kernels.

Deciding and committing happen with no `await` between them, so two requests can never be
given the same share. A failure gives the share back and leaves nothing behind; where
the outcome is unknown the share stays held until `Adoption` settles it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from agentd.core.kernel import LIVE, STARTING, Kernel, KernelSpec, KernelState, Pull
from agentd.core.partition import Partition
from agentd.core.plan import refuse_reserved
from agentd.core.reconcile import adopted, stopped
from agentd.errors import (
    Draining,
    KernelConflict,
    NotReady,
    OutcomeUnknown,
    RuntimeUnavailable,
)
from agentd.failpoints import reach
from agentd.services.devices import NodeDevices
from agentd.services.events import EventKind
from agentd.services.interfaces import Clock, Intent, Memory, Runtime
from agentd.services.operations import Operations
from agentd.services.planner import Decision, Planner
from agentd.services.table import KernelTable

log = structlog.get_logger()

GRACE_S = 10.0
"""How long an engine may take to finish a create that agentd lost sight of."""


class KernelService:
    """All kernels of the node; the only owner of the ledger."""

    def __init__(
        self,
        devices: NodeDevices,
        planner: Planner,
        runtimes: Mapping[str, Runtime],
        default_runtime: str,
        memory: Memory,
        clock: Clock,
    ) -> None:
        self.devices = devices
        self.events = devices.events
        self.table = KernelTable(self._changed)
        self.operations = Operations()
        self.runtimes = runtimes
        self.default = runtimes[default_runtime]
        self.memory = memory
        self.clock = clock
        self.unknown_until: dict[str, float] = {}
        self.not_listed: dict[str, str] = dict.fromkeys(runtimes, "")
        self._planner = planner
        self._starting: dict[str, asyncio.Task[Kernel]] = {}
        self._keep_failure: set[str] = set()
        self._is_draining = False

    def _changed(self, before: Kernel | None, now: Kernel | None) -> None:
        self._planner.tell_plugins(before, now)
        if now is None:
            self.events.publish(EventKind.KERNEL_REMOVED, before)
        elif now != before:
            self.events.publish(EventKind.KERNEL, now)

    def partition(self, agent_id: str) -> Partition:
        """Return an agent's partition; UnknownAgent if there is no such agent."""
        return self._planner.partition(agent_id)

    async def decide(self, spec: KernelSpec) -> tuple[Decision, dict[str, list[dict[str, object]]]]:
        """Return what a create would be given now, and why; changes nothing.

        Raises:
            RequestError, Unavailable: what the create would be refused with.
        """
        await self._check(spec)
        decision = self._planner.decide(spec, self.table, self.default)
        await self._planner.plan(self._planned(spec, decision), spec, self.default)
        rows = self._planner.explain(spec, decision, self.table.ledger, self.default)
        return decision, rows

    async def create(self, spec: KernelSpec, *, wait: bool = True) -> tuple[Kernel, bool]:
        """Create a kernel, or return the one that the same request created before.

        Returns the kernel, running if `wait`, and whether this call created it. A caller
        that goes away does not stop the create.

        Raises:
            RequestError, Unavailable, RuntimeFailure: nothing was created; OutcomeUnknown
                apart, nothing is held.
        """
        self._planner.partition(spec.agent_id)
        if self.existing(spec) is None:
            await self._check(spec)
        if (known := self.existing(spec)) is not None:
            task = self._starting.get(spec.kernel_id)
            if task is None and known.state in STARTING:
                raise RuntimeUnavailable(
                    f"what became of an earlier create of {spec.kernel_id} is not known yet"
                )
            return (await self._outcome(task) if wait and task else known), False
        decision = self._planner.decide(spec, self.table, self.default)
        kernel = self._planned(spec, decision)
        self.table.put(kernel)
        task = asyncio.create_task(self._start(kernel, spec, keep_failure=not wait))
        self._starting[spec.kernel_id] = task
        task.add_done_callback(lambda done: self._started(spec.kernel_id, done))
        return (await self._outcome(task) if wait else kernel), True

    async def _outcome(self, task: asyncio.Task[Kernel]) -> Kernel:
        """Wait for a create, which goes on if the waiting is given up."""
        await asyncio.wait([task])
        if not task.cancelled():
            return task.result()
        if self._is_draining:
            raise Draining("the daemon stopped before the kernel ran")
        raise KernelConflict("the kernel was deleted while it was being created")

    def existing(self, spec: KernelSpec) -> Kernel | None:
        """Return the kernel that the same request made before; KernelConflict if another did."""
        known = self.table.kernels.get(spec.kernel_id)
        if known is not None and known.spec_hash != spec.spec_hash:
            raise KernelConflict(f"kernel {spec.kernel_id} exists, made by another request")
        return known

    async def _check(self, spec: KernelSpec) -> None:
        """Refuse what can be refused before anything is decided."""
        self._refuse_unless_open()
        refuse_reserved(spec)
        await self.default.check(spec)

    def _refuse_unless_open(self) -> None:
        if self._is_draining:
            raise Draining("the daemon is stopping")
        for name, reason in self.not_listed.items():
            if reason:
                raise RuntimeUnavailable(f"runtime {name} is unavailable: {reason}")
            raise NotReady(f"the kernels of runtime {name} have not been listed yet")

    def _planned(self, spec: KernelSpec, decision: Decision) -> Kernel:
        return Kernel(
            kernel_id=spec.kernel_id,
            agent_id=spec.agent_id,
            state=KernelState.PREPARING,
            spec_hash=spec.spec_hash,
            created_at=self.clock.wall(),
            runtime=self.default.name,
            slots=decision.slots,
            allocation=decision.allocation,
            ports=decision.ports,
        )

    async def _start(self, kernel: Kernel, spec: KernelSpec, *, keep_failure: bool) -> Kernel:
        kernel_id = kernel.kernel_id
        with self.operations.on(kernel_id):
            try:
                await reach("create.after_commit")
                plan = await self._planner.plan(kernel, spec, self.default)
                await reach("create.after_plan")
                self.memory.save_intent(Intent(kernel_id, self.default.name, plan.record))
                found = await self.default.create(
                    plan, lambda state, pull=None: self._progress(kernel_id, state, pull)
                )
            except OutcomeUnknown:
                if keep_failure:
                    self._keep_failure.add(kernel_id)
                raise
            except BaseException as error:
                self.memory.drop_intent(kernel_id)
                if keep_failure and not isinstance(error, asyncio.CancelledError):
                    now = self.table.get(kernel_id)
                    self.table.put(now.moved_to(KernelState.FAILED, reason=str(error)))
                else:
                    self.table.drop(kernel_id)
                log.warning("kernel.create_failed", kernel_id=kernel_id, reason=str(error))
                raise
            await reach("create.after_runtime")
            running = adopted(found, self.devices.inventory).kernel
            self.table.put(running)
            self.memory.drop_intent(kernel_id)
        log.info("kernel.created", kernel_id=kernel_id, agent_id=kernel.agent_id)
        return running

    def never_born(self, kernel_id: str) -> None:
        """Note that a create of unknown outcome left nothing; who did not wait is to see that."""
        if kernel_id not in self._keep_failure:
            self.table.drop(kernel_id)
            return
        self._keep_failure.discard(kernel_id)
        reason = "the runtime lost it before it ran"
        self.table.put(self.table.get(kernel_id).moved_to(KernelState.FAILED, reason=reason))

    def _progress(self, kernel_id: str, state: KernelState, pull: Pull | None) -> None:
        self.table.put(self.table.get(kernel_id).moved_to(state, pull=pull))

    def _started(self, kernel_id: str, task: asyncio.Task[Kernel]) -> None:
        self._starting.pop(kernel_id, None)
        if not task.cancelled():
            task.exception()  # a caller that went away does not make it an unseen one
        kernel = self.table.kernels.get(kernel_id)
        if kernel is not None and kernel.state in STARTING:
            self.unknown_until[kernel_id] = self.clock.steady() + GRACE_S

    async def stop(self, kernel_id: str, timeout_s: float | None = None) -> Kernel:
        """End a kernel and keep it listed; stopping an ended one changes nothing.

        Raises:
            UnknownKernel: there is none.
            KernelConflict: it has not started yet.
            RuntimeUnavailable: the runtime cannot be asked; the kernel stays as it was.
        """
        await self._overtake(kernel_id, timeout_s)
        async with self.operations.alone_on(kernel_id):
            kernel = self.table.get(kernel_id)
            if kernel.state in STARTING:
                raise KernelConflict(f"kernel {kernel_id} is {kernel.state}; delete it instead")
            if kernel.state in LIVE:
                await self._stop(kernel, timeout_s)
        return self.table.get(kernel_id)

    async def _overtake(self, kernel_id: str, timeout_s: float | None) -> None:
        """Cut a stop short that is under way, if a time is asked for explicitly."""
        kernel = self.table.get(kernel_id)
        if kernel.state is KernelState.STOPPING and timeout_s is not None:
            await self.runtimes[kernel.runtime].stop(kernel_id, kernel.handle or "", timeout_s)

    async def _stop(self, kernel: Kernel, timeout_s: float | None) -> None:
        runtime = self.runtimes[kernel.runtime]
        self.table.put(kernel.moved_to(KernelState.STOPPING))
        try:
            await reach("stop.before_runtime")
            await runtime.stop(kernel.kernel_id, kernel.handle or "", timeout_s)
            await reach("stop.after_runtime")
            found = await runtime.find(kernel.kernel_id, kernel.handle)
        except BaseException:
            self.table.put(kernel)
            raise
        now = stopped(self.table.get(kernel.kernel_id), found, self.devices.inventory)
        self.table.put(now)
        log.info("kernel.stopped", kernel_id=kernel.kernel_id, exit_code=now.ending.exit_code)

    async def remove(self, kernel_id: str, timeout_s: float | None = None) -> None:
        """Stop a kernel if need be, and remove all that is left of it.

        Raises:
            UnknownKernel: there is none.
            KernelConflict: it is not known yet whether its create left anything.
            RuntimeUnavailable: the runtime cannot be asked; the kernel stays listed.
        """
        if task := self._starting.get(kernel_id):
            _cancel_once(task)
            await asyncio.wait([task])
            if kernel_id not in self.table.kernels:
                return
        await self._overtake(kernel_id, timeout_s)
        async with self.operations.alone_on(kernel_id):
            kernel = self.table.get(kernel_id)
            if kernel.state in STARTING:
                raise KernelConflict(f"the create of {kernel_id} has an unknown outcome; try later")
            if kernel.state in LIVE:
                await self._stop(kernel, timeout_s)
            await reach("delete.before_runtime")
            if kernel.handle is not None:
                await self.runtimes[kernel.runtime].remove(kernel_id, kernel.handle)
            await reach("delete.after_runtime")
            self.table.drop(kernel_id)
        await reach("delete.before_answer")
        log.info("kernel.removed", kernel_id=kernel_id)

    async def drain(self, timeout_s: float) -> None:
        """Take no more creates, and wait for those under way; cancel what is late."""
        self._is_draining = True
        self.events.close()
        if tasks := list(self._starting.values()):
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                _cancel_once(task)
            await asyncio.wait(tasks, timeout=timeout_s)


def _cancel_once(task: asyncio.Task[Kernel]) -> None:
    """Cancel a create; a second cancellation would interrupt what cleans up after the first."""
    if not task.cancelling():
        task.cancel()
