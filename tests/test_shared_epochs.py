"""Who is done claims the next batch: each sample exactly once per epoch, over all workers, whatever their speeds."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_cocod.comm.shared_epoch import Claims, SharedEpoch


class Counts:
    """A store of one process, for workers that are simulated in it."""

    def __init__(self):
        self.sums = {}

    def add(self, key, amount):
        self.sums[key] = self.sums.get(key, 0) + amount
        return self.sums[key]


def workers(n, samples=20, batch_size=2, store=None, **options):
    store = store or Counts()
    return [SharedEpoch(samples, batch_size, rank=r, world_size=n, store=store, **options) for r in range(n)]


def interleaved(iterators, schedule):
    """Each worker's batches, if they ask in this order, and then in turn until nobody gets any more."""
    got = [[] for _ in iterators]
    turns = chain(schedule, range(len(iterators)) if len(iterators) == 1 else ())
    for rank in turns:
        got[rank].extend(filter(None, [next(iterators[rank], None)]))
    for rank, iterator in enumerate(iterators):
        got[rank].extend(iterator)
    return got


def everything(batches):
    return sorted(sample for worker in batches for batch in worker for sample in batch)


schedules = st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=40)))


@given(schedules, st.integers(0, 40), st.integers(1, 5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_sample_exactly_once_in_any_order_of_claims(schedule, samples, batch_size, drop_last):
    n, order = schedule
    ranks = workers(n, SequentialSampler(range(samples)), batch_size, drop_last=drop_last)
    for _ in range(3):
        kept = samples - samples % batch_size if drop_last else samples
        assert everything(interleaved([iter(r) for r in ranks], order)) == list(range(kept))


@given(schedules, st.integers(1, 40), st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_the_rest_of_an_epoch_exactly_once_on_any_number_of_workers(schedule, samples, batch_size, data):
    n, order = schedule
    before = workers(n, samples, batch_size, seed=3)
    iterators = [iter(r) for r in before]
    for rank in order:
        next(iterators[rank], None)
    trained = [data.draw(st.integers(0, len(r.claimed))) for r in before]  # the others were claimed for nothing
    numbers = set(chain.from_iterable(r.claimed[:k] for r, k in zip(before, trained, strict=True)))
    done = [before[0].samples(number) for number in numbers]
    after = workers(data.draw(st.integers(1, 4)), samples, batch_size, seed=3)
    for r in after:
        r.resume(0, numbers)
    rest = interleaved([iter(r) for r in after], [])
    assert everything([done, *rest]) == list(range(samples))
    assert {r.epoch for r in after} == {1}
    assert everything(interleaved([iter(r) for r in after], [])) == list(range(samples))  # the next one is whole


def test_a_fast_worker_has_more_and_an_even_split_would_leave_it_idle():
    """The negative control: torch's sampler has decided before anybody has trained on anything."""
    fast, slow = interleaved([iter(r) for r in workers(2)], [1, *[0] * 20])
    assert (len(fast), len(slow)) == (9, 1)
    split = [DistributedSampler(range(20), 2, rank) for rank in range(2)]
    fast, slow = interleaved([iter(BatchSampler(sampler, 2, False)) for sampler in split], [1, *[0] * 20])
    assert (len(fast), len(slow)) == (5, 5)


def test_the_first_batch_of_each_worker_is_there_however_late_it_comes():
    ranks = workers(3)
    fast, slow = iter(ranks[0]), iter(ranks[2])
    assert len(list(fast)) == 8
    assert next(slow) == ranks[2].samples(2)
    assert next(slow, None) is None


def test_more_workers_than_batches():
    assert [len(got) for got in interleaved([iter(r) for r in workers(4, 5, 2)], [3, 3, 2, 1, 0])] == [1, 1, 1, 0]


def test_each_epoch_has_an_order_of_its_own_and_all_workers_the_same():
    ranks = workers(2, seed=5)
    orders = []
    for _ in range(3):
        got = interleaved([iter(r) for r in ranks], [0, 1] * 5)
        orders.append([sample for pair in zip(*got, strict=True) for batch in pair for sample in batch])
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)
    again, other = workers(1, seed=5)[0], workers(1, seed=6)[0]
    again.epoch = 1
    assert list(chain.from_iterable(again)) == orders[1]
    other.epoch = 1
    assert list(chain.from_iterable(other)) != orders[1]


class OneKey(Counts):
    """The negative control: a counter that knows nothing of epochs."""

    def add(self, key, amount):
        return super().add("samplers" if "samplers" in key else "batches", amount)


def test_a_counter_for_all_epochs_loses_batches():
    ranks = workers(2, store=OneKey())
    assert everything(interleaved([iter(r) for r in ranks], [])) == list(range(20))
    assert len(everything(interleaved([iter(r) for r in ranks], []))) == 4  # the first batch of each


def test_ranks_that_are_started_again_do_not_read_old_counters():
    store = Counts()
    for _ in range(2):
        assert everything(interleaved([iter(r) for r in workers(2, store=store)], [])) == list(range(20))


def test_a_limit_shortens_the_epoch():
    ranks = workers(2)
    for r in ranks:
        r.limit = 3
    assert len(everything(interleaved([iter(r) for r in ranks], []))) == 6
    assert ranks[0].total == 3


def draws_everywhere(n, torchs):
    class Everywhere:
        def __len__(self):
            return n

        def __iter__(self):
            weights = [random.random() + np.random.rand() for _ in range(n)]
            return iter(WeightedRandomSampler(weights, n, generator=torchs))

    return Everywhere()


@pytest.mark.parametrize("own", [False, True])
def test_the_users_sampler_draws_the_same_on_all_workers_and_moves_no_random_state(own):
    orders = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(rank) if own else None
        users = draws_everywhere(30, generator)
        generators = [generator] if own else []
        sampler = SharedEpoch(users, 3, rank=0, world_size=1, store=Counts(), generators=generators)
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        own_state = generator.get_state().tolist() if own else None
        orders.append([list(sampler), list(sampler)])
        assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert not own or own_state == generator.get_state().tolist()
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_a_generator_that_is_not_told_of_differs():
    """The negative control of the one above."""
    made = [WeightedRandomSampler([1.0] * 30, 30, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    assert len({str(list(SharedEpoch(users, 3, rank=0, world_size=1, store=Counts()))) for users in made}) == 2


def test_a_batch_has_a_sample():
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        SharedEpoch(3, 0)


# Loaders with worker processes, which draw ahead


def held(iterator, primed):
    """How many batches a loader gets that draws so many before the first one is asked for."""
    return sum(next(iterator, None) is not None for _ in range(primed))


def test_near_the_end_a_loader_gets_no_stock():
    ranks = workers(2, 16, 1, ahead=8)
    first = iter(ranks[0])
    assert held(first, 8) == 4  # of 16: with 11 left half of a share is less than 3; without it all eight
    assert held(iter(workers(2, 16, 1)[0]), 8) == 8
    assert held(iter(workers(2, 1000, 1, ahead=8)[0]), 8) == 8
    assert held(iter(workers(2, 6, 1, ahead=8)[0]), 8) == 3  # always a few


@given(schedules, st.integers(1, 60), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_loaders_that_draw_ahead_see_each_sample_exactly_once(schedule, samples, ahead):
    """As torch's loader does: it draws `ahead` batches, then one with each that it gives out, and ends without any."""
    n, order = schedule
    stocks, got = [], [[] for _ in range(n)]
    for rank in workers(n, SequentialSampler(range(samples)), 1, ahead=ahead):
        iterator = iter(rank)
        stocks.append((iterator, [batch for _ in range(ahead) if (batch := next(iterator, None)) is not None]))

    def step(rank):
        iterator, stock = stocks[rank]
        if not stock:
            return False
        got[rank].append(stock.pop(0))
        stock.extend(filter(None, [next(iterator, None)]))
        return True

    for rank in order:
        step(rank)
    while sum([step(rank) for rank in range(n)]):
        pass
    assert everything(got) == list(range(samples))


def test_an_iterator_that_goes_on_gives_out_first_what_was_not_trained_on():
    (only,) = workers(1, SequentialSampler(range(8)), 1)
    first = iter(only)
    assert [next(first), next(first), next(first)] == [[0], [1], [2]]
    assert list(Claims(only, only.claimed[1:])) == [[1], [2], [3], [4], [5], [6], [7]]


# Ranks


def train(rank, world, samples, num_workers, slow, epochs):
    ahead = num_workers * 2
    batches = SharedEpoch(samples, 2, ahead=ahead)
    data = DataLoader(range(samples), batch_sampler=batches, num_workers=num_workers)
    seen, counts = [], []
    store = dist.distributed_c10d._get_default_store()
    for epoch in range(epochs):
        mine = []
        for number, batch in enumerate(data):
            mine += batch.tolist()
            if rank == slow and number == 0:
                store.wait([f"others are done {epoch}"])  # with one batch at hand, or as many as its loader has drawn
        seen.append(mine)
        counts.append(len(batches.claimed))
        if rank != slow and store.add(f"done {epoch}", 1) == world - 1:
            store.set(f"others are done {epoch}", "1")
        dist.barrier()
    return seen, counts


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_a_straggler(world, num_workers):
    results = run_ranks(train, world, 61, num_workers, 0, 2, timeout=120)
    for epoch in range(2):
        assert sorted(chain.from_iterable(seen[epoch] for seen, _ in results)) == list(range(61))
        slow, *others = [counts[epoch] for _, counts in results]
        assert slow <= 1 + 2 * num_workers
        assert sum(others) == 31 - slow


def test_one_rank():
    ((seen, counts),) = run_ranks(train, 1, 21, 0, None, 2)
    assert [sorted(epoch) for epoch in seen] == [list(range(21))] * 2
    assert counts == [11, 11]
    assert seen[0] != seen[1]


def restarts(rank, world):
    """Two lives on one store: the second continues where the first was interrupted."""
    first = SharedEpoch(RandomSampler(range(40)), 2)
    mine = [batch for _, batch in zip(range(3 + rank), iter(first), strict=False)]
    everyones = [None] * world
    dist.all_gather_object(everyones, first.claimed)
    second = SharedEpoch(RandomSampler(range(40)), 2)
    second.resume(0, chain.from_iterable(everyones))
    return [mine, list(second), list(second)]


def test_ranks_resume_in_mid_epoch():
    torch.manual_seed(0)
    results = run_ranks(restarts, 3)
    first, rest, whole = (list(part) for part in zip(*results, strict=True))
    assert everything(first + rest) == list(range(40))
    assert everything(whole) == list(range(40))
