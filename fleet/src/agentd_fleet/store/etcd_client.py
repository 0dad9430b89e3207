"""A client of etcd v3 over its HTTP/JSON gateway, without gRPC: keys, leases and watches.

A write whose answer is lost may have taken effect. It is sent again, and each method documents how
it reads the second answer. A call that raises `EtcdUnavailable` may have taken effect, or may still
do so.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec

from agentd_fleet.store.etcd_transport import (
    EtcdCredentials,
    EtcdTransport,
    EtcdUnavailable,
    RevisionsCompacted,
)

MAX_CREATED = 100
"""Maximum keys of one transaction; etcd's default is 128 operations."""
_RANGE = "/v3/kv/range"
_TXN = "/v3/kv/txn"
_ONE_KEY: Mapping[str, object] = {"limit": "1", "keys_only": True}


class KeyValue(msgspec.Struct, frozen=True):
    """A key at one revision; `lease` is 0 without one."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int


class Change(msgspec.Struct, frozen=True):
    """A written key; `value` is None if it was deleted."""

    key: str
    value: bytes | None
    mod_revision: int


class EtcdClient:
    """A client of one store as one user; each call takes at most `timeout_s` seconds.

    Every method raises `EtcdUnavailable` or `EtcdRefused` if etcd does not do as requested.
    """

    def __init__(self, credentials: EtcdCredentials, *, timeout_s: float = 3.0) -> None:
        self._transport = EtcdTransport(credentials, timeout_s)

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()

    @property
    def credentials(self) -> EtcdCredentials:
        """The credentials in force."""
        return self._transport.credentials

    def replace_credentials(self, credentials: EtcdCredentials) -> None:
        """Use other credentials from the next connection and login on."""
        self._transport.replace_credentials(credentials)

    async def get(self, key: str) -> KeyValue | None:
        """Return the key, None if it does not exist."""
        answer, _ = await self._transport.call(_RANGE, {"key": _encode_key(key)})
        return next(_key_values(answer), None)

    async def range(self, prefix: str, *, page: int = 1000) -> tuple[list[KeyValue], int]:
        """Return all keys below a prefix in order, and the revision at which they were read.

        Raises:
            RevisionsCompacted: the store has dropped that revision meanwhile.
        """
        pairs: list[KeyValue] = []
        read_at = 0
        async for items, revision in self.pages(prefix, page=page):
            pairs += items
            read_at = revision
        return pairs, read_at

    async def pages(
        self, prefix: str, *, page: int = 1000, revision: int = 0
    ) -> AsyncGenerator[tuple[list[KeyValue], int], None]:
        """Yield the result of `range` page by page; `revision` 0 reads the current one.

        Raises:
            RevisionsCompacted: the store has dropped that revision meanwhile.
        """
        span = _span(prefix)
        more = True
        while more:
            body = {**span, "limit": str(page), "revision": str(revision)}
            answer, _ = await self._transport.call(_RANGE, body)
            revision = revision or _revision_of(answer)
            yield list(_key_values(answer)), revision
            if more := answer.get("more", False):
                last = b64decode(answer["kvs"][-1]["key"])
                span["key"] = b64encode(last + b"\0").decode()

    async def revision(self, key: str = "\0") -> int:
        """Return the store's current revision; `key` is one that the user may read."""
        answer, _ = await self._transport.call(_RANGE, {**_ONE_KEY, "key": _encode_key(key)})
        return _revision_of(answer)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write a key unconditionally and return its new revision.

        Raises:
            LeaseGone: the lease does not exist.
        """
        answer, _ = await self._transport.call("/v3/kv/put", _put_request(key, value, lease))
        return _revision_of(answer)

    async def put_if(self, key: str, value: bytes, *, expected: int, lease: int = 0) -> int | None:
        """Write a key whose revision is `expected` (0: it does not exist); return its new one.

        None means that the key has another revision. If an answer was lost and the key has exactly
        this value and lease, it counts as written by this call: values must be unique.

        Raises:
            LeaseGone: the lease does not exist.
        """
        write = {"request_put": _put_request(key, value, lease)}
        answer, is_repeat = await self._write_if(key, expected, write)
        if answer.get("succeeded", False):
            return _revision_of(answer)
        pair = _compared_key_value(answer)
        is_ours = is_repeat and pair is not None and (pair.value, pair.lease) == (value, lease)
        return pair.mod_revision if is_ours and pair is not None else None

    async def create_all(self, values: Mapping[str, tuple[bytes, str]]) -> None:
        """Write those keys that do not exist, many in one transaction.

        Each has its value, and another key without which it is not written.
        """
        creates = [
            {
                "request_txn": {
                    "compare": [_revision_is(key, 0), _exists(needed)],
                    "success": [{"request_put": _put_request(key, value, 0)}],
                }
            }
            for key, (value, needed) in values.items()
        ]
        for start in range(0, len(creates), MAX_CREATED):
            await self._transport.call(_TXN, {"success": creates[start : start + MAX_CREATED]})

    async def delete_unless_exists(self, without: str, *keys: str) -> bool:
        """Delete keys in one transaction if the key `without` does not exist; return whether."""
        deletes = [{"request_delete_range": {"key": _encode_key(key)}} for key in keys]
        body = {"compare": [_revision_is(without, 0)], "success": deletes}
        answer, _ = await self._transport.call(_TXN, body)
        return bool(answer.get("succeeded", False))

    async def delete_if(self, key: str, *, expected: int, without: str = "") -> bool:
        """Delete a key whose revision is `expected`; return whether that was so.

        With `without` only if that key does not exist. If an answer was lost, True means that the
        revision is gone, deleted by any client.
        """
        write = {"request_delete_range": {"key": _encode_key(key)}}
        conditions = [_revision_is(without, 0)] if without else []
        answer, is_repeat = await self._write_if(key, expected, write, conditions)
        pair = _compared_key_value(answer)
        is_gone = pair is None or pair.create_revision > expected
        return answer.get("succeeded", False) or (is_repeat and is_gone)

    async def _write_if(
        self,
        key: str,
        expected: int,
        write: Mapping[str, object],
        conditions: Sequence[Mapping[str, object]] = (),
    ) -> tuple[dict[str, Any], bool]:
        """Write if the key has this revision, else read it; return whether it was sent before."""
        read = {"request_range": {"key": _encode_key(key)}}
        compare = [_revision_is(key, expected), *conditions]
        body = {"compare": compare, "success": [write], "failure": [read]}
        return await self._transport.call(_TXN, body)

    async def delete(self, key: str) -> bool:
        """Delete a key and return whether it existed; True, too, if an answer was lost."""
        answer, is_repeat = await self._transport.call(
            "/v3/kv/deleterange", {"key": _encode_key(key)}
        )
        return is_repeat or "deleted" in answer

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease, which ends `ttl_s` seconds after its last keepalive."""
        answer, _ = await self._transport.call("/v3/lease/grant", {"TTL": str(ttl_s)})
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> int:
        """Send a keepalive for a lease and return its remaining seconds, 0 if it is gone."""
        answer, _ = await self._transport.call("/v3/lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0))

    async def time_to_live(self, lease: int) -> int:
        """Return the remaining seconds of a lease, -1 if it is gone; it is not kept alive."""
        answer, _ = await self._transport.call("/v3/lease/timetolive", {"ID": str(lease)})
        return int(answer.get("TTL", 0))

    async def have_revisions(self, revisions: Mapping[str, int]) -> bool:
        """Return whether each key has its revision, as far as one member knows yet."""
        compare = [_revision_is(key, revision) for key, revision in revisions.items()]
        answer, _ = await self._transport.call(_TXN, {"compare": compare})
        return bool(answer.get("succeeded", False))

    async def watch(
        self,
        prefix: str,
        *,
        after: int,
        silence_s: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
        keys: Collection[str] | None = None,
    ) -> AsyncGenerator[tuple[list[Change], int], None]:
        """Yield the changes below a prefix since `after`, in order, with the revision they reach.

        That revision is the `after` of the next watch; it may come without a change. After
        `silence_s` seconds of silence the endpoint is probed for life and a leader, and with
        `keys`, those that the reader has seen below the prefix, for changes that did not arrive.
        Each answer of etcd, to a probe as well, is reported to `on_answer`. Close the iterator
        (`contextlib.aclosing`) to end the watch.

        Raises:
            EtcdUnavailable: the connection ended, its endpoint does not answer, or the watch is
                deaf: what is between delivers nothing, and does not say so.
            RevisionsCompacted: the revisions are gone, or the store has not reached `after`.
        """
        start = after
        request = {**_span(prefix), "start_revision": str(start + 1), "progress_notify": True}
        stream = await self._transport.stream("/v3/watch", {"create_request": request})
        try:
            while True:
                on_answer()
                try:
                    async with asyncio.timeout(silence_s):
                        message = await stream.next()
                except TimeoutError:
                    await self._probe(stream.endpoint, prefix, after, keys)
                    continue
                changes = [_parse_change(event) for event in message.get("events", ())]
                # A member that lags behind may send what the reader has read from another one.
                changes = [change for change in changes if change.mod_revision > start]
                # A header may be ahead of its events if etcd sends them in parts.
                reached = changes[-1].mod_revision if changes else _revision_of(message)
                after = max(after, reached)
                yield changes, after
        finally:
            stream.close()

    async def _probe(
        self, endpoint: str, prefix: str, after: int, keys: Collection[str] | None
    ) -> None:
        span = {"key": _encode_key(prefix or "\0")} if keys is None else _span(prefix)
        body = {**_ONE_KEY, **span, "min_mod_revision": str(after + 1)}
        answer = await self._transport.call_at(endpoint, _RANGE, body)
        if (revision := _revision_of(answer)) < after:
            raise RevisionsCompacted(
                f"{endpoint}: the store is at revision {revision}, before {after}"
            )
        if keys is not None and ("kvs" in answer or int(answer.get("count", 0)) != len(keys)):
            raise EtcdUnavailable(f"{endpoint}: a watch did not deliver all changes")


def _encode_key(key: str) -> str:
    return b64encode(key.encode(errors="surrogateescape")).decode()


def _span(prefix: str) -> dict[str, object]:
    """Return the members that select all keys below a prefix; an empty one selects all."""
    start = prefix.encode(errors="surrogateescape")
    end = start[:-1] + bytes([start[-1] + 1]) if start else b"\0"
    return {"key": b64encode(start or b"\0").decode(), "range_end": b64encode(end).decode()}


def _revision_is(key: str, revision: int) -> dict[str, object]:
    """Return the condition that a key has this revision; 0 means that it does not exist."""
    return {"target": "MOD", "key": _encode_key(key), "mod_revision": str(revision)}


def _exists(key: str) -> dict[str, object]:
    """Return the condition that a key exists."""
    return {**_revision_is(key, 0), "result": "GREATER"}


def _put_request(key: str, value: bytes, lease: int) -> dict[str, object]:
    return {"key": _encode_key(key), "value": b64encode(value).decode(), "lease": str(lease)}


def _decode_key(member: Mapping[str, Any]) -> str:
    return b64decode(member["key"]).decode(errors="surrogateescape")


def _key_values(answer: Mapping[str, Any]) -> Iterator[KeyValue]:
    """Parse the keys of an answer, which omits zero and empty members."""
    for member in answer.get("kvs", ()):
        yield KeyValue(
            key=_decode_key(member),
            value=b64decode(member.get("value", "")),
            mod_revision=int(member["mod_revision"]),
            create_revision=int(member["create_revision"]),
            lease=int(member.get("lease", 0)),
        )


def _compared_key_value(answer: Mapping[str, Any]) -> KeyValue | None:
    """Return the key that a transaction read because its condition failed."""
    response = answer.get("responses", [{}])[0].get("response_range", {})
    return next(_key_values(response), None)


def _parse_change(event: Mapping[str, Any]) -> Change:
    member = event["kv"]
    is_deleted = event.get("type") == "DELETE"
    value = None if is_deleted else b64decode(member.get("value", ""))
    return Change(_decode_key(member), value, int(member["mod_revision"]))


def _revision_of(answer: Mapping[str, Any]) -> int:
    return int(answer["header"]["revision"])
