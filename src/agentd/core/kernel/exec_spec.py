"""A command inside a kernel: what is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STDOUT, STDERR = 1, 2
"""Which stream bytes are of."""


class ExecSpec(msgspec.Struct, frozen=True):
    """A command to run inside a kernel; with `tty` on a terminal of its own, of one stream.

    `env` goes over the kernel's own; without a `working_dir` it begins where the kernel did.
    """

    command: tuple[str, ...]
    tty: bool = False
    env: Mapping[str, str] = {}
    working_dir: str | None = None
