"""The request of an exec."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STDOUT, STDERR = 1, 2
"""The number of each output stream."""


class ExecSpec(msgspec.Struct, frozen=True):
    """A command to run in a kernel; `tty` gives it a terminal, with one stream.

    `env` overrides the kernel's own; without a `working_dir` it starts in the kernel's.
    """

    command: tuple[str, ...]
    tty: bool = False
    env: Mapping[str, str] = {}
    working_dir: str | None = None
