"""Loading settings from a file and the environment; every problem is reported.

Keys are kebab-case; an unknown key is an error that names the nearest known one.
All errors are found before any is reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentd.config.plugins import PluginSettings, table_problems
from agentd.config.settings import Settings
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.loading import UNKNOWN, is_set_in, parse, read_text, variable_of

ENV_PREFIX = "AGENTD__"
SEARCHED = Path("/etc/agentd/agent.toml")


@dataclass(frozen=True)
class Loaded:
    """Settings, the file they came from, and its raw content."""

    settings: Settings
    path: Path | None
    raw: Mapping[str, Any]
    environ: Mapping[str, str]

    def origin(self, keys: tuple[str, ...]) -> str:
        """Return where a setting comes from: a variable, the file, or `default`."""
        if name := variable_of(keys, self.environ, ENV_PREFIX):
            return name
        return str(self.path) if is_set_in(self.raw, keys) else "default"

    def effective(self) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield every setting as its kebab-case key path and its value."""
        yield from _flatten(
            (), self.settings.model_dump(mode="json", exclude={"agents", "plugins"})
        )
        if self.settings.agents:
            yield ("agents",), self.raw.get("agents", [a.id for a in self.settings.agents])
        yield from _flatten(("plugins",), self.settings.plugins.model_dump(mode="json"))


def find_config(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the option's, $AGENTD_CONFIG's, else the system's if it is there."""
    named = option or environ.get("AGENTD_CONFIG")
    if named:
        return Path(named)
    return SEARCHED if SEARCHED.exists() else None


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Read settings; no path means the defaults, with the environment over them.

    Raises:
        ConfigRefused: the file cannot be read, or its settings cannot be used.
    """
    return load_text(read_text(path), path, environ)


def load_text(text: str, path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """Read settings from the text of a file."""
    source = str(path) if path else "defaults"
    settings, problems, raw, values = parse(Settings, text, source, environ, ENV_PREFIX)
    if settings is None:
        from agentd.config.migration import explanations  # noqa: PLC0415 - for refusals alone

        older = explanations(raw)
        problems = [Problem(p.where, older.get(p.where, p.why)) for p in problems]
    extras = settings.plugins.model_extra if settings else values.get("plugins", {})
    problems += [
        Problem(f"plugins.{key}", why) for key, why in table_problems(_further_keys(extras or {}))
    ]
    if problems or settings is None:
        raise ConfigRefused(problems, source)
    return Loaded(settings, path, raw, environ)


def _further_keys(plugins: object) -> dict[str, object]:
    if not isinstance(plugins, Mapping):
        return {}
    known = PluginSettings.model_fields
    return {key.lstrip(UNKNOWN): raw for key, raw in plugins.items() if key not in known}


def _flatten(keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping) and keys[-1:] != ("default-slots",):
        for key, below in value.items():
            yield from _flatten((*keys, key.replace("_", "-")), below)
    else:
        yield keys, value
