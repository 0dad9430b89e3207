"""What the node remembers of its kernels: their records in the state folder.

Written before a runtime is asked, kept until the kernel is removed, and believed only as long
as its runtime cannot be asked itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import replace

from agentd.core.kernel.adoption import recalled
from agentd.core.kernel.record import RecordError, decode, encode
from agentd.core.kernel.states import LIVE, Kernel, KernelState, Observed
from agentd.services.devices import NodeDevices
from agentd.services.kernels.creates import GRACE_S
from agentd.services.protocols import Clock, Phase, SavedRecord, StateStore
from agentd.services.state import NodeState


def recall(
    state: NodeState,
    devices: NodeDevices,
    records: Iterable[SavedRecord],
    default_runtime: str,
    clock: Clock,
) -> None:
    """Take every remembered kernel for what it last was, until its runtime says more.

    What became of a create that was cut short is not known yet. A kernel whose record cannot be
    read is of the default runtime, and holds everything back.
    """
    for saved in records:
        adoption = recalled(
            saved.kernel_id, saved.text, default_runtime, devices.inventory, clock.wall()
        )
        devices.add_missing(adoption.missing)
        kernel = adoption.kernel
        match saved.phase:
            case Phase.INTENT:
                why = kernel.reason or "cut short by a restart; its outcome is not known yet"
                kernel = replace(kernel, reason=why)
                state.leave_unsettled(kernel.kernel_id, clock.steady() + GRACE_S)
            case Phase.HELD:
                kernel = kernel.observed(Observed.UNREADABLE if kernel.reason else Observed.RUNNING)
            case Phase.ENDED:
                kernel = kernel.observed(Observed.EXITED)
        state.put(kernel)


def recorded_runtimes(records: Iterable[SavedRecord]) -> set[str]:
    """Return the runtimes that remembered kernels are of, where that can be read."""
    names = set()
    for saved in records:
        with suppress(RecordError):
            names.add(decode(saved.text).kernel.runtime)
    return names


def remember(state: NodeState, store: StateStore, node_id: str) -> None:
    """Have the state folder follow every change of a kernel from now on."""

    def changed(before: Kernel | None, now: Kernel | None) -> None:
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

    state.listen(changed)


_PHASES = {
    **dict.fromkeys(LIVE, Phase.HELD),
    KernelState.TERMINATED: Phase.ENDED,
    KernelState.LOST: Phase.ENDED,
    KernelState.FAILED: Phase.ENDED,
}
