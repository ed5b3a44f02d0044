"""What compressed messages are about: a part p of each worker, and what becomes of it once the mean is there.

How the mean comes about is another matter: by codes (``compressed.py``) or by two factors (``powersgd.py``).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_cocod.comm.buckets import Buffer, Layout
from lightning_cocod.comm.collectives import Operation, ring
from lightning_cocod.comm.norms import RunningNorm
from lightning_cocod.compression import Codec, PowerSGD


class Parts(ABC):
    """A part p for every bucket, something to be done with the mean m and with c, what the others take p for.

    Attributes:
        layout: of the parts.
    """

    layout: Layout

    def __init__(self) -> None:
        self._distance = RunningNorm()

    @abstractmethod
    def contents(self, bucket: int) -> list[Tensor]:
        """What p is made of, as it lies in memory; looked at for NaN and infinity."""

    @abstractmethod
    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Write p."""

    @abstractmethod
    def take(self, bucket: int, m: Tensor, c: Tensor | None, spare: Tensor) -> None:
        """What happens with m and c; the memory of all three is free to be used. A worker that is left out has no c."""

    def distance(self) -> Tensor | None:
        """‖m - p‖."""
        return self._distance.value()


class FromBase(Parts):
    """S ← m - c and θ ← θ + m, where p = S - θ.

    θ is the same on all workers bit for bit. S is this worker's model: what the codec drops stays in S - θ, and is part of
    the next p. A worker that is left out gets S ← θ.
    """

    def __init__(self, snapshot: Buffer, base: Buffer) -> None:
        super().__init__()
        self.layout, self._S, self._θ = snapshot.layout, snapshot.buckets, base.buckets

    def contents(self, bucket: int) -> list[Tensor]:
        """S."""
        return [self._S[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """p."""
        torch.sub(self._S[bucket], self._θ[bucket], out=scratch)

    def take(self, bucket: int, m: Tensor, c: Tensor | None, spare: Tensor) -> None:
        """θ moves to the mean of what all have sent."""
        S, θ = self._S[bucket], self._θ[bucket]
        θ.add_(m)
        if c is None:
            S.copy_(θ)
        else:
            self._distance.add([torch.sub(θ, S, out=spare)])
            S.copy_(m.sub_(c))


class FromZero(Parts):
    """D ← m - a c and R ← p - c, where p = D.

    D is a displacement or a gradient, to which the R of the message before has been added. A worker that is left out gets
    D ← m and R ← 0.
    """

    def __init__(self, parts: Buffer, residual: Sequence[Tensor], own: float) -> None:
        super().__init__()
        self.layout, self._D, self._R = parts.layout, parts.buckets, parts.layout.pieces(residual, keep=False)
        self._own = own

    def contents(self, bucket: int) -> list[Tensor]:
        """D."""
        return [self._D[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """p."""
        scratch.copy_(self._D[bucket])

    def take(self, bucket: int, m: Tensor, c: Tensor | None, spare: Tensor) -> None:
        """What has not been sent goes to R."""
        D, R = self._D[bucket], self._R[bucket]
        if c is None:
            torch._foreach_zero_(R)
            D.copy_(m)
            return
        self._distance.add([torch.sub(m, D, out=spare)])
        torch._foreach_copy_(R, self.layout.cut(bucket, torch.sub(D, c, out=spare), R))
        D.copy_(m.sub_(c, alpha=self._own))


class How(ABC):
    """How means of parts come about. One for all messages of an algorithm.

    Attributes:
        remembered: of each parameter, from one message to the next; the same on all workers. Empty where nothing is.
    """

    def __init__(self) -> None:
        self.remembered: dict[nn.Parameter, Tensor] = {}

    @abstractmethod
    def mean(self, parts: Parts, x: Sequence[nn.Parameter], weights: Sequence[float], rank: int, step: int) -> Operation:
        """Of the parts of all workers.

        Args:
            parts: this worker's.
            x: the parameters that they are about.
            weights: of all workers.
            rank: of this one.
            step: of training.
        """

    def forget(self) -> None:
        """The next message begins anew. One in flight keeps what it has."""
        self.remembered = {}

    def state_dict(self, numbers: Mapping[nn.Parameter, int]) -> dict[int, Tensor]:
        """What is remembered, once no message is in flight."""
        return {numbers[p]: value.clone() for p, value in self.remembered.items() if p in numbers}

    def load_state_dict(self, state: Mapping[int, Tensor], members: Sequence[nn.Parameter]) -> None:
        """Continue with it, from the next message on."""
        self.remembered = {members[number]: v.to(members[number].device, copy=True) for number, v in state.items()}


def fingerprint(chosen: Codec | PowerSGD) -> int:
    """Of what a user has chosen, with its options: all workers must have the same."""
    name_and_options = repr((chosen.name, sorted(vars(chosen).items())))
    return int.from_bytes(hashlib.sha256(name_and_options.encode()).digest()[:7], "big")


class MeanOfParts(Operation):
    """What the two ways have in common.

    Args:
        parts: this worker's p, and what is done with m and c.
        chosen: by the user, the same on all workers.
        weights: of all workers.
        rank: of this one.
    """

    def __init__(self, parts: Parts, chosen: Codec | PowerSGD, weights: Sequence[float], rank: int) -> None:
        self.layout, self.parts, self._chosen = parts.layout, parts, chosen
        self.weigh(rank, weights)

    @property
    def fingerprint(self) -> int:
        """The layout's, and that of what was chosen."""
        return self.layout.fingerprint ^ fingerprint(self._chosen)

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """A worker that is left out has weight 0."""
        self._rank, self._weights, self.weight = rank, list(weights), weights[rank]

    def contents(self, bucket: int) -> list[Tensor]:
        """Those of the parts."""
        return self.parts.contents(bucket)

    def uncompressed(self, rank: int, world_size: int) -> int:
        """That of a ring all-reduce."""
        return ring(self.layout.summed_nbytes, world_size)[0]

    def distance(self) -> Tensor | None:
        """‖m - p‖."""
        return self.parts.distance()
