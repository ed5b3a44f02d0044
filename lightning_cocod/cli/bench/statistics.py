"""From trials to rows: medians, fractions of the ceiling, and what the transport alone would leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from lightning_cocod.cli.bench.counters import COMMUNICATION, HEARTBEAT, LOOPBACK, OTHERS, TRAINING
from lightning_cocod.cli.bench.host import errors
from lightning_cocod.cli.bench.meter import Result
from lightning_cocod.cli.bench.plan import ALONE, CEILING

TRANSPORT = "transport"
QUIET = 0.02  # of the CPUs: what other processes may take before figures count as rough
FRAMES = 1514 / 1448  # Ethernet's bytes for TCP's content; devices count whole buffers, with one header each
SILENCE = 0.005  # of the parameters' bytes in a round
HIDDEN, BOUND = 0.98, 0.95  # of what the transport leaves; of what the link allows where a transfer does not fit
Trials = Mapping[int, Sequence[Result]]  # repeat → a result of each rank


class Setting(NamedTuple):
    """What rows need in common to be compared.

    Attributes:
        workload: what was trained.
        batch_size: samples of a rank in a step.
        ranks: how many.
        device: of the network; all ranks share a loopback, `lo`.
        link_mbit: its rate, in Mbit/s; None is unknown or no limit.
        period: steps of a round.
    """

    workload: str
    batch_size: int
    ranks: int
    device: str
    link_mbit: float | None
    period: int


class Row(NamedTuple):
    """A contender in one setting. None where it was not measured; medians are over the repeats.

    Attributes:
        setting: what was trained, and on what.
        contender: name.
        step_ms: time of a step: of each rank the median over the rounds, of all ranks by the mean of their speeds.
        fraction: of the ceiling's speed in the same repeat.
        least: the smallest fraction of any repeat.
        most: the largest.
        by_cpu: the same fraction by CPU time: the part of the time in which the training thread computes forward, backward
            and update, beside the ceiling's, less its part of the transport's interrupts: the kernel charges them to whom
            they meet, and they meet training as often as it computes. A machine that is slower at one moment than at the
            next changes it little.
        transport_percent: of a round: the CPU time that the transport alone takes for the same bytes.
        limit: what the transport leaves of the ceiling's speed.
        target: what a strategy of ours has to reach.
        own_percent: of the ceiling's speed, lost beyond the limit by CPU time.
        own_ms: what a step takes longer than the ceiling's.
        sent_mb: put on the network for each step by each rank, with all headers.
        peak_mb: memory beyond the ceiling's peak.
        peak_parameters: the same in units of the parameters.
        training_ms: CPU time of the training thread for each step, program and kernel.
        communication_ms: of our communication thread.
        heartbeat_ms: of our heartbeat's threads.
        others_ms: of all other threads, among them the transport's.
        machine_ms: CPU time of the whole machine for each step and rank, interrupts included.
        exposed_ms: that training waited for the link in each step, as the strategy itself counts.
        repeats: that were measured.
        note: what went wrong.
    """

    setting: Setting
    contender: str
    step_ms: float | None = None
    fraction: float | None = None
    least: float | None = None
    most: float | None = None
    by_cpu: float | None = None
    transport_percent: float | None = None
    limit: float | None = None
    target: float | None = None
    own_percent: float | None = None
    own_ms: float | None = None
    sent_mb: float | None = None
    peak_mb: float | None = None
    peak_parameters: float | None = None
    training_ms: float | None = None
    communication_ms: float | None = None
    heartbeat_ms: float | None = None
    others_ms: float | None = None
    machine_ms: float | None = None
    exposed_ms: float | None = None
    repeats: int = 0
    note: str = ""


def rows(run: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each contender of a run, in the order in which they were asked for.

    Args:
        run: the plan's fields, `ranks`, `cpus`, `device` and `own` (names of our strategies).
        trials: as the host wrote them: `repeat`, `contender`, and a result of each of the `ranks`.
    """
    measured: dict[str, dict[int, Sequence[Result]]] = {name: {} for name in run["contenders"]}
    notes = dict.fromkeys(run["contenders"], "")
    for trial in trials:
        name, results = trial["contender"], trial["ranks"]
        if wrong := errors(results):
            notes[name] = wrong[0]
        if all("rounds" in result for result in results):
            measured[name][trial["repeat"]] = results
    ceiling, period = measured[CEILING], run["period"]
    others = busy_with_others(ceiling)
    if others > QUIET * run["cpus"]:
        notes[CEILING] = notes[CEILING] or f"rough: other processes kept {others:.2f} of {run['cpus']} CPUs busy"
    setting = Setting(*(run[key] for key in ("workload", "batch_size", "ranks", "device", "link_rate", "period")))
    made, link = [], None
    for name, of in sorted(measured.items(), key=lambda item: item[0] != TRANSPORT):  # first, to judge the others by
        row = Row(setting, name, repeats=len(of), note=notes[name])
        if of:
            row = _with_costs(row, of)
            if name not in ALONE and sends_nothing(row, of) and not row.note:
                row = row._replace(note="has sent nothing in the measured rounds: take more of them")
        if of and name == TRANSPORT and row.sent_mb:  # one rank has nobody to send to
            link = Transport.of(row, of, others, run)
        if of and name != TRANSPORT:
            row = row._replace(step_ms=1e3 * median(_step(results, period) for results in of.values()))
            row = _beside(row, of, ceiling)
        if link is not None and row.fraction is not None and name not in ALONE:
            row = link.judge(row, median(_step(results, period) for results in ceiling.values()), ours=name in run["own"])
        made.append(row)
    return sorted(made, key=lambda row: run["contenders"].index(row.contender))


def _step(results: Sequence[Result], period: int) -> float:
    """Seconds."""
    return 1 / (period * _rounds_per_second(results))


def _rounds_per_second(results: Sequence[Result]) -> float:
    speeds: list[float] = [1 / median(result["rounds"]) for result in results]
    return sum(speeds) / len(speeds)


def _beside(row: Row, of: Trials, ceiling: Trials) -> Row:
    """Beside the ceiling of the same repeat: machines change with time."""
    period = row.setting.period
    pairs = [(results, ceiling[repeat]) for repeat, results in of.items() if repeat in ceiling]
    if not pairs:
        return row
    fractions = [_rounds_per_second(results) / _rounds_per_second(alone) for results, alone in pairs]
    peak = median(_peak(results) - _peak(alone) for results, alone in pairs)
    return row._replace(
        fraction=median(fractions),
        least=min(fractions),
        most=max(fractions),
        by_cpu=median(_computing(results) / _computing(alone) for results, alone in pairs),
        own_ms=1e3 * median(_step(results, period) - _step(alone, period) for results, alone in pairs),
        peak_mb=peak / 1e6,
        peak_parameters=peak / pairs[0][0][0]["parameters"],
    )


def _computing(results: Sequence[Result]) -> float:
    return sum(float(result["computing"]) for result in results) / len(results)


def _peak(results: Sequence[Result]) -> float:
    return max(float(result["peak"]) for result in results)


def _with_costs(row: Row, of: Trials) -> Row:
    """Of a step and a rank."""

    def mean(value: Callable[[Result], float]) -> float:
        return median(sum(map(value, results)) / len(results) for results in of.values())

    def cpu(kind: str) -> float:
        return 1e3 * mean(lambda result: sum(result["cpu"][kind])) / row.setting.period

    told = all("metrics" in result for results in of.values() for result in results)
    return row._replace(
        sent_mb=mean(lambda result: result["sent"]) / _sharing(row.setting) / row.setting.period / 1e6,
        training_ms=cpu(TRAINING),
        communication_ms=cpu(COMMUNICATION),
        heartbeat_ms=cpu(HEARTBEAT),
        others_ms=cpu(OTHERS),
        machine_ms=1e3 * mean(lambda result: result["machine"]) / row.setting.ranks / row.setting.period,
        exposed_ms=mean(lambda result: result["metrics"]["comm/exposed_ms"]) if told else None,
    )


def _sharing(setting: Setting) -> int:
    """Ranks that share a device."""
    return setting.ranks if setting.device == LOOPBACK else 1


def sends_nothing(row: Row, of: Trials) -> bool:
    """Whether a contender has only said that it is there: its bytes are next to none beside the parameters'."""
    parameters = next(iter(of.values()))[0]["parameters"]
    return (
        row.sent_mb is not None and row.setting.ranks > 1 and row.sent_mb * row.setting.period * 1e6 < SILENCE * parameters
    )


class Transport(NamedTuple):
    """An all-reduce of the parameters, alone on the same link.

    Attributes:
        seconds: that it takes, or that its bytes take at the link's rate if that is known and the transport is slower.
        cpu: seconds of each rank: all threads, and what the kernel does for them outside of any thread.
        interrupts: the latter part of them.
        sent_mb: by each rank in an all-reduce, divided by the steps of a period.
        capacity: CPUs that a rank has: those it trains on, or its share of the machine where there are fewer.
    """

    seconds: float
    cpu: float
    interrupts: float
    sent_mb: float
    capacity: float

    @classmethod
    def of(cls, row: Row, trials: Trials, others: float, run: Mapping[str, Any]) -> Transport:
        """From the contender of that name.

        Args:
            row: its row, with its costs.
            trials: its results.
            others: CPUs that other processes kept busy meanwhile.
            run: the plan and the machine.
        """
        seconds = median(1 / _rounds_per_second(results) for results in trials.values())
        assert row.machine_ms is not None
        assert row.sent_mb is not None
        threads = row.setting.period * sum(ms or 0.0 for ms in (row.training_ms, row.others_ms)) / 1e3
        machine = row.setting.period * row.machine_ms / 1e3 - others * seconds / row.setting.ranks
        capacity = min(run["threads"], run["cpus"] / run["ranks"])
        if row.setting.link_mbit is not None:
            megabits = 8 * FRAMES * row.setting.period * row.sent_mb * _sharing(row.setting)
            seconds = min(seconds, megabits / row.setting.link_mbit)
        return cls(seconds, max(threads, machine), max(0.0, machine - threads), row.sent_mb, capacity)

    def judge(self, row: Row, alone: float, *, ours: bool) -> Row:
        """Add what the transport leaves of the ceiling's speed for a row's bytes, and for ours how near it comes.

        Training and the transport share CPUs, which leaves 1 - the transport's CPU time ÷ round. Where the transfer takes
        longer than a round of computation, the link decides. Ours are allowed the bytes of the parameters once a round.

        Args:
            row: with its costs and its fraction.
            alone: seconds of the ceiling's step.
            ours: whether it has a target.
        """
        assert row.step_ms is not None
        assert row.by_cpu is not None
        assert row.sent_mb is not None
        bytes_ = row.sent_mb / self.sent_mb
        if ours:
            bytes_ = min(1.0, bytes_)
        round_ = self.capacity * row.setting.period * row.step_ms / 1e3
        share, by_cpu = bytes_ * self.cpu / round_, row.by_cpu * (1 - bytes_ * self.interrupts / round_)
        by_link = row.setting.period * alone / (bytes_ * self.seconds) if bytes_ > 0 else 1.0
        limit = min(1 - share, by_link)
        own = 100 * (limit - by_cpu)
        row = row._replace(by_cpu=by_cpu, transport_percent=100 * share, limit=limit)
        target = HIDDEN * (1 - share) if 1 - share <= by_link else BOUND * by_link
        return row._replace(target=target, own_percent=own) if ours else row


def busy_with_others(ceiling: Trials) -> float:
    """CPUs that other processes kept busy while every rank trained alone: all that the ranks' threads do not account for."""
    found = []
    for results in ceiling.values():
        own = sum(sum(map(sum, result["cpu"].values())) for result in results)
        machine = sum(result["machine"] for result in results) / len(results)
        found.append(max(0.0, machine - own) * _rounds_per_second(results))
    return median(found) if found else 0.0
