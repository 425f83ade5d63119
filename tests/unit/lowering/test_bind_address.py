"""Where rank 0 listens for the other processes."""

import socket

import pytest

from lowering.xla.joining import bind_address


def resolving_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let every host name resolve to an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", (address, 0))]
    )


def test_an_address_of_this_host_is_bound_alone():
    assert bind_address("127.0.0.1:8476") == "127.0.0.1:8476"
    assert bind_address("localhost:8476") in ("127.0.0.1:8476", "[::1]:8476")


def test_a_name_is_bound_at_its_address(monkeypatch: pytest.MonkeyPatch):
    resolving_to(monkeypatch, "0.0.0.0")  # the only other address that every host can bind
    assert bind_address("host0:8476") == "0.0.0.0:8476"


def test_a_host_that_resolves_its_own_name_to_loopback_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch,
):
    resolving_to(monkeypatch, "127.0.1.1")
    assert bind_address("host0:8476") is None


def test_an_address_that_this_host_does_not_have_is_not_bound(monkeypatch: pytest.MonkeyPatch):
    resolving_to(monkeypatch, "192.0.2.1")  # TEST-NET-1 of RFC 5737
    assert bind_address("proxy:8476") is None


def test_without_an_address_jax_decides():
    assert bind_address("") is None
