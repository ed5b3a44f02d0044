"""Workers that go on without one that is lost, and take in one that has come back."""

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_raw
from torch import nn

from lightning_cocod import ADPSGD, SharedEpoch
from lightning_cocod.comm import Communicator, PeerLost, communicator
from lightning_cocod.comm.joining import join
from lightning_cocod.comm.members import RUN, Members

LIMIT = 90.0


def net(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=torch.float64)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def eventually(condition):
    deadline = time.monotonic() + LIMIT / 2
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def train(a, model, steps):
    for _ in range(steps):
        model(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
        a.step()
        a.optimizers[0].zero_grad()
        time.sleep(0.001)


def exchanges(a, model):
    """Whoever asks is averaged with others, whoever its neighbours have been; the others answer until all have."""
    train(a, model, 5)
    if a.comm.world_size > 1 and a.comm.rank % 2 == 0:
        before = a.gossip.exchanges
        assert eventually(lambda: train(a, model, 1) or a.gossip.exchanges > before)
    dist.barrier()


def loses(rank, n, victims, options):
    """Some ranks end without a word, one after the other; the others meet after each, and train on."""
    model = net(rank)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), timeout=20.0, **options)
    seen = []
    with a:
        train(a, model, 20)
        for number, victim in enumerate(victims):
            if rank == victim:
                os._exit(3)
            train(a, model, 20)
            with a.consensus():
                mean = flat(model)
                everyone = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, mean)
                assert all(torch.equal(other, mean) for other in everyone)
            assert a.comm.world_size == dist.get_world_size() == n - number - 1
            assert a.comm.rank == dist.get_rank() == sorted({*range(n)} - {*victims[: number + 1]}).index(rank)
            exchanges(a, model)
            seen.append(a.meetings)
    return seen, flat(model), a.t


@pytest.mark.parametrize(
    ("n", "victims", "options"),
    [
        (2, [1], {}),
        (3, [1], {"topology": [(0, 1), (2, 1)]}),
        (4, [1, 3, 2], {}),
        (4, [2], {"compression": "int8"}),
        (5, [3, 1], {"topology": "exponential"}),
    ],
)
def test_the_others_go_on_until_the_last_one(n, victims, options):
    results = run_ranks(loses, n, victims, options, timeout=LIMIT, expect=dict.fromkeys(victims, "died"))
    living = [result for rank, result in enumerate(results) if rank not in victims]
    assert all(torch.equal(model, living[0][1]) for _, model, _ in living)
    assert [seen for seen, _, _ in living] == [living[0][0]] * len(living)


@pytest.fixture
def store():
    """One that outlives every rank."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield host.port
    del host


def comes_back(worker, n, port, leaves):
    """n − 1 ranks, one of which ends; the last worker is that rank's second life."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if second_life := worker == n - 1:
        store.wait(["ended"])
    members = join(leaves if second_life else worker, n - 1, store=store)
    assert (members is not None) == second_life
    model = net(worker)
    communicator = Communicator(members=members, timeout=20.0)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), communicator=communicator)
    with a:
        if not second_life:
            train(a, model, 10)
            if worker == leaves:
                store.set("ended", "")
                os._exit(3)
            sizes = []
            while a.comm.members.generation < 2:  # one without the other, one with it
                train(a, model, 10)
                with a.consensus():
                    sizes.append(a.comm.world_size)
            assert n - 2 in sizes
        place, joined = a.meetings, flat(model)
        assert a.comm.world_size == n - 1
        assert a.comm.rank == a.comm.members.names.index(leaves if second_life else worker)
        exchanges(a, model)
        with a.consensus():
            mean = flat(model)
            everyone = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mean)
            assert all(torch.equal(other, mean) for other in everyone)
    dist.destroy_process_group()
    return place, joined, flat(model)


@pytest.mark.parametrize(("n", "leaves"), [(2, 0), (2, 1), (3, 0), (4, 2)])
def test_a_rank_that_comes_back_is_let_in_at_the_end_of_a_meeting_with_the_weights_of_another(n, leaves, store):
    results = run_ranks(comes_back, n + 1, store, leaves, init=False, timeout=LIMIT, expect={leaves: "died"})
    *others, back = [result for result in results if result is not None]
    assert all(place == back[0] for place, _, _ in others)
    assert any(torch.equal(joined, back[1]) for _, joined, _ in others)
    assert all(torch.equal(end, back[2]) for _, _, end in others)


def refused(worker, n, port):
    """The last worker claims to be one that lives."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = None
    if claims := worker == n - 1:
        store.wait(["begun"])
    members = join(0 if claims else worker, n - 1, store=store)
    model = net(worker)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), communicator=Communicator(members=members, timeout=20.0))
    said = None
    if claims:
        with pytest.raises(PeerLost) as error, a:
            pass
        said = str(error.value)
        store.set("refused", "")
    else:
        with a:
            store.set("begun", "")
            while not a.comm.who(store.check(["refused"]), a.subject("refused?")):
                train(a, model, 5)
                with a.consensus():
                    pass
            assert a.comm.world_size == n - 1
    dist.destroy_process_group()
    return said


def test_one_that_claims_to_be_a_rank_that_lives_is_refused(store):
    *_, said = run_ranks(refused, 3, store, init=False, timeout=LIMIT)
    assert said == "rank 0 cannot be taken in: there is one, and it lives"


def too_late(worker, n, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if worker == n - 1:
        store.wait(["ended"])
        members = join(1, n - 1, store=store)
        store.set("waits", "")
    else:
        members = join(worker, n - 1, store=store)
    model = net(worker)
    communicator = Communicator(members=members, timeout=3.0 if worker == n - 1 else 20.0)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), communicator=communicator)
    said = None
    if worker == n - 1:
        with pytest.raises(PeerLost) as error, a:
            pass
        said = str(error.value)
    else:
        with a:
            train(a, model, 5)
            if worker == 1:
                store.set("ended", "")
                os._exit(3)
            store.wait(["waits"])
    dist.destroy_process_group()
    return said


def test_one_that_comes_back_after_the_last_meeting_is_told(store):
    _, _, said = run_ranks(too_late, 3, store, init=False, timeout=LIMIT, expect={1: "died"})
    assert said == "rank 1 waited to be taken in, and the run has ended"


def begins_again(worker, n, port, life):
    """All ranks have ended: what is left of them in the store is no run."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    assert join(worker, n, store=dist.PrefixStore(f"life {life}", store)) is None
    model = net(worker)
    with ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), timeout=20.0) as a:
        train(a, model, 5)
        if life == 0:
            os._exit(3)
    dist.destroy_process_group()
    return flat(model)


def test_a_run_of_which_nobody_is_left_is_not_waited_for(store):
    run_ranks(begins_again, 2, store, 0, init=False, timeout=LIMIT, expect={0: "died", 1: "died"})
    one, other = run_ranks(begins_again, 2, store, 1, init=False, timeout=LIMIT)
    assert torch.equal(one, other)


def test_one_that_the_others_have_gone_on_without_is_told(store):
    """It was silent for too long, and lives."""
    client = dist.TCPStore("127.0.0.1", store, is_master=False)
    run = [Members(client, "a run", name) for name in range(2)]
    for members in run:
        members.names = (0, 1)
    run[0].elect(lambda: {0}, lets_in=False)
    assert run[0].names == (0,)
    with pytest.raises(PeerLost, match="the others took rank 1 for lost, and have gone on without it") as error:
        run[1].elect(lambda: {0, 1}, lets_in=False)
    assert error.value.for_good


def fails_after_a_loss(rank, n):
    """Rank 1 ends without a word; rank 2 has heard of that when its own training fails."""
    model = net(rank)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), timeout=20.0)
    with a:
        train(a, model, 10)
        if rank == 1:
            os._exit(3)
        assert eventually(lambda: train(a, model, 1) or a.comm.losses.error is not None)
        if rank == 2:
            raise ValueError("my own bug")
        with a.consensus():
            pass
        return a.comm.world_size


def test_a_rank_that_fails_after_a_loss_is_lost_as_well():
    outcomes = run_ranks_raw(fails_after_a_loss, 3, timeout=LIMIT, grace=40)
    assert [outcome.status for outcome in outcomes] == ["ok", "died", "error"]
    assert outcomes[0].value == 1
    assert "ValueError: my own bug" in outcomes[2].traceback


def dies_while_others_come_together(rank, n, when):
    """Rank 1 ends without a word, and rank 3 in the middle of what follows."""
    model = net(rank)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), timeout=20.0)
    with a, mock.patch.object(communicator, "_MAKING", 3.0):
        train(a, model, 10)
        if rank == 1:
            os._exit(3)
        if rank == 3:
            setattr(*when, lambda *_, **__: os._exit(3))
        with a.consensus():
            mean = flat(model)
        exchanges(a, model)
    return a.comm.rank, mean


@pytest.mark.parametrize(
    "when",
    [(Members, "elect"), (Members, "gather"), (Communicator, "_begin_life"), (Communicator, "_connect"), (Members, "agree")],
    ids=lambda when: when[1],
)
def test_one_that_dies_while_the_others_come_together_is_lost_as_well(when):
    results = run_ranks(dies_while_others_come_together, 4, when, timeout=LIMIT, expect={1: "died", 3: "died"})
    living = [result for result in results if result is not None]
    assert [rank for rank, _ in living] == [0, 1]
    assert torch.equal(living[0][1], living[1][1])


def of_another_kind(worker, n, port):
    """Rank 1 comes back with another model."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if second_life := worker == n - 1:
        store.wait(["ended"])
    members = join(1 if second_life else worker, n - 1, store=store)
    model = nn.Linear(3, 3, dtype=torch.float64) if second_life else net(worker)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), communicator=Communicator(members=members, timeout=20.0))
    said = None
    try:
        with a:
            train(a, model, 10)
            if worker == 1:
                store.set("ended", "")
                os._exit(3)
            while not store.check(["refused"]):
                train(a, model, 5)
                with a.consensus():
                    pass
    except PeerLost as lost:
        said = str(lost)
        store.set("refused", "")
    dist.destroy_process_group()
    return said


def test_one_that_comes_back_with_another_model_is_refused_and_the_run_goes_on(store):
    first, _, said = run_ranks(of_another_kind, 3, store, init=False, timeout=LIMIT, expect={1: "died"})
    assert first is None
    assert said == "rank 1 cannot be taken in: its model or its options are others than those of the run"


class Watched:
    """A store, and whether a run could be found in it whenever something was set."""

    def __init__(self, store):
        self.store, self.found = store, []

    def set(self, key, value):
        self.store.set(key, value)
        self.found.append(self.store.check([RUN]))

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_whoever_knows_that_a_run_has_begun_finds_it_again(store):
    watched = Watched(dist.TCPStore("127.0.0.1", store, is_master=False))
    Members.founding(watched, 0, 2).leave()
    assert watched.found == [True, True]


class EndsWithALoss(ADPSGD):
    outlives = False


def not_outlived(rank, n):
    model = net(rank)
    with EndsWithALoss(model, torch.optim.SGD(model.parameters(), 0.01), timeout=20.0) as a:
        train(a, model, 10)
        if rank == 1:
            os._exit(3)
        with a.consensus():
            pass


def test_where_a_loss_is_not_outlived_the_next_meeting_raises():
    """The negative control."""
    first, second = run_ranks_raw(not_outlived, 2, timeout=LIMIT, grace=40)
    assert second.status == "died"
    assert first.status == "error"
    assert "PeerLost: rank 1 is lost" in first.traceback


def shares(worker, n, port, epochs):
    """The plain loop of docs/asynchrony.md: epochs that are shared, of which rank 1 dies in the first."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if second_life := worker == n - 1:
        store.wait(["ended"])
    members = join(1 if second_life else worker, n - 1, store=store)
    model = net(worker)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), 0.01), communicator=Communicator(members=members, timeout=20.0))
    batches, seen = SharedEpoch(40, batch_size=2), {}
    with a:
        for epoch in range(a.meetings, epochs):
            batches.resume(epoch, ())
            for number, batch in enumerate(batches):
                if worker == 1:
                    store.set("ended", "")
                    os._exit(3)
                if epoch == 1 and number == 0 and a.comm.world_size < n - 1:
                    assert eventually(a.comm.members.somebody_waits)
                seen.setdefault(epoch, []).extend(batch)
                train(a, model, 1)
            with a.consensus():
                pass
    dist.destroy_process_group()
    return seen


def test_epochs_are_shared_by_those_that_there_are(store):
    results = run_ranks(shares, 4, store, 4, init=False, timeout=LIMIT, expect={1: "died"})
    living = [seen for seen in results if seen is not None]
    for epoch in range(4):
        seen = sorted(sample for of_one in living for sample in of_one.get(epoch, []))
        assert len(seen) == 38 if epoch == 0 else seen == list(range(40))  # the batch that the rank had is lost with it
    assert set(living[-1]) in ({1, 2, 3}, {2, 3})


@pytest.mark.parametrize(
    "meets",
    [
        lambda members: members.settle("what?", "this"),
        lambda members: members.elect(lambda: {0, 1}, lets_in=False),
        lambda members: members.agree(True, lambda: False),
        lambda members: members.wait(LIMIT),
    ],
    ids=["settles", "elects", "agrees", "waits"],
)
def test_whoever_meets_the_others_where_the_store_is_lost_is_told_whose_it_was(meets):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True)
    members = Members(dist.TCPStore("127.0.0.1", host.port, is_master=False), "a run", 1)
    members.names = (0, 1)
    del host
    with pytest.raises(PeerLost, match=r"^rank 0, or the launcher that hosts the store, is lost") as error:
        meets(members)
    assert error.value.for_good
