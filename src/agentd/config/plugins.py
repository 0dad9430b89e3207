"""[plugins]: the plugins to load, and their own tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from agentd.core.slots import CPU, MEM
from agentd.tomlfile.section import DEVICE_NAME, Section


class PluginTable(Section):
    """One table below [plugins]: the device name, its entry point, and its settings."""

    name: str
    plugin: str
    required: bool = False
    exclude: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}


class _Table(BaseModel):
    """The keys that every plugin's table may have."""

    model_config = ConfigDict(extra="allow", strict=True)

    plugin: str = ""
    required: bool = False
    exclude: list[Annotated[str, Field(min_length=1)]] = Field(default=[])


def _validate_device_name(name: str) -> str:
    if name in (CPU, MEM):
        raise ValueError("built in, without a table")
    if not DEVICE_NAME.fullmatch(name):
        raise ValueError(f"invalid device name {name!r}: expected a-z, then a-z, 0-9, '_', '-'")
    return name


def _validate_table(value: object) -> object:
    if not isinstance(value, Mapping):
        raise PydanticKnownError("extra_forbidden")
    _Table.model_validate(dict(value))
    return value


class PluginSettings(Section):
    """[plugins]: plugins to load; every further table is one plugin's own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[
        Annotated[str, AfterValidator(_validate_device_name)],
        Annotated[Mapping[str, Any], BeforeValidator(_validate_table)],
    ] = Field(init=False)

    allow: tuple[str, ...] = Field(
        default=(), description="Entry points to load; empty: all installed ones."
    )
    block: tuple[str, ...] = Field(default=(), description="Entry points never to load.")
    open_timeout: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=5, description="Seconds that the start waits for plugins."
    )
    call_timeout: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10, description="Seconds that a plugin has to answer before it is ended."
    )
    health_interval: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        default=10, description="Seconds between two checks of the devices' health."
    )

    @property
    def tables(self) -> tuple[PluginTable, ...]:
        """The plugins' own tables, in the order of the file."""
        return tuple(
            PluginTable(
                name=name,
                plugin=raw.get("plugin", name),
                required=raw.get("required", False),
                exclude=tuple(raw.get("exclude", ())),
                settings={k: v for k, v in raw.items() if k not in _Table.model_fields},
            )
            for name, raw in self.__pydantic_extra__.items()
        )
