"""The way into a run: at its beginning with all others, later by itself, where this worker has been lost from it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lightning_cocod.comm.default_group import alone
from lightning_cocod.comm.door import Signs
from lightning_cocod.comm.members import RUN, Members, root_of


def join(
    rank: int,
    world_size: int,
    *,
    store: Store | None = None,
    backend: str = "gloo",
    timeout: float = 1800.0,
) -> Members | None:
    """In place of ``torch.distributed.init_process_group``, for a worker that may have been in the run before.

    If the run is under way, and this worker has been lost from it, torch's default group is one of this process alone until
    the run lets it in, which is at the end of a meeting of its workers (see ``Asynchronous``)::

        members = join(rank, world_size)
        with ADPSGD(model, optimizer, communicator=Communicator(members=members)) as a:
            ...

    Otherwise the run begins, and the group is the usual one.

    Args:
        rank: of this worker, the same as it had before.
        world_size: number of workers at the run's beginning.
        store: that all workers share, and that outlives this one; by default that of ``MASTER_ADDR`` and ``MASTER_PORT``,
            which rank 0 hosts.
        backend: of the group.
        timeout: of its collectives, in seconds.

    Returns:
        Who is in the run that is under way; None where it begins.
    """
    patience = timedelta(seconds=timeout)
    if store is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    members = _returning(store, rank, backend, timeout)
    if members is None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    return members


def join_again(address: str, port: int, rank: int, backend: str, timeout: float) -> Members | None:
    """Where the run is under way without this worker, wait to be let in: as ``join``. Where it begins, nothing is done.

    Args:
        address: of the store.
        port: of it.
        rank: of this worker, which does not host it.
        backend: of the group.
        timeout: of its collectives, in seconds.
    """
    patience = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, is_master=False, timeout=patience)  # type: ignore[attr-defined]  # it is there
    return _returning(store, rank, backend, timeout)


def _returning(store: Store, rank: int, backend: str, timeout: float) -> Members | None:
    """This rank, in a group of its own, at the door of the run that is under way on this store, if one is."""
    root = root_of(store)
    if not root.check([RUN]):
        return None
    run = root.get(RUN).decode()
    if not Signs(root, f"{RUN} {run}").are_seen():
        return None
    alone(store, backend, timeout)
    return Members(root, run, rank)
