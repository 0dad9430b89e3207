"""What the log says of a kernel that was found, or has ended."""

from __future__ import annotations

import structlog

from agentd.core.kernel import Kernel, KernelState

log = structlog.get_logger()
SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a process."""


def log_found(kernel: Kernel, *, is_known: bool) -> None:
    """Log what was found of a kernel; how it ended, where it has."""
    event = "kernel.changed" if is_known else "kernel.adopted"
    facts: dict[str, object] = {"kernel_id": kernel.kernel_id, "agent_id": kernel.agent_id}
    ending = kernel.ending
    if kernel.state is not KernelState.TERMINATED:
        log.info(event, **facts, state=kernel.state)
        return
    facts |= {"state": kernel.state, "exit_code": ending.exit_code}
    if (number := (ending.exit_code or 0) - SIGNALLED) > 0:
        facts["signal"] = number
    if ending.reason:
        facts["reason"] = ending.reason
    if ending.oom_killed:
        log.warning("kernel.out_of_memory", **facts)
    else:
        log.info("kernel.ended" if is_known else event, **facts)
