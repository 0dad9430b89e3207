"""[plugins]: the plugins to load, and their own tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from agentd.core.names import did_you_mean
from agentd.core.slots import CPU, MEM
from agentd.tomlfile.section import DEVICE_NAME, Section


class PluginTable(Section):
    """One table below [plugins]: the device name, its entry point, and its settings."""

    name: str
    plugin: str
    required: bool = False
    settings: Mapping[str, Any] = {}


class PluginSettings(BaseModel):
    """[plugins]: plugins to load; every further table is one plugin's own."""

    model_config = ConfigDict(extra="allow", frozen=True)

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
                settings={k: v for k, v in raw.items() if k not in ("plugin", "required")},
            )
            for name, raw in (self.model_extra or {}).items()
        )


def table_problems(name: str, raw: object) -> Iterator[tuple[str, str]]:
    """Yield the problems of a further key of [plugins]: the key path, and the reason."""
    if not isinstance(raw, Mapping):
        hint = did_you_mean(name, _KEYS)
        allowed = f"allowed: {', '.join(_KEYS)}, and tables such as [plugins.cuda]"
        yield name, f"unknown key; {hint}{allowed}"
    elif name in (CPU, MEM):
        yield name, "built in, without a table"
    elif not DEVICE_NAME.fullmatch(name):
        yield name, f"invalid device name {name!r}: expected a-z, then a-z, 0-9, '_', '-'"
    else:
        if not isinstance(raw.get("plugin", ""), str):
            yield f"{name}.plugin", f"invalid entry point {raw['plugin']!r}: expected text"
        if not isinstance(raw.get("required", False), bool):
            yield f"{name}.required", f"expected true or false, not {raw['required']!r}"


_KEYS = ("allow", "block", "open-timeout", "call-timeout", "health-interval")
