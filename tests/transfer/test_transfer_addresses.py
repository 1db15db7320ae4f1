"""How a subscriber finds a publisher: addresses, hosts, protocols, catalogues."""

import socket
import threading
import time

import numpy as np
import pytest

from kos.comm.control.wire import MAX_MESSAGE
from kos.errors import InvalidArgument, KosError, TransferError, TransferTimeout
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, exchange, read_catalogue
from kos.transfer.exchange import PROTOCOL, PURPOSE, answered, network, receive
from tests.transfer.layouts import WHOLE
from tests.transfer.publishing import arrays_of, publishing


def test_what_listens_there_is_no_publisher():
    """It accepts, and waits for the caller to speak, as a web server does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransferTimeout, match=f"{address}, which never .* accepted the connection, but did not"):
            read_catalogue(address, 1)



def test_an_unknown_host_is_an_error_at_once(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    expected = "publisher at nowhere:29600: expected the name of a host, .* not known"
    with pytest.raises(TransferError, match=expected) as raised:
        read_catalogue("nowhere:29600", 2)
    assert type(raised.value) is TransferError  # and no timeout
    with pytest.raises(InvalidArgument, match="expected an address of this host, .*, got nowhere .*not known"):
        Publisher(None, arrays_of(WHOLE), "nowhere:0")



def test_an_address_of_another_host_is_refused(monkeypatch):
    """Of a network that is reserved for documentation.  One that leads here is right with KOS_BIND."""
    def make(comm):
        with pytest.raises(KosError) as raised:
            Publisher(comm, arrays_of(WHOLE), "192.0.2.1:0")
        return str(raised.value)

    monkeypatch.delenv("KOS_BIND", raising=False)
    assert all("address: expected an address of this host, or KOS_BIND" in text for text in spawn(make, 2))
    monkeypatch.setenv("KOS_BIND", "127.0.0.1")
    with Publisher(None, arrays_of(WHOLE), "192.0.2.1:0") as publisher:
        port = publisher.address.removeprefix("192.0.2.1:")
        assert len(read_catalogue(f"127.0.0.1:{port}").ranks) == 1



def test_another_protocol_is_refused():
    """Each side names both versions."""
    with publishing([WHOLE]) as ranks:
        host, port = ranks.address.split(":")
        deadline = time.monotonic() + 30
        connection = network(host).call(host, int(port), PURPOSE, 0, 1, deadline)
        exchange.send(connection, {"ask": "catalogue", "protocol": PROTOCOL + 1}, "", deadline)
        answer = receive(connection, deadline)
        connection.close()
        assert answer["error"] == f"expected protocol {PROTOCOL} of kos.transfer, got {PROTOCOL + 1}"
        with pytest.raises(TransferError, match=f"expected protocol {PROTOCOL} of kos.transfer, got {PROTOCOL + 1}"):
            answered({**answer, "protocol": PROTOCOL + 1}, "")



def test_a_replica_on_the_same_host_is_read(monkeypatch):
    """A subscriber on another host takes turns."""
    hosts = dict[int, str]()
    monkeypatch.setattr(exchange, "place", lambda: hosts[threading.get_ident()])

    def run(comm):
        hosts[threading.get_ident()] = f"host {comm.rank}"
        with Publisher(comm, arrays_of(WHOLE)) as publisher:
            for host, sources in ((f"host {comm.rank}", {comm.rank}), ("another host", {0, 1})):
                hosts[threading.get_ident()] = host
                with Subscriber(publisher.address, arrays_of(WHOLE)) as subscriber:
                    assert {source for source, _ in subscriber.plan().traffic()} == sources
            comm.barrier()

    spawn(run, 2, timeout=60)



def test_a_catalogue_that_is_longer_than_a_message():
    """As that of thousands of ranks: here, of a name."""
    name = "w" * (MAX_MESSAGE + 1)
    x, y = (np.full(3, value, np.float32) for value in (1, 0))
    with Publisher(None, {name: (x, Placement.whole((3,), "w"))}) as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, {"w": (y, Placement.whole((3,)))}, transport="shared") as subscriber:
            assert subscriber.update(60).version == 1
    assert (y == 1).all()
