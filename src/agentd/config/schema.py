"""The JSON Schema of `agent.toml`, made from the settings.

A plugin describes its own table in a file `settings.schema.json` of its package. The file is read;
the plugin is never imported. Tables of plugins without this file accept any key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentd.config.settings import Settings
from agentd.tomlfile.section import DEVICE_NAME

PACKAGED = Path(__file__).with_name("agent.schema.json")
"""The schema without any plugin, for editors."""
_DRAFT = "http://json-schema.org/draft-07/schema#"
_BOUNDS = {"ge": "minimum", "le": "maximum"}
_NULL = {"type": "null"}
_COMMON: Mapping[str, Any] = {
    "plugin": {"type": "string", "description": "Entry point. Default: the table's name."},
    "required": {
        "type": "boolean",
        "description": "Whether a plugin that cannot open stops the start. Default: false.",
    },
    "exclude": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "description": "Devices that no agent gets: ids, UUIDs, PCI addresses or parents.",
    },
}


def schema_text(plugins: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the schema, with the tables of plugins by their entry points."""
    return json.dumps(settings_schema(plugins), indent=1) + "\n"


def settings_schema(plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema, with the tables of plugins by their entry points."""
    schema = _to_file_terms(Settings.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = schema.pop("$defs")
    for name, table in sorted(plugins.items()):
        properties = {**_COMMON, **table.get("properties", {})}
        definitions[_definition(name)] = {**table, "properties": properties}
    settings = definitions["PluginSettings"]
    settings["properties"] |= {name: _table_schema(name, plugins) for name in sorted(plugins)}
    settings["additionalProperties"] = _table_schema("", plugins)
    settings["propertyNames"] = {"pattern": f"^{DEVICE_NAME.pattern}$"}
    return {"$schema": _DRAFT, **schema, "title": "agent.toml", "definitions": definitions}


def _to_file_terms(node: Any) -> Any:
    """Return a schema of pydantic in the terms of TOML: without titles, defaults and null."""
    if isinstance(node, list):
        return [_to_file_terms(item) for item in node if item != _NULL]
    if not isinstance(node, dict):
        return node
    translated = {
        _BOUNDS.get(key, key): _to_file_terms(value)
        for key, value in node.items()
        if key not in ("title", "default")
    }
    if len(choices := translated.get("anyOf", ())) == 1:
        del translated["anyOf"]
        translated |= choices[0]
    return translated


def _definition(entry_point: str) -> str:
    return f"plugin-{entry_point}"


def _table_schema(name: str, plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of one table of [plugins]; its `plugin` key chooses the entry point."""
    choices = [
        {
            "if": {
                "properties": {"plugin": {"const": entry_point}},
                "required": [] if entry_point == name else ["plugin"],
            },
            "then": {"$ref": f"#/definitions/{_definition(entry_point)}"},
        }
        for entry_point in sorted(plugins)
    ]
    table = {"type": "object", "properties": dict(_COMMON)}
    return {**table, "allOf": choices} if choices else table
