"""What the engine's answers, and their absence, mean."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
from aiodocker import DockerError

from agentd.core.plan import KernelPlan
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)

_PASSES = ("port is already allocated", "address already in use")
"""What somebody else on the node did first; asked again, another port is chosen."""

_T = TypeVar("_T")
CONNECTION_FAILED = 900
"""The status that aiodocker gives to a request without an answer."""

BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409


class NoAnswer(aiohttp.ClientError):
    """The engine, or what stands in its place, said something that is no answer."""


async def answered(asking: Awaitable[_T]) -> _T:
    """Wait for aiodocker's answer; it raises TypeError or ValueError for what is none.

    Raises:
        NoAnswer: in their place.
    """
    try:
        return await asking
    except (TypeError, ValueError, KeyError) as error:
        raise NoAnswer(f"the engine's answer is none: {error}") from error


def unknown(plan: KernelPlan, error: BaseException) -> OutcomeUnknown:
    """Return the error that keeps a kernel's share held until the engine tells."""
    kernel_id = plan.spec.kernel_id
    return OutcomeUnknown(f"the engine did not say what became of kernel {kernel_id}: {error}")


def was_never_asked(error: BaseException) -> bool:
    """Tell whether no connection could be made, so that the engine knows of nothing."""
    return isinstance(error.__context__, aiohttp.ClientConnectorError)


def is_no_image(error: DockerError) -> bool:
    """Tell whether a create failed for want of the image, or of one for the platform."""
    return error.status == NOT_FOUND and "image" in error.message.lower()


def is_lost_answer(error: BaseException | None) -> bool:
    """Tell whether the engine was asked and its answer did not come."""
    if isinstance(error, DockerError):
        return error.status == CONNECTION_FAILED and not was_never_asked(error)
    return isinstance(error, (aiohttp.ClientError, OSError))


def translated(  # noqa: PLR0911 - one line for each meaning
    error: BaseException, plan: KernelPlan | None = None
) -> BaseException:
    """Return the error of agentd that says what the engine's means."""
    if isinstance(error, DockerError):
        if error.status == CONNECTION_FAILED:
            return RuntimeUnavailable(error.message)
        message = error.message
        if any(why in message for why in _PASSES):
            return RuntimeUnavailable(message)
        if plan is not None and _is_no_command(message):
            command = plan.spec.command[0] if plan.spec.command else "the image's command"
            return CommandNotFound(f"command {command!r}: {message.rpartition('exec: ')[2]}")
        if plan is not None and plan.spec.user and "unable to find user" in message:
            return InvalidRequest([Problem("user", message)])
        if plan is not None and error.status == BAD_REQUEST:
            return InvalidRequest([Problem("", message)])
        return RuntimeFailure(message)
    if isinstance(error, AgentdError) or not isinstance(error, Exception):
        return error
    if isinstance(error, (aiohttp.ClientError, OSError, TimeoutError)):
        return RuntimeUnavailable(f"{type(error).__name__}: {error}")
    return error


def _is_no_command(message: str) -> bool:
    return "exec: " in message and any(
        why in message
        for why in ("executable file not found", "no such file or directory", "permission denied")
    )


@contextmanager
def translating() -> Iterator[None]:
    """Turn the engine's errors into agentd's."""
    try:
        yield
    except (DockerError, aiohttp.ClientError, OSError, TimeoutError) as error:
        raise translated(error) from error


@contextmanager
def listing() -> Iterator[None]:
    """Whatever the engine answers but "not found" proves nothing about its containers."""
    try:
        with translating():
            yield
    except RuntimeFailure as error:
        raise RuntimeUnavailable(f"the engine failed: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeUnavailable(f"the engine's answer is none: {error!r}") from error


@contextmanager
def absent_is_fine() -> Iterator[None]:
    """Let a "not found" pass."""
    try:
        yield
    except DockerError as error:
        if error.status != NOT_FOUND:
            raise
