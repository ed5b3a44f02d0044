"""What is logged means the same under any number of ranks; what would block in a step says so."""

import warnings

import pytest
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, dataset, loader, trainer


class Logs(Toy):
    """Its weights never move, so its losses are known. Each loss is logged with and without synchronisation."""

    def __init__(self):
        super().__init__(dropout=0.0, norm=False, lr=0.0, weight_decay=0.0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("train/own", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", self.loss(batch), sync_dist=True)
        self.log("val/own", self.loss(batch))


def logged(rank, world, strategy):
    t = trainer(strategy, world, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(Logs(), loader(), loader(shuffle=False))
    assert not any("blocking collective" in str(warning.message) for warning in caught)
    return {name: float(value) for name, value in t.callback_metrics.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_synchronised_loss_is_the_mean_whatever_the_number_of_ranks(strategy, world):  # field report 27
    ranks = run_ranks(logged, world, strategy, init=False)
    everything = Logs().loss(dataset().tensors).item()
    for stage in ("train", "val"):
        assert [rank[f"{stage}/mean"] for rank in ranks] == pytest.approx([everything] * world, rel=1e-5)
        own = [rank[f"{stage}/own"] for rank in ranks]
        assert len(set(own)) == world  # without sync_dist each rank's own share
        assert sum(own) / world == pytest.approx(everything, rel=1e-5)


class LogsInSteps(Toy):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, sync_dist=True)
        return loss


def logged_in_steps(rank, world, strategy):
    t = trainer(strategy, world, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(LogsInSteps(), loader())
    told = sum("training_step reduces over all ranks" in str(warning.message) for warning in caught)
    return told, float(t.callback_metrics["train/loss"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_metric_synchronised_in_every_step_is_the_mean_and_warns_once_that_it_blocks(strategy):
    (told, value), (told_too, value_too) = run_ranks(logged_in_steps, 2, strategy, init=False)
    assert value == value_too
    assert (told, told_too) == (1, 0)  # rank 0 speaks, once in six steps
    assert run_ranks(logged_in_steps, 1, strategy, init=False)[0][0] == 0  # one rank waits for nobody


def sync_batchnorm(rank, world, strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy, world, sync_batchnorm=True, max_epochs=0).fit(Toy(), loader())
    return sum("sync_batchnorm=True is a collective in every forward pass" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sync_batchnorm_warns_that_it_cancels_the_hiding(strategy):
    assert run_ranks(sync_batchnorm, 2, strategy, init=False) == [1, 0]
