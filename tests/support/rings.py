"""Rings of workers who are threads of one process."""

import socket
import threading
from contextlib import closing

from lightning_cocod.comm.ring import Ring

LIMIT = 30.0
SILENCE = 20.0  # longer than any test waits


def over_tcp():
    """Two ends of a connection, as those of ``socket.socketpair``."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def ring_of(n, timeout=SILENCE, connected=socket.socketpair):
    """The places of n workers, who are threads here."""
    edges = [connected() for _ in range(n)]  # from worker r to worker r + 1
    for end in (end for edge in edges for end in edge):
        end.setblocking(False)
    return [Ring(edges[r][0], edges[r - 1][1], r, n, timeout) for r in range(n)]


def at_once(*works):
    """The results of all, or their errors, each in a thread of its own."""
    results = [None] * len(works)

    def run(place, work):
        try:
            results[place] = work()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return results
