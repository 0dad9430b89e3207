"""Taking kernels as they are found: at start, after a lost connection, on an event.

`agentd.core.reconcile` decides; this carries it out. Nothing that ever ran is stopped,
restarted or removed here. A runtime that cannot be asked is a state of the runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from agentd.core.devices import Inventory
from agentd.core.kernel import PRESENT, Kernel, KernelState
from agentd.core.reconcile import (
    Action,
    Adopt,
    DropUnborn,
    FoundKernel,
    MarkLost,
    RemoveNeverRan,
    adopted,
    kept_back,
    located,
    reconcile,
)
from agentd.core.record import RecordError, decode
from agentd.errors import RuntimeFailure, RuntimeUnavailable
from agentd.failpoints import hit, reach
from agentd.services.events import EventKind
from agentd.services.interfaces import Intent, Runtime
from agentd.services.kernels import GRACE_S, KernelService

log = structlog.get_logger()

PARTIAL_PAUSE_S = 10.0
"""How often kernels that a runtime only listed are looked at again."""


@dataclass(frozen=True, slots=True)
class RuntimeStatus:
    """Whether a runtime answers: `starting`, `available` or `unavailable`, and why."""

    state: str
    reason: str = ""


class Adoption:
    """Keeps the kernel table true to what the runtimes say."""

    def __init__(self, service: KernelService) -> None:
        self._service = service
        self.statuses = {name: RuntimeStatus("starting") for name in service.runtimes}
        self.first_try = {name: asyncio.Event() for name in service.runtimes}
        self.listening: set[str] = set()
        """Runtimes whose events are followed at the moment."""
        self._partial: set[str] = set()
        self._partial_again = 0.0

    def recall_intents(self) -> None:
        """Hold the shares of creates that the last daemon did not see the end of."""
        for intent in self._service.memory.load_intents():
            try:
                record = decode(intent.record)
            except RecordError as error:
                log.warning("intent.unreadable", kernel_id=intent.kernel_id, reason=str(error))
                kernel = self._of_unknown_devices(intent, str(error))
            else:
                allocation, missing = located(record.shares, self._inventory)
                self._service.devices.add_missing(missing)
                kernel = Kernel(
                    kernel_id=intent.kernel_id,
                    agent_id=record.agent_id,
                    state=KernelState.CREATING,
                    spec_hash=record.spec_hash,
                    created_at=record.created_at,
                    runtime=self._runtime_of(intent),
                    slots=record.slots,
                    allocation=allocation,
                    ports=record.ports,
                    reason="cut short by a restart; its outcome is not known yet",
                )
            self._service.table.put(kernel)
            until = self._service.clock.steady() + GRACE_S
            self._service.unknown_until[kernel.kernel_id] = until

    def _runtime_of(self, intent: Intent) -> str:
        is_known = intent.runtime in self._service.runtimes
        return intent.runtime if is_known else self._service.default.name

    def _of_unknown_devices(self, intent: Intent, why: str) -> Kernel:
        service = self._service
        return Kernel(
            kernel_id=intent.kernel_id,
            agent_id="",
            state=KernelState.CREATING,
            spec_hash="",
            created_at=service.clock.wall(),
            runtime=self._runtime_of(intent),
            allocation=kept_back(self._inventory),
            reason=f"cut short by a restart, and what it was to be given cannot be read: {why}",
        )

    @property
    def _inventory(self) -> Inventory:
        return self._service.devices.inventory

    async def relist(self, runtime: Runtime) -> None:
        """Compare everything that a runtime has with everything that is known of it.

        Raises:
            RuntimeUnavailable: there was no complete list; nothing changed.
        """
        service = self._service
        with service.operations.witnessed() as busy:
            await reach("adopt.before_list")
            try:
                found = [*await runtime.list()]
                found += await self._renamed(runtime, {item.kernel_id for item in found})
            except RuntimeUnavailable as error:
                self.unavailable(runtime.name, str(error))
                raise
            await reach("adopt.after_list")
            found = [item for item in found if not self._is_taken(item)]
            known = {k.kernel_id: k for k in service.table if k.runtime == runtime.name}
            now = service.clock.steady()
            expired = [k for k, until in service.unknown_until.items() if until <= now]
            actions = reconcile(known, found, self._inventory, busy=busy, expired=expired)
            await self._settle(actions)
            self._partial |= {item.kernel_id for item in found if item.is_partial}
        for kernel_id in busy:
            service.operations.look_again(kernel_id)
        service.not_listed.pop(runtime.name, None)
        if self.statuses[runtime.name].state != "available":
            log.info("runtime.listed", runtime=runtime.name, kernels=len(found))
        self._note(runtime.name, RuntimeStatus("available"))
        self.first_try[runtime.name].set()

    def _is_taken(self, item: FoundKernel) -> bool:
        """Tell whether another runtime has a kernel of that name; that one is left alone."""
        is_taken = self._service.table.is_second(item.kernel_id, item.runtime)
        if is_taken:
            what = {"kernel_id": item.kernel_id, "runtime": item.runtime, "handle": item.handle}
            log.error("kernel.second_of_its_name", **what)
        return is_taken

    async def _renamed(self, runtime: Runtime, listed: set[str]) -> list[FoundKernel]:
        """Look by handle for kernels that a list is without: a name is no proof."""
        missing = [
            kernel
            for kernel in self._service.table
            if kernel.runtime == runtime.name
            and kernel.state in PRESENT
            and kernel.kernel_id not in listed
        ]
        found = [await runtime.find(kernel.kernel_id, kernel.handle) for kernel in missing]
        return [item for item in found if item is not None]

    async def observe(self, kernel_id: str) -> None:
        """Look at one kernel after something happened to it."""
        service = self._service
        known = service.table.kernels.get(kernel_id)
        runtimes = [service.runtimes[known.runtime]] if known else service.runtimes.values()
        with service.operations.witnessed() as busy:
            for runtime in runtimes:
                await reach("reconcile.before_find")
                try:
                    found = await runtime.find(kernel_id, known.handle if known else None)
                except RuntimeUnavailable as error:
                    self.unavailable(runtime.name, str(error))
                    continue
                if kernel_id in busy:
                    break
                await reach("reconcile.after_find")
                before = {kernel_id: known} if known else {}
                items = [found] if found and not self._is_taken(found) else []
                await self._settle(reconcile(before, items, self._inventory))
                await reach("reconcile.after_settle")
        if kernel_id in busy:
            service.operations.look_again(kernel_id)

    async def retry(self) -> None:
        """Ask again where a runtime did not answer, or a create has an unknown outcome."""
        service = self._service
        service.devices.settle()
        for name, runtime in service.runtimes.items():
            is_down = self.statuses[name].state == "unavailable"
            if name in self.listening and (is_down or service.unknown_until):
                with suppress(RuntimeUnavailable):
                    await self.relist(runtime)
        if self._partial and service.clock.steady() >= self._partial_again:
            self._partial_again = service.clock.steady() + PARTIAL_PAUSE_S
            partial, self._partial = self._partial, set()
            for kernel_id in partial:
                service.operations.look_again(kernel_id)

    def unavailable(self, name: str, reason: str) -> None:
        """Note that a runtime does not answer; says nothing about its kernels.

        Nothing is created before the next complete list: the runtime may have acted unseen.
        """
        if self.statuses[name].state != "unavailable":
            log.warning("runtime.unavailable", runtime=name, reason=reason)
        self._note(name, RuntimeStatus("unavailable", reason))
        service = self._service
        if name in service.not_listed or name == service.default.name:
            service.not_listed[name] = reason
        self.first_try[name].set()

    def _note(self, name: str, status: RuntimeStatus) -> None:
        if self.statuses[name].state != status.state:
            self._service.events.publish(EventKind.RUNTIME, (name, status))
        self.statuses[name] = status

    async def _settle(self, actions: Iterable[Action]) -> None:
        table, removals = self._service.table, []
        for action in actions:
            match action:
                case Adopt(kernel, missing):
                    self._service.devices.add_missing(missing)
                    is_known = kernel.kernel_id in table.kernels
                    event = "kernel.changed" if is_known else "kernel.adopted"
                    table.put(kernel)
                    self._known_now(kernel.kernel_id)
                    log.info(event, kernel_id=kernel.kernel_id, state=kernel.state)
                case MarkLost(kernel_id):
                    reason = "not found any more; removed from outside"
                    table.put(table.get(kernel_id).moved_to(KernelState.LOST, reason=reason))
                    log.warning("kernel.lost", kernel_id=kernel_id)
                case DropUnborn(kernel_id):
                    self._service.never_born(kernel_id)
                    self._known_now(kernel_id)
                    log.info("kernel.never_born", kernel_id=kernel_id)
                case RemoveNeverRan(found):
                    removals.append(found)
            hit("adopt.after_action")
        for found in removals:
            await self._remove_never_ran(found)

    async def _remove_never_ran(self, found: FoundKernel) -> None:
        """Remove what was cut short; its share is held until that is confirmed."""
        service, kernel_id = self._service, found.kernel_id
        held = adopted(found, self._inventory)
        service.devices.add_missing(held.missing)
        service.table.put(held.kernel)
        service.unknown_until[kernel_id] = service.clock.steady() + GRACE_S
        with service.operations.on(kernel_id):
            await reach("adopt.before_discard")
            try:
                is_gone = await service.runtimes[found.runtime].discard(kernel_id, found.handle)
            except (RuntimeUnavailable, RuntimeFailure) as error:
                log.warning("kernel.not_removed", kernel_id=kernel_id, reason=str(error))
                return
            await reach("adopt.after_discard")
            if is_gone:
                service.table.drop(kernel_id)
                self._known_now(kernel_id)
                log.info("kernel.never_ran_removed", kernel_id=kernel_id)
            else:
                service.operations.look_again(kernel_id)

    def _known_now(self, kernel_id: str) -> None:
        self._service.unknown_until.pop(kernel_id, None)
        self._service.memory.drop_intent(kernel_id)
