"""The site's settings in `/etc/agentd/slurm.toml`; no file means the defaults.

Hooks read them for each job, so this module imports little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

DEFAULT_SETTINGS = "/etc/agentd/slurm.toml"
SETTINGS_VARIABLE = "AGENTD_SLURM_SETTINGS"
MAX_NICE = 2147483645
_TIME = re.compile(r"UNLIMITED|INFINITE|(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}", re.IGNORECASE)


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


class Settings(NamedTuple):
    """All settings. `bin` is the folder of Slurm's commands, empty if it is to be found."""

    bin: str = ""
    placeholder: PlaceholderSettings = PlaceholderSettings()


def read_settings() -> Settings:
    """Read the settings file.

    Raises:
        InvalidSettings: it cannot be read, or has an unknown key or a bad value.
    """
    path = os.environ.get(SETTINGS_VARIABLE) or DEFAULT_SETTINGS
    try:
        with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123 - pathlib costs 3 ms
            text = file.read()
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"{path}: {error}") from None
    try:
        return parse_settings(text)
    except InvalidSettings as error:
        raise InvalidSettings(f"{path}: {error}") from None


def parse_settings(text: str) -> Settings:
    """Read the content of the settings file.

    Raises:
        InvalidSettings: it has an unknown key or a bad value.
    """
    import tomllib  # noqa: PLC0415 - slow to load, and most sites have no such file

    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings(str(error)) from None
    _check_keys("", tables, ("slurm", "placeholder"))
    slurm = _read_table(tables, "slurm", {"bin": ""})
    if slurm["bin"] and not str(slurm["bin"]).startswith("/"):
        raise InvalidSettings(f"invalid slurm.bin: got {slurm['bin']!r}, expected an absolute path")
    placeholder = _read_table(tables, "placeholder", PlaceholderSettings._field_defaults)
    if placeholder["time"] and not _TIME.fullmatch(str(placeholder["time"])):
        wanted = 'expected a time such as "02:00:00"'
        raise InvalidSettings(f"invalid placeholder.time: got {placeholder['time']!r}, {wanted}")
    if abs(int(placeholder["nice"])) > MAX_NICE:
        raise InvalidSettings(f"invalid placeholder.nice: the limit is {MAX_NICE}")
    return Settings(str(slurm["bin"]), PlaceholderSettings(**placeholder))


def _read_table(
    tables: Mapping[str, object], name: str, defaults: Mapping[str, str | int]
) -> dict[str, Any]:
    """Return the values of a table, with the default of each that is missing."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise InvalidSettings(f"invalid {name}: got {table!r}, expected a table")
    _check_keys(f"{name}.", table, defaults)
    for key, value in table.items():
        wanted = type(defaults[key])
        if type(value) is not wanted or (wanted is str and not str(value).isprintable()):
            kind = "a text" if wanted is str else "a whole number"
            raise InvalidSettings(f"invalid {name}.{key}: got {value!r}, expected {kind}")
    return {**defaults, **table}


def _check_keys(prefix: str, table: Mapping[str, object], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise InvalidSettings(f"unknown key {prefix}{key} (known: {', '.join(known)})")
