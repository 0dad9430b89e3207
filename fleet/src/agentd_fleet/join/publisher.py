"""The publisher: reports one node to the fleet, under a lease that ends with it.

    python -m agentd_fleet.join.publisher

`agentd-fleet join` starts it and passes the settings in an inherited file descriptor, so that the
parser of the settings takes no memory here.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import ssl
import sys
import uuid
from pathlib import Path

import msgspec
import structlog

from agentd import log as logs
from agentd import stderr
from agentd.client.asynchronous import AsyncClient
from agentd.client.tls import client_tls
from agentd.concurrency import wait_event
from agentd.errors import AgentdError, DaemonFailed
from agentd.program.background import Background
from agentd.program.boot_id import boot_id
from agentd.program.exit_status import exit_refused
from agentd.program.process import prepare_daemon
from agentd.program.sd_notify import Notifier
from agentd.program.weaknesses import Weakness, Weaknesses
from agentd_fleet.nodes.reader import MAX_ANSWER, NodeReader
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials, EtcdRefused, LeaseGone
from agentd_fleet.store.keys import fleet_key, fleet_prefix
from agentd_fleet.view.reports import (
    UNREADABLE,
    KnownNode,
    NodeReading,
    NodeReport,
    first_seen,
)

log = structlog.get_logger()

FREE_PAUSE_S = 1.0
"""Minimum seconds between two reports of free amounts."""
ERROR_LOG_PERIOD_S = 30.0


class JoinOptions(msgspec.Struct, frozen=True):
    """The publisher's settings; files are paths."""

    fleet: str
    endpoints: tuple[str, ...]
    user: str
    password: str
    ca: str | None
    cert: str | None
    key: str | None
    socket: str
    url: str
    labels: dict[str, str]
    lease_s: int
    state_dir: str
    weaknesses: tuple[Weakness, ...] = ()


class NodeIdTaken(AgentdError):
    """Another node of this fleet has the node id."""

    code = "DuplicateNode"


class Publisher:
    """Publishes reports of a node while it owns the node id in the fleet."""

    def __init__(
        self, etcd: EtcdClient, options: JoinOptions, install_id: str, boot_id: str
    ) -> None:
        self._etcd = etcd
        self._options = options
        self._install_id, self._boot_id = install_id, boot_id
        self._reading: NodeReading | None = None
        self._changed = asyncio.Event()
        self._lease = 0
        self._revision = 0
        self._published_values: tuple[bytes, bytes] = (b"", b"")
        self._recorded = b""
        self._free_publish_at = 0.0
        self._notifier = Notifier()
        self._next_log_at = 0.0

    async def set_reading(self, reading: NodeReading) -> None:
        """Take the node's latest reading; without an id, the daemon has never answered."""
        if reading.node_id:
            self._reading = reading
            self._changed.set()
        else:
            self._notifier.status(f"not in the fleet: {reading.reason}")

    async def run(self) -> None:
        """Publish until cancelled, retrying after every error."""
        self._notifier.ready("not in the fleet yet")
        loop = asyncio.get_running_loop()
        keepalive_at = 0.0
        while True:
            await wait_event(self._changed, max(keepalive_at - loop.time(), 0.01))
            self._changed.clear()
            if self._reading is None:
                keepalive_at = loop.time() + 1.0
                continue
            try:
                if self._lease and loop.time() >= keepalive_at:
                    keepalive_at = loop.time() + self._options.lease_s / 3
                    if not await self._etcd.keep_alive(self._lease):
                        self._lease = 0
                if not self._lease:
                    keepalive_at = loop.time() + self._options.lease_s / 3
                    await self._join(self._reading)
                await self._publish(self._reading)
            except AgentdError as error:
                self._log_error(error)
                if isinstance(error, (LeaseGone, NodeIdTaken)):
                    self._lease = 0
                self._changed.set()
                await asyncio.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - spreads the publishers

    async def _join(self, reading: NodeReading) -> None:
        """Claim the node id under a new lease.

        Raises:
            NodeIdTaken: another install has it, or this one had it before a reboot; then it is free
                once that lease has ended.
        """
        key = self._key("nodes", reading)
        published = await self._etcd.get(key)
        if published is not None and not self._is_own_report(published.value):
            raise NodeIdTaken(
                _node_id_taken_reason(reading.node_id, published.value, self._options.url)
            )
        lease = await self._etcd.grant(self._options.lease_s)
        value = self._encode_report(reading)
        expected = published.mod_revision if published is not None else 0
        revision = await self._etcd.put_if(key, value, expected=expected, lease=lease)
        if revision is None:
            raise NodeIdTaken(f"node id {reading.node_id} was claimed concurrently by another node")
        self._lease, self._revision, self._published_values = lease, revision, (value, b"")
        self._recorded = b""
        log.info("node.published", node_id=reading.node_id, fleet=self._options.fleet)
        self._notifier.status(f"node {reading.node_id} is in fleet {self._options.fleet}")

    def _is_own_report(self, value: bytes) -> bool:
        try:
            report = msgspec.json.decode(value, type=NodeReport)
        except UNREADABLE:
            return False
        return (report.install_id, report.boot_id) == (self._install_id, self._boot_id)

    async def _publish(self, reading: NodeReading) -> None:
        """Write the changes since the last write."""
        report, free = self._encode_report(reading), msgspec.json.encode(reading.free)
        if report != self._published_values[0]:
            key = self._key("nodes", reading)
            revision = await self._etcd.put_if(
                key, report, expected=self._revision, lease=self._lease
            )
            if revision is None:
                raise NodeIdTaken(f"node id {reading.node_id} is published by another node")
            self._revision, self._published_values = revision, (report, self._published_values[1])
        if not reading.reason:
            await self._record_node(reading)
        if free != self._published_values[1]:
            loop = asyncio.get_running_loop()
            if (wait_s := self._free_publish_at - loop.time()) > 0:
                loop.call_later(wait_s, self._changed.set)
                return
            await self._etcd.put(self._key("free", reading), free, lease=self._lease)
            self._free_publish_at = loop.time() + FREE_PAUSE_S
            self._published_values = report, free

    async def _record_node(self, reading: NodeReading) -> None:
        """Record the node and its slots permanently, beyond its lease."""
        content = msgspec.json.encode([self._options.url, reading.slot_types])
        if content == self._recorded:
            return
        key = self._key("known", reading)
        try:
            stored = await self._etcd.get(key)
            record = KnownNode(
                first_seen=first_seen(stored.value if stored is not None else None),
                url=self._options.url,
                slot_types=reading.slot_types,
            )
            await self._etcd.put(key, msgspec.json.encode(record))
        except EtcdRefused as error:  # a missing right; the node is in the fleet anyway
            log.warning("node.record_failed", key=key, reason=str(error))
        self._recorded = content

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
        return fleet_key(fleet_prefix(self._options.fleet), part, reading.node_id)

    def _log_error(self, error: AgentdError) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next_log_at:
            log.error("node.publish_failed", code=error.code, reason=str(error))
            self._notifier.status(f"not in the fleet: {error}")
            self._next_log_at = now + ERROR_LOG_PERIOD_S


def _node_id_taken_reason(node_id: str, value: bytes, own_url: str) -> str:
    try:
        owner = msgspec.json.decode(value, type=NodeReport).url or "an unknown address"
    except UNREADABLE:
        owner = "an unreadable report"
    return (
        f"node id {node_id} is taken by {owner}; this one is at {own_url or 'no address'}."
        " If that was this host before a reboot or reinstallation, the id is free in a few seconds;"
        " otherwise change one of the ids"
    )


def load_install_id(folder: Path) -> str:
    """Return the id of this install, created once.

    Raises:
        OSError: it cannot be saved.
    """
    path = folder / "install-id"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        new_path = path.with_suffix(".new")
        new_path.write_text(f"{uuid.uuid4().hex}\n")
        new_path.replace(path)
    return path.read_text().strip()


def etcd_tls_context(options: JoinOptions) -> ssl.SSLContext:
    """Return the TLS context for etcd, by default with the system's CAs."""
    context = client_tls(cafile=options.ca or None)
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return context


async def publish(options: JoinOptions) -> None:
    """Publish the node of a socket until SIGTERM or SIGINT.

    Published reports stay until the lease ends, so the node survives a restart of the publisher.

    Raises:
        DaemonFailed: a part of the publisher has ended.
    """
    endpoints = random.sample(options.endpoints, len(options.endpoints))
    credentials = EtcdCredentials(
        tuple(endpoints), options.user, options.password, etcd_tls_context(options)
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with EtcdClient(credentials) as etcd:
        publisher = Publisher(etcd, options, load_install_id(Path(options.state_dir)), boot_id())
        async with AsyncClient(options.socket, timeout_s=5.0, max_bytes=MAX_ANSWER) as client:
            failures: list[str] = []

            def fail(reason: str) -> None:
                failures.append(reason)
                stopped.set()

            background = Background(fail)
            weaknesses = Weaknesses()
            weaknesses.replace(options.weaknesses)
            background.run("credentials", weaknesses.log_daily())
            background.run("publisher", publisher.run())
            background.run(
                "reader", NodeReader(options.socket, client, publisher.set_reading).run()
            )
            await stopped.wait()
            await background.close()
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
