"""Groups of this host: their ids, and those of a request.

A name means the same group in every kernel, whatever an image calls it. Names are looked up by NSS
(nsswitch.conf(5)), which may query a server and block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from agentd.core.kernel.plan import KernelPlan
from agentd.errors import InvalidRequest, NotReady, Problem, RuntimeUnavailable
from agentd.host.lookups import Lookups
from agentd.program.name_service import find_entry

_SUBJECT = "the group database"
DEVICES = ""
"""The place of devices' groups among lookups by agent."""


def find_group_id(group: int | str) -> int | None:
    """Return the id of a group, None if this host does not know its name.

    Raises:
        RuntimeUnavailable: the name service failed.
    """
    if isinstance(group, int):
        return group
    entry = find_entry("getgrnam_r", group)
    return entry.number if entry is not None else None


def resolve_groups(
    requested: Sequence[int | str], allowed: Sequence[int | str]
) -> tuple[list[int], list[Problem]]:
    """Return the ids of the groups of a request, and a problem for each that is not allowed.

    Without allowed ones no name is looked up.

    Raises:
        NotReady: this host does not know an allowed one, which is named or may be meant by number.
        RuntimeUnavailable: the name service failed, and a group of the request needs its answer.
    """
    allowed_ids: dict[int | str, int | None] = {}
    failure: RuntimeUnavailable | None = None
    for group in allowed:
        try:
            allowed_ids[group] = find_group_id(group)
        except RuntimeUnavailable as error:
            failure = error
    unknown = [group for group, group_id in allowed_ids.items() if group_id is None]
    ids: list[int] = []
    problems: list[Problem] = []
    for index, group in enumerate(requested):
        group_id = find_group_id(group) if allowed else None
        if group_id is None or group_id not in allowed_ids.values():
            if failure is not None:  # it may be one of those
                raise failure
            if unknown and (group in unknown or isinstance(group, int)):  # it may be its number
                name = group if group in unknown else unknown[0]
                reason = f"group {name!r} of allowed-groups does not exist on this host"
                raise NotReady(reason, is_local=True)
            names = ", ".join(map(str, allowed)) or "none"
            reason = f"group {group!r} is not allowed; allowed-groups: {names}"
            problems.append(Problem(f"groups.{index}", reason))
        else:
            ids.append(group_id)
    return ids, problems


async def group_problems(
    requested: Sequence[int | str], allowed: Sequence[int | str], lookups: Lookups
) -> Sequence[Problem]:
    """Return the problems of the groups of a request.

    Raises:
        NotReady: this host does not know an allowed one.
        RuntimeUnavailable: the lookup does not finish in time.
    """
    if not requested:
        return ()
    return (await lookups.call(_SUBJECT, partial(resolve_groups, requested, allowed)))[1]


async def with_group_ids(
    plan: KernelPlan,
    requested: Sequence[int | str],
    allowed: Sequence[int | str],
    lookups: Mapping[str, Lookups],
) -> KernelPlan:
    """Return a plan with the groups of its request beside those of its devices, as numbers.

    Names of devices' groups that this host does not know are kept. `lookups` are by agent, so no
    agent's names hold up those of another, or of `DEVICES`.

    Raises:
        InvalidRequest, NotReady, RuntimeUnavailable: see `resolve_groups` and `Lookups.call`.
    """
    names = [name for name in plan.edits.groups if not name.isdecimal()]
    ids: Mapping[str, int | None] = {}
    requested_ids: Sequence[int] = ()
    if names:
        find_all = partial(_find_group_ids, names)
        ids = await lookups[DEVICES].call("the group database of devices", find_all)
    if requested:
        resolve = partial(resolve_groups, requested, allowed)
        requested_ids, problems = await lookups[plan.spec.agent_id].call(_SUBJECT, resolve)
        if problems:
            raise InvalidRequest(problems)
    of_devices = (name if (n := ids.get(name)) is None else n for name in plan.edits.groups)
    groups = tuple(dict.fromkeys(map(str, (*of_devices, *requested_ids))))
    return replace(plan, edits=dataclasses.replace(plan.edits, groups=groups))


def _find_group_ids(names: Sequence[str]) -> Mapping[str, int | None]:
    return {name: find_group_id(name) for name in names}
