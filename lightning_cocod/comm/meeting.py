"""How two ranks find each other: addresses through the store, tokens against mistaken identity, then a link.

Whoever answers listens at an address of its own and puts that, with a random token, into the store. Whoever asks connects
and begins with the token; a connection that begins with anything else is closed before another byte of it is read. The keys
carry the number of the meeting, so a second one on the same store never reads addresses of the first.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_cocod.comm.errors import PeerLost, first_line
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.link import HELLO, Link

_log = logging.getLogger(__name__)
TOKEN = 16
"""Bytes of a token."""
_LOOK, _PART = 0.02, 0.5  # seconds between two looks into the store, and between two checks
_GREETING = 10.0  # seconds in which somebody who has connected must have sent the token


def gloo_encrypts() -> bool:
    """Whether what Gloo sends is to be encrypted, which links are not."""
    return os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS"


def meet(
    store: Store,
    rank: int,
    name: str,
    *,
    asks: Sequence[int],
    answers: Sequence[int],
    ledger: Ledger,
    timeout: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Link], dict[int, Link]]:
    """Connect this rank with those that it asks and with those that it answers. All of them call it, equally often.

    Args:
        store: that all ranks share. A clone of its connection is used.
        rank: this one.
        name: of what the links are for.
        asks: ranks to which this one connects.
        answers: ranks that connect to this one. A rank may be in both: then there are two links, one for each direction.
        ledger: of the links.
        timeout: seconds in which all of them must have appeared.
        check: called now and then meanwhile; what it raises ends the waiting.

    Returns:
        The links to those that it asks, and to those that it answers, by rank.

    Raises:
        PeerLost: one has not appeared, or cannot be reached; it is named.
        RuntimeError: Gloo is told to encrypt.
    """
    if gloo_encrypts():
        raise RuntimeError(
            f"GLOO_DEVICE_TRANSPORT=TCP_TLS, and {name} would send by links of its own that are not encrypted: "
            "choose a strategy whose ranks are in step, or unset it where the network is trusted"
        )
    deadline = time.monotonic() + timeout
    store = store.clone()
    number = store.add(f"lightning_cocod/{name}/meetings of rank {rank}", 1)  # the same on all: each counts its own

    def key(of: int) -> str:
        return f"lightning_cocod/{name}/meeting {number}/rank {of}"

    asked: dict[int, Link] = {}
    answered: dict[int, Link] = {}
    try:
        with closing(listen(own_address(store), len(answers))) as listener:
            token = secrets.token_bytes(TOKEN)
            if answers:
                host, port = listener.getsockname()[:2]
                store.set(key(rank), json.dumps([host, port, token.hex()]))
            for peer in asks:  # none of them waits to be answered before it answers others, so no circle can close
                asked[peer] = _connect(store, key(peer), rank, peer, ledger, deadline, timeout, check)
            while len(answered) < len(answers):
                missing = [peer for peer in answers if peer not in answered]
                link = _accept(listener, token, missing, ledger, deadline, timeout, check)
                if link is not None:
                    answered[link.peer] = link
                    link.send(HELLO, tag=rank, silence=_GREETING)
        for peer, link in asked.items():
            hello = link.receive(max(0.1, deadline - time.monotonic()))
            if (hello.kind, hello.tag) != (HELLO, peer):
                raise PeerLost(f"rank {peer} cannot be reached: somebody else answers at its address")
    except BaseException:
        for link in (*asked.values(), *answered.values()):
            link.close()
        raise
    return asked, answered


def own_address(store: Store) -> str:
    """The address through which this host reaches the store's; the loopback address if the store is in no network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host and port:
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: it only looks the route up
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def listen(host: str, peers: int) -> socket.socket:
    """A socket that listens at a free port of this host's address ``host`` for at least ``peers`` connections."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]  # it knows scopes
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(peers + 16)  # peers connect before they are accepted, and strangers may
        undo.pop_all()
    return listener


def _connect(
    store: Store,
    key: str,
    rank: int,
    peer: int,
    ledger: Ledger,
    deadline: float,
    timeout: float,
    check: Callable[[], None],
) -> Link:
    host, port, token = json.loads(_value(store, key, peer, deadline, timeout, check))
    with ExitStack() as undo:
        try:
            patience = max(0.1, deadline - time.monotonic())
            connection = undo.enter_context(socket.create_connection((host, port), timeout=patience))
            connection.sendall(bytes.fromhex(token))
        except OSError as error:
            raise PeerLost(f"rank {peer} cannot be reached at {host} port {port}: {first_line(error)}") from None
        undo.pop_all()
    link = Link(connection, peer, ledger)
    link.send(HELLO, tag=rank, silence=_GREETING)
    return link


def _value(store: Store, key: str, peer: int, deadline: float, timeout: float, check: Callable[[], None]) -> bytes:
    try:
        while not store.check([key]):  # waiting in the store would be logged as a time-out, twice a second
            if time.monotonic() >= deadline:
                break
            check()
            time.sleep(_LOOK)
        else:
            return store.get(key)
    except PeerLost:
        raise
    except RuntimeError:  # what torch's store raises
        pass
    raise PeerLost(f"rank {peer} has not appeared within {timeout:g} s")


def _accept(
    listener: socket.socket,
    token: bytes,
    missing: list[int],
    ledger: Ledger,
    deadline: float,
    timeout: float,
    check: Callable[[], None],
) -> Link | None:
    """The next of the missing ranks, or None where it was somebody else, or nobody yet."""
    connection = admit(listener, token)
    if connection is None:
        if time.monotonic() >= deadline:
            raise PeerLost(f"rank {missing[0]} has not appeared within {timeout:g} s")
        check()
        return None
    link = Link(connection, missing[0], ledger)
    try:
        hello = link.receive(_GREETING)
    except PeerLost:
        link.close()
        return None
    if hello.kind != HELLO or hello.tag not in missing:
        link.close()
        return None
    link.peer = hello.tag
    return link


def admit(listener: socket.socket, token: bytes) -> socket.socket | None:
    """The next connection, if it begins with the token; None where it does not, or nobody has come for a moment."""
    listener.settimeout(_PART)
    try:
        connection, address = listener.accept()
    except TimeoutError:
        return None
    if _has_token(connection, token):
        return connection
    _log.warning("a connection from %s did not begin with the token of this run: closed", address[0])
    connection.close()
    return None


def _has_token(connection: socket.socket, token: bytes) -> bool:
    """Whether it begins with the token. No more than that is read."""
    limit = time.monotonic() + _GREETING
    got = b""
    with suppress(OSError):
        while len(got) < TOKEN and (left := limit - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(TOKEN - len(got))
            if not part:
                break
            got += part
    return hmac.compare_digest(got, token)
