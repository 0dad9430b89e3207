"""A call of the RPC as a value; both clients carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from agentd.client.defaults import SILENCE_S
from agentd.client.paths import api_path, next_query
from agentd.errors import InvalidRequest, Problem, Refused, Unavailable

T = TypeVar("T")


class Call(NamedTuple, Generic[T]):
    """One call; `T` is its answer's type. One that `is_repeatable` may be sent again.

    One that `is_paged` asks for a list without a limit: the clients read all of its pages. An
    answer may pause for `silence_s`: 0 for the timeout of the client, None for ever.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    is_repeatable: bool = True
    is_paged: bool = False
    silence_s: float | None = 0.0

    def may_retry(self, refusal: Unavailable, remaining_s: float) -> bool:
        """Return whether to repeat the call after the pause that `refusal` asks for."""
        return self.is_repeatable and bool(refusal.content) and refusal.retry_after_s <= remaining_s

    def next_page(self, link: str | None) -> Self | None:
        """Return the call for the page after an answer with the header `Link`, if there is one.

        It has the path of this call: only the query is taken from the header.

        Raises:
            Refused: it is this page again, as from a cache that does not look at the query.
        """
        query = next_query(link) if self.is_paged else None
        path, _, own_query = self.path.partition("?")
        if query is not None and query == own_query:
            raise Refused("Internal", f"the page after {self.path} is the same page again", {})
        return None if query is None else self._replace(path=f"{path}?{query}")


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with a token, none without one.

    Raises:
        InvalidRequest: no header can have it.
    """
    if token and not (token.isascii() and token.isprintable()):
        raise InvalidRequest([Problem("token", "it is not printable ASCII")])
    return {"Authorization": f"Bearer {token}"} if token else {}


def label_parameters(labels: Mapping[str, str] | None) -> list[str]:
    """Return the values of the parameter `label` that select labels."""
    return [f"{name}={value}" for name, value in (labels or {}).items()]


def logs_call(kernel_id: str, *, follow: bool, **query: object) -> Call[bytes]:
    """`GET /v1/kernels/{kernel}/logs`; one that is followed is silent while its kernel is."""
    path = api_path("kernels", kernel_id, "logs", follow=follow, **query)
    return Call("GET", path, is_repeatable=False, silence_s=None if follow else 0.0)


def events_call(after: str | None = None) -> Call[bytes]:
    """`GET /v1/events`, from the event after `after` on."""
    headers = {} if after is None else {"Last-Event-ID": after}
    path = api_path("events")
    return Call("GET", path, headers=headers, is_repeatable=False, silence_s=SILENCE_S)
