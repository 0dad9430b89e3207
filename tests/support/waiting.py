"""Waits for what a test expects; one in vain says what was expected and what was seen."""

import asyncio
import inspect
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
                if expected(value) if callable(expected) else value == expected:
                    return value
                await asyncio.sleep(every_s)
    except TimeoutError:
        wanted = text or " ".join(inspect.getsource(read).split())
        shown = repr(value)
        raise AssertionError(
            f"expected within {within_s:g} s: {wanted}; last seen: {shown[:2000]}"
        ) from None
