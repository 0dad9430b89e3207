"""The users and groups that the configuration names, as this host knows them.

A name service may learn them only later, such as a directory that does not answer at boot. Until
then only the kernels are refused that need them. A user that was known stays so while the name
service does not answer: only "no such user" proves that there is none.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.core.partition.split import DEFAULT_AGENT
from agentd.errors import ConfigRefused, InvalidRequest, Problem, RuntimeUnavailable
from agentd.host.groups import unknown_groups
from agentd.host.lookups import Lookups
from agentd.runtimes.host.user_accounts import (
    UnknownAccount,
    UserAccount,
    UserAccounts,
    find_account,
)

RETRY_S = 30.0
"""Seconds between two looks for what is missing."""
RETRY_REMEDY = f"agentd looks again every {RETRY_S:g} s, and at a reload"
_NOT_ROOT = "agentd is not root and runs kernels as its own user"
_NO_ANSWER = "cannot be looked up: the name service does not answer"


def configured_users(settings: Settings, runtime: str) -> Mapping[str, tuple[str, str]]:
    """Return the users of kernels and their keys, by agent; "" stands for all other agents.

    Raises:
        ConfigRefused: agentd may not run anything as another user.
    """
    if runtime == "docker":
        return {}  # a container's users are its image's
    is_root = os.geteuid() == 0
    default = getattr(settings.runtime, runtime).user
    rows = [("", f"runtime.{runtime}.user", default if is_root or runtime != "process" else None)]
    rows += [(agent.id, f"agents.{n}.user", agent.user) for n, agent in enumerate(settings.agents)]
    users = {agent: (key, user) for agent, key, user in rows if user is not None}
    if users and not is_root:
        raise ConfigRefused([Problem(key, _NOT_ROOT) for key, _ in users.values()])
    return users


class HostNames:
    """The users and groups of the kernels of the configured runtime.

    Each user is looked up by a thread of its own, so one that the name service does not answer for
    delays no other.
    """

    def __init__(self, settings: Settings) -> None:
        self.accounts = UserAccounts(is_unprivileged=os.geteuid() != 0)
        self.problems: Sequence[Problem] = ()
        """One for each name that this host does not know, or did not look up in time."""
        self._settings = settings
        self._runtime = settings.node.runtime
        self._lookups: Mapping[str, Lookups] = defaultdict(partial(Lookups, max_threads=1))
        self._known: dict[str, UserAccount] = {}

    async def refresh(self, settings: Settings) -> None:
        """Look up all names of a configuration.

        Raises:
            ConfigRefused: agentd may not run anything as another user; nothing was looked up.
        """
        users, problems = configured_users(settings, self._runtime), list[Problem]()
        lookups = (self._find_account(*user, problems) for user in users.values())
        *found, _ = await asyncio.gather(*lookups, self._check_groups(settings, problems))
        own = dict(zip(users, found, strict=True))
        default, is_unprivileged = own.pop("", None), self.accounts.is_unprivileged
        self.accounts = UserAccounts(default, own, is_unprivileged=is_unprivileged)
        self.problems, self._settings = problems, settings

    async def _find_account(
        self, key: str, user: str, problems: list[Problem]
    ) -> UserAccount | UnknownAccount:
        try:
            lookup = self._lookups[user].call(f"user {user!r}", partial(find_account, user, key))
            self._known[user] = account = await lookup
        except InvalidRequest as error:
            self._known.pop(user, None)
            problem = error.problems[0]
        except RuntimeUnavailable:
            problem = Problem(key, f"user {user!r} {_NO_ANSWER}")
        else:
            return account
        problems.append(problem)
        return self._known.get(user) or UnknownAccount(problem)

    async def _check_groups(self, settings: Settings, problems: list[Problem]) -> None:
        key = f"runtime.{self._runtime}.allowed-groups"
        groups = {key: getattr(settings.runtime, self._runtime).allowed_groups}
        for index, agent in enumerate(settings.agents):
            groups[f"agents.{index}.allowed-groups"] = agent.allowed_groups or ()
        for key, allowed in groups.items():
            if not any(isinstance(group, str) for group in allowed):
                continue
            try:
                lookup = partial(unknown_groups, key, allowed)
                problems += await self._lookups[""].call("the group database", lookup)
            except RuntimeUnavailable:
                problems.append(Problem(key, _NO_ANSWER))

    def conditions(self) -> Iterator[Condition]:
        """Yield a condition for each agent and each name that it waits for."""
        for problem in self.problems:
            for agent in self._agents_of(problem.where):
                yield Condition(f"agent/{agent}", str(problem), RETRY_REMEDY)

    def _agents_of(self, key: str) -> Sequence[str]:
        """Return the agents whose kernels use the names of a key."""
        section, name, member, *_ = key.split(".")
        if section == "agents":
            return [self._settings.agents[int(name)].id]
        field = member.replace("-", "_")
        users = [agent.id for agent in self._settings.agents if getattr(agent, field) is None]
        return users if self._settings.agents else [DEFAULT_AGENT]
