"""Which messages of the libraries a user of `cocod-train` need not read, and why."""

import logging
import os
import warnings

IRRELEVANT = (
    # Data in memory is faster without loader processes; those who need them set data.num_workers.
    "The '.*_dataloader' does not have many workers",
    # Logging every n steps is configured, and a short epoch is no mistake.
    "The number of training batches .* is smaller than the logging interval",
    # At most one test image per rank is counted twice.
    "Using `DistributedSampler` with the dataloaders",
    # The layout of a one-channel kernel's gradient, which only says that DDP copies a few hundred bytes.
    "Grad strides do not match bucket view strides",
    # A private call inside Lightning, which only its authors can change.
    ".*is deprecated, use `isinstance\\(treespec, TreeSpec\\)",
)


def quiet() -> None:
    """Silence what is irrelevant; and on all ranks but the first every warning, because rank 0 says the same."""
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
    for message in IRRELEVANT:
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # devices found, tips, "max_epochs reached"
    logging.getLogger("lightning_cocod.strategies.leaving").disabled = True  # a failure is reported once (failure.py)


def quiet_launcher() -> None:
    """Silence the launcher's account of a failure: `cocod-train` reports it once, from the rank that failed first."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        launcher = logging.getLogger(name)
        launcher.propagate = False
        launcher.addHandler(logging.NullHandler())
