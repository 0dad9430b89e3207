"""Starting the shim of a process kernel and reading its answer."""

from __future__ import annotations

import errno
import json
import os
import pwd
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentd.config.runtimes import ProcessSettings
from agentd.core.kernel.plan import KernelPlan
from agentd.errors import (
    AgentdError,
    CoresUnavailable,
    InvalidRequest,
    Problem,
    RuntimeFailure,
)
from agentd.failpoints import inherited_environment
from agentd.host.cgroups.hierarchies import Cgroup
from agentd.host.lookups import Lookups
from agentd.host.systemd.dbus import SystemdManager, UnitExists, UnitProperty, UnitRefused
from agentd.os_errors import os_error_as_refusal
from agentd.runtimes.host.environment import kernel_environment
from agentd.runtimes.host.execve_errors import command_refusal, folder_refusal
from agentd.runtimes.host.request_limits import host_options
from agentd.runtimes.host.user_accounts import UserAccount
from agentd.runtimes.process import shim
from agentd.runtimes.process.bundle import LOG_PREFIX

SPAWN_TIMEOUT_S, MAX_SPAWN_TIMEOUT_S = 30.0, 65.0
"""Seconds for a start, and for one that waits until another one has timed out."""
STOP_MARGIN_S = 5.0
"""Seconds beyond the kernel's stop timeout before systemd kills its shim."""
SLICE = "agentd.slice"
_SILENT_STEP = "its command or working directory"
_COMMAND = [sys.executable, "-I", "-S", shim.__file__]


def daemon_user_name() -> str:
    """Return the name of the daemon's user, its number if it has none; may block, as NSS does."""
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def shim_request(
    plan: KernelPlan,
    *,
    folder: Path,
    boot_id: str,
    settings: ProcessSettings,
    account: UserAccount | None,
    cgroup: Cgroup | None,
) -> dict[str, Any]:
    """Return the request for a kernel's shim, without the lock.

    The plan's groups are added to those of the account, if this host knows them; without an
    account they are ignored.
    """
    spec = plan.spec
    groups = [int(group) for group in plan.edits.groups if group.isdecimal()]
    limits = settings.with_default_ulimits(host_options(spec).ulimits)
    return {
        "folder": str(folder),
        "boot_id": boot_id,
        "command": list(spec.command),
        "env": kernel_environment(plan),
        "cpus": [int(core) for core in plan.cpus],
        "working_dir": spec.working_dir or "/",
        "user": None
        if account is None
        else {"uid": account.uid, "gid": account.gid, "groups": [*account.groups, *groups]},
        "cgroup_procs": [str(file) for file in cgroup.procs_files] if cgroup else [],
        "oom_file": str(cgroup.oom_file) if cgroup else "",
        "ulimits": {name: [limit.soft, limit.hard] for name, limit in limits.items()},
        "log_prefix": LOG_PREFIX,
        "log_max_size": settings.log_max_size,
        "log_max_files": settings.log_max_files,
        "stop_timeout": settings.stop_timeout,
    }


def spawn_shim(request: Mapping[str, Any], lock: int) -> dict[str, Any]:
    """Start a shim that inherits a lock, and return its answer.

    The answer is the kernel's identity, or why it did not start.
    """
    content = {**request, "lock": lock, "stop_timeout": None}
    try:
        process = subprocess.run(  # noqa: S603 - our own program; the request goes over its input
            _COMMAND,
            input=json.dumps(content).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited_environment(),
            pass_fds=(lock,),
            start_new_session=True,
            timeout=SPAWN_TIMEOUT_S,
            check=False,
        )
        return _parse_answer(process.stdout)
    except OSError as error:
        return {"step": "shim", "errno": error.errno}
    except subprocess.TimeoutExpired:
        return {"step": _SILENT_STEP, "errno": errno.ETIMEDOUT}


async def spawn_shim_unit(
    manager: SystemdManager, unit: str, request: Mapping[str, Any], lock: int, spawns: Lookups
) -> dict[str, Any]:
    """Start a shim as a unit, outside of the daemon's cgroup and sandbox.

    When systemd stops the unit, for example at shutdown, the shim ends the kernel and writes the
    exit status. Returns the same as `spawn_shim`.
    """
    control, shim_end = socket.socketpair()
    answer_read, answer_write = os.pipe2(os.O_CLOEXEC)
    with control, open(answer_read, "rb") as answer:  # noqa: ASYNC230, PTH123 - read by a thread
        try:
            with shim_end:
                properties = _shim_unit_properties(request)
                descriptors = [shim_end.fileno(), answer_write]
                await manager.start(unit, properties, descriptors)
        except (UnitExists, UnitRefused) as error:
            return {
                "step": "shim",
                "errno": getattr(error, "number", 0),
                "why": f"systemd: {error}",
            }
        finally:
            os.close(answer_write)
        message = json.dumps(request).encode() + b"\n"

        def ask() -> bytes:
            try:
                control.settimeout(SPAWN_TIMEOUT_S)
                socket.send_fds(control, [message[:1]], [lock])
                control.sendall(message[1:])
                is_answered = select.select([answer], [], [], SPAWN_TIMEOUT_S)[0]
            except OSError:
                return b""
            silent = json.dumps({"step": _SILENT_STEP, "errno": errno.ETIMEDOUT}).encode()
            return answer.readline() if is_answered else silent

        line = await spawns.call("the start of a kernel", ask, MAX_SPAWN_TIMEOUT_S)
        return _parse_answer(line)


def _shim_unit_properties(request: Mapping[str, Any]) -> list[UnitProperty]:
    grace_us = round((request["stop_timeout"] + STOP_MARGIN_S) * 1_000_000)
    return [
        ("Description", "s", f"shim of the kernel in {request['folder']}"),
        ("Slice", "s", SLICE),
        ("Type", "s", "exec"),
        ("ExitType", "s", "cgroup"),
        ("CollectMode", "s", "inactive-or-failed"),
        ("ExecStart", "a(sasb)", [[_COMMAND[0], _COMMAND, False]]),
        (
            "Environment",
            "as",
            [f"{name}={value}" for name, value in inherited_environment().items()],
        ),
        ("StandardInputFileDescriptor", "h", 0),
        ("StandardOutputFileDescriptor", "h", 1),
        ("StandardError", "s", "null"),
        ("KillMode", "s", "control-group"),
        ("TimeoutStopUSec", "t", grace_us),
        ("OOMPolicy", "s", "continue"),
    ]


def _parse_answer(line: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError as error:
        return {"step": "shim", "why": f"malformed answer: {error}"}
    return answer


def start_error(
    plan: KernelPlan, answer: Mapping[str, Any], settings: ProcessSettings
) -> AgentdError:
    """Return the error for a kernel that its shim did not start."""
    number = int(answer.get("errno", 0))
    reason = os.strerror(number) if number else str(answer.get("why", "no reason given"))
    step = str(answer.get("step"))
    if step == "command":
        refusal = command_refusal(plan.spec.command[0], number, reason)
        if refusal is not None:
            return refusal
    if step == "working_dir":
        refusal = folder_refusal(plan.spec.working_dir, number, reason)
        if refusal is not None:
            return refusal
    requested, fault = host_options(plan.spec).ulimits, "cannot be set on this node"
    has_nproc = "nproc" in settings.with_default_ulimits(requested)
    if number == errno.EAGAIN and step in ("user", "command") and has_nproc:
        step, fault = "ulimits.nproc", "too low to start a kernel"
    if cores := answer.get("cores"):
        return CoresUnavailable(map(str, cores), reason)
    is_limit = step.startswith("ulimits.")
    if is_limit:
        if step.removeprefix("ulimits.") in requested:
            return InvalidRequest([Problem(step, f"{fault}: {reason}")])
        step = f"runtime.process.default-{step}"
    subject = f"the kernel did not start; {step}"
    if number and not is_limit:
        return os_error_as_refusal(OSError(number, reason), subject)
    return RuntimeFailure(f"{subject}: {reason}")
