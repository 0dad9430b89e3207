"""Loading of `agent.toml` and the environment.

`agentd.tomlfile.parsing` reads the text, rejects unknown keys and words every problem.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentd.config.settings import Settings
from agentd.errors import ConfigRefused
from agentd.tomlfile.parsing import find_variable, has_key, parse_settings, read_text, source_name

ENV_PREFIX = "AGENTD__"
DEFAULT_PATH = Path("/etc/agentd/agent.toml")


class LoadedSettings(msgspec.Struct, frozen=True):
    """Loaded settings, with their file and its raw content."""

    settings: Settings
    path: Path | None
    raw: Mapping[str, Any]
    environ: Mapping[str, str]

    @property
    def source(self) -> str:
        """The name of the file in messages."""
        return source_name(self.path)

    def origin(self, keys: tuple[str, ...]) -> str:
        """Return the origin of a setting: a variable, the file, or `default`."""
        if name := find_variable(keys, self.environ, ENV_PREFIX):
            return name
        return str(self.path) if has_key(self.raw, keys) else "default"

    def effective(self) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield every setting as its kebab-case key path and value."""
        yield from _flatten(
            (),
            self.settings.model_dump(mode="json", by_alias=True, exclude={"agents", "plugins"}),
        )
        if self.settings.agents:
            yield ("agents",), self.raw.get("agents", [a.id for a in self.settings.agents])
        yield from _flatten(
            ("plugins",), self.settings.plugins.model_dump(mode="json", by_alias=True)
        )


def find_config(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the option's, $AGENTD_CONFIG's, or the system's if it exists."""
    path_text = option or environ.get("AGENTD_CONFIG")
    if path_text:
        return Path(path_text)
    return DEFAULT_PATH if DEFAULT_PATH.exists() else None


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> LoadedSettings:
    """Load settings; without a path, the defaults and the environment.

    Raises:
        ConfigRefused: the file is unreadable or its settings are unusable.
        StartRefused: its file system does not answer.
    """
    return load_text(read_text(path), path, environ)


def load_text(text: str, path: Path | None, environ: Mapping[str, str]) -> LoadedSettings:
    """Load settings from the text of a file.

    Raises:
        ConfigRefused: the settings are unusable.
    """
    settings, raw = parse_settings(Settings, text, path, environ, ENV_PREFIX)
    if problems := [*settings.unknown_agents(), *settings.means_elsewhere()]:
        raise ConfigRefused(problems, source_name(path))
    return LoadedSettings(settings, path, raw, environ)


def _flatten(keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping) and keys[-1:] != ("default-slots",):
        for key, inner_value in value.items():
            yield from _flatten((*keys, key), inner_value)
    else:
        yield keys, value
