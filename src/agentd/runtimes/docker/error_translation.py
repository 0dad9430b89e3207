"""Translation of the engine's errors to errors of agentd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentd.core.kernel.plan import KernelPlan
from agentd.core.names import quote_untrusted
from agentd.errors import (
    CommandNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.runtimes.docker.container_config import program_of
from agentd.runtimes.docker.docker_errors import (
    DockerError,
    DockerResponseLost,
    DockerUnreachable,
)
from agentd.runtimes.docker.request_errors import request_problem

_PORT_CONFLICTS = ("port is already allocated", "address already in use")
"""Conflicts with other processes on the host; a retry chooses another port."""

_NODE_REFUSALS = ("error mounting", "hook")
"""Refusals of a start that concern the node's devices, if not a target of the request."""
_NO_COMMAND_CODES = (126, 127)
"""Exit codes that the engine gives a container whose command is not executable, or missing."""
BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409


def unknown_outcome_error(plan: KernelPlan, error: BaseException) -> OutcomeUnknown:
    """Return the error that keeps a kernel's share held until the outcome is known."""
    kernel_id = plan.spec.kernel_id
    return OutcomeUnknown(f"no answer from the engine; kernel {kernel_id} may exist: {error}")


def translate_error(
    error: BaseException, plan: KernelPlan | None = None, exit_code: int = 0
) -> BaseException:
    """Translate an error of the engine; other errors are returned unchanged.

    `exit_code` is that of a container whose start was refused.
    """
    if isinstance(error, DockerError):
        return _translate_refusal(error, plan, exit_code)
    if isinstance(error, (DockerUnreachable, DockerResponseLost, OSError, TimeoutError)):
        return RuntimeUnavailable(str(error) or type(error).__name__)
    return error


def _translate_refusal(
    error: DockerError, plan: KernelPlan | None, exit_code: int
) -> BaseException:
    if plan is not None and (problem := request_problem(error.detail, plan.spec)):
        return InvalidRequest([problem])
    if plan is not None and not any(text in error.detail for text in _NODE_REFUSALS):
        if exit_code in _NO_COMMAND_CODES:
            program = program_of(plan.spec)
            command = quote_untrusted(program) if program else "of the image"
            return CommandNotFound(f"command {command}: {error.message}")
        if error.status == BAD_REQUEST:
            return InvalidRequest([Problem("", error.message)])
    if any(text in error.detail for text in _PORT_CONFLICTS):
        return RuntimeUnavailable(error.message)
    return RuntimeFailure(f"the Docker Engine: {error.message}")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the engine's errors to those of agentd."""
    try:
        yield
    except (DockerError, DockerUnreachable, DockerResponseLost, OSError, TimeoutError) as error:
        raise translate_error(error) from error


@contextmanager
def errors_as_unavailable() -> Iterator[None]:
    """Translate every error except "not found" to `RuntimeUnavailable`: it proves nothing."""
    try:
        with translate_errors():
            yield
    except RuntimeFailure as error:
        raise RuntimeUnavailable(f"the engine failed: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeUnavailable(f"unexpected response of the engine: {error!r}") from error


@contextmanager
def suppress_not_found() -> Iterator[None]:
    """Suppress "not found"."""
    try:
        yield
    except DockerError as error:
        if error.status != NOT_FOUND:
            raise
