"""A look at this node by its own rules: the daemon's books beside what its runtimes have.

Changes nothing. Kernels that something is under way with are left out, and what is found
counts only if a second look finds it too: an end is seen before it is booked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentd.core.devices import MEMORY, Inventory
from agentd.core.invariants import RULES, Booked, Census, There, Violation, violations
from agentd.core.kernel import STARTING, Kernel, KernelState
from agentd.core.reconcile import FoundKernel, FoundState, adopted
from agentd.core.rules import AllocationMode
from agentd.errors import RuntimeUnavailable
from agentd.services.kernels import KernelService

SECOND_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and what was found against it."""

    rule: str
    promise: str
    findings: Sequence[str] = ()


async def self_check(service: KernelService) -> list[Check]:
    """Judge the node by every rule.

    Raises:
        RuntimeUnavailable: a runtime does not say what it has.
    """
    found = await _look(service)
    if found:
        await asyncio.sleep(SECOND_LOOK_S)
        again = set(await _look(service))
        found = [violation for violation in found if violation in again]
    return [
        Check(rule, promise, tuple(v.detail for v in found if v.rule == rule))
        for rule, promise in RULES.items()
    ]


async def _look(service: KernelService) -> list[Violation]:
    with service.operations.witnessed() as busy:
        found: list[FoundKernel] = []
        strays = list(_kept_for_nobody(service))
        for runtime in service.runtimes.values():
            if (why := service.not_listed.get(runtime.name)) is not None:
                raise RuntimeUnavailable(f"runtime {runtime.name} is not known: {why}")
            found += await runtime.list()
            strays += await runtime.strays(set(service.table.kernels) | busy)
        seconds = [i for i in found if service.table.is_second(i.kernel_id, i.runtime)]
        strays += [f"{i.runtime} kernel {i.kernel_id} ({i.handle}), a second one" for i in seconds]
        found = [item for item in found if item not in seconds]
        return violations(_census(service, found, strays, busy))


def _kept_for_nobody(service: KernelService) -> Sequence[str]:
    kernels = service.table.kernels
    intents = {intent.kernel_id for intent in service.memory.load_intents()}
    starting = {kernel.kernel_id for kernel in service.table if kernel.state in STARTING}
    ports = {
        f"port {number}/{protocol}, held for kernel {kernel_id}"
        for (protocol, number), kernel_id in service.table.ports.items()
        if kernel_id not in kernels or not kernels[kernel_id].holds
    }
    return [*(f"intent of kernel {k}" for k in sorted(intents - starting)), *sorted(ports)]


def _census(
    service: KernelService, found: Sequence[FoundKernel], strays: Sequence[str], busy: set[str]
) -> Census:
    ledger, inventory = service.table.ledger, service.devices.inventory
    return Census(
        is_shared=service.devices.split.mode is AllocationMode.SHARED,
        capacities={str(device_id): d.capacity for device_id, d in inventory.by_id.items()},
        holdings={
            str(device_id): {k: share.amount for k, share in holders.items() if k not in busy}
            for device_id, holders in ledger.held.items()
        },
        booked={k.kernel_id: _booked(k) for k in service.table if k.kernel_id not in busy},
        there={i.kernel_id: _there(i, inventory) for i in found if i.kernel_id not in busy},
        strays=tuple(strays),
        divisible=frozenset({str(MEMORY)}),
    )


def _there(item: FoundKernel, inventory: Inventory) -> There:
    kernel = adopted(item, inventory).kernel
    is_alive = item.state in (FoundState.RUNNING, FoundState.PAUSED)
    if kernel.state is KernelState.UNREADABLE:
        return There(item.handle, is_alive)
    given = {str(share.device_id): share.amount for share in kernel.allocation.shares}
    return There(item.handle, is_alive, given)


def _booked(kernel: Kernel) -> Booked:
    return Booked(kernel.agent_id, kernel.state, kernel.handle)
