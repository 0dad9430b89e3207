"""The publisher: reports one node to the fleet, under a lease that ends with it.

    python -m agentd_fleet.join.publisher

`agentd-fleet join` starts it and passes the settings in an inherited file descriptor, so that the
parser of the settings takes no memory here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from agentd import log as logs
from agentd import stderr
from agentd.client.asynchronous import AsyncClient
from agentd.concurrency import wait_event
from agentd.errors import AgentdError, DaemonFailed
from agentd.program.background import Background
from agentd.program.boot_id import boot_id
from agentd.program.exit_status import exit_refused
from agentd.program.process import early_signals, prepare_daemon
from agentd_fleet.join.options import JoinCredentials, JoinOptions
from agentd_fleet.join.status import PublisherStatus
from agentd_fleet.nodes.reader import MAX_ANSWER, NodeReader
from agentd_fleet.store.etcd_client import EtcdClient, KeyValue
from agentd_fleet.store.etcd_transport import EtcdRefused, LeaseGone
from agentd_fleet.store.keys import fleet_key, fleet_prefix
from agentd_fleet.view.reports import (
    UNREADABLE,
    KnownNode,
    NodeReading,
    NodeReport,
    known_record,
)

log = structlog.get_logger()
T = TypeVar("T")

FREE_PAUSE_S = 1.0
"""Minimum seconds between two reports of free amounts."""
MAX_RENEW_PERIOD_S = 10.0
"""Maximum seconds between two renewals, after which a deleted key is written again."""
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.1
"""Tries to lock the id of this install, and seconds between two."""
MAX_RETRY_S = 3.0
"""Maximum seconds before a retry, which are a fifth of the lease in a small fleet."""
PARTS = ("nodes", "free", "known")
"""Parts of the fleet's keys that have one of each node, written by its publisher alone."""


class NodeIdTaken(AgentdError):
    """Another publisher of this fleet has the node id under a living lease."""

    code = "DuplicateNode"


class Publisher:
    """Publishes reports of a node while it owns the node id in the fleet.

    A lease vouches for the keys that were written under it. So each renewal first verifies that
    they are as this publisher left them, and the lease is left to end once a report has been
    unwritten for longer than it. After an error, the keys are read again before they are written.
    """

    def __init__(
        self, etcd: EtcdClient, options: JoinOptions, install_id: str, boot_id: str
    ) -> None:
        self._etcd = etcd
        self._options = options
        self._url = options.url or "no address"
        self._install_id, self._boot_id = install_id, boot_id
        self._reading: NodeReading | None = None
        self._changed = asyncio.Event()
        self._lease = 0
        self._foreign_lease = 0
        """Lease of another publisher, as it was read last; it counts until it ends."""
        self._renew_at = 0.0
        self._unwritten_since = math.inf
        self._pairs: dict[str, KeyValue] = {}
        """The node's keys as they are in etcd, by part; empty while that is not known."""
        self._is_record_refused = False
        self._rival = ""
        """Address of another publisher that waits for the node id."""
        self._free_publish_at = 0.0
        self._status = PublisherStatus()

    async def set_reading(self, reading: NodeReading) -> None:
        """Take the node's latest reading."""
        if not reading.node_id:  # it has not answered yet
            self._status.show(f"not in the fleet: {self._options.socket}: {reading.reason}")
            return
        self._reading = reading
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled, retrying after every error."""
        self._status.ready()
        loop = asyncio.get_running_loop()
        pause_s = min(self._options.lease / 5, MAX_RETRY_S)
        await self._changed.wait()
        node_id = ""
        while True:
            await wait_event(self._changed, max(self._renew_at - loop.time(), 0.01))
            self._changed.clear()
            if (reading := self._reading) is None:
                continue
            if reading.node_id != node_id:  # the keys of the other id end with their lease
                node_id, self._pairs = reading.node_id, {}
                self._lease = self._foreign_lease = 0
            try:
                if loop.time() >= self._renew_at:
                    await self._renew(reading)
                self._unwritten_since = min(self._unwritten_since, loop.time())
                await self._publish(reading)
                self._unwritten_since = math.inf
            except AgentdError as error:
                self._pairs = {}
                if isinstance(error, (LeaseGone, NodeIdTaken)):
                    self._lease = 0
                where = "no report since an error" if self._lease else "not in the fleet"
                self._status.failed(where, error)
                self._changed.set()
                await asyncio.sleep(random.uniform(0.2, pause_s))  # noqa: S311 - spreads the publishers
            else:
                self._status.published(reading.node_id, self._options.name, self._rival)

    def has_failed(self) -> bool:
        """Return whether the last attempt to publish has failed, or none has succeeded yet."""
        return not self._pairs

    async def hand_over(self) -> None:
        """Give the next publisher of this install a whole lease to take the node id over."""
        if self._lease and self._pairs:
            with contextlib.suppress(AgentdError):
                await self._etcd.keep_alive(self._lease)

    async def _renew(self, reading: NodeReading) -> None:
        """Verify the node's keys, and keep the lease alive if it may vouch for them."""
        loop = asyncio.get_running_loop()
        written = self._pairs
        revisions = {pair.key: pair.mod_revision for pair in written.values()}
        self._rival = ""
        if revisions and not await self._etcd.have_revisions(revisions):
            await self._read_keys(reading)
            if deleted := sorted(written.keys() - self._pairs.keys()):
                log.warning("node.keys_deleted", node_id=reading.node_id, keys=deleted)
        if loop.time() > self._unwritten_since + self._options.lease:
            return
        if self._lease and not await self._etcd.keep_alive(self._lease):
            self._lease = 0
        self._renew_at = loop.time() + min(self._options.lease / 3, MAX_RENEW_PERIOD_S)

    async def _read_keys(self, reading: NodeReading) -> None:
        """Read the node's keys.

        Raises:
            NodeIdTaken: another publisher has the node id, until the lease of its keys has ended,
                also if these are deleted meanwhile. A key without a lease vouches for nobody.
        """
        pairs = {part: await self._read_key(part, reading) for part in PARTS}
        node, free, known = pairs.values()
        report, record = _parse(node, NodeReport), _parse(known, KnownNode)
        leases = {pair.lease for pair in (node, free) if pair is not None} - {0, self._lease}
        self._foreign_lease = (
            0 if self._is_own(report) else max(leases, default=self._foreign_lease)
        )
        if self._foreign_lease and not leases:
            remaining_s = await self._etcd.time_to_live(self._foreign_lease)
            self._foreign_lease = self._foreign_lease if remaining_s >= 0 else 0
        if self._foreign_lease:
            if known is not None and record is not None and record.rival != self._url:
                rival_record = msgspec.json.encode(replace(record, rival=self._url))
                with contextlib.suppress(EtcdRefused):  # then the owner does not learn of it
                    await self._etcd.put_if(known.key, rival_record, expected=known.mod_revision)
            owner = report or record
            raise NodeIdTaken(
                _node_id_taken_reason(reading.node_id, owner.url if owner else "", self._url)
            )
        self._pairs = {part: pair for part, pair in pairs.items() if pair is not None}
        if record is not None and record.rival:
            self._rival = record.rival
            self._status.has_rival(reading.node_id, self._url, record.rival)

    async def _read_key(self, part: str, reading: NodeReading) -> KeyValue | None:
        try:
            return await self._etcd.get(self._key(part, reading))
        except EtcdRefused as error:
            if part != "known":
                raise
            self._on_record_refused(reading, error)
            return None

    def _is_own(self, report: NodeReport | None) -> bool:
        own = (self._install_id, self._boot_id)
        return report is not None and (report.install_id, report.boot_id) == own

    async def _publish(self, reading: NodeReading) -> None:
        """Write what differs in etcd, under a lease."""
        if not self._pairs:
            await self._read_keys(reading)
        if is_new := not self._lease:
            self._lease = await self._etcd.grant(self._options.lease)
            self._is_record_refused = False
        while not await self._write_changes(reading):
            await self._read_keys(reading)
        if is_new:
            log.info("node.published", node_id=reading.node_id, fleet=self._options.name)

    async def _write_changes(self, reading: NodeReading) -> bool:
        """Write what differs in etcd; return False if a key was not as it was read."""
        report, free = self._encode_report(reading), msgspec.json.encode(reading.free)
        if not await self._write("nodes", reading, report, self._lease):
            return False
        is_recorded = reading.version and not self._is_record_refused  # never read: no slots yet
        if is_recorded and not await self._record(reading):
            return False
        loop = asyncio.get_running_loop()
        if self._is_written("free", free, self._lease):
            return True
        if (wait_s := self._free_publish_at - loop.time()) > 0:
            loop.call_later(wait_s, self._changed.set)
            return True
        is_as_read = await self._write("free", reading, free, self._lease)
        self._free_publish_at = loop.time() + FREE_PAUSE_S
        return is_as_read

    async def _record(self, reading: NodeReading) -> bool:
        """Record the node and its slots permanently, beyond its lease."""
        pair = self._pairs.get("known")
        stored = pair.value if pair is not None else None
        record = known_record(stored, self._options.url, reading.slot_types)
        try:
            return await self._write("known", reading, record, 0)
        except EtcdRefused as error:
            self._on_record_refused(reading, error)
            return True

    def _on_record_refused(self, reading: NodeReading, error: EtcdRefused) -> None:
        """Go on without the lasting record: a right is missing, and the node is in the fleet."""
        if not self._is_record_refused:
            self._is_record_refused = True
            key = self._key("known", reading)
            log.warning("node.record_failed", key=key, reason=str(error))

    def _is_written(self, part: str, value: bytes, lease: int) -> bool:
        pair = self._pairs.get(part)
        return pair is not None and (pair.value, pair.lease) == (value, lease)

    async def _write(self, part: str, reading: NodeReading, value: bytes, lease: int) -> bool:
        """Write a key unless it is so; return False if it was not as it was read."""
        if self._is_written(part, value, lease):
            return True
        key, pair = self._key(part, reading), self._pairs.get(part)
        expected = pair.mod_revision if pair is not None else 0
        revision = await self._etcd.put_if(key, value, expected=expected, lease=lease)
        if revision is not None:
            self._pairs[part] = KeyValue(key, value, revision, revision, lease)
        return revision is not None

    def _encode_report(self, reading: NodeReading) -> bytes:
        options = self._options
        report = reading.to_report(
            install_id=self._install_id,
            boot_id=self._boot_id,
            url=options.url,
            labels=options.labels,
        )
        return msgspec.json.encode(report)

    def _key(self, part: str, reading: NodeReading) -> str:
        return fleet_key(fleet_prefix(self._options.name), part, reading.node_id)


def _parse(pair: KeyValue | None, form: type[T]) -> T | None:
    try:
        return None if pair is None else msgspec.json.decode(pair.value, type=form)
    except UNREADABLE:
        return None


def _node_id_taken_reason(node_id: str, url: str, own_url: str) -> str:
    return (
        f"node id {node_id} is taken by {url or 'an unknown address'}; this one is at {own_url}."
        " If that was this host before a reboot or reinstallation, the id is free in a few seconds;"
        " otherwise end one of the two publishers, or change one of the ids"
    )


def lock_install_id(folder: Path) -> str:
    """Return an id of this install that no copy of it and no other process has.

    The id in the file is created once. Its device and inode distinguish it from copies, and a lock
    that ends with this process from other processes here, which get a random id. A process that is
    just ending may hold the lock for a moment longer.

    Raises:
        OSError: the id cannot be saved.
    """
    path = folder / "install-id"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        new_path = path.with_suffix(".new")
        new_path.write_text(f"{uuid.uuid4().hex}\n")
        new_path.replace(path)
    descriptor = os.open(path, os.O_RDONLY)  # open until this process ends
    install_id = path.read_text().strip()
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            return f"{install_id}@{status.st_dev}:{status.st_ino}"
        time.sleep(LOCK_PAUSE_S)
    return f"{install_id}@{uuid.uuid4().hex}"


async def publish(options: JoinOptions) -> None:
    """Publish the node of a socket until SIGTERM or SIGINT; SIGHUP reads credentials again.

    Published reports stay until the lease ends, so the node survives a restart of the publisher.

    Raises:
        DaemonFailed: a part of the publisher has ended.
    """
    stopped, hangup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    if signal.SIGHUP in early_signals:
        hangup.set()
    credentials = JoinCredentials(options)
    async with EtcdClient(options.to_credentials()) as etcd:
        publisher = Publisher(etcd, options, lock_install_id(Path(options.state_dir)), boot_id())
        async with AsyncClient(options.socket, timeout_s=5.0, max_bytes=MAX_ANSWER) as client:
            failures: list[str] = []

            def fail(reason: str) -> None:
                failures.append(reason)
                stopped.set()

            background = Background(fail)
            background.run("credentials", credentials.log_daily())
            background.run("reload", credentials.run(hangup, etcd, publisher.has_failed))
            background.run("publisher", publisher.run())
            background.run(
                "reader", NodeReader(options.socket, client, publisher.set_reading).run()
            )
            await stopped.wait()
            await background.close()
            await publisher.hand_over()
    if failures:
        raise DaemonFailed(failures[0])


def main() -> None:
    """Publish with the options that the descriptor of the first argument has."""
    stderr.guard()
    prepare_daemon()
    logs.configure()
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        options = msgspec.json.decode(file.read(), type=JoinOptions)
    try:
        asyncio.run(publish(options))
    except AgentdError as error:
        exit_refused("agentd-fleet", error)


if __name__ == "__main__":
    main()
