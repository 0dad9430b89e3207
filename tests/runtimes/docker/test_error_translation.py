"""Whose mistake an engine's refusal is: the caller's, the engine's, or that of the moment."""

import pytest

from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.runtimes.docker.engine_errors import EngineError
from agentd.runtimes.docker.error_translation import translated
from contracts.test_runtime import plan

PARSER = 'AppArmor enabled: exec: "apparmor_parser": executable file not found in $PATH'
HOOK = "error running hook #0: fork/exec /usr/bin/nvidia-hook: no such file or directory"
OCI = "failed to create task for container: failed to create shim task: OCI runtime create failed: "
PROCESS = f"{OCI}runc create failed: unable to start container process: "
OLD = "OCI runtime create failed: container_linux.go:380: starting container process caused: "

MEANINGS = {
    "no such command": (
        400, f'{PROCESS}exec: "sleep": executable file not found in $PATH: unknown',
        CommandNotFound,
    ),
    "no such command, of an older runc": (
        400, f'{OLD}exec: "sleep": executable file not found in $PATH: unknown', CommandNotFound,
    ),
    "a command that is a folder": (
        400, f'{PROCESS}exec: "/": permission denied: unknown', CommandNotFound,
    ),
    "a command of another machine's libraries": (
        500, f"{PROCESS}exec: /bin/x: no such file or directory: unknown", CommandNotFound,
    ),
    "a folder that cannot be entered": (
        500, f'{PROCESS}chdir to cwd ("/x") set in config.json failed: not a directory: unknown',
        InvalidRequest,
    ),
    "a folder that is a file": (500, "Cannot mkdir: /x is not a directory", InvalidRequest),
    "a command named as a port's trouble": (
        400, f'{PROCESS}exec: "port is already allocated": executable file not found in $PATH',
        CommandNotFound,
    ),
    "AppArmor without its parser": (
        500,
        PARSER,
        RuntimeFailure,
    ),
    "a hook that is not there": (
        500,
        f"{PROCESS}error during container init: {HOOK}: unknown",
        RuntimeFailure,
    ),
    "a runtime that is not there": (
        500, 'failed to start shim: exec: "runc": executable file not found in $PATH: unknown',
        RuntimeFailure,
    ),
    "a port that another has": (
        500, "driver failed programming: Bind for 0.0.0.0:80 failed: port is already allocated",
        RuntimeUnavailable,
    ),
    "a value that no engine takes": (400, "invalid reference format", InvalidRequest),
    "a full disk": (500, "write /var/lib/docker/x: no space left on device", RuntimeFailure),
}  # fmt: skip


@pytest.mark.parametrize(("status", "message", "meaning"), MEANINGS.values(), ids=MEANINGS)
def test_engine_errors_are_attributed(
    status: int, message: str, meaning: type[AgentdError]
) -> None:
    error = translated(EngineError(status, message), plan("sleep", "1000"))
    assert type(error) is meaning, error
    if meaning is RuntimeFailure:
        assert str(error) == f"the Docker Engine: {message}"
