"""User accounts of kernels that run on the host, without a container."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from agentd.errors import NotReady, Problem
from agentd.procfs import read_lines
from agentd.program.name_service import find_entry, refuse_incomplete


def may_become_others() -> bool:
    """Return whether agentd is root, of more users than one: a user namespace may have no other."""
    try:
        ranges = read_lines("/proc/self/uid_map")
    except FileNotFoundError:  # this Linux has no user namespaces
        return os.geteuid() == 0
    return os.geteuid() == 0 and sum(int(line.split()[2]) for line in ranges) > 1


class UserAccount(msgspec.Struct, frozen=True):
    """A user account of the host."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


class UserAccounts(msgspec.Struct, frozen=True):
    """The user accounts of a runtime's kernels, which the host adds to its settings.

    `own` holds agents with their own account; `default` applies to all others. Without an account,
    kernels run as the daemon's user; in units of root, each has a user of its own. An account that
    this host does not know yet is a problem. With `is_unprivileged`, agentd cannot become
    another user and there are no accounts.
    """

    default: UserAccount | Problem | None = None
    own: Mapping[str, UserAccount | Problem] = {}
    is_unprivileged: bool = False

    def has_account(self, agent_id: str) -> bool:
        """Return whether a user is configured for an agent's kernels."""
        return self.own.get(agent_id, self.default) is not None

    def account_for(self, agent_id: str) -> UserAccount | None:
        """Return the user account of an agent's kernels.

        Raises:
            NotReady: this host does not know it yet.
        """
        account = self.own.get(agent_id, self.default)
        if isinstance(account, Problem):
            raise NotReady(f"kernels of {agent_id} cannot start: {account}", is_local=True)
        return account

    def user_for(self, agent_id: str) -> str | None:
        """Return the name of the user account of an agent's kernels.

        Raises:
            NotReady: this host does not know it yet.
        """
        account = self.account_for(agent_id)
        return account.name if account is not None else None

    def has_own_account(self, agent_id: str) -> bool:
        """Return whether no other agent's kernels run as this agent's user."""
        account = self.own.get(agent_id)
        others = [other for agent, other in self.own.items() if agent != agent_id]
        uids = {other.uid for other in (*others, self.default) if isinstance(other, UserAccount)}
        return isinstance(account, UserAccount) and account.uid not in uids


def find_account(user: str, known: UserAccount | None = None) -> UserAccount | None:
    """Return a user account, None if this host does not know it; may block, as NSS does.

    `known` is the account that was found before: it loses no group whose source does not answer.

    Raises:
        RuntimeUnavailable: the name service failed.
    """
    if (entry := find_entry("getpwnam_r", user)) is None:
        return None
    groups = os.getgrouplist(entry.name, entry.group)
    if known is not None and (lost := {*known.groups} - {*groups}):
        for group in lost:
            find_entry("getgrgid_r", group)
        groups = os.getgrouplist(entry.name, entry.group)  # its source may have answered since
    refuse_incomplete()  # a failure leaves the primary group alone (getgrouplist(3))
    return UserAccount(entry.name, entry.number, entry.group, tuple(groups))
