"""When the mean of a round's displacements is merged: some steps after its end, or where the next one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_cocod.algorithms.fragment import Fragment
from lightning_cocod.algorithms.options import below_one, flag, nonnegative, whole
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.norms import norm

if TYPE_CHECKING:
    from lightning_cocod.algorithms.outer import OuterRounds


class Lag:
    """The mean of a round is merged τ steps after its end, or at the end of the next round if that comes first.

    A replica keeps a part of what it has, so of the steps that it has made since the launch::

        end of a round:   Δ_i ← θ − x_i ;  Δ̄ ← async Σ_j w_j Δ_j
        τ steps later:    θ ← θ + V(Δ̄) ;  x_i ← α x_i + (1 − α) θ

    Where τ is a whole round, the second line comes before the first of the next round's end, and in the first round, with
    nothing on its way, it is x_i ← α x_i + (1 − α) θ alone.

    θ is the same on all ranks. A rank that is left out of a mean takes in θ for all its parameters. What a codec has
    dropped, e_i, stays in θ − x_i, part of the next Δ_i: then x_i ← α x_i + (1 − α) (θ − e_i).

    Args:
        steps: τ ≥ 0; 0 waits for it, None is a whole round.
        keep: 0 ≤ α < 1.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, steps: int | None = 0, keep: float = 0.0, *, overlap: bool = True) -> None:
        self.steps = None if steps is None else whole("delay", steps, least=0)
        self.keep = below_one("keep", keep)
        self.overlap = flag("overlap", overlap)

    def is_due(self, fragment: Fragment, t: int) -> bool:
        """Whether what it has sent is merged at step t, in the middle of a round."""
        return self.steps is not None and fragment.launched is not None and fragment.launched + self.steps == t

    @torch.no_grad()
    def end(self, rounds: OuterRounds, fragment: Fragment) -> None:
        """Δ ← θ − x, and the launch of Δ̄."""
        if fragment.launched is not None:
            self.merge(rounds, fragment)
        elif self.steps is None:
            self._pull(fragment)
        Δ = fragment.displacement()
        fragment.D, fragment.sent, fragment.launched, fragment.ended = Δ, len(Δ), rounds.t, rounds.t
        said = rounds.says(Δ)
        if rounds.comm.world_size > 1:
            fragment.A = self._launch(rounds, fragment, Δ, said)
            if not self.overlap:
                fragment.A.wait()

    def _launch(self, rounds: OuterRounds, fragment: Fragment, Δ: list[Tensor], said: list[Tensor]) -> Message:
        """Δ̄ ← async Σ_j w_j Δ_j, and the same for what else is said."""
        subject, size = rounds.subject("round"), norm(fragment.x)
        if rounds.compression is None:
            return rounds.comm.mean_(said, rounds.w, subject, measured=True, relative_to=size)
        if beside := said[len(Δ) :]:
            rounds.comm.mean_(beside, rounds.w, rounds.subject("beside the round"))  # has arrived when the other has
        D = fragment.D = rounds.comm.layout(Δ).buffer()
        D.copy_(Δ, keep=False)
        fragment.e = Δ
        return rounds.comm.compressed_mean_(D, Δ, list(fragment.θ), rounds.compression, subject, relative_to=size)

    @torch.no_grad()
    def merge(self, rounds: OuterRounds, fragment: Fragment) -> None:
        """θ ← θ + V(Δ̄) ; x ← α x + (1 − α) θ."""
        assert fragment.launched is not None
        fragment.drain()
        rounds.merged(fragment, of=fragment.launched)
        rounds.outer_step(fragment.about(), fragment.arrived())
        left_out = fragment.left_out
        if rounds.comm.rank in left_out:
            rounds.fold()
        else:
            self._pull(fragment)
        fragment.D, fragment.e, fragment.A, fragment.launched, fragment.left_out = None, None, None, None, ()
        rounds.repair(left_out)

    def _pull(self, fragment: Fragment) -> None:
        """x ← α x + (1 − α) (θ − e). Where a round does not end, only of what has been sent."""
        x, θ, e = fragment.x, list(fragment.θ.values()), fragment.e or []
        y = [*torch._foreach_sub(θ[: len(e)], e), *θ[len(e) :]] if e else θ
        pulled = len(x) if self.steps is None else fragment.sent
        if self.keep:
            torch._foreach_lerp_(x[:pulled], y[:pulled], 1 - self.keep)
        else:
            torch._foreach_copy_(x[:pulled], y[:pulled])


class Delay:
    """The mean of a round is waited for one round later; until then a worker goes by its own part of it.

    ′ is the round before::

        end of a round:   Δ_i ← θ_i − x_i
                          G_i ← a Δ_i + [Δ̄′ − a Δ_i′] ;  Δ̄ ← async Σ_j w_j Δ_j
                          θ_i ← θ_i + V(G_i) ;  x_i ← θ_i

    With a codec Δ̄′ is the mean of codes and Δ_i′ this worker's own (see ``Residuals``).

    Args:
        own: a ≥ 0, the weight of a worker's own, fresh term; the worker's weight in the mean by default, or its node's.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, own: float | None = None, *, overlap: bool = True) -> None:
        self.own = None if own is None else nonnegative("own", own)
        self.overlap = flag("overlap", overlap)

    @torch.no_grad()
    def end(self, rounds: OuterRounds, fragment: Fragment) -> None:
        """G, the launch of Δ̄, θ ← θ + V(G) and x ← θ."""
        G = self._late(rounds, fragment, fragment.displacement())
        rounds.outer_step(list(fragment.θ.values()), G)
        fragment.fold()
        fragment.ended = rounds.t

    def _late(self, rounds: OuterRounds, fragment: Fragment, Δ: list[Tensor]) -> list[Tensor]:
        """a Δ_i + [Δ̄′ − a Δ_i′], and the launch of Δ̄."""
        a = rounds.own_weight if self.own is None else self.own
        G = list(torch._foreach_mul(Δ, a))
        D = fragment.D if isinstance(fragment.D, Buffer) else None
        if D is not None:
            fragment.drain()
            if fragment.A is not None:
                rounds.merged(fragment, of=fragment.A.step)
            D.add_to(G[: fragment.sent], keep=False)  # parameters that are new since then come last
        layout = rounds.comm.layout(Δ)
        if D is None or D.layout is not layout:
            D = layout.buffer()
        D.copy_(Δ, keep=False)
        fragment.D, fragment.sent = D, len(Δ)
        if rounds.comm.world_size == 1:  # Δ̄ = Δ
            torch._foreach_mul_(D.buckets, 1 - a)
            return G
        subject, size = rounds.subject("round"), norm(fragment.x)
        if rounds.residuals is None:
            fragment.A = rounds.comm.correction_(D, subject, own=a, relative_to=size)
        else:
            fragment.A = rounds.residuals.mean_(D, list(fragment.θ), subject, like=Δ, own=a, relative_to=size)
        if not self.overlap:
            fragment.A.wait()
        return G
