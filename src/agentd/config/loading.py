"""Loading of `agent.toml` and the environment.

`agentd.tomlfile.parsing` reads the text, rejects unknown keys and words every problem.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentd.config.plugins import PluginSettings, table_problems
from agentd.config.settings import Settings
from agentd.core.printable import printable_line
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.key_paths import Keys, unmarked
from agentd.tomlfile.parsing import is_set_in, parse, read_text, variable_of

ENV_PREFIX = "AGENTD__"
SEARCHED = Path("/etc/agentd/agent.toml")


@dataclass(frozen=True)
class Loaded:
    """Loaded settings, with their file and its raw content."""

    settings: Settings
    path: Path | None
    raw: Mapping[str, Any]
    environ: Mapping[str, str]

    @property
    def source(self) -> str:
        """The name of the file in messages."""
        return source_of(self.path)

    def origin(self, keys: tuple[str, ...]) -> str:
        """Return the origin of a setting: a variable, the file, or `default`."""
        if name := variable_of(keys, self.environ, ENV_PREFIX):
            return name
        return str(self.path) if is_set_in(self.raw, keys) else "default"

    def effective(self) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield every setting as its kebab-case key path and value."""
        yield from _flatten(
            (), self.settings.model_dump(mode="json", exclude={"agents", "plugins"})
        )
        if self.settings.agents:
            yield ("agents",), self.raw.get("agents", [a.id for a in self.settings.agents])
        yield from _flatten(("plugins",), self.settings.plugins.model_dump(mode="json"))


def find_config(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the option's, $AGENTD_CONFIG's, or the system's if it exists."""
    named = option or environ.get("AGENTD_CONFIG")
    if named:
        return Path(named)
    return SEARCHED if SEARCHED.exists() else None


def source_of(path: Path | None) -> str:
    """Return the name of a file in messages; "defaults" without one."""
    return str(path) if path else "defaults"


class Examined(NamedTuple):
    """The usable part of a configuration, and every problem of the rest."""

    loaded: Loaded | None
    """None if no part is usable; keys in `left_out` have their defaults."""
    problems: tuple[Problem, ...]
    left_out: frozenset[Keys]
    source: str

    def lacks(self, *keys: str) -> bool:
        """Return whether a key, or a table that contains it, was left out."""
        return any(keys[: len(gone)] == gone for gone in self.left_out)

    def is_whole(self, *keys: str) -> bool:
        """Return whether neither a key nor anything below it was left out."""
        return not self.lacks(*keys) and all(gone[: len(keys)] != keys for gone in self.left_out)


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Load settings; without a path, the defaults and the environment.

    Raises:
        ConfigRefused: the file is unreadable or its settings are unusable.
    """
    return load_text(read_text(path), path, environ)


def load_text(text: str, path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """Load settings from the text of a file.

    Raises:
        ConfigRefused: the settings are unusable.
    """
    examined = examine_text(text, path, environ)
    if examined.problems or examined.loaded is None:
        raise ConfigRefused(examined.problems, examined.source)
    return examined.loaded


def examine_text(text: str, path: Path | None, environ: Mapping[str, str]) -> Examined:
    """Load the usable part of settings from the text of a file.

    Raises:
        ConfigRefused: the text is not TOML.
    """
    source = source_of(path)
    settings, problems, left_out, raw, values = parse(Settings, text, source, environ, ENV_PREFIX)
    given = settings.plugins.model_extra if settings is not None else values.get("plugins", {})
    extras = dict(_further_keys(given))
    wrong = {key: [*table_problems(key, value)] for key, value in extras.items()}
    problems += [
        Problem(f"plugins.{printable_line(where)}", printable_line(why))
        for found in wrong.values()
        for where, why in found
    ]
    if settings is None:
        return Examined(None, tuple(problems), left_out, source)
    unusable = [key for key, found in wrong.items() if found]
    if unusable:
        settings = _without_tables(settings, unusable)
        left_out |= {("plugins", key) for key in unusable}
    examined = Examined(Loaded(settings, path, raw, environ), tuple(problems), left_out, source)
    if examined.lacks("agents"):
        return examined
    return examined._replace(problems=(*problems, *settings.unknown_agents()))


def _further_keys(plugins: object) -> Iterator[tuple[str, object]]:
    if isinstance(plugins, Mapping):
        for key, raw in plugins.items():
            if key not in PluginSettings.model_fields:
                yield key if isinstance(raw, Mapping) else unmarked(key), raw


def _without_tables(settings: Settings, names: Collection[str]) -> Settings:
    """Return settings without some further keys of [plugins]."""
    plugins = settings.plugins
    known: dict[str, Any] = {n: getattr(plugins, n) for n in type(plugins).model_fields}
    kept: dict[str, Any] = {
        k: raw for k, raw in _further_keys(plugins.model_extra or {}) if k not in names
    }
    return settings.model_copy(update={"plugins": PluginSettings(**{**known, **kept})})


def _flatten(keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping) and keys[-1:] != ("default-slots",):
        for key, below in value.items():
            yield from _flatten((*keys, key.replace("_", "-")), below)
    else:
        yield keys, value
