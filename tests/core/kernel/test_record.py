import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.kernel.record import RecordError, decode, decode_device_label, encode_device_label
from agentd.core.kernel.states import Kernel
from core.kernels import HELD, KERNEL, encoded


def test_records_and_statements_come_back_as_they_were() -> None:
    assert decode(encoded()) == KERNEL
    assert decode_device_label(encode_device_label(HELD)) == HELD
    assert encode_device_label(HELD) == (
        "cuda/cuda0/cuda.device=1@GPU-cuda-0 mem/root/mem=4096B@mem-root"
    )


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_reader_refuses_any_malformed_text(text) -> None:
    for read in (decode, decode_device_label):
        try:
            read(text)
        except RecordError as error:
            assert str(error)


@given(st.integers(0, len(encoded()) - 1), st.integers(0, 255))
def test_a_damaged_record_is_refused_or_read_as_some_record(position, byte) -> None:
    damaged = encoded()[:position] + chr(byte) + encoded()[position + 1 :]
    try:
        assert isinstance(decode(damaged), Kernel)
    except RecordError as error:
        assert str(error)


def test_a_newer_schema_is_refused_and_unknown_members_are_not() -> None:
    text = encoded()
    with pytest.raises(RecordError, match="newer"):
        decode(text.replace('"schema":1', '"schema":2'))
    more = text.replace('"schema":1', '"schema":1,"extra":{"a":[1]}')
    assert decode(more) == KERNEL


@pytest.mark.parametrize("time", ["1e300", "NaN", "Infinity", "-1", '"x"', "null"])
def test_a_time_that_cannot_be_shown_makes_a_record_unreadable(time) -> None:
    text = encoded().replace('"created_at":5.0', f'"created_at":{time}')
    with pytest.raises(RecordError, match="invalid time"):
        decode(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"amount":"1"', '"amount":"0"'),
        ('"amount":"1"', '"amount":"-1"'),
        ('"stable_id":"GPU-cuda-0"', '"stable_id":"a b"'),
        ('"id":"cuda0"', '"id":"\\u001b[31m"'),
        ('"slot":"cuda.device"', '"slot":"?"'),
    ],
)
def test_a_share_of_nothing_makes_a_record_unreadable(before: str, after: str) -> None:
    text = encoded()
    assert before in text
    with pytest.raises(RecordError):
        decode(text.replace(before, after, 1))


@pytest.mark.parametrize("amount", ["0", "-1", "0B"])
def test_a_share_of_nothing_makes_a_statement_unreadable(amount: str) -> None:
    with pytest.raises(RecordError):
        decode_device_label(f"cuda/cuda0/cuda.device={amount}@GPU-cuda-0")
