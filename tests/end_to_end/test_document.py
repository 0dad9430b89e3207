"""The OpenAPI document, held against the daemon: by schemathesis, and by a generated client."""

import asyncio
import importlib
import inspect
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from daemon import AGENTS, BASE, Daemon, gpus

EXAMPLES = 200 if os.environ.get("AGENTD_SOAK") else 8
SEED = int(os.environ.get("AGENTD_SEED", "13"))
STREAMS = {"get_events", "exec_kernel"}
"""Calls whose answers have no end; their own tests read them."""


class Node:
    """A daemon over TCP, with a kernel that lives and a device that can be drained."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        token = daemon.folder / "token"
        token.write_text("secret\n")
        token.chmod(0o600)
        listen = f'listen = "{self.url.removeprefix("http://")}"\ntoken-file = "{token}"\n[host]'
        daemon.configure(AGENTS + gpus(), BASE.replace("[host]", listen))

    async def start(self) -> dict[str, Any]:
        await self.daemon.start()
        await self.daemon.running(kernel_id="alive", slots={"cpu": 0, "mem": "16m"})
        document: dict[str, Any] = await self.daemon.get("/v1/openapi.json")
        return document


def operations_of(document: dict[str, Any]) -> set[str]:
    return {call["operationId"] for path in document["paths"].values() for call in path.values()}


KNOWN = {
    "agent": "agent-1",
    "kernel": "alive",
    "device_name": "cuda",
    "id": "cuda0",
    "plugin": "cuda",
    "runtime": "process",
}
GOOD = {"command": ["sleep", "1000"], "slots": {"cpu": 0, "mem": "16m"}}


@pytest.fixture
async def node(plain: Daemon) -> Node:
    return Node(plain)


async def test_no_request_that_fits_the_document_breaks_the_daemon(node: Node) -> None:
    """Every second request is for what exists, so that the paths of success are reached too."""
    document = await node.start()
    reached: Counter[str] = Counter()

    def one(operation: Any) -> None:
        name = operation.definition.raw["operationId"]
        number = 0

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
            nonlocal number
            number += 1
            if number % 2:
                case.path_parameters = {key: KNOWN[key] for key in case.path_parameters or {}}
                if "create" in name:
                    case.body = dict(GOOD)
            if name == "get_logs":
                case.query = {**(case.query or {}), "follow": "false"}
            if name == "delete_kernel" and number % 2:
                case.path_parameters = {"kernel": "nobody"}
            response = case.call(
                base_url=node.url, headers={"Authorization": "Bearer secret"}, timeout=20
            )
            assert response.status_code < 500 or response.status_code == 503, (
                name,
                response.request.method,
                response.request.url,
                response.request.body,
                response.content,
            )
            case.validate_response(
                response,
                checks=[
                    schemathesis.checks.response_schema_conformance,
                    schemathesis.checks.content_type_conformance,
                    schemathesis.checks.status_code_conformance,
                ],
            )
            if response.status_code < 300:
                reached[name] += 1

        tried()

    def everything() -> None:
        schema = schemathesis.openapi.from_dict(document)
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.definition.raw["operationId"] not in STREAMS:
                one(operation)

    await asyncio.to_thread(everything)
    for kernel in await node.daemon.get("/v1/kernels"):
        await node.daemon.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    operations = {
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    }
    never = operations - reached.keys() - STREAMS
    assert never <= {"forget_device", "forget_runtime", "delete_kernel", "retry_plugin"}, never
    assert reached["create_kernel_of_agent"] >= 3


async def test_a_generated_client_works_for_every_route(node: Node, tmp_path: Path) -> None:
    document = await node.start()
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    target = tmp_path / "generated_agentd"
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path"]
    command += [str(tmp_path / "openapi.json"), "--meta", "none", "--output-path", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "WARNING" not in made.stdout, made.stdout
    sys.path.insert(0, str(tmp_path))
    try:
        answers = await asyncio.to_thread(_called, node)
    finally:
        sys.path.remove(str(tmp_path))
    operations = {
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    }
    assert answers.keys() == operations - STREAMS
    assert {name: status for name, status in answers.items() if status >= 500} == {}
    good = {name for name, status in answers.items() if status < 300}
    assert operations - STREAMS - good <= {"forget_device", "forget_runtime", "retry_plugin"}


def _called(node: Node) -> dict[str, int]:
    """Call every function of the generated client, deleting last."""
    package = importlib.import_module("generated_agentd")
    client = package.AuthenticatedClient(base_url=node.url, token="secret")  # noqa: S106 - the test's own
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(package.__path__, "generated_agentd.")
        if found.name.count(".") == 3 and ".api." in found.name
    ]
    answers = {}
    for module in sorted(modules, key=lambda module: "delete" in module.__name__):
        name = module.__name__.rpartition(".")[2]
        if name in STREAMS:
            continue
        arguments: dict[str, Any] = {}
        for parameter in inspect.signature(module.sync_detailed).parameters.values():
            bare = parameter.name.rstrip("_")
            if parameter.name == "client":
                continue
            if parameter.name == "body" and "create" in name:
                models = importlib.import_module("generated_agentd.models")
                arguments["body"] = models.CreateKernelRequest.from_dict(GOOD)
            elif bare in KNOWN and parameter.default is inspect.Parameter.empty:
                arguments[parameter.name] = KNOWN[bare]
        answers[name] = int(module.sync_detailed(client=client, **arguments).status_code)
    return answers
