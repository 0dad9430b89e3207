"""Exit statuses of the programs, and the output of a refused start."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from agentd.core.printable import printable
from agentd.errors import AgentdError, ConfigRefused

EX_CONFIG, CANNOT_RUN = 78, 1
"""The configuration is unusable (sysexits.h), and the program cannot run here."""
_UNINDENTED = re.compile(r"\n(?!    )")


def print_problems(program: str, lines: Iterable[str]) -> None:
    """Print problems to stderr; further lines of a problem are indented."""
    for line in lines:
        sys.stderr.write(printable(f"{program}: " + _UNINDENTED.sub("\n    ", line)) + "\n")


def end_refused(program: str, error: AgentdError, source: str = "") -> NoReturn:
    """Print an error, or every problem of a configuration with its file, and exit."""
    if isinstance(error, ConfigRefused):
        print_problems(program, error.of(source).lines())
        sys.exit(EX_CONFIG)
    print_problems(program, [str(error)])
    sys.exit(CANNOT_RUN)
