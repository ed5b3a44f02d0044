"""The simplest asynchronous algorithm, and its strategy: workers train on their own, and the consensus is their mean."""

from contextlib import contextmanager

from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy


class Apart(Asynchronous):
    """x_i <- x_i + U(g(x_i)). Nothing is exchanged."""

    name = "apart"

    def __init__(self, model, optimizer, **shared):
        super().__init__(model, optimizer, when=as_when(1), **shared)
        self.numbers = []

    def claimed(self, number):
        super().claimed(number)
        self.numbers.append(number)

    @contextmanager
    def _rest(self, all_paused):
        all_paused()
        yield

    def _leave(self):
        pass

    def _state(self):
        return {}


class ApartStrategy(AsynchronousStrategy):
    """Runs it."""

    registered_name = "apart"

    def __init__(self, **options):
        super().__init__(**options)
        self.runs(Apart)
