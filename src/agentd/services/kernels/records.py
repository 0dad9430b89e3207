"""Kernel records: saved before the runtime is called, kept until the kernel is removed.

A record counts only until the runtime itself answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import replace

from agentd.core.kernel.adoption import adopt_record
from agentd.core.kernel.record import RecordError, decode, encode
from agentd.core.kernel.states import LIVE, Kernel, KernelState, ObservedState
from agentd.services.devices import NodeDevices
from agentd.services.kernels.pending_creates import UNRESOLVED_GRACE_S
from agentd.services.protocols import Clock
from agentd.services.state import NodeState
from agentd.state.folder import StateFolder
from agentd.state.schemas import Phase, SavedRecord


def restore_kernels(
    state: NodeState,
    devices: NodeDevices,
    records: Iterable[SavedRecord],
    default_runtime: str,
    clock: Clock,
) -> None:
    """Restore every recorded kernel in its last state, until its runtime answers.

    An interrupted create is unresolved. A kernel with an unreadable record belongs to the default
    runtime, and all devices are quarantined for it.
    """
    for saved in records:
        adoption = adopt_record(
            saved.kernel_id, saved.text, default_runtime, devices.inventory, clock.wall()
        )
        devices.add_missing(adoption.missing)
        kernel = adoption.kernel
        match saved.phase:
            case Phase.INTENT:
                reason = kernel.reason or "create interrupted by a restart; not resolved yet"
                kernel = replace(kernel, reason=reason)
                state.mark_unresolved(kernel.kernel_id, clock.steady() + UNRESOLVED_GRACE_S)
            case Phase.LIVE:
                kernel = kernel.with_observation(
                    ObservedState.UNREADABLE if kernel.reason else ObservedState.RUNNING
                )
            case Phase.ENDED:
                kernel = kernel.with_observation(ObservedState.EXITED)
        state.put_kernel(kernel)


def recorded_runtimes(records: Iterable[SavedRecord]) -> set[str]:
    """Return the runtimes of the recorded kernels; unreadable records are skipped."""
    names = set()
    for saved in records:
        with suppress(RecordError):
            names.add(decode(saved.text).runtime)
    return names


def persist_changes(state: NodeState, store: StateFolder, node_id: str) -> None:
    """Save every change of a kernel to the state folder from now on."""

    def on_change(before: Kernel | None, now: Kernel | None) -> None:
        kernel = now or before
        if kernel is None or (now is not None and now.state not in _PHASES):
            return
        if now is None or now.state is KernelState.FAILED:
            store.drop_record(kernel.kernel_id)
        else:
            phase = _PHASES[now.state]
            store.save_phase(now.kernel_id, phase, lambda: encode(kernel, node_id))
            is_known = now.state is not KernelState.UNREADABLE
            if before is not None and is_known and before.allocation != now.allocation:
                store.save_record(now.kernel_id, encode(now, node_id))

    state.subscribe(on_change)


_PHASES = {
    **dict.fromkeys(LIVE, Phase.LIVE),
    KernelState.TERMINATED: Phase.ENDED,
    KernelState.LOST: Phase.ENDED,
    KernelState.FAILED: Phase.ENDED,
}
