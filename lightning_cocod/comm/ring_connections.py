"""How the ranks of a group close a ring: each connects to the next one, at an address that the group has told it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch.distributed as dist

from lightning_cocod.comm.errors import PeerLost, first_line
from lightning_cocod.comm.meeting import TOKEN, admit, listen


def close_ring(
    group: dist.ProcessGroup, address: str, rank: int, ranks: Sequence[int], timeout: float, check: Callable[[], None]
) -> tuple[socket.socket, socket.socket]:
    """Collective among the ranks of a group.

    Args:
        group: theirs, over Gloo.
        address: at which the others reach this host.
        rank: this one.
        ranks: of the group, in the order of the ring.
        timeout: seconds in which a neighbour must have connected.
        check: called now and then meanwhile; what it raises ends the waiting.

    Returns:
        A connection to the next rank, and one to the one before.

    Raises:
        PeerLost: a neighbour cannot be reached, or has not connected; it is named.
    """
    try:
        after, before = _connected(group, address, rank, ranks, timeout, check)
    except OSError as error:
        raise PeerLost(f"no ring can be closed at {address}: {first_line(error)}") from None
    return after, before


def _connected(
    group: dist.ProcessGroup, address: str, rank: int, ranks: Sequence[int], timeout: float, check: Callable[[], None]
) -> tuple[socket.socket, socket.socket]:
    deadline = time.monotonic() + timeout
    place, n = ranks.index(rank), len(ranks)
    following, preceding = ranks[(place + 1) % n], ranks[place - 1]
    with closing(listen(address, 1)) as listener:
        token = secrets.token_bytes(TOKEN)
        told: list[Any] = [None] * n
        dist.all_gather_object(told, (*listener.getsockname()[:2], token), group=group)
        host, port, theirs = told[(place + 1) % n]
        _, percent, scope = address.partition("%")  # of a link-local address: the interface is called what it is called here
        with ExitStack() as undo:
            # The next rank need not have accepted anybody to be connected to, so no circle of waiting closes.
            try:
                after = undo.enter_context(socket.create_connection((f"{host}{percent}{scope}", port), timeout=timeout))
                after.sendall(theirs)
            except OSError as error:
                why = first_line(error)
                raise PeerLost(f"rank {following} cannot be reached at {host} port {port}: {why}") from None
            while (before := admit(listener, token)) is None:
                if time.monotonic() >= deadline:
                    raise PeerLost(f"rank {preceding} has not connected within {timeout:g} s")
                check()
            undo.enter_context(before)
            for connection in (after, before):
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            undo.pop_all()
    return after, before
