"""A create whose undo fails: the log and refusals quote nothing of its request."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentd.core.kernel.observation import KernelRef
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
)
from agentd.runtimes.docker.docker_errors import DockerError
from agentd.runtimes.docker.error_translation import unknown_outcome_error
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.runtimes.systemd.runtime import SystemdRuntime
from contracts.test_runtime import plan

ERRORS: dict[str, BaseException] = {
    "a missing command": CommandNotFound("command '--token=SECRET' does not exist"),
    "an invalid variable": InvalidRequest([Problem("env.SECRET", "is too long")]),
    "a private location": InvalidRequest([Problem("x.SECRET", "is twice", is_private=True)]),
    "a command that runc refuses": RuntimeFailure('runc: exec: "SECRET": text file busy'),
}


def undo(kind: Any) -> Callable[[BaseException], Awaitable[None]]:
    async def remove(_: KernelRef) -> None:
        raise RuntimeFailure('cannot stop: exec: "SECRET": busy')

    return lambda error: kind._undo(SimpleNamespace(remove=remove), KernelRef("k1"), error)


async def undo_of_docker(error: BaseException) -> None:
    raise unknown_outcome_error(plan("true"), error)


UNDOS = {
    "docker": undo_of_docker,
    "process": undo(ProcessRuntime),
    "systemd": undo(SystemdRuntime),
}


@pytest.mark.parametrize("fails", UNDOS.values(), ids=UNDOS)
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
async def test_undo_that_fails_publishes_no_private_words(
    fails: Callable[[BaseException], Awaitable[None]], error: BaseException
) -> None:
    with pytest.raises(OutcomeUnknown) as unknown:
        await fails(error)
    assert "SECRET" not in unknown.value.public_text()
    public = error.public_text() if isinstance(error, AgentdError) else ""
    assert public in str(unknown.value)


async def test_engine_s_own_words_are_not_published_either() -> None:
    message = 'runc create failed: exec: "--token=SECRET": text file busy'
    error = unknown_outcome_error(plan("--token=SECRET"), DockerError(500, message))
    assert "SECRET" not in error.public_text()
