"""What all tables of `agent.toml` have in common: strictness, names and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, field_validator

from agentd.core.names import NAME, is_name
from agentd.core.slots import CPU, MEM, AmountError, SlotKind, parse_base_units

DEVICE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
MAX_SOCKET_PATH = 107
"""Bytes in the longest unix socket path that Linux binds (unix(7))."""

DEFAULT_SLOTS: Mapping[str, object] = {CPU: 1, MEM: "256m"}


def size(raw: object) -> int:
    """Read a size in bytes; the message of a ValueError says what is expected."""
    try:
        return parse_base_units(raw, SlotKind.BYTES)
    except AmountError as error:
        raise ValueError(
            f'{error}; write a size such as "512m" or "4g", or a number of bytes'
        ) from None


def refuse_bool(value: object) -> object:
    """Refuse true and false, which Python counts as numbers."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic's way
    return value


SizeBytes = Annotated[
    int, BeforeValidator(size), WithJsonSchema({"type": ["integer", "string"], "minimum": 0})
]


class Section(BaseModel):
    """A table of the file; keys that it does not list are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _without_nul(cls, value: object) -> object:
        """Refuse NUL, which no path and no name of a user or group can contain."""
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"invalid text {text!r}: expected no NUL")
        return value

    @classmethod
    def explain_unknown(cls, key: str, value: object) -> str | None:
        """Return what to write instead of a key that the table does not list, if that is known."""
        del key, value
        return None


def name(value: object) -> object:
    """Refuse anything but a name or None; the message of a ValueError says what is expected."""
    if value is not None and not is_name(value):
        raise ValueError(
            f"invalid name {value!r}: expected 1 to 63 letters, digits, '_', '.' and '-',"
            " starting with a letter or digit"
        )
    return value


Name = Annotated[
    str, BeforeValidator(name), WithJsonSchema({"type": "string", "pattern": f"^{NAME}$"})
]

LONGEST_AGENT_ID = 48
"""Where an agent's id is escaped in the name of a slice, that stays a file's name."""


def agent_id(value: object) -> object:
    """Refuse anything but a name that also fits into the names of slices and journals."""
    if isinstance(name(value), str) and len(str(value)) > LONGEST_AGENT_ID:
        raise ValueError(f"{value!r} is too long: expected at most {LONGEST_AGENT_ID} characters")
    return value


AgentId = Annotated[
    str,
    BeforeValidator(agent_id),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME}$", "maxLength": LONGEST_AGENT_ID}),
]
