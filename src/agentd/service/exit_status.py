"""Exit statuses of all programs, and the end of one that is refused.

This is the only place that defines them; the reference page and the man pages are made from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from enum import IntEnum
from typing import NoReturn, Self

from agentd.core.printable import printable
from agentd.errors import AgentdError, ConfigRefused

_UNINDENTED = re.compile(r"\n(?!    )")
_SERVICES = ("agentd", "agentd-fleet")
_ALL = ("agentctl", *_SERVICES)


class ExitStatus(IntEnum):
    """The statuses with which agentd, agentctl and agentd-fleet end."""

    meaning: str
    remedy: str
    programs: tuple[str, ...]

    def __new__(cls, value: int, meaning: str, remedy: str, programs: tuple[str, ...]) -> Self:
        """Make a member with its row in the reference."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning, member.remedy, member.programs = meaning, remedy, programs
        return member

    DONE = (0, "done", "", _ALL)
    FAILED = (
        1,
        "refused, failed or unreachable",
        "Read standard error. `agentd` and `agentd-fleet`: the program cannot run on this host.",
        _ALL,
    )
    USAGE = (2, "wrong usage", "Read the command's `--help`.", _ALL)
    TIMED_OUT = (3, "`wait` timed out", "Repeat it with a longer `--timeout`.", ("agentctl",))
    CONFIG = (
        78,
        "unusable configuration (EX_CONFIG of sysexits.h)",
        "Correct every key that standard error names; `check-config` names them without a start.",
        _SERVICES,
    )
    INTERRUPTED = (
        130,
        "`exec` was interrupted",
        "The command in the kernel was ended; start it again.",
        ("agentctl",),
    )


def print_problems(program: str, lines: Iterable[str]) -> None:
    """Print problems to stderr; further lines of one are indented, so none looks like another."""
    for line in lines:
        sys.stderr.write(printable(f"{program}: " + _UNINDENTED.sub("\n    ", line)) + "\n")


def end_refused(program: str, error: AgentdError, source: str = "") -> NoReturn:
    """Print an error, or every problem of a configuration with its file, and end."""
    if isinstance(error, ConfigRefused):
        print_problems(program, error.of(source).lines())
        sys.exit(ExitStatus.CONFIG)
    print_problems(program, [str(error)])
    sys.exit(ExitStatus.FAILED)
