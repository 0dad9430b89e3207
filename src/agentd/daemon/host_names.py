"""The users and groups that the configuration names, as this host knows them.

A name service may learn them only later, such as a directory that does not answer at boot. Until
then only what needs them is refused. A name that was known stays so while the name service does not
answer: only "not found" proves that there is none.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.core.partition.split import DEFAULT_AGENT
from agentd.errors import ConfigRefused, Problem, RuntimeUnavailable
from agentd.host.groups import find_group_id
from agentd.host.lookups import Lookups
from agentd.runtimes.host.user_accounts import UnknownAccount, UserAccounts, find_account

RETRY_S = 30.0
"""Seconds between two looks for what is missing."""
RETRY_REMEDY = f"agentd looks again every {RETRY_S:g} s, and at a reload"
_NOT_ROOT = "agentd is not root and runs kernels as its own user"
_FIND = {"user": find_account, "group": find_group_id}


class _Name(NamedTuple):
    """A configured user or group, and the agents whose kernels need it."""

    kind: str
    name: str
    key: str
    agents: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def configured_users(settings: Settings, runtime: str) -> Mapping[str, _Name]:
    """Return the users of kernels by agent; "" stands for all agents without one of their own.

    Raises:
        ConfigRefused: agentd may not run anything as another user.
    """
    if runtime == "docker":
        return {}  # a container's users are its image's
    default = getattr(settings.runtime, runtime).user
    if runtime == "process" and os.geteuid() != 0:
        default = None  # it is for root
    key, agents = f"runtime.{runtime}.user", _agents_without(settings, "user")
    users = {"": _Name("user", default, key, agents)} if default is not None else {}
    for index, agent in enumerate(settings.agents):
        if agent.user is not None:
            users[agent.id] = _Name("user", agent.user, f"agents.{index}.user", (agent.id,))
    if users and os.geteuid() != 0:
        raise ConfigRefused([Problem(user.key, _NOT_ROOT) for user in users.values()])
    return users


def _configured_groups(settings: Settings, runtime: str) -> Iterator[_Name]:
    """Yield the groups of sockets, and those that requests may add."""
    if settings.rpc.socket_group is not None:
        yield _Name("group", settings.rpc.socket_group, "rpc.socket-group")
    for index, unix in enumerate(settings.rpc.sockets):
        if unix.group is not None:
            yield _Name("group", unix.group, f"rpc.sockets.{index}.group")
    allowed = getattr(settings.runtime, runtime).allowed_groups
    lists = [(f"runtime.{runtime}", allowed, _agents_without(settings, "allowed_groups"))]
    for index, agent in enumerate(settings.agents):
        lists.append((f"agents.{index}", agent.allowed_groups or (), (agent.id,)))
    for key, groups, agents in lists:
        for index, group in enumerate(groups):
            if isinstance(group, str):
                yield _Name("group", group, f"{key}.allowed-groups.{index}", agents)


def _agents_without(settings: Settings, field: str) -> tuple[str, ...]:
    """Return the agents that use the runtime's value of a field."""
    agents = tuple(agent.id for agent in settings.agents if getattr(agent, field) is None)
    return agents if settings.agents else (DEFAULT_AGENT,)


class HostNames:
    """The users and groups of the configured runtime's kernels, and the groups of sockets.

    Each name is looked up by a thread of its own, so one that the name service does not answer for
    delays no other.
    """

    def __init__(self, settings: Settings) -> None:
        self.accounts = UserAccounts(is_unprivileged=os.geteuid() != 0)
        self.group_ids: Mapping[str, int] = {}
        """The ids of the known groups, by name."""
        self.problems: Mapping[str, Problem] = {}
        """By key, a name that this host does not know, or did not look up in time."""
        self._runtime = settings.node.runtime
        self._lookups: Mapping[str, Lookups] = defaultdict(partial(Lookups, max_threads=1))
        self._known: dict[str, Any] = {}
        self._names: Sequence[_Name] = ()

    def conditions(self) -> Iterator[Condition]:
        """Yield the names that agents wait for."""
        for name in self._names:
            for agent in name.agents if name.key in self.problems else ():
                yield Condition(f"agent/{agent}", str(self.problems[name.key]), RETRY_REMEDY)

    async def refresh(self, settings: Settings) -> None:
        """Look up all names of a configuration.

        Raises:
            ConfigRefused: agentd may not run anything as another user; nothing was looked up.
        """
        users = configured_users(settings, self._runtime)
        groups = [*_configured_groups(settings, self._runtime)]
        self._names = [*users.values(), *groups]
        problems = await asyncio.gather(*map(self._look_up, self._names))
        self.problems = {problem.where: problem for problem in problems if problem is not None}
        accounts = {
            agent: self._known.get(str(name)) or UnknownAccount(self.problems[name.key])
            for agent, name in users.items()
        }
        default, is_unprivileged = accounts.pop("", None), self.accounts.is_unprivileged
        self.accounts = UserAccounts(default, accounts, is_unprivileged=is_unprivileged)
        ids = {group.name: self._known.get(str(group)) for group in groups}
        self.group_ids = {
            group: group_id for group, group_id in ids.items() if group_id is not None
        }

    async def _look_up(self, name: _Name) -> Problem | None:
        """Look up a name, and return its problem."""
        try:
            lookup = partial(_FIND[name.kind], name.name)
            self._known[str(name)] = known = await self._lookups[str(name)].call(str(name), lookup)
        except RuntimeUnavailable:
            return Problem(
                name.key, f"{name} cannot be looked up: the name service does not answer"
            )
        return Problem(name.key, f"no {name} on this host") if known is None else None
