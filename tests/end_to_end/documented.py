"""An OpenAPI document checked against its server: by schemathesis, and by a generated client."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

EXAMPLES = 200 if os.environ.get("AGENTD_SOAK") else 8
SEED = int(os.environ.get("AGENTD_SEED", "13"))
TOKEN = "secret"  # noqa: S105 - the tests' own
GOOD = {"command": ["sleep", "1000"], "slots": {"cpu": 0, "mem": "16m"}}
CLAIM = {"claim_id": "alive", "holder": {"ttl": 3600}, "slots": {"mem": "1m"}}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "create_kernel": GOOD,
    "create_claim": {name: CLAIM[name] for name in ("holder", "slots")},
    "get_edits": {"claims": [CLAIM["claim_id"]]},
    "put_engine": {"ready": True},
    "signal_kernel": {"signal": "USR1"},
}
"""Bodies by the beginnings of the operations' names."""
STREAMS = ("get_events", "exec_kernel")
"""Begin the names of operations whose answers have no end; of those only the status is read."""
UNAVAILABLE = 503


def good_body(operation: str) -> dict[str, Any] | None:
    """Return a body that the operation accepts, None if it needs none."""
    return next((dict(body) for name, body in BODIES.items() if operation.startswith(name)), None)


@dataclass(frozen=True)
class Documented:
    """A server on TCP, its document, and path parameters by operation that exist there."""

    url: str
    document: dict[str, Any]
    known: Callable[[str], Mapping[str, str]]

    @property
    def operations(self) -> dict[str, dict[str, Any]]:
        """The operations by id."""
        paths = self.document["paths"].values()
        return {call["operationId"]: call for path in paths for call in path.values()}

    @property
    def streams(self) -> set[str]:
        """The operations whose answers have no end."""
        return {name for name in self.operations if name.startswith(STREAMS)}


def fuzzed(server: Documented) -> Counter[str]:
    """Send requests that fit the document; return how often each operation succeeded.

    Every second request is for what exists, so that the paths of success are reached too.
    """
    reached: Counter[str] = Counter()
    for result in schemathesis.openapi.from_dict(server.document).get_all_operations():
        operation = result.ok()
        name = operation.definition.raw["operationId"]
        if name not in server.streams:
            reached[name] = _succeeded(server, operation, name)
    return +reached


def _succeeded(server: Documented, operation: Any, name: str) -> int:
    number = succeeded = 0

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def tried(case: Any) -> None:
        nonlocal number, succeeded
        number += 1
        if number % 2:
            known = server.known(name)
            if name.startswith("delete_"):
                known = {**known, "kernel": "nobody", "claim": "nobody"}
            case.path_parameters = {key: known[key] for key in case.path_parameters or {}}
            if (body := good_body(name)) is not None:
                case.body = body
        if name.startswith("get_logs"):
            case.query = {**(case.query or {}), "follow": "false"}
        response = case.call(
            base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20
        )
        sent = response.request
        assert response.status_code < 500 or response.status_code == UNAVAILABLE, (
            name, sent.method, sent.url, sent.body, response.content,
        )  # fmt: skip
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.response_schema_conformance,
                schemathesis.checks.content_type_conformance,
                schemathesis.checks.status_code_conformance,
            ],
        )
        succeeded += response.status_code < 300

    tried()
    return succeeded


@contextmanager
def generated(document: dict[str, Any], folder: Path, name: str) -> Iterator[Any]:
    """Generate a client package of this name and return it; the generator has no warnings."""
    file, target = folder / "openapi.json", folder / name
    file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(file)]
    command += ["--meta", "none", "--output-path", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "WARNING" not in made.stdout, made.stdout
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


LAST = re.compile("delete|cordon")


def called(server: Documented, package: Any) -> dict[str, int]:
    """Call every function of a generated client and return the status of each.

    Deletes are last, as is what keeps kernels off a node.
    """
    client = package.AuthenticatedClient(base_url=server.url, token=TOKEN)
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if found.name.count(".") == 3 and ".api." in found.name
    ]
    answers = {}
    for module in sorted(modules, key=lambda found: LAST.search(found.__name__) is not None):
        name = module.__name__.rpartition(".")[2]
        arguments = _arguments(server, package, module, name)
        if name in server.streams:
            with client.get_httpx_client().stream(**module._get_kwargs(**arguments)) as response:
                answers[name] = int(response.status_code)
        else:
            response = module.sync_detailed(client=client, **arguments)
            answers[name] = int(response.status_code)
    return answers


def _arguments(server: Documented, package: Any, module: Any, name: str) -> dict[str, Any]:
    known, arguments = server.known(name), dict[str, Any]()
    for parameter in inspect.signature(module._get_kwargs).parameters.values():
        bare = parameter.name.rstrip("_")
        if parameter.name == "body" and (body := good_body(name)) is not None:
            content = server.operations[name]["requestBody"]["content"]["application/json"]
            model = content["schema"]["$ref"].rpartition("/")[2]
            models = importlib.import_module(f"{package.__name__}.models")
            arguments["body"] = getattr(models, model).from_dict(body)
        elif bare in known and parameter.default is inspect.Parameter.empty:
            arguments[parameter.name] = known[bare]
    return arguments
