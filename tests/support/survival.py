"""Facts that survive a crash: kernels that were alive before, and their shares."""

from collections.abc import Collection

from agentd.core.invariants import NodeSnapshot, Violation
from agentd.core.kernel.states import LIVE, STARTING

SURVIVAL = "survival"
"""The rule of these violations, beside those of `agentd.core.invariants`."""


def changes(
    before: NodeSnapshot, after: NodeSnapshot, touched: Collection[str] = ()
) -> list[Violation]:
    """Return the kernels that changed or vanished between two snapshots, except touched ones."""
    found = []
    for kernel_id, lived in before.present.items():
        if kernel_id in touched or not lived.is_alive:
            continue
        now, accounted = after.present.get(kernel_id), after.accounted.get(kernel_id)
        if now is None or not now.is_alive or now.handle != lived.handle:
            what = f"is {now.handle if now and now.is_alive else 'gone'}"
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} was {lived.handle}, {what}"))
        elif accounted is None or accounted.state not in LIVE | STARTING:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} is alive but not recorded"))
        elif now.given != lived.given:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} holds {now.given}"))
    return found
