"""Reconciliation of the recorded kernels with the observed ones.

The result is a list of actions; none stops, restarts or removes a kernel that ever ran. A container
that was created and never started belongs to an interrupted create and is removed. An unreadable
kernel quarantines every device that it might hold.

A kernel whose create is unresolved counts as absent only after its grace period (`expired`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from agentd.core.devices import Inventory
from agentd.core.kernel.adoption import KernelUpdate, adopt, changed_limits
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.states import (
    ENDED,
    PRESENT,
    STARTING,
    Ending,
    Kernel,
    KernelState,
    ObservedState,
)


class RemoveUnstarted(msgspec.Struct, frozen=True):
    """Remove a kernel that was created and never started."""

    observed: ObservedKernel


class MarkAbsent(msgspec.Struct, frozen=True):
    """Mark a kernel as lost if it ran, or as never created if its create was interrupted."""

    kernel_id: str


Action: TypeAlias = KernelUpdate | RemoveUnstarted | MarkAbsent


def reconcile(
    known: Mapping[str, Kernel],
    observed: Iterable[ObservedKernel],
    inventory: Inventory,
    *,
    expired: Collection[str] = (),
    now: float = 0.0,
) -> list[Action]:
    """Return the actions for every difference between `known` and a complete list.

    `now` is the time of adoption, in seconds since the epoch.
    """
    by_id = {item.kernel_id: item for item in observed}
    actions: list[Action] = []
    for kernel_id, item in by_id.items():
        before = known.get(kernel_id)
        corrected = correct_by_history(before, item) if before else item
        if corrected.state is ObservedState.CREATED:
            actions.append(RemoveUnstarted(corrected))
        elif item.is_unreadable and (before or not item.handle):
            actions += _readopt_unreadable(before, item)
        elif action := _adopt_if_changed(before, corrected, inventory, now):
            actions.append(action)
            for device in action.missing:
                inventory = inventory.with_device(device)
    for kernel_id in known.keys() - by_id.keys():
        state = known[kernel_id].state
        if state in PRESENT or (state in STARTING and kernel_id in expired):
            actions.append(MarkAbsent(kernel_id))
    return actions


def _readopt_unreadable(before: Kernel | None, item: ObservedKernel) -> Iterator[KernelUpdate]:
    """Yield a kernel whose remains cannot be read as it was known; unknown ones are left alone."""
    is_proven = item.is_alive and item.handle
    if before is None or (before.state in ENDED and not is_proven):
        return
    state = ObservedState.UNREADABLE if item.is_alive else ObservedState.EXITED
    handle, pid = item.handle or before.handle, item.pid or _first_pid(before, item)
    now = before.with_observation(
        state, reason=item.record_problem, ending=item.ending, handle=handle, pid=pid
    )
    if now != before:
        yield KernelUpdate(now)


def correct_by_history(before: Kernel, item: ObservedKernel) -> ObservedKernel:
    """Return the observation; a kernel that was seen running did run, whatever its remains show."""
    is_same = before.state in PRESENT and item.handle in ("", before.handle or "")
    if item.state is not ObservedState.CREATED or not is_same:
        return item
    ending = Ending(reason="it has ended, and its remains are damaged")
    handle, started_at = before.handle or "", before.started_at
    return replace(
        item, state=ObservedState.EXITED, handle=handle, started_at=started_at, ending=ending
    )


def kernel_after_stop(before: Kernel, item: ObservedKernel | None) -> Kernel:
    """Return a kernel after a stop, from its last observation."""
    if item is None:
        return before.with_observation(
            ObservedState.ABSENT, reason="removed outside of agentd during the stop"
        )
    corrected = correct_by_history(before, item)
    return before.with_observation(
        corrected.state, ending=corrected.ending, pid=_first_pid(before, corrected)
    )


def _adopt_if_changed(
    before: Kernel | None, item: ObservedKernel, inventory: Inventory, now: float
) -> KernelUpdate | None:
    if before is None or before.state in STARTING or before.handle != item.handle:
        return adopt(item, inventory, before, now=now)
    if before.state is KernelState.UNREADABLE and item.record and not item.is_partial:
        adoption = adopt(item, inventory, before, now=now)
        return None if adoption.kernel == before else adoption
    is_unreadable = before.state is KernelState.UNREADABLE and item.is_alive
    state = ObservedState.UNREADABLE if is_unreadable else item.state
    after = before.with_observation(state, degraded=changed_limits(before, item))
    ending = item.ending if after.state in ENDED else Ending()
    is_same = (after.state, after.degraded) == (before.state, before.degraded)
    if is_same and (
        item.is_partial or (item.started_at, ending) == (before.started_at, before.ending)
    ):
        return None
    return KernelUpdate(
        replace(after, ending=ending, started_at=item.started_at, pid=_first_pid(before, item))
    )


def _first_pid(before: Kernel, item: ObservedKernel) -> int | None:
    """Return the first process: a running unit has one, a process kernel is one."""
    return item.pid if item.unit else before.pid
