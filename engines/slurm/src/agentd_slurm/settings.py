"""The site's settings in `/etc/agentd/slurm.toml`; no file means the defaults.

Hooks read them for each job, so this module imports little.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

DEFAULT_SETTINGS = "/etc/agentd/slurm.toml"
SETTINGS_VARIABLE = "AGENTD_SLURM_SETTINGS"


class InvalidSettings(Exception):
    """The settings file is unreadable or malformed."""


class PlaceholderSettings(NamedTuple):
    """Options of placeholder jobs; an empty text leaves one out.

    `partition` is empty for all partitions of the node, and `time` is in Slurm's form.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time: str = ""
    nice: int = -10000


class SlurmSettings(NamedTuple):
    """All settings. `bin` is the folder of Slurm's commands, empty if it is to be found."""

    bin: str = ""
    placeholder: PlaceholderSettings = PlaceholderSettings()


def read_settings() -> SlurmSettings:
    """Read the settings file.

    Raises:
        InvalidSettings: it cannot be read, or has an unknown key or a bad value.
    """
    path = _settings_path()
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms
            return parse_settings(file.read().decode("utf-8-sig"))
    except FileNotFoundError:
        return SlurmSettings()
    except (OSError, ValueError, InvalidSettings) as error:  # TOML's error is a ValueError
        raise InvalidSettings(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _settings_path() -> str:
    return os.environ.get(SETTINGS_VARIABLE) or DEFAULT_SETTINGS


def parse_settings(text: str) -> SlurmSettings:
    """Read the content of the settings file.

    Raises:
        InvalidSettings: it has an unknown key or a bad value.
        ValueError: it is not TOML.
    """
    import tomllib  # noqa: PLC0415 - slow to load, and most sites have no such file

    tables: dict[str, dict[str, Any]] = {
        "slurm": {"bin": ""},
        "placeholder": dict(PlaceholderSettings._field_defaults),
    }
    for name, given in tomllib.loads(text).items():
        if not isinstance(given, dict) or name not in tables:
            raise InvalidSettings(f"unknown key {name}, expected [{'] or ['.join(tables)}]")
        for key, value in given.items():
            if key not in tables[name]:
                raise InvalidSettings(
                    f"unknown key {name}.{key} (known: {', '.join(tables[name])})"
                )
            _check(f"{name}.{key}", value, tables[name][key])
        tables[name] |= given
    return SlurmSettings(tables["slurm"]["bin"], PlaceholderSettings(**tables["placeholder"]))


def _check(key: str, value: object, default: object) -> None:
    """Refuse a value of another type than the default; Slurm checks the rest."""
    if isinstance(default, int):
        expected = "" if type(value) is int else "a whole number"
    elif not isinstance(value, str) or not value.isprintable():
        expected = "a text"
    else:
        is_relative = key == "slurm.bin" and not value.startswith("/")
        expected = "an absolute path" if is_relative else ""
    if expected:
        raise InvalidSettings(f"invalid {key}: got {value!r}, expected {expected}")
