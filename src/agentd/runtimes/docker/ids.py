"""Validation of ids in an engine's responses, which become API paths and paths of /proc.

Containers and execs have ids of 64 hexadecimal digits, images have digests (Engine API).
"""

from __future__ import annotations

import re

from agentd.core.names import shortened
from agentd.runtimes.docker.engine_errors import EngineAnswerLost

_CONTAINER = re.compile(r"[0-9a-f]{64}")
_IMAGE = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_PID = 2**22
"""PID_MAX_LIMIT of proc_sys_kernel(5)."""


def container_id(raw: object) -> str:
    """Validate a container id.

    Raises:
        EngineAnswerLost: the value is invalid.
    """
    return _checked(_CONTAINER, raw, "container")


def exec_id(raw: object) -> str:
    """Validate an exec id.

    Raises:
        EngineAnswerLost: the value is invalid.
    """
    return _checked(_CONTAINER, raw, "exec")


def image_id(raw: object) -> str:
    """Validate an image id.

    Raises:
        EngineAnswerLost: the value is invalid.
    """
    return _checked(_IMAGE, raw, "image")


def process_id(raw: object) -> int:
    """Validate a process id; 0 means that there is no process.

    Raises:
        EngineAnswerLost: the value is invalid.
    """
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw <= _MOST_PID:
        return raw
    raise EngineAnswerLost(f"the engine's response has an invalid process id: {shortened(raw)}")


def _checked(pattern: re.Pattern[str], raw: object, what: str) -> str:
    if isinstance(raw, str) and pattern.fullmatch(raw):
        return raw
    raise EngineAnswerLost(f"the engine's response has an invalid {what} id: {shortened(raw)}")
