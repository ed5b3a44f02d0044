"""A small GPT in plain torch: pre-norm blocks, learned positions, a head of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] to the same."""
        parts = self.attention(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(self.norm2(x))
        return out


class GPT(nn.Module):
    """Maps tokens [N, T] to logits [N, T, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]  # a module's call is untyped


def gpt(vocabulary: int = 256, context: int = 64, width: int = 384, depth: int = 6, heads: int = 6) -> nn.Module:
    """A GPT over bytes (10.9 M parameters)."""
    return GPT(vocabulary, context, width, depth, heads)
