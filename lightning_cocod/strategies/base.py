"""Lightning's calendar: which verb of an algorithm is called when. Nothing algorithmic."""

from __future__ import annotations

import sys
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.comm import CommunicationError, Communicator, seconds
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.strategies import own_state, parts
from lightning_cocod.strategies.checkpoint_io import WholeFileIO
from lightning_cocod.strategies.checkpoints import Checkpoints
from lightning_cocod.strategies.continuing import continuing
from lightning_cocod.strategies.own_state import OwnState
from lightning_cocod.strategies.plateau import judge_together
from lightning_cocod.strategies.quiet import QuietLoop
from lightning_cocod.strategies.randomness import random_state, set_random_state
from lightning_cocod.strategies.rendezvous import check_master
from lightning_cocod.strategies.stepper import Stepper

if TYPE_CHECKING:
    import lightning.pytorch as pl

_LOCAL_AVERAGE: Any = getattr(lightning_callbacks, "WeightAveraging", ())  # Lightning has it since 2.6
_START_METHODS = ("popen", "spawn", "fork", "forkserver")
_DDP_ONLY = {
    "find_unused_parameters": "parameters without a gradient are allowed anyway",
    "static_graph": "there is no DDP reducer whose graph could be static",
    "gradient_as_bucket_view": "gradients are not exchanged in DDP's buckets",
    "bucket_cap_mb": "gradients are not exchanged in DDP's buckets",
    "broadcast_buffers": "buffers stay local in training and are averaged for evaluation",
    "model_averaging_period": "that is what period= is for",
    "ddp_comm_state": "there is no DDP reducer to hook into",
    "ddp_comm_hook": "there is no DDP reducer to hook into",
    "ddp_comm_wrapper": "there is no DDP reducer to hook into",
}


class AlgorithmStrategy(DDPStrategy):
    """Runs an algorithm of this package under a Lightning Trainer.

    Subclasses make the algorithm in ``make_algorithm`` and do nothing else.

    Args:
        timeout: seconds without a heartbeat after which a peer counts as lost.
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

    def __init__(
        self,
        *,
        timeout: float = 60.0,
        process_group_timeout: float = 1800.0,
        connect_timeout: float = 300.0,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        for name, why in _DDP_ONLY.items():
            if name in options:
                raise TypeError(f"{type(self).__name__} has no option {name}: {why}; leave it out")
        known = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
        if unknown := sorted(set(options) - known):
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        if start_method not in _START_METHODS:
            raise ValueError(f"start_method must be one of {', '.join(_START_METHODS)}, got {start_method!r}")
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
        self._stepped = False
        self._resumed: OwnState | None = None
        self._training_random: dict[str, Any] | None = None  # while it is set aside
        self._undo: list[Callable[[], None]] = []

    @abstractmethod
    def make_algorithm(self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator) -> Algorithm:
        """The algorithm, with this strategy's options."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm object, from ``setup`` to ``teardown`` of a fit.

        Raises:
            RuntimeError: outside of a fit.
        """
        if self._algorithm is None:
            raise RuntimeError("the algorithm exists while trainer.fit runs")
        return self._algorithm

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """The metric vocabulary, see ``Algorithm.metrics``."""
        return self.algorithm.metrics(since)

    # Start and end

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.world_size > 1 and not torch.distributed.is_initialized():
            environment = self.cluster_environment
            check_master(environment.main_address, environment.main_port, self.global_rank, self._connect_timeout)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._communicator = Communicator(
            self.root_device,
            timeout=self._heartbeat_timeout,
            process_group_timeout=self._process_group_timeout,
            connect_timeout=self._connect_timeout,
        )
        self._communicator.start()  # here, not in setup: from now on a peer that is lost is noticed, whatever is running

    @override
    def configure_ddp(self) -> None:
        """No wrapper. What DDP's constructor does besides stays: initial weights are those of rank 0, unless resumed."""
        assert self.model is not None
        if self._resumed is None:
            _sync_module_states(self.model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None and trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
            rank_zero_warn(
                "sync_batchnorm=True is a collective in every forward pass: it puts the ranks in step, and communication "
                "cannot be hidden behind it. Evaluation averages the running statistics without it."
            )
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._refuse_local_averages(trainer)
        communicator = self._communicator
        assert self.model is not None
        assert communicator is not None
        self._algorithm = self.make_algorithm(self.model, self.optimizers, communicator)
        self._refuse_scaled_warm_up(self._algorithm)
        self._steppers = {optimizer: Stepper(optimizer, self._algorithm) for optimizer in self.optimizers}
        algorithm = self._algorithm
        self._quiet = QuietLoop(
            trainer,
            communicator.agreement,
            lambda wish: bool(communicator.who(wish, algorithm.subject("stop?", counted=False))),
        )
        self._enter_calendar(trainer, self._algorithm, self._quiet)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        # Where a consensus model goes on. In manual optimization global_step counts every optimizer; otherwise the other
        # counter lacks the step in which a checkpoint was saved.
        automatic = self.lightning_module.automatic_optimization
        self.algorithm.t = loop.epoch_loop.global_step if automatic else loop.epoch_loop._batches_that_stepped
        self.algorithm.start(broadcast=False)  # done in configure_ddp, or every rank has been given its own
        if self._resumed is not None:
            self._resumed.continue_(self.lightning_module.trainer, self.algorithm, self.root_device)
            self._resumed = None

    @override
    def teardown(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        communicator = self._communicator
        self._communicator, self._algorithm, self._quiet, self._steppers, self._resumed = None, None, None, {}, None
        try:
            if communicator is not None:
                communicator.close()  # raises if a peer was lost unnoticed
        finally:
            super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.abort(exception)
        super().on_exception(exception)

    def abort(self, exception: BaseException) -> None:
        """Tell the peers why this rank cannot go on. A SIGTERM has been agreed with them: all leave together."""
        if self._communicator is not None and not isinstance(exception, SIGTERMException):
            self._communicator.abort(exception)

    def _tell(self, error: BaseException) -> None:
        """A spawned rank's exception passes no hook of Lightning's, and the launcher may report a peer's before it."""
        if self._start_method == "popen":
            return
        if not isinstance(error, CommunicationError | SIGTERMException):
            trace = "".join(traceback.format_exception(error))
            print(f"[rank {self.global_rank}] {trace}", file=sys.stderr, flush=True)
        self.abort(error)

    # Steps

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
            self._stepped = True  # a step is a batch in which any optimizer stepped
        return output

    def _after_step(self) -> None:
        assert self._quiet is not None
        self._stepped = False
        self.algorithm.after_step()
        self._quiet.on_step(self.algorithm.t)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.algorithm.no_sync():
            yield

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._communicator is not None:
            self._communicator.check()  # every loop comes by here: a lost peer ends validation as well
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._quiet is not None and (decide := self._quiet.decision()) is not None:
            return decide(obj)
        with self._named("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._communicator is not None and self._communicator.failed:
            return  # a callback saves what it can: nobody would come
        with self._named("a barrier"):
            super().barrier(*args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self._quiet is not None and self.world_size > 1:
            self._quiet.on_reduction()
        with self._named("a reduction"):
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with self._named("a gathering"):
            return super().all_gather(tensor, group, sync_grads)

    def _named(self, what: str) -> AbstractContextManager[None]:
        """Lightning's collectives fail with the transport's words when a peer is lost; this one says which."""
        return nullcontext() if self._communicator is None else self._communicator.named(what)

    # Evaluation and checkpoints see the consensus model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The consensus model in place and the random state set aside; on leaving, training is exactly where it was."""
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
        if self._algorithm.comm.failed:
            rank_zero_warn("Communication has failed: the state is that of this rank's replica, not the consensus model's.")
            return super().lightning_module_state_dict()
        with self._algorithm.consensus():
            state = super().lightning_module_state_dict()
            return {name: _copy(value) for name, value in state.items()}

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
            return
        assert self.lightning_module is not None
        randomness = self._training_random or random_state(self.root_device)
        part = own_state.take(self.lightning_module.trainer, self._algorithm, checkpoint, randomness)
        self._checkpoints().save(checkpoint, part, filepath, write)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None, **options: Any) -> dict[str, Any]:
        if weights_only is not None:  # Lightning 2.5 does not know it
            options["weights_only"] = weights_only
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = self._checkpoints().load(checkpoint, checkpoint_path, weights_only)
            if self._resumed is not None:
                self._resumed.merge_into(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._resumed is not None:
            assert self.lightning_module is not None
            self._resumed.load_replica(self.lightning_module)

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
        return continuing(dataloader, self.root_device, None if resumed is None else resumed.next_position())

    def _checkpoints(self) -> Checkpoints:
        assert self._communicator is not None
        return Checkpoints(self._communicator, self.registered_name, tidies=self.local_rank == 0)

    # The calendar

    def _enter_calendar(self, trainer: pl.Trainer, algorithm: Algorithm, quiet: QuietLoop) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Trainer.__init__
        first = _First(self, algorithm, quiet)
        quiet.install()
        callbacks.insert(0, first)
        validation = trainer.fit_loop.epoch_loop.val_loop
        run = validation.run

        def run_on_consensus() -> Any:
            with self.evaluating():
                result = run()
            quiet.decide_together()
            return result

        loop = trainer.fit_loop
        fit = loop.run

        def fit_and_tell() -> None:
            try:
                fit()
                if self._resumed is not None:  # nothing was left to train
                    self.on_train_start()
                    algorithm.finish()
            except BaseException as error:
                self._tell(error)
                raise

        validation.run = run_on_consensus  # type: ignore[method-assign]  # on this instance, until teardown
        loop.run = fit_and_tell  # type: ignore[method-assign]
        batches = loop.epoch_loop
        reset = batches.reset

        def reset_quietly() -> None:
            with warnings.catch_warnings():  # Lightning does not know that the loaders continue
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
                reset()

        batches.reset = reset_quietly  # type: ignore[method-assign]
        if self.world_size > 1:
            self._undo.append(judge_together(trainer))
        self._undo += [
            quiet.remove,
            lambda: callbacks.remove(first),
            lambda: delattr(validation, "run"),
            lambda: delattr(loop, "run"),
            lambda: delattr(batches, "reset"),
        ]

    def _refuse_local_averages(self, trainer: pl.Trainer) -> None:
        if self.world_size > 1 and any(isinstance(c, _LOCAL_AVERAGE) for c in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "WeightAveraging and EMAWeightAveraging average one rank's replica and would evaluate another model on each "
                "rank; use StochasticWeightAveraging, or strategy='ddp'"
            )

    def _refuse_scaled_warm_up(self, algorithm: Algorithm) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None and algorithm.when.synchronous(0):
            raise MisconfigurationException(
                "warmup_steps and precision='16-mixed' do not go together: each rank's gradient scaler decides on its own "
                "whether to skip a step; use precision='bf16-mixed' or warmup_steps=0"
            )

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


class _First(Callback):
    """Comes before every other callback: verbs, and news of a failure."""

    def __init__(self, strategy: AlgorithmStrategy, algorithm: Algorithm, quiet: QuietLoop) -> None:
        self._strategy, self._algorithm, self._quiet = strategy, algorithm, quiet

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._quiet.on_batch_start()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._algorithm.before_step(getattr(optimizer, "wrapped", optimizer))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._strategy._stepped:  # manual optimization
            self._strategy._after_step()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._algorithm.finish()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._strategy.abort(exception)


def _copy(value: Any) -> Any:
    """A copy in host memory that later steps leave alone."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
