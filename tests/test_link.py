"""Links: what goes in comes out, nobody hangs, and whoever is lost is named."""

import json
import logging
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from lightning_cocod.comm.errors import LinkShut, MessageMismatch, PeerLeft, PeerLost
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.link import FIRST_FREE, Link
from lightning_cocod.comm.meeting import meet, own_address

LIMIT = 30.0
SILENCE = 20.0  # longer than any test waits: where a peer is noticed, it is not because of this
DATA = FIRST_FREE
BIG = 3_000_000  # float64 values: more than sockets buffer


@pytest.fixture
def pair():
    """The two ends of a link, seen from ranks 0 and 1, and their ledgers."""
    ledgers = Ledger(), Ledger()
    links = [Link(end, 1 - rank, ledgers[rank]) for rank, end in enumerate(socket.socketpair())]
    yield *links, *ledgers
    for link in links:
        link.close()


class Other(threading.Thread):
    """What the other end does meanwhile; its result or its error."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work, self.result = work, None
        self.start()

    def run(self):
        try:
            self.result = self._work()
        except Exception as error:
            self.result = error

    def end(self):
        self.join(LIMIT)
        assert not self.is_alive()
        return self.result


# Messages


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8])
def test_tensors_of_any_dtype_and_shape_arrive_bit_for_bit(pair, dtype):
    a, b, *_ = pair
    sent = [torch.arange(12).to(dtype).view(3, 4), torch.tensor(5).to(dtype), torch.empty(0, dtype=dtype)]
    got = [torch.zeros_like(t) for t in sent]
    a.send(DATA, sent, step=-3, tag=7, silence=SILENCE)
    header = b.receive(SILENCE)
    assert (header.kind, header.step, header.tag, header.finite) == (DATA, -3, 7, True)
    assert header.nbytes == sum(t.numel() * t.element_size() for t in sent)
    b.take(header, got, SILENCE)
    assert all(torch.equal(s, g) for s, g in zip(sent, got, strict=True))


def test_messages_keep_their_order_and_pings_are_not_among_them(pair):
    a, b, *_ = pair
    for step in range(5):
        a.ping(SILENCE)
        a.send(DATA, step=step, silence=SILENCE)
    assert [b.receive(SILENCE).step for _ in range(5)] == list(range(5))


def swapped(link, value, n=BIG, **options):
    out, into = torch.full((n,), value, dtype=torch.float64), [torch.zeros(n // 2), torch.zeros(3 * n // 2)]
    header = link.swap(DATA, [out], into, silence=SILENCE, **options)
    return header, [t.view(torch.float64) for t in into]


def test_a_swap_is_full_duplex_and_goes_through_memory_of_other_forms(pair):
    a, b, *_ = pair
    other = Other(lambda: swapped(b, 2.0, step=9))
    header, got = swapped(a, 1.0, step=4)
    other_header, other_got = other.end()
    assert (header.step, other_header.step) == (9, 4)
    assert all((t == 2).all() for t in got)
    assert all((t == 1).all() for t in other_got)


def test_two_sends_at_a_time_do_not_get_through_where_a_swap_does(pair):  # the negative control of full duplex
    a, b, *_ = pair
    big = torch.zeros(BIG, dtype=torch.float64)
    other = Other(lambda: b.send(DATA, [big], silence=1.0))
    with pytest.raises(PeerLost, match=r"rank 1 is lost: it was silent for 1 s"):
        a.send(DATA, [big], silence=1.0)
    assert isinstance(other.end(), PeerLost)


def test_every_byte_is_counted_headers_included(pair):
    a, b, first, second = pair
    other = Other(lambda: swapped(b, 2.0))
    swapped(a, 1.0)
    other.end()
    a.ping(SILENCE)
    b.send(DATA, silence=SILENCE)
    a.receive(SILENCE)
    assert first.totals().sent == 24 + 8 * BIG + 24
    assert first.totals().received == second.totals().sent == 24 + 8 * BIG + 24
    assert second.totals().received == 24 + 8 * BIG  # the ping has not been looked at


# What is not finite


def test_content_that_is_not_finite_is_announced_and_never_sent(pair):
    a, b, first, _ = pair
    other = Other(lambda: swapped(b, float("nan"), finite=False))
    header, got = swapped(a, 1.0)
    theirs, theirs_got = other.end()
    assert (header.finite, header.nbytes) == (False, 0)
    assert all((t == 0).all() for t in got)  # untouched
    assert theirs.finite
    assert all((t == 1).all() for t in theirs_got)  # the other direction is as ever
    assert first.totals().received == 24


def test_what_is_not_finite_would_arrive_if_nobody_said_so(pair):  # the negative control
    a, b, *_ = pair
    other = Other(lambda: swapped(b, float("nan")))
    assert all(t.isnan().all() for t in swapped(a, 1.0)[1])
    other.end()


# Disagreement


def test_messages_of_another_length_or_kind_are_told(pair):
    a, b, *_ = pair
    b.send(DATA, [torch.zeros(3)], silence=SILENCE)
    with pytest.raises(MessageMismatch, match=r"rank 1 sent 12 bytes where 16 were expected"):
        a.take(a.receive(SILENCE), [torch.zeros(4)], SILENCE)


def test_a_swap_with_a_message_of_another_kind_is_told(pair):
    a, b, *_ = pair
    b.send(DATA + 1, silence=SILENCE)
    with pytest.raises(MessageMismatch, match=r"rank 1 sent a message of kind 17, not of kind 16"):
        swapped(a, 1.0, n=4)


def test_tensors_that_do_not_lie_in_one_piece_are_refused_before_anything_is_sent(pair):
    a, _, ledger, _ = pair
    with pytest.raises(ValueError, match="contiguous tensors of the CPU"):
        a.send(DATA, [torch.zeros(4, 4).t()], silence=SILENCE)
    assert ledger.totals().sent == 0


# Ends


def test_a_goodbye_is_no_loss(pair):
    a, b, *_ = pair
    b.bye(SILENCE)
    b.close()
    with pytest.raises(PeerLeft, match="rank 1 has left"):
        a.receive(SILENCE)


def tcp():
    """Two connected sockets of the loopback network."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


@pytest.mark.parametrize("last_words", [True, False])
def test_a_goodbye_is_heard_by_somebody_who_only_sends(last_words):
    a, b = (Link(end, 1 - rank, Ledger()) for rank, end in enumerate(tcp()))
    b.ping(SILENCE)
    if last_words:
        b.bye(SILENCE)
    b.close()

    def keeps_pinging():
        for _ in range(1000):  # until the network says that nobody listens any more
            a.ping(SILENCE)
            time.sleep(0.005)

    with pytest.raises(PeerLost) as caught:
        keeps_pinging()
    assert isinstance(caught.value, PeerLeft) == last_words
    a.close()


def test_a_connection_that_closes_is_one(pair):
    a, b, *_ = pair
    b.close()
    with pytest.raises(PeerLost, match="rank 1 is lost: its connection closed") as caught:
        a.receive(SILENCE)
    assert not isinstance(caught.value, PeerLeft)


@pytest.mark.parametrize(
    "use", [lambda link: swapped(link, 1.0), lambda link: link.receive(SILENCE)], ids=["swap", "receive"]
)
def test_shutdown_from_another_thread_wakes_whoever_uses_the_link(pair, use):
    a, b, *_ = pair
    other = Other(lambda: use(a))
    if use is not None:
        while not other.is_alive():
            time.sleep(0.001)
    time.sleep(0.1)  # likely in the middle of it; the outcome is the same if not
    a.shutdown()
    error = other.end()
    assert isinstance(error, LinkShut)
    assert "this rank has shut down its link to rank 1" in str(error)
    with pytest.raises(LinkShut):
        a.ping(SILENCE)
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        swapped(b, 1.0)
    a.shutdown()  # idempotent, like close()
    a.close()
    a.close()
    a.shutdown()


def test_pings_of_one_end_keep_the_other_waiting(pair):
    """With pings it still waits when many times its limit is over; without them it gives up. No clock decides which."""
    a, b, *_ = pair
    other = Other(lambda: a.receive(0.4))
    for _ in range(40):
        b.ping(SILENCE)
        time.sleep(0.05)
    b.send(DATA, step=5, silence=SILENCE)
    assert other.end().step == 5
    with pytest.raises(PeerLost, match=r"silent for 0\.4 s"):
        a.receive(0.4)


def test_limits_that_are_staggered_let_the_one_that_answers_give_up_first(pair):
    """The one that asks has twice the limit: when the other one gives up and closes, that is what it learns."""
    a, b, *_ = pair

    def answers():
        try:
            b.receive(0.5)
        finally:
            b.shutdown()

    other = Other(answers)
    with pytest.raises(PeerLost, match="its connection closed"):
        a.receive(1.5)
    assert "silent for 0.5 s" in str(other.end())


def test_waiting_for_a_header_costs_no_time_of_the_processor(pair):
    a, b, *_ = pair
    spent = []

    def waits():
        a.receive(SILENCE)
        spent.append(time.thread_time())

    other = Other(waits)
    time.sleep(1.0)
    b.send(DATA, silence=SILENCE)
    other.end()
    assert spent[0] < 0.1  # of the processor, whatever the clock said


# Meeting


def all_meet(rank, n, times):
    """Every rank asks and answers every other one, as parameter servers do."""
    others, heard = [r for r in range(n) if r != rank], []
    for _ in range(times):
        asked, answered = meet(
            dist.distributed_c10d._get_default_store(),
            rank,
            "test",
            asks=others,
            answers=others,
            ledger=Ledger(),
            timeout=LIMIT,
        )
        for link in asked.values():
            link.send(DATA, tag=rank, silence=SILENCE)
        heard.append([link.receive(SILENCE).tag for link in answered.values()] == list(answered))
        for links in (asked, answered):
            heard.append(sorted(links) == others and all(link.peer == peer for peer, link in links.items()))
        for link in asked.values():
            link.bye(SILENCE)
        for link in answered.values():
            with pytest.raises(PeerLeft):
                link.receive(SILENCE)
        for link in (*asked.values(), *answered.values()):
            link.close()
    return heard, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_ranks_meet_again_and_again_on_one_store(n):
    once = run_ranks(all_meet, n, 1, timeout=LIMIT)
    again = run_ranks(all_meet, n, 4, timeout=LIMIT)
    assert all(all(heard) for heard, _ in (*once, *again))
    assert all(b - a <= 6 for (_, a), (_, b) in zip(once, again, strict=True))  # descriptors: closed ones do not add up


def strangers(rank, n):
    """Before rank 0 comes, others connect to rank 1 who do not know the token."""
    store = dist.distributed_c10d._get_default_store()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning_cocod").addHandler(handler)
    try:
        if rank == 1:
            _, links = meet(store, rank, "test", asks=[], answers=[0], ledger=Ledger(), timeout=LIMIT)
            got = links[0].receive(SILENCE).step
            links[0].close()
            return got, messages
        store.wait(["lightning_cocod/test/meeting 1/rank 1"])
        host, port, token = json.loads(store.get("lightning_cocod/test/meeting 1/rank 1"))
        ends = []
        for first in (b"0" * 16, b"GET / HTTP/1.0\r\n\r\n" * 1000, bytes.fromhex(token)[:15] + b"\0", b"short"):
            with socket.create_connection((host, port)) as connection:
                connection.sendall(first)
                connection.shutdown(socket.SHUT_WR)
                try:
                    ends.append(connection.recv(1))
                except ConnectionResetError:  # closed with bytes that nobody has read
                    ends.append(b"")
        links, _ = meet(store, rank, "test", asks=[1], answers=[], ledger=Ledger(), timeout=LIMIT)
        links[1].send(DATA, step=3, silence=SILENCE)
        links[1].close()
        return ends, messages
    finally:
        logging.getLogger("lightning_cocod").handlers.remove(handler)


def test_a_wrong_token_is_closed_unread_and_the_right_peer_still_gets_in():
    (ends, _), (got, messages) = run_ranks(strangers, 2, timeout=LIMIT)
    assert ends == [b""] * 4
    assert got == 3
    assert len(messages) == 4
    assert all("did not begin with the token of this run" in text for text in messages)


def nobody_comes(rank, n):
    if rank == 1:
        return []
    store, texts = dist.distributed_c10d._get_default_store(), []
    for sides in ({"asks": [1], "answers": []}, {"asks": [], "answers": [1]}):
        with pytest.raises(PeerLost) as caught:
            meet(store, rank, "test", **sides, ledger=Ledger(), timeout=0.5)
        texts.append(str(caught.value))
    return texts


def test_a_peer_that_does_not_come_is_named():
    assert run_ranks(nobody_comes, 2, timeout=LIMIT)[0] == ["rank 1 has not appeared within 0.5 s"] * 2


def test_the_address_is_that_which_reaches_the_store():
    assert own_address(dist.HashStore()) == "127.0.0.1"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "127.0.0.1"


def harmed(what):
    """A peer in a process of its own, that is killed or stopped in the middle of a swap. How this end's swap ends."""
    ends = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ends[0].close()
        try:
            link = Link(ends[1], 0, Ledger())
            link.send(DATA, silence=SILENCE)
            os.kill(os.getpid(), what)
            signal.pause()
        finally:
            os._exit(0)
    ends[1].close()
    link = Link(ends[0], 1, Ledger())
    try:
        link.receive(SILENCE)
        with pytest.raises(PeerLost) as caught:
            link.swap(DATA, [torch.zeros(BIG)], [torch.zeros(BIG)], silence=SILENCE if what == signal.SIGKILL else 1.0)
        return str(caught.value)
    finally:
        link.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_peer_that_is_killed_in_mid_swap_is_noticed_by_its_connection():
    assert harmed(signal.SIGKILL) == "rank 1 is lost: its connection closed"


def test_a_peer_that_is_stopped_in_mid_swap_is_noticed_by_its_silence():
    assert harmed(signal.SIGSTOP) == "rank 1 is lost: it was silent for 1 s"


def test_where_gloo_is_told_to_encrypt_no_link_is_made(monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    with pytest.raises(RuntimeError, match="gossip would send by links of its own that are not encrypted"):
        meet(dist.HashStore(), 0, "gossip", asks=[1], answers=[], ledger=Ledger(), timeout=LIMIT)
