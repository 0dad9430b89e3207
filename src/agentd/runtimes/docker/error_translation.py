"""Translation of the engine's errors to errors of agentd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from agentd.core.kernel.plan import KernelPlan
from agentd.core.names import shortened
from agentd.errors import (
    CommandNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.runtimes.docker.engine_errors import (
    EngineAnswerLost,
    EngineError,
    EngineUnreachable,
    shortly,
)
from agentd.runtimes.docker.request_errors import request_problem

_PASSES = ("port is already allocated", "address already in use")
"""Conflicts with other processes on the host; a retry chooses another port."""

_NO_COMMAND = re.compile(
    r"container process[^\"]*: exec: (?P<why>.*"
    r"(?:executable file not found|no such file or directory|permission denied|"
    r"file name too long|not a directory|is a directory|too many levels of symbolic links|"
    r"exec format error).*)",
    re.DOTALL,
)
"""Errors of runc (since 1.0) about the container's own command.

Programs that the engine itself could not run, such as a hook or `apparmor_parser`, are named in
other words before `exec:`.
"""
BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409


def unknown(plan: KernelPlan, error: BaseException) -> OutcomeUnknown:
    """Return the error that keeps a kernel's share held until the outcome is known."""
    kernel_id = plan.spec.kernel_id
    return OutcomeUnknown(f"no answer from the engine; kernel {kernel_id} may exist: {error}")


def is_no_image(error: EngineError) -> bool:
    """Return whether a create failed because the image, or its platform, is missing."""
    return error.status == NOT_FOUND and "image" in error.message.lower()


def translated(error: BaseException, plan: KernelPlan | None = None) -> BaseException:
    """Translate an error of the engine; other errors are returned unchanged."""
    if isinstance(error, EngineError):
        return _refusal(error, plan)
    if isinstance(error, (EngineUnreachable, EngineAnswerLost, OSError, TimeoutError)):
        return RuntimeUnavailable(str(error) or type(error).__name__)
    return error


def _refusal(error: EngineError, plan: KernelPlan | None) -> BaseException:
    if plan is not None and (found := _NO_COMMAND.search(error.detail)):
        command = shortened(plan.spec.command[0]) if plan.spec.command else "of the image"
        return CommandNotFound(f"command {command}: {shortly(found['why'])}")
    if any(why in error.detail for why in _PASSES):
        return RuntimeUnavailable(error.message)
    if plan is not None and (problem := request_problem(error.detail, plan.spec)):
        return InvalidRequest([problem])
    if plan is not None and error.status == BAD_REQUEST and "error mounting" not in error.detail:
        return InvalidRequest([Problem("", error.message)])
    return RuntimeFailure(f"the Docker Engine: {error.message}")


class _Translating:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(
            error, (EngineError, EngineUnreachable, EngineAnswerLost, OSError, TimeoutError)
        ):
            raise translated(error) from error


_TRANSLATING = _Translating()


def translating() -> AbstractContextManager[None]:
    """Translate the engine's errors to those of agentd."""
    return _TRANSLATING


@contextmanager
def proving() -> Iterator[None]:
    """Translate every error except "not found" to `RuntimeUnavailable`: it proves nothing."""
    try:
        with translating():
            yield
    except RuntimeFailure as error:
        raise RuntimeUnavailable(f"the engine failed: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeUnavailable(f"unexpected response of the engine: {error!r}") from error


class _AbsentIsFine:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, EngineError) and error.status == NOT_FOUND


_ABSENT_IS_FINE = _AbsentIsFine()


def absent_is_fine() -> AbstractContextManager[bool | None]:
    """Suppress "not found"."""
    return _ABSENT_IS_FINE
