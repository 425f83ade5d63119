"""A Llama in PyTorch, as a user would write it for speed: the peer of train_step.py."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Grouped-query attention by PyTorch's fused kernel."""

    def __init__(self, embed: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = embed // heads
        self.query = nn.Linear(embed, heads * self.head_dim, bias=False)
        self.key = nn.Linear(embed, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(embed, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, embed, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key, value = (heads(of(x)) for of in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, cosine, sine),
            _rotate(key, cosine, sine),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, embed: int, heads: int, kv_heads: int, mlp: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(embed, 1e-5), nn.RMSNorm(embed, 1e-5)
        self.attention = Attention(embed, heads, kv_heads)
        self.gate = nn.Linear(embed, mlp, bias=False)
        self.up = nn.Linear(embed, mlp, bias=False)
        self.down = nn.Linear(mlp, embed, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens and targets, each (batch, seq), to the mean loss."""

    def __init__(self, *, layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed)
        self.layers = nn.ModuleList(Block(embed, heads, kv_heads, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(embed, 1e-5)
        self.head = nn.Linear(embed, vocab, bias=False)
        self.head_dim = embed // heads
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).float()
        powers = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        angles = places[:, None] * 10_000.0**-powers
        angles = torch.cat((angles, angles), -1)
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
