"""Log lines about kernels: observed changes and ends."""

from __future__ import annotations

import structlog

from agentd.core.kernel.states import LIVE, Kernel, KernelState

log = structlog.get_logger()
SIGNALLED = 128
"""The offset that a shell adds to a signal number in an exit code."""


def log_observation(before: Kernel | None, kernel: Kernel) -> None:
    """Log the change that an observation made, except for an end: see `log_end`."""
    event = "kernel.adopted"
    if before is not None and before.handle is not None:
        if has_ended(before, kernel):
            return
        event = "kernel.changed"
    if kernel.reason and kernel.state in LIVE:
        log.warning(event, **_facts(kernel), reason=kernel.reason)
    else:
        log.info(event, **_facts(kernel))


def has_ended(before: Kernel | None, now: Kernel | None) -> bool:
    """Return whether a change ends a kernel; restoring an ended kernel is not an end."""
    return (
        now is not None
        and now.state is KernelState.TERMINATED
        and before is not None
        and before.state is not KernelState.TERMINATED
    )


def log_end(kernel: Kernel) -> None:
    """Log how a kernel ended."""
    facts = _facts(kernel)
    if kernel.ending.oom_killed:
        log.warning("kernel.oom_killed", **facts)
    else:
        log.info("kernel.ended", **facts)


def _facts(kernel: Kernel) -> dict[str, object]:
    facts: dict[str, object] = {
        "kernel_id": kernel.kernel_id,
        "agent_id": kernel.agent_id,
        "state": kernel.state,
    }
    if kernel.state is not KernelState.TERMINATED:
        return facts
    facts["exit_code"] = kernel.ending.exit_code
    if (number := (kernel.ending.exit_code or 0) - SIGNALLED) > 0:
        facts["signal"] = number
    if kernel.ending.reason:
        facts["reason"] = kernel.ending.reason
    return facts
