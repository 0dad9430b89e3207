"""systemd's manager over D-Bus: starting, stopping, inspecting and watching units.

Methods, properties and signals are those of org.freedesktop.systemd1(5). One connection serves all
calls. If it breaks, every call in progress fails, and the next call opens another.

Signals count only from the bus name of systemd: any local user may send one to a connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec
from dbus_fast import BusType, Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from agentd.errors import AgentdError, RuntimeUnavailable
from agentd.host.systemd.unit_paths import UNIT_PATH, unit_exists, unit_of_path, user_runtime_folder

_NAME = "org.freedesktop.systemd1"
_PATH = "/org/freedesktop/systemd1"
_MANAGER, _UNIT, _SERVICE = f"{_NAME}.Manager", f"{_NAME}.Unit", f"{_NAME}.Service"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_BUS, _BUS_PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"
_LOST_ERRORS = frozenset(f"{_BUS}.Error.{why}" for why in ("NoReply", "Timeout", "Disconnected"))
_ERRNO_PREFIX = "System.Error."
_ABSENT_ERRORS = (f"{_NAME}.NoSuchUnit", f"{_BUS}.Error.UnknownObject")
MAX_CALLS = 64
"""Maximum calls in progress; a system bus allows 128 for each connection."""
CALL_TIMEOUT_S = 30.0
"""Seconds that one call may take; a start has its own limit."""
JOB_TIMEOUT_S = 120.0
"""Seconds that the start or stop of a unit may take."""

UnitProperty = tuple[str, str, Any]
"""A property of a unit: its name, D-Bus type and value."""


class UnitExists(AgentdError):
    """A unit of that name exists."""


class UnitRefused(AgentdError):
    """systemd refused a call; the message is its own, and `number` its errno, 0 if unknown."""

    number = 0


class NoSuchUnit(UnitRefused):
    """No unit of that name exists."""


class CallLost(RuntimeUnavailable):
    """A call was sent and its answer lost: it may have taken effect."""


class Unit(msgspec.Struct, frozen=True):
    """A listed unit: its name and systemd's states."""

    name: str
    active: str
    sub: str


class _Signal(msgspec.Struct, frozen=True):
    """A change of a unit, or the end of a job of it."""

    unit: str
    job: str = ""
    result: str = ""


class _BusConnection:
    """One connection and those who wait for its signals; `lost` is done once it is broken."""

    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus
        self.owner = ""
        self.places = asyncio.Semaphore(MAX_CALLS)
        self.queues: set[asyncio.Queue[_Signal | None]] = set()
        self.lost = asyncio.create_task(self._wait_lost())

    async def _wait_lost(self) -> None:
        try:
            with suppress(Exception):
                await self.bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
        finally:
            for queue in self.queues:
                queue.put_nowait(None)

    @contextmanager
    def signals(self) -> Iterator[asyncio.Queue[_Signal | None]]:
        """Yield a queue of the signals from now on; None once the connection is broken."""
        queue: asyncio.Queue[_Signal | None] = asyncio.Queue()
        self.queues.add(queue)
        try:
            yield queue
        finally:
            self.queues.discard(queue)


class SystemdManager:
    """The system manager, or with `is_user` the manager of this user."""

    def __init__(self, *, is_user: bool) -> None:
        self.is_user = is_user
        self._connection: _BusConnection | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.bus.disconnect()
            self._connection.lost.cancel()
            await asyncio.wait([self._connection.lost])

    async def start(
        self, unit: str, properties: Iterable[UnitProperty], descriptors: Sequence[int] = ()
    ) -> str:
        """Start a transient unit and return the result of the job, such as `done` or `failed`.

        Properties of type `h` are indexes into `descriptors`.

        Raises:
            UnitExists: a unit of that name exists.
            UnitRefused: systemd rejects the unit.
            CallLost: the unit may have been started.
        """
        body = [unit, "fail", _to_variants(properties), []]
        try:
            return await self._run_job("StartTransientUnit", "ssa(sv)a(sa(sv))", body, descriptors)
        except NoSuchUnit as error:  # systemd does not tell that it could not write the unit
            refusal = UnitRefused(f"{unit} cannot be written; is /run full?")
            refusal.number = errno.ENOSPC
            raise refusal from error

    async def set_properties(self, unit: str, properties: Iterable[UnitProperty]) -> None:
        """Change properties of a unit until the next boot."""
        await self._call_manager(
            "SetUnitProperties", "sba(sv)", [unit, True, _to_variants(properties)]
        )

    async def kill(self, unit: str, number: int, whom: Literal["all", "main"] = "all") -> bool:
        """Send a signal to processes of a unit.

        Returns:
            False if it has no main process and that was meant, or does not exist.
        """
        with suppress(UnitRefused):
            await self._call_manager("KillUnit", "ssi", [unit, whom, number])
            return True
        return False

    async def unload(self, unit: str) -> None:
        """Stop a unit, failed or not, and wait until the manager has unloaded it.

        Raises:
            RuntimeUnavailable: the unit is still loaded.
        """
        changes = self.watch_units()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                async for changed in changes:
                    if changed in ("", unit) and await self._is_dropped(unit):
                        return
        except TimeoutError:
            raise RuntimeUnavailable(f"{unit} is still loaded after {CALL_TIMEOUT_S:g} s") from None
        finally:
            await changes.aclose()

    async def _is_dropped(self, unit: str) -> bool:
        unit_state = await self.get_properties(unit, ("Unit.ActiveState",))
        if unit_state is None:
            return True
        with suppress(UnitRefused):
            if unit_state["Unit.ActiveState"] == "failed":
                await self._call_manager("ResetFailedUnit", "s", [unit])
            elif unit_state["Unit.ActiveState"] != "inactive":
                await self._run_job("StopUnit", "ss", [unit, "replace"])
        return False

    async def list_units(self, pattern: str) -> list[Unit]:
        """Return all units whose names match a pattern."""
        (rows,) = await self._call_manager("ListUnitsByPatterns", "asas", [[], [pattern]])
        return [Unit(row[0], row[3], row[4]) for row in rows if unit_exists(row[2], row[3])]

    async def get_properties(
        self, unit: str, names: Sequence[str], *, loading: bool = False
    ) -> Mapping[str, Any] | None:
        """Return the current properties of a unit, None if it does not exist.

        A name is that of a service property, or `Unit.` plus that of any unit's. With `loading` an
        unused unit is read from its files.
        """
        try:
            # A query to the path of a missing unit would load and unload it.
            (path,) = await self._call_manager("LoadUnit" if loading else "GetUnit", "s", [unit])
            connection = await self._get_connection()
            calls = [
                self._call(connection, (path, _PROPERTIES), "Get", "ss", [*_split_property(name)])
                for name in ("Unit.LoadState", "Unit.ActiveState", *names)
            ]
            answers = await asyncio.gather(*calls)
        except NoSuchUnit:
            return None
        except UnitRefused as error:  # proves nothing about the unit
            raise RuntimeUnavailable(f"systemd does not describe {unit}: {error}") from None
        load, active, *values = (answer[0].value for answer in answers)
        return dict(zip(names, values, strict=True)) if unit_exists(load, active) else None

    async def reload(self) -> None:
        """Reload unit files and drop-ins."""
        await self._call_manager("Reload", "", [])

    async def watch_units(self) -> AsyncGenerator[str]:
        """Yield the name of each unit with an event; "" once the subscription works.

        Raises:
            RuntimeUnavailable: the connection could not be made, or broke.
        """
        connection = await self._get_connection()
        with connection.signals() as signals:
            yield ""
            while (signal := await signals.get()) is not None:
                yield signal.unit
            raise RuntimeUnavailable("the connection to systemd broke")

    async def _run_job(
        self, member: str, signature: str, body: list[Any], descriptors: Sequence[int] = ()
    ) -> str:
        """Make a call that starts a job, and return the job's result.

        Raises:
            CallLost: the connection broke, or the job takes too long.
        """
        connection = await self._get_connection()
        with connection.signals() as signals:  # the signal may precede the answer
            (path,) = await self._call_manager(member, signature, body, descriptors)
            try:
                async with asyncio.timeout(JOB_TIMEOUT_S):
                    while (signal := await signals.get()) is not None:
                        if signal.job == path:
                            return signal.result
            except TimeoutError:
                raise CallLost(f"a job of systemd did not end within {JOB_TIMEOUT_S:g} s") from None
        raise CallLost("the connection to systemd broke during a job")

    async def _call_manager(
        self, member: str, signature: str, body: list[Any], descriptors: Sequence[int] = ()
    ) -> list[Any]:
        connection = await self._get_connection()
        return await self._call(connection, (_PATH, _MANAGER), member, signature, body, descriptors)

    @staticmethod
    async def _call(
        connection: _BusConnection,
        target: tuple[str, str],
        member: str,
        signature: str,
        body: list[Any],
        descriptors: Sequence[int] = (),
    ) -> list[Any]:
        """Call a method of `target`, an object path and an interface, and return its results."""
        path, interface = target
        message = Message(
            destination=_BUS if interface == _BUS else _NAME,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=body,
            unix_fds=list(descriptors),
        )
        async with connection.places:
            call = asyncio.ensure_future(connection.bus.call(message))
            call.add_done_callback(_retrieve_error)
            outcomes: set[asyncio.Future[Any]] = {call, connection.lost}
            await asyncio.wait(
                outcomes, timeout=CALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        if not call.done() or call.cancelled() or call.exception() or not (reply := call.result()):
            call.cancel()
            raise CallLost(f"systemd did not answer {member}")
        if reply.message_type is MessageType.ERROR:
            text = str(reply.body[0]) if reply.body else str(reply.error_name)
            if reply.error_name in _LOST_ERRORS:
                raise CallLost(f"{member}: {text}")
            if reply.error_name == f"{_NAME}.UnitExists":
                raise UnitExists(text)
            error = NoSuchUnit(text) if reply.error_name in _ABSENT_ERRORS else UnitRefused(text)
            error.number = getattr(errno, str(reply.error_name).removeprefix(_ERRNO_PREFIX), 0)
            raise error
        return list(reply.body)

    async def _get_connection(self) -> _BusConnection:
        async with self._connecting:
            if self._connection is None or self._connection.lost.done():
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _BusConnection:
        bus_type = BusType.SESSION if self.is_user else BusType.SYSTEM
        try:
            address = _user_bus_address() if self.is_user else None
            bus = MessageBus(bus_address=address, bus_type=bus_type, negotiate_unix_fd=True)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await bus.connect()
        except Exception as error:  # noqa: BLE001 - the library raises any error of a socket
            raise RuntimeUnavailable(f"cannot connect to systemd over D-Bus: {error}") from None
        connection = _BusConnection(bus)

        def on_message(message: Message) -> None:
            if message.message_type is MessageType.SIGNAL:
                self._on_signal(connection, message)

        bus.add_message_handler(on_message)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                for rule in _MATCH_RULES:
                    await self._call(connection, (_BUS_PATH, _BUS), "AddMatch", "s", [rule])
                (connection.owner,) = await self._call(
                    connection, (_BUS_PATH, _BUS), "GetNameOwner", "s", [_NAME]
                )
                await self._call(connection, (_PATH, _MANAGER), "Subscribe", "", [])
        except BaseException as error:
            bus.disconnect()
            if isinstance(error, (UnitRefused, TimeoutError)):
                raise RuntimeUnavailable(f"cannot subscribe to systemd: {error}") from None
            raise
        return connection

    @staticmethod
    def _on_signal(connection: _BusConnection, message: Message) -> None:
        if message.sender == _BUS and message.member == "NameOwnerChanged":
            connection.bus.disconnect()  # another systemd, which requires a new subscription
            return
        if message.sender != connection.owner:
            return
        if message.member == "JobRemoved":
            _, job, unit, result = message.body
            signal = _Signal(unit, job, result)
        elif message.member == "UnitRemoved":
            signal = _Signal(message.body[0])
        elif (path := message.path or "").startswith(UNIT_PATH):
            signal = _Signal(unit_of_path(path))
        else:
            return
        for queue in connection.queues:
            queue.put_nowait(signal)


_MATCH_RULES = (
    f"type='signal',sender='{_NAME}',interface='{_MANAGER}',member='JobRemoved'",
    f"type='signal',sender='{_NAME}',interface='{_MANAGER}',member='UnitRemoved'",
    f"type='signal',sender='{_NAME}',member='PropertiesChanged',path_namespace='{_PATH}/unit'",
    f"type='signal',sender='{_BUS}',member='NameOwnerChanged',arg0='{_NAME}'",
)
"""The subscribed signals (D-Bus Specification, "Match Rules")."""


def _retrieve_error(call: asyncio.Future[Any]) -> None:
    """Mark the error of an abandoned call as retrieved."""
    if not call.cancelled():
        call.exception()


def _user_bus_address() -> str:
    return os.environ.get("DBUS_SESSION_BUS_ADDRESS") or f"unix:path={user_runtime_folder()}/bus"


def _to_variants(properties: Iterable[UnitProperty]) -> list[list[Any]]:
    return [[name, Variant(signature, value)] for name, signature, value in properties]


def _split_property(name: str) -> tuple[str, str]:
    interface, _, member = name.rpartition(".")
    return (_UNIT if interface else _SERVICE), member
