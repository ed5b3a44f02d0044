"""Lightning's calendar: which verb of an algorithm is called when. Nothing algorithmic."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import Algorithm, When
from lightning_cocod.algorithms.naming import with_inter_node
from lightning_cocod.algorithms.node import Sizes
from lightning_cocod.algorithms.options import choice, nonfinite, positive
from lightning_cocod.comm import Communicator, seconds
from lightning_cocod.comm.joining import join_again
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.members import Members
from lightning_cocod.strategies import calendar, own_state, parts, refusals
from lightning_cocod.strategies.batch_sizes import BatchSizes
from lightning_cocod.strategies.checkpoint_io import WholeFileIO
from lightning_cocod.strategies.checkpoints import Checkpoints
from lightning_cocod.strategies.continuing import continuing
from lightning_cocod.strategies.far_apart import FarApart
from lightning_cocod.strategies.leaving import IN_ORDER, Launcher, LeaveFirst, conceal_ends, refuse_success, shorten, show
from lightning_cocod.strategies.own_state import OwnState
from lightning_cocod.strategies.proportional import EQUAL, PROPORTIONAL, Proportional
from lightning_cocod.strategies.quiet import QuietLoop, sigterm_without_broadcast
from lightning_cocod.strategies.randomness import random_state, set_random_state
from lightning_cocod.strategies.rendezvous import check_master, join_afresh, joining, store_outlives_ranks
from lightning_cocod.strategies.replaced import Replaced
from lightning_cocod.strategies.shard_gradients import ShardGradients, clips
from lightning_cocod.strategies.stepper import Stepper, users

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AlgorithmStrategy(DDPStrategy):
    """Runs an algorithm of this package under a Lightning Trainer.

    Subclasses say in their constructors what it ``runs``, and do nothing else.

    Args:
        intra_node: h, if the ranks of a machine are to average every h steps among themselves: their gradients if h is 1,
            else their parameters (see ``NodeAverage``). The rounds, of ``period`` steps, are then those between machines.
        inter_node: with ``intra_node``, another name of ``period``.
        ranks_per_node: with ``intra_node``: of every machine, or a list; by default as Lightning has started them.
        batch_sizes: "equal", or "proportional" to the ranks' speeds, which are measured as training goes on: the samples
            of all ranks' batches together stay the same, and each batch's weight in every mean is its size.
        on_nonfinite: "raise" ends the run where a rank's message holds NaN or infinity. "skip" goes on with the mean of the
            others, which that rank gets as well, and resets its optimizer's state if that is not a server's.
        timeout: seconds without a heartbeat after which a peer counts as lost, and its process is ended if it is one of
            this host. Heartbeats need the interpreter lock: choose more than the longest call that holds it.
        process_group_timeout: seconds after which any collective fails although all peers live.
        connect_timeout: seconds to wait for the master, and for the other ranks, at start-up.
        process_group_backend: ``gloo``, ``nccl``; by default the usual one of the device.
        start_method: ``popen``, ``spawn``, ``fork`` or ``forkserver``.
        **options: the other options of Lightning's ``ParallelStrategy``: ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = with_inter_node(cls.__init__)  # type: ignore[method-assign]  # the same with two names

    def __init__(
        self,
        *,
        intra_node: int | None = None,
        inter_node: int | Mapping[int, int] | When | None = None,
        ranks_per_node: Sizes | None = None,
        batch_sizes: Literal["equal", "proportional"] = "equal",
        on_nonfinite: Literal["raise", "skip"] = "raise",
        timeout: float = 60.0,
        process_group_timeout: float = 1800.0,
        connect_timeout: float = 300.0,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        refusals.unknown_options(type(self), options)
        choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        nonfinite(on_nonfinite)
        if inter_node is not None:
            raise ValueError(f"{type(self).__name__} has no period that inter_node could be another name of: leave it out")
        self._intra_node, self._ranks_per_node = intra_node, ranks_per_node
        self._batch_sizes = choice("batch_sizes", batch_sizes, (EQUAL, PROPORTIONAL))
        self._on_nonfinite = on_nonfinite
        self._heartbeat_timeout = seconds("timeout", timeout)
        self._process_group_timeout = seconds("process_group_timeout", process_group_timeout)
        self._connect_timeout = seconds("connect_timeout", connect_timeout)
        super().__init__(
            timeout=timedelta(seconds=self._process_group_timeout),
            process_group_backend=process_group_backend,
            start_method=start_method,  # type: ignore[arg-type]  # a str that was checked above
            **options,
        )
        self._communicator: Communicator | None = None
        self._algorithm: Algorithm | None = None
        self._steppers: dict[Optimizer, Stepper] = {}
        self._quiet: QuietLoop | None = None
        self._far_apart = FarApart()
        self._sizes = BatchSizes()  # in a fit others, if batch_sizes says so
        self._in_shards: ShardGradients | None = None
        self._stepped = False
        self._members: Members | None = None  # of a run that waits to be joined
        self._ending: BaseException | None = None
        self._alone = False
        self._resumed: OwnState | None = None
        self._sampler_seed: int | None = None  # once a sampler has been made, or a run is resumed
        self._training_random: dict[str, Any] | None = None  # while it is set aside
        self._replaced = Replaced()

    def runs(
        self,
        algorithm: Callable[..., Algorithm],
        *,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        """Say which algorithm every fit makes, and with which options. One is made for a model of one number now, so that
        options that are out of range are refused at once.

        Raises:
            ValueError: an option out of range.
        """
        within = {} if self._intra_node is None else {"intra_node": self._intra_node}
        self._make = partial(algorithm, on_nonfinite=self._on_nonfinite, **within, **options)
        self._weights = positive(weights)  # how many there are to be is not known yet
        if self._weights is not None and self._batch_sizes == PROPORTIONAL:
            raise ValueError("with batch_sizes='proportional' the sizes are the weights: leave weights out")
        x = torch.nn.ParameterList([torch.zeros(1)])
        made = self._make(x, torch.optim.SGD(x.parameters(), lr=0.0), communicator=Communicator.alone(), **self._nodes(1))
        self._asynchronous, self._outlives = made.asynchronous, made.comm.outlives
        if self._asynchronous and self._batch_sizes == PROPORTIONAL:
            raise ValueError(
                f"batch_sizes='proportional' is for ranks in step; under {type(self).__name__} a faster rank trains on more "
                "batches anyway: leave batch_sizes out"
            )
        if self._batch_sizes == PROPORTIONAL and not made.weighs_workers:
            raise ValueError(f"{self.registered_name} weighs all workers alike: leave batch_sizes='proportional' out")

    def _nodes(self, ranks_per_node: int) -> dict[str, Any]:
        """Which ranks share a node, where somebody wants to know."""
        if self._intra_node is None and self._ranks_per_node is None:
            return {}
        return {"ranks_per_node": ranks_per_node if self._ranks_per_node is None else self._ranks_per_node}

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm object, from ``setup`` to ``teardown`` of a fit.

        Raises:
            RuntimeError: outside of a fit.
        """
        if self._algorithm is None:
            raise RuntimeError(
                "the algorithm and its metrics are there while trainer.fit runs: ask in a callback, as in on_train_end"
            )
        return self._algorithm

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """The metric vocabulary, see ``Algorithm.metrics``.

        Raises:
            RuntimeError: outside of a fit.
        """
        return {**self.algorithm.metrics(since), **self._sizes.metrics()}

    # Start and end

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = Launcher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.world_size == 1 or torch.distributed.is_initialized():
            return super().setup_distributed()
        environment = self.cluster_environment
        meeting = environment.main_address, environment.main_port, self.global_rank, self._connect_timeout
        try:
            check_master(*meeting)
            with joining(*meeting):
                backend = self._get_process_group_backend()
                if store_outlives_ranks():
                    device = self.root_device if self.root_device.type != "cpu" else None
                    join_afresh(backend, self.global_rank, self.world_size, self._process_group_timeout, device)
                elif self._outlives and self.global_rank > 0:
                    place = environment.main_address, environment.main_port, self.global_rank
                    self._members = join_again(*place, backend, self._process_group_timeout)
                super().setup_distributed()
        except BaseException:
            if isinstance(self._launcher, _SubprocessScriptLauncher):
                self._launcher.kill(signal.SIGKILL)  # ranks that this one has started would wait for it
            raise

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._communicator = Communicator(
            self.root_device,
            timeout=self._heartbeat_timeout,
            process_group_timeout=self._process_group_timeout,
            connect_timeout=self._connect_timeout,
            in_step=not self._asynchronous,
            members=self._members if fitting else None,
        )
        self._communicator.outlives = self._outlives and fitting
        self._communicator.needs_all(True)  # ranks are together: asynchronous ones take it back for their epochs
        if self._members is None or not fitting:
            self._communicator.start()  # here, not in setup: a peer that is lost is noticed, whatever is running
        else:
            self._members = None  # it begins with the others, where they let it in
        self._checkpoints = Checkpoints(
            self._communicator,
            self.registered_name,
            tidies=self.local_rank == 0,
            late=isinstance(self.checkpoint_io, AsyncCheckpointIO),
        )
        self._ending, self._alone = None, False
        if self._batch_sizes == PROPORTIONAL and self.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            self._sizes = Proportional(trainer, self._communicator)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Trainer.__init__
        self._replaced.inserted(callbacks, 0, LeaveFirst(self))

    @override
    def configure_ddp(self) -> None:
        """No wrapper. What DDP's constructor does besides stays: initial weights are those of rank 0."""
        assert self.model is not None
        refusals.lazy_parameters(self.model)
        _sync_module_states(self.model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None and trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
            refusals.warn_of_synchronous_batch_norm()
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            sigterm_without_broadcast(trainer, self._replaced)
            return
        communicator = self._communicator
        assert self.model is not None
        assert communicator is not None
        algorithm = self._algorithm = self._make(
            self.model,
            self.optimizers,
            weights=self._weights,
            communicator=communicator,
            **self._nodes(self.num_processes),
        )
        refusals.scaler(self.precision_plugin, algorithm)
        self._far_apart, self._stepped = FarApart(), False
        self._sizes.install(algorithm, self._replaced)
        assert self.lightning_module is not None
        clipped_first = algorithm.sends_own_gradients and clips(trainer)  # so they are not complete after backward
        algorithm.one_backward_a_step = self.lightning_module.automatic_optimization and not clipped_first
        if algorithm.in_shards and self.world_size > 1:
            self._in_shards = ShardGradients(trainer, self.precision_plugin, algorithm, self._replaced)
        self._steppers = {optimizer: Stepper(optimizer, algorithm) for optimizer in self.optimizers}
        self._quiet = self._quiet_loop(
            trainer,
            communicator,
            lambda what, wish: bool(communicator.who(wish, algorithm.subject(f"{what}?", counted=False))),
        )
        calendar.enter(self, trainer, self._quiet, self._replaced)

    def _quiet_loop(
        self, trainer: pl.Trainer, communicator: Communicator, ask_all: Callable[[str, bool], bool]
    ) -> QuietLoop:
        return QuietLoop(trainer, communicator.agreement, ask_all)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        # Where a consensus model goes on. In manual optimization global_step counts every optimizer; otherwise the other
        # counter lacks the step in which a checkpoint was saved.
        automatic = self.lightning_module.automatic_optimization
        self.algorithm.t = loop.epoch_loop.global_step if automatic else loop.epoch_loop._batches_that_stepped
        self._sizes.on_train_start()
        self.algorithm.start(broadcast=False)  # done in configure_ddp
        if self._resumed is not None:
            self._resumed.continue_(self.lightning_module.trainer, self.algorithm, self.root_device)
            self._resumed = None

    def finish_if_nothing_was_left(self) -> None:
        """A run that is resumed where it ended ends as it did."""
        if self._resumed is not None:
            self.on_train_start()
            self.algorithm.finish()

    @override
    def teardown(self) -> None:
        self._replaced.put_back()
        communicator, quiet = self._communicator, self._quiet
        self._sampler_seed = None
        if self._algorithm is not None:
            self._algorithm.release()
        self._communicator, self._algorithm, self._quiet, self._steppers, self._resumed = None, None, None, {}, None
        self._sizes, self._in_shards = BatchSizes(), None
        try:
            if communicator is not None:
                communicator.close()  # raises if a peer was lost unnoticed
        finally:
            super().teardown()
        if quiet is not None and quiet.sigterm_is_open and self._ending is None:
            raise SIGTERMException  # it came after the last step: the rest of the script is cut short

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.leave(exception)
        super().on_exception(exception)

    def leave(self, exception: BaseException) -> None:
        """This rank's run ends with an exception. A SIGTERM in a fit has been agreed: all leave together. Otherwise the
        peers are told why, and nobody answers any more: collectives of Lightning's give back what this rank has.
        """
        if self._ending is exception:
            return
        self._ending = exception
        if self.world_size > 1 or isinstance(exception, SIGTERMException):
            refuse_success(exception)
        shorten(exception)
        agreed = isinstance(exception, SIGTERMException) and self._quiet is not None
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            conceal_ends(self._launcher.procs, math.inf if agreed else IN_ORDER)
        if not agreed and self._communicator is not None and self.world_size > 1:
            cause = self._communicator.loss_behind(exception) or exception
            show(exception, cause, self.global_rank)
            self._communicator.abort(cause)
            self._alone = True

    # Steps

    def before_epoch(self) -> None:
        """An epoch begins."""

    def before_batch(self, batch_idx: int) -> None:
        """Every batch, before all hooks of the user's."""
        self._sizes.on_batch_start(self.algorithm, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._quiet is not None
        with self._quiet.training_step():
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        stepper: Any = self._steppers.get(optimizer, optimizer)  # an optimizer of the user's own steps as it is
        output = super().optimizer_step(stepper, closure, model, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._after_step()
        else:
            self._stepped = True
        return output

    def before_step(self, optimizer: Any) -> None:
        """Gradients are complete, and not yet clipped but in manual optimization."""
        refusals.scaler(self.precision_plugin, self.algorithm)
        (self._in_shards or self.algorithm).before_step(users(optimizer))

    def after_batch(self) -> None:
        """In manual optimization a step is a batch in which any optimizer stepped."""
        if self._in_shards is not None:
            self._in_shards.after_batch()
        if self._stepped:
            self._after_step()

    def _after_step(self) -> None:
        assert self._quiet is not None
        self._stepped = False
        self._sizes.before_verb()
        self.algorithm.after_step()
        self._sizes.after_step()
        self._far_apart.after_step(self.algorithm)
        self._quiet.on_step(self.algorithm.t)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._algorithm is not None:
            self._algorithm.after_backward()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.algorithm.no_sync():
            yield

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._communicator is not None:
            self._communicator.check()  # every loop comes by here: a lost peer ends validation as well
            assert self.lightning_module is not None
            if self.lightning_module.trainer.received_sigterm:
                raise SIGTERMException
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._quiet is not None and (decide := self._quiet.decision()) is not None:
            return decide(obj)
        if self._alone:
            return obj
        with self._named("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            return
        with self._named("a barrier"):
            super().barrier(*args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self._alone:
            return tensor
        if self._quiet is not None and self.world_size > 1:
            self._quiet.on_reduction()
        with self._named("a reduction"):
            return self._sizes.reduce(tensor, group, reduce_op, super().reduce)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._alone:
            return tensor.unsqueeze(0)
        with self._named("a gathering"):
            return super().all_gather(tensor, group, sync_grads)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Lightning's collectives fail with the transport's words when a peer is lost; this one says which."""
        with self._sizes.apart(), nullcontext() if self._communicator is None else self._communicator.named(what):
            yield

    # Evaluation and checkpoints see the consensus model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The consensus model in place and the random state set aside; on leaving, training is exactly where it was."""
        self._sizes.interrupt()
        self._training_random = random_state(self.root_device)
        try:
            with self.algorithm.consensus():
                yield
        finally:
            set_random_state(self._training_random, self.root_device)
            self._training_random = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus model's. Collective: all ranks call it. After a failure nobody answers: this rank's replica's."""
        if self._algorithm is None:
            return super().lightning_module_state_dict()
        with self.saving():
            state = super().lightning_module_state_dict()
            return {name: _copy(value) for name, value in state.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole, where each rank has a shard. Collective then: all ranks call it. After a failure there is none of it."""
        if self._algorithm is None:
            return super().optimizer_state(optimizer)
        return self._algorithm.optimizer_state(users(optimizer))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The consensus model in place, or this rank's replica once communication has failed."""
        self._sizes.interrupt()
        if self.algorithm.comm.failed:
            rank_zero_warn("Communication has failed: the state is that of this rank's replica, not the consensus model's.")
            yield
            return
        with self.algorithm.consensus():
            yield

    # Beside the consensus model, a checkpoint has each rank's own state

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFileIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFileIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        def write(content: dict[str, Any]) -> None:
            super(AlgorithmStrategy, self).save_checkpoint(content, filepath, storage_options)

        weights_only = "optimizer_states" not in checkpoint
        if self._algorithm is None or self._algorithm.comm.failed or weights_only:
            write(checkpoint)
            if self.global_rank == 0 and isinstance(self.checkpoint_io, WholeFileIO):  # it has been written
                parts.remove(filepath)  # of a checkpoint that had this name
            return
        assert self.lightning_module is not None
        randomness = self._training_random or random_state(self.root_device)
        seed = self.distributed_sampler_kwargs["seed"]
        part = own_state.take(self.lightning_module.trainer, self._algorithm, checkpoint, randomness, seed)
        part["batch_sizes"] = self._sizes.state_dict()
        self._checkpoints.save(checkpoint, part, filepath, write)

    @override
    def load_checkpoint(  # type: ignore[override]  # Lightning 2.5 neither gives nor knows weights_only
        self, checkpoint_path: _PATH, **options: Any
    ) -> dict[str, Any]:
        weights_only = options.get("weights_only", False)
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        Checkpoints.silence(checkpoint)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = self._checkpoints.load(checkpoint, checkpoint_path, weights_only)
            if self._resumed is not None:
                self._resumed.merge_into(checkpoint)
                self._sampler_seed = self._resumed.sampler_seed
                self._sizes.load_state_dict(self._resumed.batch_sizes)
        return checkpoint

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """With the seed that Lightning would choose at first; in a resumed run, with that of the run it belongs to."""
        if self._sampler_seed is None:
            self._sampler_seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        of_sizes = self._sizes.sampler_kwargs() if self._in_training else {}
        return {**super().distributed_sampler_kwargs, "seed": self._sampler_seed, **of_sizes}

    @property
    def _in_training(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.training

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            parts.remove(filepath)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        resumed = self._resumed if trainer.training else None  # validation begins at the beginning, and draws nothing before
        position = None if resumed is None else resumed.next_position()
        if trainer.training:
            self._sizes.cut(dataloader, position, self.broadcast)
        return continuing(dataloader, self.root_device, position)

    # Names

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """``name``, ``name_spawn``, ``name_fork`` and ``name_notebook``, as Lightning's own strategies do."""
        methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for suffix, method in methods.items():
            name = cls.registered_name + suffix
            if name not in strategy_registry:
                description = f"{cls.__name__} with start_method {method!r}"
                strategy_registry.register(name, cls, description=description, start_method=method)


def _copy(value: Any) -> Any:
    """A copy in host memory that later steps leave alone."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
