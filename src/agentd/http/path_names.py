"""Validation of the names in paths: a name that cannot exist is unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentd.core.devices import ID_PATTERN
from agentd.core.names import NAME, shortened
from agentd.core.slots import SLOT_NAME
from agentd.errors import (
    RequestError,
    UnknownAgent,
    UnknownClaim,
    UnknownDevice,
    UnknownEngine,
    UnknownKernel,
    UnknownNode,
    UnknownPlugin,
    UnknownRuntime,
    UnknownSlotType,
)


class _Kind(NamedTuple):
    pattern: re.Pattern[str]
    what: str
    unknown: type[RequestError]


_NAME = re.compile(NAME)
_KINDS: Mapping[str, _Kind] = {
    "agent": _Kind(_NAME, "agent", UnknownAgent),
    "claim": _Kind(_NAME, "claim", UnknownClaim),
    "device_name": _Kind(_NAME, "device", UnknownDevice),
    "engine": _Kind(_NAME, "engine", UnknownEngine),
    "id": _Kind(ID_PATTERN, "device", UnknownDevice),
    "kernel": _Kind(_NAME, "kernel", UnknownKernel),
    "node": _Kind(_NAME, "node", UnknownNode),
    "plugin": _Kind(_NAME, "plugin", UnknownPlugin),
    "runtime": _Kind(_NAME, "runtime", UnknownRuntime),
    "slot": _Kind(re.compile(SLOT_NAME), "slot", UnknownSlotType),
}
REST = "rest"
"""The path parameter that a gateway passes on; not a name."""


def schema_of(parameter: str) -> Mapping[str, Any]:
    """Return the JSON schema of a path parameter."""
    return {"type": "string", "pattern": f"^{_KINDS[parameter].pattern.pattern}$"}


def require_names(parameters: Mapping[str, str]) -> None:
    """Refuse a path with an invalid name.

    Raises:
        RequestError: an "unknown" error of the parameter's kind.
    """
    for parameter, value in parameters.items():
        if parameter != REST and not (kind := _KINDS[parameter]).pattern.fullmatch(value):
            raise kind.unknown(f"no {kind.what} {shortened(value)}: it is not a valid name")
