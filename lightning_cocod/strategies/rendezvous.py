"""Finding the master: a wrong address is an error within ``connect_timeout``, not half an hour of silence."""

from __future__ import annotations

import socket
import time


def check_master(address: str, port: int, rank: int, timeout: float) -> None:
    """Rank 0 checks that the address is its own; the others wait until something listens there.

    Raises:
        ConnectionError: one line that names the address and what to look at.
    """
    look_at = "check MASTER_ADDR and MASTER_PORT"
    if rank == 0:
        try:
            with socket.socket(_family(address)) as probe:
                probe.bind((address, 0))
        except OSError as error:
            raise ConnectionError(
                f"rank 0 runs here, but the master address {address} is not one of this machine's ({error}); {look_at}"
            ) from None
        return
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((address, port), timeout=min(timeout, 5.0)):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"rank {rank} cannot reach the master at {address}:{port} within {timeout:g} s ({error}); "
                    f"{look_at}, and that rank 0 is running"
                ) from None
        time.sleep(0.2)


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None)[0][0]
