"""Starting the keeper of a process kernel, and reading its answer."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentd.core.plan import KernelPlan
from agentd.errors import AgentdError, CommandNotFound, InvalidRequest, Problem, RuntimeFailure
from agentd.failpoints import inherited
from agentd.host.cgroups import KernelGroup
from agentd.runtimes.process import shim
from agentd.runtimes.process.bundle import OUTPUT
from agentd.runtimes.process.proof import NodeMarks

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SPAWN_TIMEOUT_S = 30.0


def account(user: str) -> dict[str, Any]:
    """Return the ids of an account.

    Raises:
        InvalidRequest: there is none of that name.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise InvalidRequest([Problem("runtime.process.user", f"no user {user!r} here")]) from None
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"uid": entry.pw_uid, "gid": entry.pw_gid, "groups": groups}


def with_groups(user: Mapping[str, Any] | None, names: Sequence[str]) -> Mapping[str, Any] | None:
    """Return an account with further groups, those that this node has."""
    if user is None:
        return None
    numbers = [int(name) if name.isdecimal() else _group_number(name) for name in names]
    return {**user, "groups": [*user["groups"], *(n for n in numbers if n is not None)]}


def _group_number(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def order_of(
    plan: KernelPlan,
    folder: Path,
    node: NodeMarks,
    user: Mapping[str, Any] | None,
    group: KernelGroup | None,
) -> dict[str, Any]:
    """Return what a keeper is told to do for a kernel."""
    own = {
        **node.of(plan.spec.kernel_id),
        "AGENTD_AGENT": plan.spec.agent_id,
        "AGENTD_DEVICES": plan.statement,
    }
    limits = plan.spec.container.ulimits.items()
    return {
        "folder": str(folder),
        "boot_id": node.boot_id,
        "command": list(plan.spec.command),
        "env": {"PATH": PATH, **plan.env, **own},
        "cpus": [int(core) for core in plan.cpus],
        "log": str(folder / OUTPUT),
        "working_dir": plan.spec.working_dir or "/",
        "user": with_groups(user, plan.edits.groups),
        "cgroup_procs": str(group.procs) if group else "",
        "ulimits": {name: [limit.soft, limit.hard] for name, limit in limits},
        "oom_file": str(group.oom_file) if group else "",
    }


def spawn(order: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, Any]:
    """Start a keeper and return its answer: the kernel's identity, or why there is none.

    `told` is its environment, in which it says for as long as it lives whose keeper it is.
    """
    command = [sys.executable, "-I", "-S", shim.__file__]
    try:
        done = subprocess.run(  # noqa: S603 - our own program; the order goes over its input
            command,
            input=json.dumps(order).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**told, **inherited()},
            start_new_session=True,
            timeout=SPAWN_TIMEOUT_S,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"step": "keeper", "why": f"{type(error).__name__}: {error}"}
    return answer


def failure(plan: KernelPlan, answer: Mapping[str, Any]) -> AgentdError:
    """Return the error that says why a keeper did not start its kernel."""
    number = int(answer.get("errno", 0))
    why = os.strerror(number) if number else str(answer.get("why", "it gave no reason"))
    step = answer.get("step")
    if step == "command" and number in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return CommandNotFound(f"command {plan.spec.command[0]!r}: {why}")
    if step == "working_dir":
        return InvalidRequest([Problem("working_dir", f"{plan.spec.working_dir!r}: {why}")])
    return RuntimeFailure(f"the kernel did not start; {step}: {why}")
