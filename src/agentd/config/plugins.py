"""[plugins]: which plugins are loaded, and the tables that are handed to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentd.config.section import DEVICE_NAME, Section
from agentd.core.slots import CPU, MEM


class PluginTable(Section):
    """One table below [plugins]: the device name, its entry point, and its settings."""

    name: str
    plugin: str
    required: bool = False
    settings: Mapping[str, Any] = {}


class PluginSettings(BaseModel):
    """[plugins]: which plugins are loaded; every further table is one plugin's own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    allow: tuple[str, ...] = Field(
        default=(), description="Entry-point names; empty means every one that is installed."
    )
    block: tuple[str, ...] = Field(default=(), description="Entry-point names never to load.")
    open_timeout: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=5, description="Seconds that readiness waits for plugins."
    )

    @model_validator(mode="after")
    def _tables_are_tables(self) -> PluginSettings:
        wrong = []
        for name, raw in (self.model_extra or {}).items():
            if not isinstance(raw, Mapping):
                wrong.append(f"{name.lstrip('?')}: unknown key; allowed: {_PLUGIN_KEYS}")
            elif name in (CPU, MEM):
                wrong.append(f"{name}: is built in and has no table")
            elif not DEVICE_NAME.fullmatch(name):
                wrong.append(f"{name}: is no device name; allowed: a-z, then a-z, 0-9, '_', '-'")
            elif not isinstance(raw.get("plugin", ""), str):
                wrong.append(f"{name}.plugin: {raw['plugin']!r} is no entry-point name")
            elif not isinstance(raw.get("required", False), bool):
                wrong.append(f"{name}.required: {raw['required']!r} is neither true nor false")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

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


_PLUGIN_KEYS = "allow, block, open-timeout, and tables such as [plugins.cuda]"
