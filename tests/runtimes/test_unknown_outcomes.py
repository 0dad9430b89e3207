"""A create whose undo fails: the log and refusals quote nothing of its request."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    StateUnavailable,
)
from agentd.runtimes.docker.docker_errors import DockerError
from agentd.runtimes.docker.error_translation import unknown_outcome_error
from agentd.runtimes.host.failed_create import undo_create
from agentd.services.protocols import CreateUndone
from contracts.test_runtime import plan

ERRORS: dict[str, BaseException] = {
    "a missing command": CommandNotFound("command '--token=SECRET' does not exist"),
    "an invalid variable": InvalidRequest([Problem("env.SECRET", "is too long")]),
    "a private location": InvalidRequest([Problem("x.SECRET", "is twice", is_private=True)]),
    "a command that runc refuses": RuntimeFailure('runc: exec: "SECRET": text file busy'),
}


async def undo_on_the_host(error: BaseException) -> None:
    async def remove() -> None:
        raise RuntimeFailure('cannot stop: exec: "SECRET": busy')

    await undo_create(remove(), error, Path("/kernels/k1"))


async def undo_of_docker(error: BaseException) -> None:
    raise unknown_outcome_error(plan("true"), error)


UNDOS = {"docker": undo_of_docker, "process and systemd": undo_on_the_host}


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


@pytest.mark.parametrize(
    ("error", "raises"),
    [
        (OSError(errno.ENOSPC, "full"), pytest.raises(StateUnavailable, match="/kernels/k1: full")),
        (asyncio.CancelledError(), pytest.raises(CreateUndone)),
        (RuntimeFailure("x"), nullcontext()),
    ],
)
async def test_undone_create_raises_what_proves_it(
    error: BaseException, raises: AbstractContextManager[object]
) -> None:
    removed: list[str] = []

    async def remove() -> None:
        removed.append("k1")

    with raises:
        await undo_create(remove(), error, Path("/kernels/k1"))
    assert removed == ["k1"]
