"""Faults that users of other projects have reported, and the tests that show what happens here instead.

A report about something that is not possible here names the test that shows how it is refused.
"""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import Toy, loader, trainer

from lightning_cocod import GLU
from lightning_cocod.compression import Int8
from lightning_cocod.strategies import (
    STRATEGIES,
    ADPSGDStrategy,
    AlgorithmStrategy,
    APSGDStrategy,
    CDSGDStrategy,
    CO2Strategy,
    CompSkipDSGDStrategy,
    DCASGDStrategy,
    DistEFSGDStrategy,
    DPSGDStrategy,
    EagerDiLoCoStrategy,
    EAMSGDStrategy,
    FlexCompressSGDStrategy,
    ODSGDStrategy,
    PipeSGDStrategy,
    SGPStrategy,
    SSDSGDStrategy,
    SSGDStrategy,
)

RESUMED = "test_resume::test_resumed_equals_uninterrupted"
REPORTS = {
    1: (
        "an option is accepted and ignored",
        "test_field_reports::test_every_option_is_honoured_or_refused",
        "test_launch::test_options_of_ddp_are_refused_with_a_reason",
        "test_cli::test_strategies_get_their_options",
    ),
    2: (
        "a tensor larger than a bucket, buckets mixed up",
        "test_cocod::test_parameters_of_every_kind_follow_the_paper_bit_for_bit",
        "test_comm_buckets::test_the_pieces_hold_every_element_exactly_once",
    ),
    3: (
        "collectives in another order on every rank",
        "test_comm_communicator::test_many_messages_of_different_kinds_keep_their_order_beside_foreign_collectives",
        "test_comm_communicator::test_a_difference_in_any_field_of_the_header_is_an_error_on_all_ranks_that_names_both_sides",
        "test_compressed_rounds::test_workers_with_different_codecs_are_told",
        "test_two_way::test_nothing_is_lost_whatever_the_codec",  # six buckets, and who sends one is drawn
        "test_two_way::test_a_bucket_that_nobody_sends_leaves_the_memory_of_others_alone",
        "test_memory::test_codes_need_the_copies_that_they_promise",  # eighty buckets
    ),
    4: (
        "a collective of the user's races with ours",
        "test_cocod::test_a_users_own_all_reduce_meets_ours_and_both_are_right",
        "test_consensus::test_a_users_own_collective_does_not_interfere",
    ),
    5: (
        "a skipped step splits counters and rates",
        "test_strategy::test_a_step_that_one_ranks_scaler_skips_counts_on_both",
        "test_plain_loop::test_a_step_skipped_on_one_rank_only_keeps_the_rounds_together",
    ),
    6: (
        "a resumed run warms up again",
        RESUMED,
        "test_cocod::test_a_run_resumed_from_its_state_is_the_uninterrupted_run_bit_for_bit",
        "test_strategy::test_a_resumed_run_goes_on_counting_steps",
    ),
    7: (
        "residuals are missing in a checkpoint",
        "test_compressed_rounds::test_waiting_resuming_and_evaluating_change_no_bit",
        RESUMED,
    ),
    8: (
        "the anchor is missing in a checkpoint",
        RESUMED,
        "test_checkpoints::test_a_resumed_run_differs_if_anything_is_left_out",
    ),
    9: (
        "one rank resumes with a stale learning rate",
        "test_expected_callbacks::test_the_best_checkpoints_are_kept_and_found_again",
        RESUMED,
    ),
    10: (
        "data and model saved at different moments",
        "test_checkpoints::test_a_crash_while_saving_leaves_the_checkpoint_before_exactly_resumable_and_is_tidied_up",
        "test_checkpoints::test_what_is_saved_at_a_sigterm_is_exact",
    ),
    11: (
        "one rank has a batch more",
        "test_plain_loop::test_ranks_out_of_step_both_name_both_sides",
        "test_faults::test_a_rank_that_runs_out_of_data_early_is_named_and_hangs_nobody",
    ),
    12: (
        "a rank is lost; the others hang, or end with 0",
        "test_faults::test_a_rank_that_is_killed_anywhere_ends_its_peer_which_names_it",
        "test_faults::test_a_rank_that_ends_in_any_other_way_ends_its_peer_which_names_it",
        "test_fault_launches::test_the_original_traceback_comes_first_and_the_peer_names_the_rank",
        "test_fault_launches::test_a_rank_that_is_gone_ends_the_job_and_is_named",
        "test_plain_loop::test_an_exception_in_the_block_aborts_and_the_peer_names_the_cause",
        "test_plain_loop::test_a_killed_peer_is_named",
    ),
    13: (
        "SIGTERM reaches one rank only",
        "test_quiet::test_sigterm_at_one_rank_reaches_all_after_the_same_step",
        "test_faults::test_sigterm_stops_all_ranks_after_the_same_step_and_is_no_success",
    ),
    14: (
        "a wrong divisor in post-local SGD",
        "test_local_sgd::test_period_one_is_synchronous_sgd",
        "test_local_sgd::test_post_local_sgd_is_synchronous_first_and_then_local",
        "test_cocod::test_every_world_size_follows_the_paper",
    ),
    15: (
        "BatchNorm statistics differ from rank to rank",
        "test_consensus::test_validation_sees_the_mean_of_the_replicas_and_leaves_them_alone",
        "test_cocod::test_consensus_averages_floats_and_takes_counters_from_rank_zero",
    ),
    16: (
        "error feedback is lost when buckets change",
        "test_compressed_rounds::test_a_layer_that_thaws_joins_the_base",
        RESUMED,
        "test_trainer_modes::test_an_unfrozen_backbone_joins_the_average_when_it_joins_the_optimizer",
    ),
    17: (
        "a rank that is ahead is held up again and again",
        "test_expected_data::test_a_rank_that_is_ahead_is_not_held_up_within_a_round",
    ),
    18: (
        "a message that is under way at the end hangs the process",
        "test_comm_communicator::test_a_process_that_ends_without_close_and_with_a_message_in_flight_ends_well",
        "test_plain_loop::test_torchrun_trains_and_exits_with_zero",
        "test_launch::test_torchrun",
    ),
    19: (
        "the transport's time-outs are ignored",
        "test_faults::test_a_rank_that_ends_in_any_other_way_ends_its_peer_which_names_it",
        "test_faults::test_rank_0_that_is_stopped_is_ended_by_its_peer_although_it_hosts_the_store",
        "test_comm_communicator::test_a_stopped_rank_is_lost_after_the_timeout_and_its_process_is_ended",
    ),
    20: (
        "a peer dies before the first collective",
        "test_comm_communicator::test_a_rank_that_dies_inside_start_does_not_leave_the_others_there",
        "test_faults::test_a_rank_that_is_killed_anywhere_ends_its_peer_which_names_it",
        "test_faults::test_rank_0_that_is_killed_while_it_prepares_the_data_is_named_before_lightnings_barrier_fails",
        "test_faults::test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_connect_timeout",
    ),
    21: (
        "the wrong sign of what is folded in",
        "test_cocod::test_the_sign_of_the_correction_in_one_parameter",
    ),
    22: (
        "messages of two dimensions only",
        "test_compression_codes::test_tensors_of_any_form",
        "test_cocod::test_parameters_of_every_kind_follow_the_paper_bit_for_bit",
        "test_comm_communicator::test_unusual_tensors_travel_or_are_refused_for_what_they_are",
        "test_half_precision::test_a_mean_of_halves_is_the_exact_mean_rounded_once",
    ),
    23: (
        "a sweep over several ranks starts wrong jobs",
        "test_cli::test_sweep_over_strategies",
        "test_cli::test_sweep_over_numbers_of_ranks",
    ),
    24: ("every rank writes a W&B run", "test_cli::test_default_run_prints_a_table_and_where_the_results_are"),
    25: (
        "ranks write to one file",
        "test_checkpoints::test_a_checkpoint_holds_the_consensus_and_each_rank_writes_its_own_part_beside_it",
        "test_cli::test_torchrun_starts_the_ranks_and_one_folder_is_made",
    ),
    26: (
        "one rank alone divides by zero, or does not train",
        "test_strategy::test_one_device_is_plain_training",
        "test_cocod::test_without_a_process_group_it_is_plain_training",
        "test_cocod::test_every_world_size_follows_the_paper",
        "test_d_psgd::test_the_trajectory_is_that_of_a_serial_simulation_with_w",
        "test_sgp::test_the_trajectory_is_that_of_a_serial_push_sum",
        "test_ad_psgd::test_one_worker_is_the_optimizer_bit_for_bit",
        "test_a_psgd::test_one_worker_is_the_users_optimizer_bit_for_bit",
        "test_two_way::test_one_worker_trains_plainly",
    ),
    27: (
        "a logged loss is the sum over the ranks",
        "test_expected_logging::test_a_synchronised_loss_is_the_mean_whatever_the_number_of_ranks",
    ),
    28: (
        "a communication hook of DDP's beside ours",
        "test_launch::test_options_of_ddp_are_refused_with_a_reason",
    ),
}


def test_every_report_has_tests_that_exist():
    assert list(REPORTS) == list(range(1, 29))
    existing = {
        f"{file.stem}::{node.name}"
        for file in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    for number, (_, *tests) in REPORTS.items():
        assert tests, number
        assert set(tests) <= existing, f"report {number}: {sorted(set(tests) - existing)}"


# Report 1: a value of every option that is not the default, and what a run makes of it

HONOURED = {
    "period": (3, lambda algorithm: algorithm.when.period(100)),
    "intra_node": (2, lambda algorithm: algorithm.node.every),
    "ranks_per_node": (2, lambda algorithm: len(algorithm.node.ranks)),
    "warmup_steps": (5, lambda algorithm: sum(algorithm.when.synchronous(t) for t in range(100))),
    "weights": ([0.75, 0.25], lambda algorithm: algorithm.weights),
    "overlap": (False, lambda algorithm: getattr(algorithm, "delay", algorithm).overlap),
    "overlap_pull": (True, lambda algorithm: algorithm.overlap_pull),
    "elementwise": (True, lambda algorithm: algorithm.elementwise),
    "on_nonfinite": ("skip", lambda algorithm: {True: "skip", False: "raise"}[algorithm.skip_nonfinite]),
    "lambda_0": (0.4, lambda algorithm: getattr(algorithm, "compensate", algorithm).lambda_0),
    "norm": ("tensor", lambda algorithm: {True: "tensor", False: "model"}[algorithm.compensate.per_tensor]),
    "lambda_max": (2.0, lambda algorithm: algorithm.compensate.lambda_max),
    "weight_decay": ("before", lambda algorithm: {True: "before", False: "after"}[algorithm.decay_before]),
    "outer_lr": (0.3, lambda algorithm: algorithm.make_outer.keywords["lr"]),
    "outer_momentum": (0.4, lambda algorithm: algorithm.make_outer.keywords["momentum"]),
    "gap_penalty": (1.5, lambda algorithm: algorithm.make_outer.keywords["penalty"]),
    "clip": (0.6, lambda algorithm: algorithm.make_outer.keywords["clip"]),
    "pull": (0.25, lambda algorithm: 1 - algorithm.delay.keep),
    "anchor_momentum": (0.4, lambda algorithm: algorithm.make_outer.keywords["momentum"]),
    "slow_lr": (0.3, lambda algorithm: algorithm.α),
    "slow_momentum": (0.4, lambda algorithm: algorithm.β),
    "fragments": (2, lambda algorithm: algorithm.cut),
    "delay": (2, lambda algorithm: algorithm.τ if hasattr(algorithm, "τ") else algorithm.delay.steps),
    "graph": ([[0.75, 0.25], [0.25, 0.75]], lambda algorithm: list(map(list, algorithm.matrices[0]))),
    "topology": ("random", lambda algorithm: "in turn" if algorithm.topology._seed is None else "random"),
    "every": (3, lambda algorithm: algorithm.every),
    "seed": (3, lambda algorithm: algorithm.seed),
    "max_staleness": (5, lambda algorithm: algorithm.max_staleness),
    "adaptive": (True, lambda algorithm: algorithm.adaptive),
    "beta": (0.8, lambda algorithm: algorithm.beta),
    "epsilon": (1e-5, lambda algorithm: algorithm.epsilon),
    "alpha": (0.2, lambda algorithm: algorithm.alpha),
    "keep": (0.2, lambda algorithm: algorithm.delay.keep),
    "local_update": (GLU(alpha=0.3), lambda algorithm: replace(algorithm.local_update, every_step=False)),  # pre_refresh's
    "scaling": ("paper", lambda algorithm: algorithm.scaling),
    "pre_refresh": ("every_step", lambda algorithm: {True: "every_step", False: "pull"}[algorithm.local_update.every_step]),
    "compression": (Int8(block=64), lambda algorithm: getattr(algorithm.compression, "codec", None) or algorithm.codec),
    "server_compression": (Int8(block=32), lambda algorithm: algorithm.server_compression.codec),
    "worker_skip": (3, lambda algorithm: algorithm.worker_skip.n),
    "server_skip": (2, lambda algorithm: algorithm.server_skip.n),
    "compress_steps": (3, lambda algorithm: algorithm.compress_steps),
    "timeout": (17.0, lambda algorithm: algorithm.comm.timeout),
    "process_group_timeout": (77.0, lambda algorithm: algorithm.comm.process_group_timeout),
    "connect_timeout": (37.0, lambda algorithm: algorithm.comm.connect_timeout),
}
ELSEWHERE = {"process_group_backend", "start_method"}  # test_launch.py
ELSEWHERE |= {"batch_sizes"}  # not beside weights: test_proportional.py
ELSEWHERE |= {"inter_node"}  # another name of period: test_hierarchy.py
NOT_ALLOWED = {strategy: {"on_nonfinite"} for strategy in (EagerDiLoCoStrategy, CO2Strategy)}
WITHOUT_ROUNDS = (PipeSGDStrategy, SSGDStrategy, SSDSGDStrategy, ODSGDStrategy, DPSGDStrategy, SGPStrategy)
NOT_ALLOWED |= {strategy: {"intra_node", "ranks_per_node"} for strategy in WITHOUT_ROUNDS}
ON_SERVERS = (APSGDStrategy, DCASGDStrategy, EAMSGDStrategy)
NOT_ALLOWED |= {strategy: {"intra_node", "ranks_per_node"} for strategy in ON_SERVERS}
NOT_ALLOWED |= {ADPSGDStrategy: {"intra_node", "ranks_per_node", "on_nonfinite"}}
WITH_RESIDUALS_OF_PUSHES = (CDSGDStrategy, DistEFSGDStrategy, FlexCompressSGDStrategy, CompSkipDSGDStrategy)
NOT_ALLOWED |= {strategy: {"intra_node", "ranks_per_node", "on_nonfinite"} for strategy in WITH_RESIDUALS_OF_PUSHES}


def options_of(strategy):
    named = {**inspect.signature(AlgorithmStrategy).parameters, **inspect.signature(strategy).parameters}
    return set(named) - {"options"} - ELSEWHERE - NOT_ALLOWED.get(strategy, set())


def honoured(rank, world, strategy):
    seen = {}

    class Look(Callback):
        def on_train_start(self, trainer, *_):
            seen.update({name: HONOURED[name][1](trainer.strategy.algorithm) for name in options_of(strategy)})

    given = {name: HONOURED[name][0] for name in options_of(strategy)}
    trainer(strategy(**given), world, callbacks=[Look()], max_steps=1).fit(Toy(), loader())
    return given, seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_option_is_honoured_or_refused(strategy):
    """A new option has no entry above: this test fails until it has one."""
    for given, seen in run_ranks(honoured, 2, strategy, init=False):
        assert seen == given
    for name in NOT_ALLOWED.get(strategy, ()):
        with pytest.raises(ValueError, match=name):
            strategy(**{name: HONOURED[name][0]})
