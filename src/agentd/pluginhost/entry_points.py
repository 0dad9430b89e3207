"""Entry points of the group `agentd.accelerators`, found by their metadata alone.

The plugin's process loads them (`child`). If two distributions claim a name, neither is loaded: the
choice would depend on the order of a path.

See https://packaging.python.org/en/latest/specifications/entry-points/
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from importlib_metadata import EntryPoint, entry_points

from agentd.core.names import did_you_mean
from agentd.plugin_api import ENTRY_POINT_GROUP

SCHEMA_FILE = "settings.schema.json"
"""JSON Schema of a plugin's table, in the package of its entry point."""


def installed_entry_points() -> list[EntryPoint]:
    """Return the installed entry points."""
    return [*entry_points(group=ENTRY_POINT_GROUP)]


class EntryPoints:
    """Entry points by name, and the names that several distributions claim."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        by_name: dict[str, list[EntryPoint]] = {}
        for point in points:
            by_name.setdefault(point.name, []).append(point)
        self._targets = {name: group[0].value for name, group in by_name.items() if len(group) == 1}
        self.clashes = {
            name: _clash_problem(name, group) for name, group in by_name.items() if len(group) > 1
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets.keys() | self.clashes.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self.clashes

    def target(self, name: str) -> str:
        """Return the target of an entry point (`module:class`), empty if it cannot be loaded."""
        return self._targets.get(name, "")

    def missing_target_reason(self, name: str) -> str:
        """Return why an entry point has no target."""
        return self.clashes.get(name) or self.not_installed_reason(name)

    def not_installed_reason(self, name: str) -> str:
        """Return the error for a missing entry point, with the nearest installed one."""
        hint = did_you_mean(name, self, 0.6)
        names = ", ".join(sorted(self)) or "none"
        return f"no entry point {name!r} is installed; {hint}installed: {names}"


def _clash_problem(name: str, points: Iterable[EntryPoint]) -> str:
    owners = sorted(point.dist.name if point.dist else point.value for point in points)
    return f"entry point {name!r} is claimed by {' and '.join(owners)}; uninstall one of them"


def settings_schemas(points: Iterable[EntryPoint]) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of the table of each entry point whose package has one.

    The packages are found and not imported.
    """
    schemas = {}
    for point in points:
        spec = find_spec(point.module.partition(".")[0])
        for folder in (spec and spec.submodule_search_locations) or ():
            with contextlib.suppress(FileNotFoundError):
                text = (Path(folder) / SCHEMA_FILE).read_text(encoding="utf-8")
                schemas[point.name] = json.loads(text)
    return schemas
