"""Mistakes in a request that only the engine, or its runc, detects; pure.

They are recognized by message, for Engine 20.10 to 26 and runc 1.1.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator

from agentd.core.kernel.options import ULIMITS
from agentd.core.kernel.states import KernelSpec
from agentd.errors import Problem
from agentd.runtimes.docker.engine_errors import shortly

_WHY = (
    r"(?P<why>not a directory|is a directory|file name too long|no such file or directory"
    r"|read-only file system|too many levels of symbolic links|permission denied)"
)
_USER = re.compile(r"unable to find (?:user|group) |uids and gids must be in range ")
_MOUNT = re.compile(
    rf'error mounting "[^"]*" to rootfs at "(?P<target>[^"]*)".*?: {_WHY}', re.DOTALL
)
_FOLDER = re.compile(
    rf"chdir to cwd .*?: {_WHY}|[Cc]annot mkdir: .* is (?P<mkdir>not a directory)"
    rf"|(?:^|container init: )(?:mkdir|lstat|stat) (?P<path>/.*?): {_WHY.replace('why', 'lstat')}",
    re.DOTALL,
)
_NEVER_THE_DISK = ("not a directory", "file name too long")
"""Reasons that are always about the path itself."""
_LIMIT = re.compile(r"error setting rlimit type (?P<number>[0-9]+): (?P<why>[^:]*)")
_LIMITS = {
    str(number): name
    for name in ULIMITS
    if (number := getattr(resource, f"RLIMIT_{name.upper()}", None)) is not None
}
_TIGHT = {
    "too many open files": "nofile",
    "cannot allocate memory": "data",
    "resource temporarily unavailable": "nproc",
}
"""Messages of runc when a limit of the request is too low for itself."""


def request_problem(message: str, spec: KernelSpec) -> Problem | None:
    """Return the problem of a request behind the engine's refusal, None if there is none."""
    return next(
        (
            problem
            for find in (_in_user, _in_mounts, _in_folder, _in_limits, _in_length)
            for problem in find(message, spec)
        ),
        None,
    )


def _in_user(message: str, spec: KernelSpec) -> Iterator[Problem]:
    if found := _USER.search(message):
        why = shortly(message[found.start() :])
        yield Problem("user", why) if spec.user else Problem("image", f"its user is invalid: {why}")


def _in_mounts(message: str, spec: KernelSpec) -> Iterator[Problem]:
    if found := _MOUNT.search(message):
        targets = [(f"mounts.{n}.target", mount.target) for n, mount in enumerate(spec.mounts)]
        targets += [(f"tmpfs.{n}.target", t.target) for n, t in enumerate(spec.container.tmpfs)]
        for where, target in targets:
            if os.path.normpath(target) == os.path.normpath(found["target"]):
                yield Problem(where, f"cannot be mounted there: {found['why']}")


def _in_folder(message: str, spec: KernelSpec) -> Iterator[Problem]:
    if (found := _FOLDER.search(message)) is None:
        return
    why = found["why"] or found["mkdir"] or found["lstat"]
    if found["path"] is not None:
        folder = os.path.normpath(spec.working_dir or "")
        is_it = f"{folder}/".startswith(f"{found['path'].rstrip('/')}/")
        if not is_it and (spec.working_dir or why not in _NEVER_THE_DISK):
            return
    if spec.working_dir:
        yield Problem("working_dir", f"inaccessible: {why}")
    else:
        yield Problem("image", f"its working directory is inaccessible: {why}")


def _in_limits(message: str, spec: KernelSpec) -> Iterator[Problem]:
    if (found := _LIMIT.search(message)) and _LIMITS.get(found["number"]) in spec.container.ulimits:
        where = f"ulimits.{_LIMITS[found['number']]}"
        yield Problem(where, f"cannot be set on this node: {found['why']}")
    elif "container process" in message:
        for why, name in _TIGHT.items():
            if why in message and name in spec.container.ulimits:
                yield Problem(f"ulimits.{name}", f"too low to start a container: {why}")


def _in_length(message: str, spec: KernelSpec) -> Iterator[Problem]:
    del spec
    if "container process" in message and "argument list too long" in message:
        yield Problem("command", "too long, together with env")
