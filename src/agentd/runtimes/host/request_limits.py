"""Members and limits of requests whose kernels are processes of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from agentd.config.runtimes import KernelSettings
from agentd.core.kernel.options import TOO_LONG, Ulimit, is_too_long
from agentd.core.kernel.states import KernelSpec
from agentd.errors import Problem
from agentd.host.groups import group_problems
from agentd.host.lookups import Lookups
from agentd.runtimes.host.user_accounts import UserAccounts


class HostOptions(msgspec.Struct, frozen=True):
    """The options of a request that a process of the host has."""

    pids_limit: int | None = None
    ulimits: Mapping[str, Ulimit] = {}
    groups: tuple[int | str, ...] = ()


HOST_MEMBERS = frozenset(
    {"command", "env", "image", "working_dir", "user", *HostOptions.__struct_fields__}
)
"""Members that these runtimes carry out; `image` is ignored and in `not_enforced`."""


def host_options(spec: KernelSpec) -> HostOptions:
    """Return the options of a request."""
    return msgspec.convert(spec.options, HostOptions)


def host_problems(
    spec: KernelSpec, runtime: str, user: str | None, settings: KernelSettings
) -> Iterator[Problem]:
    """Yield the problems of a request; without a `user` each kernel has a user of its own."""
    options = host_options(spec)
    if not spec.command:
        yield Problem("command", f"is empty; the {runtime} runtime requires a command")
    yield from settings.limit_problems(options.pids_limit, options.ulimits)
    if spec.user not in (None, user):
        who = "a user of their own" if user is None else user
        yield Problem("user", f"kernels of {spec.agent_id} run as {who} here")
    if is_too_long(spec.working_dir or ""):
        yield Problem("working_dir", TOO_LONG)


async def host_group_problems(
    spec: KernelSpec, allowed: Sequence[int | str], accounts: UserAccounts, lookups: Lookups
) -> Sequence[Problem]:
    """Return the problems of the groups of a request; only root can add any.

    Raises:
        NotReady, RuntimeUnavailable: see `group_problems`.
    """
    groups = host_options(spec).groups
    if groups and accounts.is_unprivileged:
        return [Problem("groups", "agentd is not root and cannot add groups")]
    return await group_problems(groups, allowed, lookups)
