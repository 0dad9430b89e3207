"""Durations as people write them; times have their tests in tests/rpc/test_requests.py."""

import pytest

from agentd.core.times import parse_duration_s

DAY_S = 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("90s", 90),
        ("1.5s", 1.5),
        ("10m", 600),
        ("1h30m", 5400),
        ("2d1h", 2 * DAY_S + 3600),
        ("1d1h1m1.25s", DAY_S + 3661.25),
        ("9999d999999h999999m999999999s", 9999 * DAY_S + 999999 * 3660 + 999999999),
    ],
)
def test_duration_is_the_sum_of_its_parts(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "5", "s", "m", "-5s", "+5s", "1 h", "1m1h", "1.5h", "1_0s", "٣s", "1e3s", "nans",
     "infs", "10M", "1w", "5ss", "9" * 10 + "s", "1h\n"],
)  # fmt: skip
def test_other_text_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 90s or 1h30m"):
        parse_duration_s(text)
