"""The users and groups that the configuration names, as this host knows them.

A name service may learn them only later, such as a directory that does not answer at boot. Until
then only what needs them is refused. A name that was known stays so while the name service does not
answer: only "not found" proves that there is none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agentd.concurrency import MAX_SILENT
from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.core.partition.split import DEFAULT_AGENT
from agentd.errors import ConfigRefused, Problem, RuntimeUnavailable
from agentd.host.groups import find_group_id
from agentd.host.lookups import Lookups
from agentd.runtimes.host.user_accounts import UserAccounts, find_account, may_become_others

RETRY_S = 30.0
"""Seconds between two looks for what is missing."""
ALL_EVERY = 10
"""One of so many looks is for known names, too: a user may have got further groups."""
RETRY_REMEDY = f"agentd looks again every {RETRY_S:g} s, and at a reload"
_NOT_ROOT = "agentd is not root and runs kernels as its own user"


class _Name(NamedTuple):
    """A configured user or group, and the agents whose kernels need it."""

    kind: str
    name: str
    key: str
    agents: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def configured_names(settings: Settings, runtime: str) -> Sequence[_Name]:
    """Return the users and groups of kernels, and the groups of sockets.

    Raises:
        ConfigRefused: agentd may not run anything as another user.
    """
    rpc, is_root = settings.rpc, may_become_others()
    sockets = [("rpc.socket-group", rpc.socket_group)]
    sockets += [(f"rpc.sockets.{n}.group", unix.group) for n, unix in enumerate(rpc.sockets)]
    names = [_Name("group", group, key) for key, group in sockets if group is not None]
    tables: list[tuple[str, Any]] = [(f"runtime.{runtime}", getattr(settings.runtime, runtime))]
    tables += [(f"agents.{n}", agent) for n, agent in enumerate(settings.agents)]
    for section, table in tables:
        agents = _agents_of(settings, table, "allowed_groups")
        groups = [
            (f"{section}.allowed-groups.{n}", g) for n, g in enumerate(table.allowed_groups or ())
        ]
        names += [_Name("group", g, key, agents) for key, g in groups if isinstance(g, str)]
        # A container's user is its image's, and the default of processes is for root.
        is_used = is_root or runtime != "process" or table in settings.agents
        if runtime != "docker" and is_used and table.user is not None:
            agents = _agents_of(settings, table, "user")
            names.append(_Name("user", table.user, f"{section}.user", agents))
    if not is_root and (users := [name for name in names if name.kind == "user"]):
        raise ConfigRefused([Problem(user.key, _NOT_ROOT) for user in users])
    return names


def _agents_of(settings: Settings, table: Any, field: str) -> tuple[str, ...]:
    """Return the agents that use a field of a table: its own agent, or those without it."""
    if table in settings.agents or not settings.agents:
        return (getattr(table, "id", DEFAULT_AGENT),)
    return tuple(agent.id for agent in settings.agents if getattr(agent, field) is None)


class HostNames:
    """The users and groups of the configured runtime's kernels, and the groups of sockets.

    Each name is looked up by threads of its own, so one that the name service does not answer for
    delays no other, while these are fewer than `MAX_SILENT`.
    """

    def __init__(self, settings: Settings) -> None:
        self.accounts = UserAccounts(is_unprivileged=not may_become_others())
        self.problems: Mapping[str, Problem] = {}
        """By key, a name that this host does not know, or did not look up in time."""
        self._runtime = settings.node.runtime
        self._lookups: Mapping[str, Lookups] = defaultdict(partial(Lookups, max_threads=1))
        self._turns = asyncio.Semaphore(MAX_SILENT)
        self._known: dict[str, Any] = {}
        self._names: Sequence[_Name] = ()
        self._looks = 0

    def group_id(self, name: str) -> int | None:
        """Return the id of a group, None if it is not known."""
        group_id: int | None = self._known.get(f"group {name!r}")
        return group_id

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
        self._names = configured_names(settings, self._runtime)
        await self._look_up_all(self._names, keeps_known=False)

    async def look_again(self) -> None:
        """Look up the names that are missing, and now and then all; a known one stays known."""
        self._looks += 1
        is_all = self._looks % ALL_EVERY == 0
        names = [name for name in self._names if is_all or name.key in self.problems]
        await self._look_up_all(names, keeps_known=True)

    async def _look_up_all(self, names: Sequence[_Name], *, keeps_known: bool) -> None:
        found = await asyncio.gather(
            *(self._look_up(name, keeps_known=keeps_known) for name in names)
        )
        self.problems = {problem.where: problem for problem in found if problem is not None}
        accounts = {
            name.agents[0] if name.key.startswith("agents.") else "": self._known.get(str(name))
            or self.problems[name.key]
            for name in self._names
            if name.kind == "user"
        }
        default, is_unprivileged = accounts.pop("", None), self.accounts.is_unprivileged
        self.accounts = UserAccounts(default, accounts, is_unprivileged=is_unprivileged)

    async def _look_up(self, name: _Name, *, keeps_known: bool) -> Problem | None:
        """Look up a name, and return its problem."""
        known, subject = self._known.get(str(name)), str(name)
        find_user = partial(find_account, name.name, known)
        find: Any = find_user if name.kind == "user" else partial(find_group_id, name.name)
        try:
            async with self._turns:
                found = await self._lookups[subject].call(subject, find)
        except (RuntimeUnavailable, OSError):
            reason = f"{name} cannot be looked up: the name service does not answer"
            return Problem(name.key, reason)
        self._known[subject] = found = known if found is None and keeps_known else found
        return Problem(name.key, f"no {name} on this host") if found is None else None
