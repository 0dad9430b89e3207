"""Waits for what a test expects; one in vain says what was expected and what was seen."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(
    read: Callable[[], Any],
    expected: Any = bool,
    *,
    text: str = "",
    within_s: float = 20,
    every_s: float = 0.02,
) -> Any:
    """Read until the value is as expected, which is a value or a predicate; return the value.

    `read` may return an awaitable. `text` is for the message; without it the code stands there.
    """
    value: Any = "nothing"
    try:
        async with asyncio.timeout(within_s):
            while True:
                value = read()
                if inspect.isawaitable(value):
                    value = await value
                if _is_as(expected, value):
                    return value
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise _failure(read, text, within_s, value) from None


def until_blocking(
    read: Callable[[], Any],
    expected: Any = bool,
    *,
    text: str = "",
    within_s: float = 30,
    every_s: float = 0.1,
) -> Any:
    """Do the same in a test without an event loop."""
    end = time.monotonic() + within_s
    while not _is_as(expected, value := read()):
        if time.monotonic() > end:
            raise _failure(read, text, within_s, value)
        time.sleep(every_s)
    return value


def _is_as(expected: Any, value: Any) -> bool:
    return bool(expected(value) if callable(expected) else value == expected)


def _failure(read: Callable[[], Any], text: str, within_s: float, value: Any) -> AssertionError:
    wanted = text or " ".join(inspect.getsource(read).split())
    return AssertionError(
        f"expected within {within_s:g} s: {wanted}; last seen: {repr(value)[:2000]}"
    )
