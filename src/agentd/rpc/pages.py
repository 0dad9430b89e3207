"""Lists of kernels and claims: their order and their pages.

A list has the order of creation. A page ends after `limit` entries, or after `MAX_PAGE_BYTES`, so
that no answer takes the event loop for long; the header `Link` then has the next page.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar

from aiohttp import web

from agentd.core.claim.claim import Claim
from agentd.core.kernel.states import KERNEL_ID, Kernel
from agentd.errors import InvalidRequest, Problem
from agentd.http.queries import MAX_PAGE_BYTES, query_of
from agentd.rpc.queries import PageQuery

_CURSOR = re.compile(rf"([0-9]{{1,18}})~({KERNEL_ID})")
_Position: TypeAlias = tuple[int, str]
"""The position in a list: microseconds since the epoch at the creation, and the id."""
_T = TypeVar("_T", Kernel, Claim)


def page_response(
    request: web.Request,
    items: Iterable[_T],
    encode: Callable[[_T], bytes],
    is_selected: Callable[[_T], bool] = lambda _: True,
) -> web.Response:
    """Answer with the page that `label`, `limit` and `after` select of a list.

    Raises:
        InvalidRequest: `after` is neither a cursor nor a listed id.
    """
    query = query_of(request, PageQuery)
    labels = query.labels
    ordered = sorted(items, key=_position)
    after = None if query.after is None else _parse_position(query.after, ordered)
    start = 0 if after is None else bisect_right(ordered, after, key=_position)
    rows: list[bytes] = []
    size, last, headers = 0, "", dict[str, str]()
    for item in islice(ordered, start, None):
        has_labels = all(item.labels.get(name) == value for name, value in labels)
        if not (has_labels and is_selected(item)):
            continue
        if len(rows) == query.limit or size >= MAX_PAGE_BYTES:
            url = request.rel_url.update_query(after=last)
            headers["Link"] = f'<{url}>; rel="next"'
            break
        rows.append(encode(item))
        size, last = size + len(rows[-1]), cursor(item)
    body = b"[%s]" % b",".join(rows)
    return web.Response(body=body, content_type="application/json", headers=headers)


def cursor(item: Kernel | Claim) -> str:
    """Return the text that names an entry, and no later one with its id."""
    return "{}~{}".format(*_position(item))


def _position(item: Kernel | Claim) -> _Position:
    name = item.kernel_id if isinstance(item, Kernel) else item.claim_id
    return round(item.created_at * 1e6), name


def _parse_position(after: str, ordered: Sequence[Kernel | Claim]) -> _Position:
    if (cursor := _CURSOR.fullmatch(after)) is not None:
        return int(cursor[1]), cursor[2]
    for item in ordered:
        if (position := _position(item))[1] == after:
            return position
    reason = f"invalid position {after!r}: expected a listed id, or `after` of the header Link"
    raise InvalidRequest([Problem("after", reason)])
