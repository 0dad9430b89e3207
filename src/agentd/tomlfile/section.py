"""The common base of all tables in `agent.toml`: strictness, names and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, field_validator

from agentd.core.names import NAME, is_name
from agentd.core.slots import CPU, MEM, AmountError, SlotKind, parse_base_units

DEVICE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
MAX_SOCKET_PATH = 107
"""Maximum bytes of a unix socket path on Linux (unix(7))."""

DEFAULT_SLOTS: Mapping[str, object] = {CPU: 1, MEM: "256m"}


def parse_size(raw: object) -> int:
    """Parse a size in bytes; the message of a ValueError has the expectation."""
    try:
        return parse_base_units(raw, SlotKind.BYTES)
    except AmountError as error:
        raise ValueError(
            f'{error}; write a size such as "512m" or "4g", or a number of bytes'
        ) from None


def refuse_bool(value: object) -> object:
    """Refuse booleans, which Python counts as numbers."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic's way
    return value


SizeBytes = Annotated[
    int, BeforeValidator(parse_size), WithJsonSchema({"type": ["integer", "string"], "minimum": 0})
]


class Section(BaseModel):
    """A table of the file; unknown keys are errors, and keys are kebab-case.

    A class method `explain_unknown(key, value)` may return what replaces an unknown key.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        defer_build=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_unprintable(cls, value: object) -> object:
        """Refuse NUL, the newline that ends a secret in a variable, and bytes that are not UTF-8.

        None of them belongs to a path or a name.
        """
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(text, str) and not text.isprintable():
                raise ValueError(f"invalid text {text!r}: expected printable characters")
        return value


def _validate_absolute(value: object) -> object:
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError(f"invalid path {value!r}: expected an absolute path")
    return value


AbsolutePath = Annotated[
    Path,
    BeforeValidator(_validate_absolute),
    WithJsonSchema({"type": "string", "format": "path", "pattern": "^/"}),
]
"""A path that does not depend on the working directory, as an empty one does."""


def validate_name(value: object) -> object:
    """Validate a name or None; the message of a ValueError has the expectation."""
    if value is not None and not is_name(value):
        raise ValueError(
            f"invalid name {value!r}: expected 1 to 63 letters, digits, '_', '.' and '-',"
            " starting with a letter or digit"
        )
    return value


Name = Annotated[
    str, BeforeValidator(validate_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME}$"})
]

MAX_AGENT_ID = 48
"""An escaped agent id of this length still fits into a file name as part of a slice."""


def validate_agent_id(value: object) -> object:
    """Validate a name that also fits into the names of slices and journals."""
    if isinstance(validate_name(value), str) and len(str(value)) > MAX_AGENT_ID:
        raise ValueError(f"{value!r} is too long: expected at most {MAX_AGENT_ID} characters")
    return value


AgentId = Annotated[
    str,
    BeforeValidator(validate_agent_id),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME}$", "maxLength": MAX_AGENT_ID}),
]
