"""What codecs cost beside a copy of the memory.

    python recipes/codecs.py [--mib 1 4 40] [--threads 1] [--device cpu] [--only int8 sign]

For each codec the bits of a value and the speed of encode and decode as a fraction of the speed of `out.copy_(x)` on float32
values of the same number: 1 is as fast as a copy. Medians of repeats that are interleaved with those of the copy, in seconds
of the processor where one thread does it, so that others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from lightning_cocod.compression import CODECS, Codec, Int4, Int8

MORE: list[Codec] = [Int8(stochastic=True), Int4(stochastic=True)]


def seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """Of one call."""
    now = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begun = now()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (now() - begun) / calls


def measure(codec: Codec, x: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Speed of encode and decode, in copies."""
    out, code = torch.empty_like(x), torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    jobs = (lambda: out.copy_(x), lambda: codec.encode(x, code), lambda: codec.decode(code, out))
    calls = [max(1, int(0.01 / seconds(job, 1, x.device))) for job in jobs]
    taken = [[seconds(job, n, x.device) for job, n in zip(jobs, calls, strict=True)] for _ in range(repeats)]
    copy, encode, decode = (statistics.median(times) for times in zip(*taken, strict=True))
    return copy / encode, copy / decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4, 40], help="sizes of the float32 values")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="names of codecs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    values = [torch.randn(int(mib * 2**18), device=args.device) for mib in args.mib]
    sizes = "".join(f"{f'{mib:g} MiB':>16s}" for mib in args.mib)
    print(f"{'encode/decode, in copies':44s}{'bits':>6s}{sizes}")
    codecs = [*(kind() for kind in CODECS.values()), *MORE]
    for codec in (codec for codec in codecs if not args.only or codec.name in args.only):
        speeds = [measure(codec, x, args.repeats) for x in values]
        bits = 8 * codec.nbytes(values[-1].numel()) / values[-1].numel()
        print(f"{codec!r:44}{bits:6.2f}" + "".join(f"{f'{e:.2f} / {d:.2f}':>16s}" for e, d in speeds), flush=True)


if __name__ == "__main__":
    main()
