"""Errors of execve(2) and chdir(2) that the client of a create or exec can fix."""

from __future__ import annotations

import errno

from agentd.core.names import quote_untrusted
from agentd.errors import CommandNotFound, InvalidRequest, Problem, RequestError
from agentd.os_errors import UNUSABLE_PATH, can_pass

_NOT_FOUND = UNUSABLE_PATH | {errno.ENOEXEC, errno.EISDIR, errno.ELIBBAD}


def command_refusal(command: str, number: int, reason: str) -> RequestError | None:
    """Return the refusal of a command that could not be executed, None for other causes."""
    if number in _NOT_FOUND:
        return CommandNotFound(f"command {quote_untrusted(command)}: {reason}")
    if number == errno.E2BIG:
        return InvalidRequest([Problem("command", f"too long with its environment: {reason}")])
    return None


def folder_refusal(folder: str | None, number: int, reason: str) -> RequestError | None:
    """Return the refusal of a working directory, None if the host lacks something."""
    if can_pass(OSError(number, reason)):
        return None
    return InvalidRequest([Problem("working_dir", f"{folder!r}: {reason}")])
