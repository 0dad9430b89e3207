"""Creates of kernels and claims: when a client repeats one, and the id that its errors name.

The repeats of one call have one id, and those of a kernel one attempt, so that they create one. A
create is repeated if it was refused for the moment, or if its answer was lost: then it may have
succeeded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agentd.client.following import RETRY_S
from agentd.errors import AgentdError, AnswerLost, RefusedForNow, RequestError, Unavailable

HELD_S = 5.0
"""Seconds of an attempt after which its loss is that of a long answer, as through a balancer."""

_LOST_CODES = ("OutcomeUnknown", "Internal")


def new_kernel_id() -> str:
    """Return a random id for a kernel, as clients give it to a create without one."""
    return f"k-{os.urandom(6).hex()}"


def kernel_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of a create with its id and its attempt."""
    identity = {"kernel_id": new_kernel_id(), "attempt": os.urandom(8).hex()}
    given = {name: value for name, value in request.items() if value is not None}
    return {**request, **identity, **{name: given[name] for name in identity if name in given}}


def claim_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of a claim with its id."""
    return {"claim_id": f"c-{os.urandom(6).hex()}", **request}


class CreateAttempts:
    """The attempts of one create, within `timeout_s` all together.

    It is repeated for `retry_s` after a refusal for the moment, and for `lost_s` if the kernel or
    claim may exist. `member` names its id in the body.
    """

    def __init__(
        self,
        created_id: str,
        *,
        timeout_s: float,
        retry_s: float,
        lost_s: float,
        member: str = "kernel_id",
    ) -> None:
        self._member, self._id = member, created_id
        self._note = f"{member.removesuffix('_id')} {self._id} may exist"
        self._retry_s, self._lost_s = retry_s, lost_s
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._first_failure: float | None = None
        self._may_exist = False

    def next_timeout_s(self) -> float:
        """Begin an attempt, and return how long it may take."""
        self._began = time.monotonic()
        return max(self._deadline - self._began, 0.001)

    def pause_s(self, error: Unavailable) -> float:
        """Return the seconds until the next attempt.

        Raises:
            Unavailable: there is none.
        """
        now = time.monotonic()
        self._may_exist = self._may_exist or _is_lost(error)
        is_cut = isinstance(error, AnswerLost) and now - self._began > HELD_S
        if self._first_failure is None or is_cut:
            self._first_failure = now
        window_s = self._lost_s if self._may_exist else self._retry_s if error.content else 0.0
        pause_s = error.retry_after_s if error.content else RETRY_S
        if now + pause_s > min(self._deadline, self._first_failure + window_s):
            raise error
        return pause_s

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Add the id to every error, and to its text if the kernel or claim may exist."""
        try:
            yield
        except AgentdError as error:
            setattr(error, self._member, self._id)
            may_exist = self._may_exist or _is_lost(error)
            if may_exist and not isinstance(error, RequestError):
                text = f"{error}; {self._note}"
                error.args = (text,)
                error.content = {**error.content, "detail": text, self._member: self._id}
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # it was cancelled, or interrupted
                error.add_note(self._note)
            raise


def _is_lost(error: AgentdError) -> bool:
    """Return whether a create with this error may have succeeded."""
    is_of_proxy = isinstance(error, RefusedForNow) and error.code == AnswerLost.code
    return is_of_proxy or isinstance(error, AnswerLost) or error.code in _LOST_CODES
