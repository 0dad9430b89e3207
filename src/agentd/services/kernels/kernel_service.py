"""Creates, stops and deletes of kernels.

There is no `await` between a decision and its commit, so two requests can never get the same share.
A failure releases the share and leaves nothing behind. If the outcome is unknown, the share stays
held until the reconciler resolves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from decimal import Decimal
from functools import partial
from typing import TypeVar

import structlog
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation
from agentd.core.devices import DeviceId
from agentd.core.kernel.adoption import adopt
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.plan import reserved_problems
from agentd.core.kernel.reconcile import kernel_after_stop
from agentd.core.kernel.states import LIVE, STARTING, Kernel, KernelSpec, KernelState, Pull
from agentd.core.slots import CPU
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    CoresUnavailable,
    InsufficientResource,
    InvalidRequest,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RuntimeUnavailable,
    StateUnavailable,
    UnknownKernel,
)
from agentd.failpoints import hit_async
from agentd.services.kernels.pending_creates import PendingCreates, may_have_left_remains
from agentd.services.lost_cores import LostCores
from agentd.services.node import Node
from agentd.services.planner import Decision, ParsedRequest, Planner
from agentd.services.protocols import Clock, KernelLog, LogQuery, Runtime
from agentd.state.folder import StateFolder

log = structlog.get_logger()

MAX_SAVED_BYTES = 32 * 1024
"""Maximum bytes of a saved command, and of the names of variables and of mounts.

Longer ones are not saved and not shown.
"""
_T = TypeVar("_T")


class KernelService:
    """Creates, stops and deletes of kernels; new ones run on the default runtime."""

    def __init__(
        self,
        node: Node,
        planner: Planner,
        creates: PendingCreates,
        runtimes: Mapping[str, Runtime],
        default_runtime: str,
        store: StateFolder,
        clock: Clock,
        cores: LostCores,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._planner = planner
        self._runtimes = runtimes
        self._default_runtime = runtimes[default_runtime]
        self._store = store
        self._clock = clock
        self._creates = creates
        self._cores = cores

    async def dry_run_create(
        self, spec: KernelSpec
    ) -> tuple[Decision, dict[str, list[dict[str, object]]]]:
        """Return the decision that a create would make now, with its explanation; changes nothing.

        Raises:
            RequestError, Unavailable: the create would be refused.
        """
        problems = await self._default_runtime.validate_spec(spec)
        request = self._parse(spec, problems)
        decision = self._decide(spec, request)
        await self._planner.plan(
            self._prepare(spec, decision), spec, self._state, self._default_runtime
        )
        ledger = self._state.ledger
        return decision, self._planner.explain(spec, request, decision, ledger)

    async def create(self, spec: KernelSpec, *, wait: bool = True) -> tuple[Kernel, bool]:
        """Create a kernel, or return the one that the same request created before.

        A caller that disconnects does not stop the create.

        Returns:
            The kernel, running if `wait`, and whether this call created it.

        Raises:
            RequestError, Unavailable, RuntimeFailure: nothing was created. Nothing is held, except
                after `OutcomeUnknown`.
        """
        problems: Sequence[Problem] = ()
        if (known := self.find_existing(spec)) is None:
            problems = await self._default_runtime.validate_spec(spec)
            known = self.find_existing(spec)  # a concurrent request may have created it
        if known is not None:
            return await self._wait_existing(known, wait=wait), False
        kernel = self._prepare(spec, self._decide(spec, self._parse(spec, problems)))
        self._state.put_kernel(kernel)
        self._creates.start(spec.kernel_id, self._start(kernel, spec, keep_failure=not wait))
        return await self._creates.wait(spec.kernel_id) if wait else kernel, True

    async def _wait_existing(self, known: Kernel, *, wait: bool) -> Kernel:
        """Return an existing kernel, or wait for its create in progress."""
        if known.kernel_id in self._creates:
            return await self._creates.wait(known.kernel_id) if wait else known
        if known.state in STARTING:
            reason = f"an earlier create of {known.kernel_id} is unresolved; retry later"
            raise OutcomeUnknown(reason, known.kernel_id)
        return known

    def find_existing(self, spec: KernelSpec) -> Kernel | None:
        """Return the kernel that the same request created before, if any.

        Raises:
            UnknownAgent: the agent does not exist.
            UnsupportedResource: another request created it, and this one names unknown slots.
            KernelConflict: another request, or another attempt, created it.
        """
        self._devices.partition(spec.agent_id)
        known = self._state.kernels.get(spec.kernel_id)
        if known is None:
            return None
        if known.spec_hash != spec.spec_hash:
            self._planner.refuse_unsupported(spec.slots)
            if known.agent_id != spec.agent_id:
                raise KernelConflict(f"duplicate kernel id {spec.kernel_id}")
            raise KernelConflict.of_other(spec.kernel_id, "request")
        if spec.attempt not in ("", known.attempt):
            raise KernelConflict.of_other(spec.kernel_id, "attempt")
        return known

    def _parse(self, spec: KernelSpec, problems: Sequence[Problem]) -> ParsedRequest:
        """Parse a request and make the checks that precede a decision."""
        problems = [*reserved_problems(spec), *problems]
        request = self._planner.parse_request(spec, self._default_runtime, problems, self._state)
        self._creates.require_open()
        self._state.require_runtime(self._default_runtime.name)
        return request

    def _decide(self, spec: KernelSpec, request: ParsedRequest) -> Decision:
        """Choose devices.

        Raises:
            RequestError: the request cannot be granted.
            RuntimeUnavailable: it could be with the cores that are lost now.
        """
        self._cores.scan()
        try:
            return self._planner.decide(spec, request, self._state)
        except InsufficientResource as error:
            held = self._state.ledger.shares_by_device
            members = self._devices.partition(spec.agent_id).members
            lost = [i for i in self._cores.reasons if i in members and i not in held]
            missed = Decimal(error.requested) - Decimal(error.free) if error.slot == CPU else 0
            if error.limit or not 0 < missed <= len(lost):
                raise
            cores = ", ".join(device_id.id for device_id in lost)
            raise RuntimeUnavailable(f"{error}; cores that are lost for now: {cores}") from error

    def _prepare(self, spec: KernelSpec, decision: Decision) -> Kernel:
        return prepare_kernel(spec, decision, self._default_runtime.name, self._clock.wall())

    async def _start(self, kernel: Kernel, spec: KernelSpec, *, keep_failure: bool) -> Kernel:
        kernel_id = kernel.kernel_id
        async with self._state.kernel_lock(kernel_id):
            try:
                await hit_async("create.after_commit")
                observed = await self._create(kernel, spec)
            except BaseException as error:
                if may_have_left_remains(error, self._state.kernel(kernel_id)):
                    raise self._creates.mark_unresolved(
                        kernel_id, error, keep_failure=keep_failure
                    ) from error
                self._creates.mark_failed(kernel_id, error, keep_failure=keep_failure)
                kinds = (InvalidRequest, CommandNotFound) if spec.image is None else InvalidRequest
                if isinstance(error, kinds):
                    error.mark_local()
                raise
            await hit_async("create.after_runtime")
            current = self._state.kernel(kernel_id)
            running = adopt(
                observed, self._devices.inventory, current, now=self._clock.wall()
            ).kernel
            self._state.put_kernel(running)
        return running

    async def _create(self, kernel: Kernel, spec: KernelSpec) -> ObservedKernel:
        """Create a kernel on the runtime, on other cores if some are lost; each is tried once."""
        kernel_id, runtime = kernel.kernel_id, self._default_runtime
        failures: dict[str, CoresUnavailable] = {}
        while True:
            plan = await self._planner.plan(kernel, spec, self._state, runtime)
            for core in failures.keys() & plan.cpus:
                raise failures[core]
            await hit_async("create.after_plan")
            self._store.save_intent(kernel_id, plan.record)
            try:
                with self._watching_disk(runtime):
                    return await runtime.create(plan, partial(self._on_progress, kernel_id))
            except CoresUnavailable as error:
                self._cores.scan(error.cores)
                asked = {DeviceId(CPU, core): core for core in plan.cpus}
                lost = error.cores or [asked[i] for i in asked.keys() & self._cores.reasons]
                failures |= dict.fromkeys(lost or plan.cpus, error)  # any of them, if none is known
                kernel = self._decide_again(kernel_id, spec, failures, error)

    def _decide_again(
        self, kernel_id: str, spec: KernelSpec, cores: Iterable[str], error: CoresUnavailable
    ) -> Kernel:
        """Choose devices without these cores for a create that left nothing, or raise its error."""
        before = self._state.kernel(kernel_id)
        released = replace(before, allocation=Allocation(), claim_id=None, ports=(), labels={})
        self._state.put_kernel(released)
        try:
            members = self._devices.partition(spec.agent_id).members
            request = self._parse(spec, ()).without_cores(cores, members)
            kernel = self._prepare(spec, self._decide(spec, request))
        except AgentdError as refusal:
            self._state.put_kernel(before)
            raise error from refusal
        self._state.put_kernel(kernel)
        return kernel

    @contextmanager
    def _watching_disk(self, runtime: Runtime) -> Iterator[None]:
        """Show a state folder in which a runtime cannot write, until it can."""
        try:
            yield
        except StateUnavailable:
            self._store.probe_bundles(runtime.name)
            raise

    def _on_progress(self, kernel_id: str, state: KernelState, pull: Pull | None = None) -> None:
        self._state.put_kernel(self._state.kernel(kernel_id).moved_to(state, pull=pull))

    async def stop(self, kernel_id: str, timeout_s: float | None = None) -> Kernel:
        """End a kernel and keep it listed; stopping an ended one changes nothing.

        Raises:
            UnknownKernel: the kernel does not exist.
            KernelConflict: the kernel has not started yet.
            RuntimeUnavailable: the runtime does not answer; the kernel is unchanged.
        """
        await self._shorten_stop(kernel_id, timeout_s)
        async with self._state.kernel_lock(kernel_id):
            kernel = self._state.kernel(kernel_id)
            if kernel.state in LIVE:
                await self._stop(kernel, timeout_s)
        return self._state.kernel(kernel_id)

    async def _shorten_stop(self, kernel_id: str, timeout_s: float | None) -> None:
        """Shorten a stop in progress if the caller gives a timeout.

        Raises:
            UnknownKernel: the kernel does not exist.
            KernelConflict: the kernel has not started yet.
        """
        kernel = self._state.kernel(kernel_id)
        if kernel.state in STARTING:
            raise KernelConflict(
                f"kernel {kernel_id} is {kernel.state}, expected running; delete it"
            )
        if kernel.state is KernelState.STOPPING and timeout_s is not None:
            await self._runtime_of(kernel).stop(kernel.ref, timeout_s)

    async def _stop(self, kernel: Kernel, timeout_s: float | None) -> None:
        runtime = self._runtime_of(kernel)
        self._state.put_kernel(kernel.moved_to(KernelState.STOPPING))
        try:
            await hit_async("stop.before_runtime")
            await runtime.stop(kernel.ref, timeout_s)
            await hit_async("stop.after_runtime")
            observed = await runtime.find(kernel.ref)
        except BaseException:
            self._state.put_kernel(self._state.kernel(kernel.kernel_id).moved_to(kernel.state))
            raise
        ended = kernel_after_stop(self._state.kernel(kernel.kernel_id), observed)
        self._state.put_kernel(ended)
        log.info("kernel.stopped", kernel_id=kernel.kernel_id, exit_code=ended.ending.exit_code)

    async def signal(self, kernel_id: str, number: int) -> None:
        """Send a signal to the first process of a kernel.

        Raises:
            UnknownKernel: the kernel does not exist.
            KernelConflict: it does not run, or its first process does not.
            RuntimeUnavailable: the runtime does not answer.
        """
        kernel = self._state.kernel(kernel_id)
        if kernel.state not in LIVE or kernel.state is KernelState.PAUSED:
            raise KernelConflict(f"kernel {kernel_id} is {kernel.state}, expected running")
        if not await self._runtime_of(kernel).signal(kernel.ref, number):
            raise KernelConflict(f"the first process of kernel {kernel_id} has ended")

    async def remove(
        self, kernel_id: str, timeout_s: float | None = None, *, expected: Kernel | None = None
    ) -> None:
        """Stop a kernel if it runs, and remove it completely.

        With `expected`, an ended kernel, a later kernel of the same id is not touched.

        Raises:
            UnknownKernel: the kernel does not exist.
            KernelConflict: its create is unresolved.
            RuntimeUnavailable: the runtime does not answer; the kernel stays listed.
        """
        if expected is not None and self._state.kernels.get(kernel_id) is not expected:
            return
        if kernel_id in self._creates:
            await self._creates.cancel(kernel_id)
            if kernel_id not in self._state.kernels:
                return
        if kernel_id in self._state.unresolved:
            raise KernelConflict(f"the create of {kernel_id} is unresolved; retry later")
        await self._shorten_stop(kernel_id, timeout_s)
        async with self._state.kernel_lock(kernel_id):
            kernel = self._state.kernel(kernel_id)
            if expected is not None and kernel is not expected:
                return
            if kernel.state in LIVE:
                await self._stop(kernel, timeout_s)
            await hit_async("delete.before_runtime")
            if kernel.state is not KernelState.FAILED:
                runtime = self._runtime_of(kernel)
                with self._watching_disk(runtime):
                    await runtime.remove(kernel.ref)
            await hit_async("delete.after_runtime")
            self._state.drop_kernel(kernel_id)
        await hit_async("delete.before_answer")
        log.info("kernel.removed", kernel_id=kernel_id)

    def logs(self, kernel_id: str, query: LogQuery) -> AbstractAsyncContextManager[KernelLog]:
        """Open a kernel's output.

        Raises:
            UnknownKernel: the kernel does not exist, has not started, or is lost.
            RuntimeUnavailable: the kernel is unreadable.
        """
        kernel = self._state.kernel(kernel_id)
        if kernel.handle is None:
            if kernel.state is KernelState.UNREADABLE:
                raise RuntimeUnavailable(f"no logs of {kernel_id}: {kernel.reason}")
            raise UnknownKernel(f"no logs of {kernel_id}: it has not started")
        if kernel.state is KernelState.LOST:
            raise UnknownKernel(f"no logs of {kernel_id}: the kernel is lost")
        return self._runtime_of(kernel).logs(kernel.ref, query)

    def _runtime_of(self, kernel: Kernel) -> Runtime:
        if (runtime := self._runtimes.get(kernel.runtime)) is None:
            raise RuntimeUnavailable(f"runtime {kernel.runtime} is not configured")
        return runtime


def prepare_kernel(spec: KernelSpec, decision: Decision, runtime: str, now: float) -> Kernel:
    """Return the kernel of a decided request, before its runtime is called."""
    return Kernel(
        kernel_id=spec.kernel_id,
        agent_id=spec.agent_id,
        state=KernelState.PREPARING,
        spec_hash=spec.spec_hash,
        created_at=now,
        runtime=runtime,
        slots=decision.slots,
        allocation=decision.allocation,
        ports=decision.ports,
        created_by=spec.created_by,
        image=spec.image,
        command=_items_to_save(spec.command, spec.command),
        env_names=_items_to_save(tuple(spec.env), spec.env),
        mounts=_items_to_save(spec.mounts, (mount.source + mount.target for mount in spec.mounts)),
        labels=spec.labels,
        claim_id=spec.claim_id,
        keeps_claim=decision.keeps_claim,
        attempt=spec.attempt,
        removes=spec.removes,
        creator_uid=spec.caller.uid if spec.removes and spec.caller else None,
    )


def _items_to_save(items: tuple[_T, ...], texts: Iterable[str]) -> tuple[_T, ...]:
    return (
        items
        if sum(len(text.encode(errors="replace")) for text in texts) <= MAX_SAVED_BYTES
        else ()
    )
