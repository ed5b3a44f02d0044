"""Finding each other: what is wrong there is an error within ``connect_timeout``, not half an hour of silence."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_LOOK = 0.05  # seconds between two looks


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
        time.sleep(0.02)


@contextmanager
def joining(address: str, port: int, rank: int, timeout: float) -> Iterator[None]:
    """Around the making of the world group, which waits for a rank that never comes, and for a foreign service at the
    master's port, far longer than ``timeout`` seconds and cannot be interrupted: the process is ended.

    Raises:
        ConnectionError: the port is taken.
    """

    def give_up() -> None:
        print(
            f"[rank {rank}] the ranks have not come together at {address}:{port} within {timeout:g} s: one is missing, or "
            "something else listens at MASTER_PORT; this process ends now",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    patience = threading.Timer(timeout, give_up)
    patience.daemon = True
    patience.start()
    try:
        yield
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConnectionError(f"rank {rank} cannot listen at {address}:{port}: the port is taken; set MASTER_PORT") from None
    finally:
        patience.cancel()
        patience.join()


def store_outlives_ranks() -> bool:
    """Whether torchrun's agent hosts the store: it keeps it, and what is in it, when it restarts the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_afresh(backend: str, rank: int, world_size: int, timeout: float, device: torch.device | None) -> None:
    """What Lightning does, in a part of the store in which restarted ranks do not find those that were there before.

    Args:
        backend: of the world group.
        rank: this one.
        world_size: number of ranks.
        timeout: of the group's collectives, in seconds.
        device: to which the group is bound, if to any.
    """
    patience = timedelta(seconds=timeout)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    part = fresh_part(store, rank, world_size)
    dist.init_process_group(backend, store=part, rank=rank, world_size=world_size, timeout=patience, device_id=device)


def fresh_part(store: Store, rank: int, world_size: int) -> Store:
    """A part of the store that no earlier ranks have written to: their addresses lead nowhere.

    Rank 0 chooses its name and answers whoever asks, with a question nobody has asked before, until all have come. Waits
    for ever: see ``joining``.
    """
    ask, answer = (f"lightning_cocod/{word} {{}}".format for word in ("question", "answer"))
    if rank > 0:
        question, reply = uuid.uuid4().hex, ["", ""]
        store.set(ask(rank), question)
        while reply[0] != question:
            time.sleep(_LOOK)
            reply = store.get(answer(rank)).decode().split() if store.check([answer(rank)]) else reply
        part = PrefixStore(reply[1], store)
        part.set(f"here {rank}", "")
        return part
    name = uuid.uuid4().hex
    part = PrefixStore(name, store)
    missing = set(range(1, world_size))
    while missing:
        for other in missing:
            if store.check([ask(other)]):
                store.set(answer(other), f"{store.get(ask(other)).decode()} {name}")
        time.sleep(_LOOK)
        missing = {other for other in missing if not part.check([f"here {other}"])}
    return part


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None)[0][0]
