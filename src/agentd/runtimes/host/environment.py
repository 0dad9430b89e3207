"""Environment variables that agentd sets for a kernel on the host."""

from __future__ import annotations

from agentd.core.kernel.plan import KernelPlan

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def kernel_variables(plan: KernelPlan) -> dict[str, str]:
    """Return the variables that describe a kernel to itself."""
    return {
        "AGENTD_NODE": plan.node_id,
        "AGENTD_KERNEL": plan.spec.kernel_id,
        "AGENTD_AGENT": plan.spec.agent_id,
        "AGENTD_DEVICES": plan.device_label,
    }


def kernel_environment(plan: KernelPlan) -> dict[str, str]:
    """Return all variables of a kernel; agentd's own take precedence."""
    return {"PATH": PATH, **plan.env, **kernel_variables(plan)}
