"""What process 0 tells the others while they run: bytes, in order, through the key-value store of JAX's own runtime.

Not through the devices: there a message would wait behind the steps in flight, and whoever waits for one would keep its
device busy. Here a process waits in a remote call, which costs it nothing, and hears of a message at once.
"""

from itertools import count

import jax
from jax._src import distributed  # the store has no public name yet; other libraries use it from here, too

WAIT_MS = 60_000  # for a message, before it is asked for again
LAG_MS = 600_000  # that a process may be behind, compiling for one
KEPT = 1024  # messages, before those that all have read are removed


class Announcements:
    """One line of messages from process 0 to all others.

    Every process of a run opens its lines in the same order; process 0 only sends, the others only receive. Where
    another process has died both raise JaxRuntimeError, unless the runtime ends this one first.
    """

    _opened = count()

    def __init__(self) -> None:
        client = distributed.global_state.client
        assert client is not None, "announcements are for processes that have joined a run"
        self._client = client
        self._line = f"uniprefill/announcements/{next(self._opened)}"
        self._number = 0

    def send(self, message: bytes) -> None:
        """Tell all others; waits for none of them, except that none may be `KEPT` messages behind."""
        self._client.key_value_set_bytes(self._key(), message)
        if self._all_have_read():
            self._client.key_value_delete(f"{self._line}/{self._number // KEPT - 1}/")
        self._number += 1

    def receive(self) -> bytes:
        """The next message, however long it takes to come."""
        while True:
            try:
                message = self._client.blocking_key_value_get_bytes(self._key(), WAIT_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise
        self._all_have_read()
        self._number += 1
        return message

    def _key(self) -> str:
        return f"{self._line}/{self._number // KEPT}/{self._number}"

    def _all_have_read(self) -> bool:
        """Whether all processes have now met, after this message: everything before it was read by all."""
        if not self._number or self._number % KEPT:
            return False
        self._client.wait_at_barrier(f"{self._line}/{self._number}", LAG_MS)
        return True
