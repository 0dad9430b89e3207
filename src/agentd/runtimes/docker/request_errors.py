"""Mistakes in a request that only the engine, or its runc, detects; pure.

The engine reports them by text alone; these are the texts of Engine 20.10 to 26 with runc 1.1.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator

from agentd.core.kernel.states import KernelSpec
from agentd.errors import Problem
from agentd.runtimes.docker.container_config import container_options, targets_of
from agentd.runtimes.docker.docker_errors import truncate_message

_USER = ("unable to find user ", "unable to find group ", "uids and gids must be in range ")
_FOLDER = ("chdir to cwd ", "Cannot mkdir: ", "container init: mkdir /")
_LOW_LIMITS = {
    "nofile": "too many open files",
    "data": "cannot allocate memory",
    "nproc": "resource temporarily unavailable",
}
"""Texts of a limit that is too low for runc itself."""
_FOREIGN_IMAGE = re.compile(
    r"image's platform \((\w+/\S+)\) does not match the detected host platform \((\S+)\)"
)
"""A warning about an image that names its architecture; a home-made one may name none."""


def request_problem(message: str, spec: KernelSpec) -> Problem | None:
    """Return the problem of a request behind the engine's refusal, None if there is none."""
    for where, text in _texts(message, spec):
        if text in message:
            return Problem(where, truncate_message(message[message.index(text) :]))
    return None


def foreign_image_reason(warnings: Iterable[str]) -> str:
    """Return why an image is not for this node, from the engine's warnings; "" if it is."""
    for warning in warnings:
        if found := _FOREIGN_IMAGE.search(warning):
            image, host = found.groups()
            return f"its platform is {image}, this node's is {host}; to run it, set platform"
    return ""


def _texts(message: str, spec: KernelSpec) -> Iterator[tuple[str, str]]:
    """Yield the members that the engine may have refused, each with the text that says so."""
    for text in _USER:
        yield "user" if spec.user else "image", text
    is_create_refused = message.startswith("lstat /") and message.endswith("not a directory")
    for text in (*_FOLDER, "lstat /") if is_create_refused else _FOLDER:
        yield "working_dir" if spec.working_dir else "image", text
    for where, target in targets_of(spec):
        yield where, f'to rootfs at "{os.path.normpath(target)}"'
    for name in container_options(spec).ulimits:
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        yield f"ulimits.{name}", f"setting rlimit type {number}:"
        if name in _LOW_LIMITS and "container process" in message:
            yield f"ulimits.{name}", _LOW_LIMITS[name]
