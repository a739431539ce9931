"""Messages from process 0 to the others arrive whole and in order, and are removed once all have read them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src import distributed
from jax._src.lib import _jax

from tests.parallel.test_meshes import free_address
from uniprefill_jax.parallel import announcements
from uniprefill_jax.parallel.announcements import Announcements

MESSAGES = [b"", *(bytes([number]) * 2**number for number in range(12)), bytes(5 * 2**20)]


@pytest.fixture
def lines(monkeypatch):
    """The two ends of a line, over the runtime's service and two of its clients in this process."""
    address = free_address()
    service = _jax.get_distributed_runtime_service(address, 2)
    clients = [_jax.get_distributed_runtime_client(address, number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.connect(), clients))
    ends = []
    monkeypatch.setattr(Announcements, "_opened", iter((0, 0)))
    for client in clients:
        monkeypatch.setattr(distributed.global_state, "client", client)
        ends.append(Announcements())
    yield ends
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def test_all_arrive_in_order_and_none_is_kept_for_long(lines, monkeypatch) -> None:
    monkeypatch.setattr(announcements, "KEPT", 4)
    sender, receiver = lines
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive() for _ in MESSAGES])
        for message in MESSAGES:
            sender.send(message)
        assert received.result(60) == MESSAGES
    left = receiver._client.key_value_dir_get_bytes("uniprefill/announcements")
    assert [message for _, message in left] == MESSAGES[-(len(MESSAGES) % 4) :]


def test_a_message_is_waited_for_over_and_over(lines, monkeypatch) -> None:
    sender, receiver = lines
    monkeypatch.setattr(announcements, "WAIT_MS", 50)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.receive)
        with pytest.raises(TimeoutError):
            received.result(0.3)
        sender.send(b"late")
        assert received.result(60) == b"late"
