"""Requests that only a container can fulfil, and limits of kernels on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentd.core.kernel.options import TOO_LONG, PullPolicy, is_too_long, over_ceiling
from agentd.core.kernel.states import KernelSpec
from agentd.errors import Problem


def uncontained_problems(
    spec: KernelSpec, runtime: str, user: str | None, pids_limit: int, ceilings: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield the problems of a request; without a `user` each kernel has a user of its own."""
    options = spec.container
    if not spec.command:
        yield Problem("command", f"is empty; the {runtime} runtime requires a command")
    if (options.pids_limit or 0) > pids_limit:
        why = f"{options.pids_limit} exceeds the limit of {pids_limit}"
        yield Problem("pids_limit", why)
    needs_container = {
        "mounts": spec.mounts,
        "ports": spec.ports,
        "network": options.network,
        "tmpfs": options.tmpfs,
        "shm_size": options.shm_size,
        "platform": options.platform,
        "pull_policy": options.pull_policy is not PullPolicy.MISSING,
    }
    for member, given in needs_container.items():
        if given:
            yield Problem(member, f"the {runtime} runtime has no containers")
    if spec.user not in (None, user):
        who = "a user of their own" if user is None else user
        yield Problem("user", f"kernels of {spec.agent_id} run as {who} here")
    if is_too_long(spec.working_dir or ""):
        yield Problem("working_dir", TOO_LONG)
    for name, why in over_ceiling(options.ulimits, ceilings):
        yield Problem(f"ulimits.{name}", why)
