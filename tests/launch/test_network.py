"""The commands that make a shaped network, and what is said where there can be none."""

import ipaddress

import pytest

from launch import network
from launch.network import NetworkError


def test_every_rank_has_an_address_of_its_own():
    made = [ipaddress.ip_address(address) for address in network.addresses(300)]
    assert made == sorted(set(made)) and len(made) == 300
    subnet = ipaddress.ip_network("10.77.0.0/16")
    assert all(address in subnet and address != subnet.network_address for address in made)


@pytest.mark.parametrize(
    ("rate_gbit", "rate", "burst"),
    [(1, "1000000000bit", "131072b"), (0.5, "500000000bit", "131072b"), (10, "10000000000bit", "625000b")],
)
def test_both_ends_of_a_link_have_its_rate(rate_gbit, rate, burst):
    shape = ["root", "tbf", "rate", rate, "burst", burst, "limit", "2mb"]
    port = network.port_commands(3, "/proc/self/fd/9", rate_gbit)
    assert ["tc", "qdisc", "add", "dev", "port3", *shape] in port
    veth = "ip link add port3 mtu 9000 type veth peer name eth0 mtu 9000 netns /proc/self/fd/9"
    assert veth.split() in port
    rank = network.rank_commands("10.77.0.4", rate_gbit)
    assert ["tc", "qdisc", "add", "dev", "eth0", *shape] in rank
    assert ["ip", "address", "add", "10.77.0.4/16", "dev", "eth0"] in rank
    for commands, device in ((port, "port3"), (rank, "eth0")):  # nothing passes before it is shaped
        up = next(i for i, command in enumerate(commands) if command[:4] == ["ip", "link", "set", device])
        assert [command[0] for command in commands].index("tc") < up


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setattr(network, "_found", lambda program: None if program == "tc" else f"/sbin/{program}")
    assert network.refusal(1) == "needs the program tc (of iproute2)"


def test_who_may_not_make_namespaces_is_told_what_it_takes(monkeypatch):
    def not_permitted(flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(network, "_unshare", not_permitted)
    with pytest.raises(NetworkError, match="^needs root, or a system that lets users make .*: Operation not permitted$"):
        network.Network(2, 1)


def test_a_command_that_fails_is_one_line_with_its_reason(monkeypatch, tmp_path):
    program = tmp_path / "tc"
    program.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.\nNo more.' >&2; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(network, "_found", lambda name: str(program))
    with pytest.raises(NetworkError) as error:
        network._run(network.shape_command("eth0", 1))
    assert str(error.value).startswith("tc qdisc add dev eth0 root tbf rate 1000000000bit ")
    assert str(error.value).endswith(": Error: Specified qdisc kind is unknown. No more.")
