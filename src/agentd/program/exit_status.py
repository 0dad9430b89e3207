"""Exit statuses of all programs, and the end of one that is refused.

This is the only place that defines them; the reference page and the man pages are made from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

from agentd.core.printable import printable
from agentd.errors import AgentdError, ConfigRefused

_UNINDENTED = re.compile(r"\n(?!    )")


class ExitStatus(IntEnum):
    """Exit statuses of agentd, agentctl and agentd-fleet.

    `OUTPUT_FAILED` and `CONFIG` are EX_IOERR and EX_CONFIG of sysexits.h; those from 125 to 127 are
    those of `docker run`, and `NO_READER` is that of SIGPIPE.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    TIMED_OUT = 3
    OUTPUT_FAILED = 74
    CONFIG = 78
    CLIENT_FAILED = 125
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    INTERRUPTED = 130
    NO_READER = 141


SIGNALLED = 128
"""Added to the number of a signal, as a shell does."""


class StatusMeaning(NamedTuple):
    """The meaning of a status for some commands; None is the status of another command."""

    commands: Sequence[str]
    status: ExitStatus | None
    text: str


SERVICES = ("agentd", "agentd-fleet")
MEANINGS = (
    StatusMeaning((), ExitStatus.DONE, "Done."),
    StatusMeaning(SERVICES, ExitStatus.FAILED, "The program cannot run on this host, or failed."),
    StatusMeaning(("agentd reload",), ExitStatus.FAILED, "No daemon answers."),
    StatusMeaning(("agentd plugin check",), ExitStatus.FAILED, "A check failed."),
    StatusMeaning(
        ("agentctl",), ExitStatus.FAILED, "The daemon refused the request, or is unreachable."
    ),
    StatusMeaning(("agentctl doctor",), ExitStatus.FAILED, "A check failed, or could not run."),
    StatusMeaning(("agentctl plugins retry",), ExitStatus.FAILED, "The plugin is not ready."),
    StatusMeaning(("agentctl token revoke",), ExitStatus.FAILED, "The token is still valid."),
    StatusMeaning((), ExitStatus.USAGE, "Wrong usage: an unknown option, or a missing argument."),
    StatusMeaning(("agentctl wait",), ExitStatus.TIMED_OUT, "The wait timed out."),
    StatusMeaning(
        (), ExitStatus.OUTPUT_FAILED, "Output cannot be written: a full disk, or a closed stream."
    ),
    StatusMeaning(
        SERVICES, ExitStatus.CONFIG, "The configuration was refused; systemd does not retry."
    ),
    StatusMeaning(
        ("agentctl run", "agentctl exec"),
        ExitStatus.CLIENT_FAILED,
        "agentctl itself failed: it was refused, or the node or the kernel was lost.",
    ),
    StatusMeaning(
        ("agentctl run", "agentctl exec"),
        ExitStatus.NOT_EXECUTABLE,
        "The command cannot be executed.",
    ),
    StatusMeaning(
        ("agentctl run", "agentctl exec"), ExitStatus.NOT_FOUND, "The command does not exist."
    ),
    StatusMeaning(("agentctl claim",), ExitStatus.NOT_FOUND, "The command cannot be executed."),
    StatusMeaning((), ExitStatus.INTERRUPTED, "Interrupted by Ctrl-C (INT)."),
    StatusMeaning((), ExitStatus.NO_READER, "The reader of the output has left, such as `head`."),
    StatusMeaning(("agentctl",), None, "128 plus the number of the signal that ended agentctl."),
    StatusMeaning(("agentctl claim",), None, "The status of the command, which replaces agentctl."),
    StatusMeaning(
        ("agentctl run",), None, "The status of the kernel, or 128 plus the number of its signal."
    ),
    StatusMeaning(
        ("agentctl exec",), None, "The status of the command, or 128 plus the number of its signal."
    ),
)
"""The table of all statuses. No commands stand for all of them."""


def print_problems(program: str, lines: Iterable[str]) -> None:
    """Print problems to stderr; further lines of one are indented, so none looks like another."""
    for line in lines:
        sys.stderr.write(printable(f"{program}: " + _UNINDENTED.sub("\n    ", line)) + "\n")


def exit_refused(program: str, error: AgentdError, source: str = "") -> NoReturn:
    """Print an error, or every problem of a configuration with its file, and end."""
    if isinstance(error, ConfigRefused):
        print_problems(program, error.with_source(source).lines())
        sys.exit(ExitStatus.CONFIG)
    print_problems(program, [str(error)])
    sys.exit(ExitStatus.FAILED)
