"""List the names that users and their tools rely on: `python tests/recorded/names.py NAME`.

Operation ids with their routes, members of request and view schemas, audit actions, log events,
options of all programs, configuration keys and environment variables (`record.py` has metrics and
keys of etcd). The lists of a version stay as they were recorded; `test_recorded.py` compares them
with those of today.
"""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.config.schema import PACKAGED
from agentd.http.openapi import build_document
from agentd.rpc.routes import ROUTES
from agentd_fleet.cli import agentd_fleet
from agentd_fleet.gateway.routes import ROUTES as GATEWAY_ROUTES
from agentd_slurm.cli import agentctl_slurm, agentd_slurm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ("src", "fleet/src", "plugins/*/src", "engines/*/src")
PROGRAMS = (agentd, agentctl, agentd_fleet, agentd_slurm, agentctl_slurm)
VARIABLE = re.compile(r"_?AGENT(D|CTL)_[A-Z_]*[A-Z]")


def names() -> dict[str, Any]:
    """Return today's names by what they name."""
    routes = {"agentd": ROUTES, "gateway": GATEWAY_ROUTES}
    documents = {program: build_document(program, listed) for program, listed in routes.items()}
    return {
        "operations": {program: operations(shown) for program, shown in documents.items()},
        "schemas": {
            program: {
                name: sorted(schema.get("properties", {}))
                for name, schema in sorted(shown["components"]["schemas"].items())
            }
            for program, shown in documents.items()
        },
        "audit_actions": {
            program: sorted(
                {
                    route.action
                    for listed in routes[program]
                    for route in (listed.proxied_routes or (listed,))
                    if route.is_audited
                }
            )
            for program in routes
        },
        "log_events": sorted(generator().log_events()),
        "options": dict(options()),
        "configuration": sorted(configuration_keys()),
        "environment": sorted(variables()),
    }


def operations(shown: dict[str, Any]) -> dict[str, str]:
    """Return method, path and parameters of each operation."""
    return {
        operation["operationId"]: " ".join(
            [
                method.upper(),
                path,
                *sorted(f"{p['in']}:{p['name']}" for p in operation.get("parameters", ())),
            ]
        )
        for path, methods in sorted(shown["paths"].items())
        for method, operation in methods.items()
    }


def generator() -> Any:
    """Return the module that generates the reference pages."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options() -> Iterator[tuple[str, list[str]]]:
    """Yield options and arguments of each command."""
    for program in PROGRAMS:
        yield from of_command(str(program.name), program)


def of_command(words: str, command: click.Command) -> Iterator[tuple[str, list[str]]]:
    yield words, sorted("/".join([*p.opts, *p.secondary_opts]) for p in command.params)
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from of_command(f"{words} {name}", below)


def configuration_keys() -> set[str]:
    """Return the path of each configuration key; `*` is any name."""
    schema = json.loads(PACKAGED.read_text())
    return set(below(schema, schema["definitions"], ""))


def below(schema: Any, definitions: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the keys below a part of the schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from below(part, definitions, path)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/definitions/")
            yield from below(definitions[name], definitions, path)
        for name, part in schema.get("properties", {}).items():
            yield f"{path}{name}"
            yield from below(part, definitions, f"{path}{name}.")
        for several in ("anyOf", "allOf", "oneOf", "items"):
            yield from below(schema.get(several), definitions, path)
        yield from below(schema.get("additionalProperties"), definitions, f"{path}*.")


def variables() -> set[str]:
    """Return the environment variables that the sources name."""
    found = set()
    for pattern in SOURCES:
        for file in (path for folder in ROOT.glob(pattern) for path in folder.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {node.value} if VARIABLE.fullmatch(node.value) else set()
    return found


if __name__ == "__main__":
    (HERE / f"{sys.argv[1]}-names.json").write_text(json.dumps(names(), indent=1) + "\n")
