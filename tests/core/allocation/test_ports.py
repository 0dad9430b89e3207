import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation.ports import FIRST_CHOICE, Port, PortRange, assign_ports, port_problems
from agentd.errors import InsufficientResource

SMALL = PortRange("127.0.0.1", 5000, 5003)


def hosts(*ports: Port, holders=(), busy=(), allowed=SMALL) -> list[int | None]:
    held = {("tcp", port): "k0" for port in holders}
    return [port.host for port in assign_ports(ports, held, busy, allowed)]


@pytest.mark.parametrize(
    ("ports", "holders", "busy", "expected"),
    [
        ([Port(80)], [], [], [5000]),
        ([Port(80), Port(81)], [5000], [], [5001, 5002]),
        ([Port(80)], [5000], [("tcp", 5001)], [5002]),
        ([Port(80), Port(80, 5000)], [], [], [5001, 5000]),
        ([Port(53, None, "udp")], [5000], [], [5000]),
        ([Port(80, 5003), Port(53, 5003, "udp")], [], [], [5003, 5003]),
        ([], [5000], [], []),
    ],
)
def test_the_lowest_free_port_is_given(ports, holders, busy, expected) -> None:
    assert hosts(*ports, holders=holders, busy=busy) == expected


@pytest.mark.parametrize(
    ("ports", "where", "why"),
    [
        ([Port(80, 4999)], "ports.0.host", "outside publish-ports 5000-5003"),
        ([Port(80), Port(80, 5004)], "ports.1.host", "outside publish-ports"),
        ([Port(80, 5000), Port(81, 5000)], "ports.0.host", "duplicate host port"),
    ],
)
def test_impossible_ports_are_named(ports, where, why) -> None:
    problem = next(port_problems(ports, SMALL))
    assert problem.where == where
    assert why in problem.why


@pytest.mark.parametrize(
    ("ports", "holders", "busy", "reason"),
    [
        ([Port(80, 5000)], [5000], [], "held by kernel k0"),
        ([Port(80, 5001)], [], [("tcp", 5001)], "in use outside agentd"),
        ([Port(80)] * 5, [], [], "every port is in use"),
    ],
)
def test_busy_ports_are_explained(ports, holders, busy, reason) -> None:
    with pytest.raises(InsufficientResource) as caught:
        hosts(*ports, holders=holders, busy=busy)
    assert caught.value.slot == "ports"
    assert caught.value.explain[0]["reason"] == reason


def test_ports_start_above_registered_services() -> None:
    assert hosts(Port(80), allowed=PortRange()) == [FIRST_CHOICE]
    assert list(PortRange("", FIRST_CHOICE - 1, FIRST_CHOICE + 1).in_order()) == [
        FIRST_CHOICE, FIRST_CHOICE + 1, FIRST_CHOICE - 1
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from(["tcp", "udp"]), st.none() | st.integers(5000, 5003)), max_size=6
    ),
    st.sets(st.integers(5000, 5003)),
    st.sets(st.tuples(st.sampled_from(["tcp", "udp"]), st.integers(5000, 5003))),
)
def test_no_port_is_ever_given_twice(wanted, holders, busy) -> None:
    ports = [Port(80 + n, host, protocol) for n, (protocol, host) in enumerate(wanted)]
    held = {("tcp", port): "k0" for port in holders}
    if list(port_problems(ports, SMALL)):
        return
    try:
        given_ports = assign_ports(ports, held, busy, SMALL)
    except InsufficientResource:
        return
    taken = [(port.protocol, port.host) for port in given_ports]
    assert len(taken) == len(set(taken)) == len(ports)
    assert not set(taken) & {*held, *busy}
    assert all(port.address == "127.0.0.1" and port.host in SMALL for port in given_ports)
