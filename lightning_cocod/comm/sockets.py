"""The only way to wake a thread that is stuck in Gloo: shut the group's own connections down.

Aborting a Gloo group does not interrupt a blocked wait, and destroying it blocks as well; both end only at the group's
time-out, half an hour later. A connection that is shut down makes every pending operation on it fail at once, here and at
the peer. The connections are those that appeared while the group was made.
"""

from __future__ import annotations

import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def _port(fd: int, *, listening: bool) -> int | None:
    """Local port of a socket that listens, or of one that does not; None for any other."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as it:
        internet = it.family in (socket.AF_INET, socket.AF_INET6)
        if internet and bool(it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
            return int(it.getsockname()[1])
    return None


def _sockets() -> dict[int, int]:
    """File descriptor and inode of every open socket of this process; empty where there is no /proc."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself is gone by now
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


class Connections:
    """The connections made inside ``with connections.being_made():``."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}

    @contextmanager
    def being_made(self) -> Iterator[None]:
        """Sockets that appear inside belong to the group."""
        before = _sockets()
        # On the rank that hosts the store, peers may connect to it meanwhile: their heartbeats are not ours to cut.
        served = {_port(fd, listening=True) for fd in before} - {None}
        yield
        made = {fd: inode for fd, inode in _sockets().items() if inode not in before.values()}
        self._made = {fd: inode for fd, inode in made.items() if _port(fd, listening=False) not in served}

    def add(self, connection: socket.socket) -> None:
        """One more that belongs to the group. Another thread may be looking at those before."""
        self._made = {**self._made, connection.fileno(): os.fstat(connection.fileno()).st_ino}

    def address(self) -> str | None:
        """This host's, at which its peers have been reached, with its scope if it has one; None where that cannot be seen.

        Another thread may have connected to somebody else meanwhile: it is the address of most, then one in a network.
        """
        found: Counter[str] = Counter()
        for fd in self._made:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # fails if it is connected to nobody
                    host, _, *of_v6 = connection.getsockname()
                    found[f"{host}%{socket.if_indextoname(of_v6[1])}" if of_v6 and of_v6[1] else host] += 1
        return max(found, key=lambda address: (found[address], not address.startswith("127.")), default=None)

    def are_broken(self) -> bool:
        """Whether the transport has closed one of them, as it does when the peer's end is gone, at work or idle."""
        for fd, inode in self._made.items():
            try:
                if os.fstat(fd).st_ino != inode:
                    return True
            except OSError:
                return True
        return False

    def cut(self) -> None:
        """Shut down those that are still open. Listening sockets are left alone: Gloo ends the process over them."""
        now = _sockets()
        for fd, inode in self._made.items():
            if now.get(fd) != inode:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and not connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    connection.shutdown(socket.SHUT_RDWR)
        self._made = {}
