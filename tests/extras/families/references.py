"""PyTorch models of families whose code is not in transformers, written from their papers' text.

They share nothing with graphtrain's decoder: loops over heads, explicit matrices, float64.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def turn(x, base=10_000.0):
    """Rotary positions of (batch, seq, head_dim): each pair of halves as a complex number."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
    angle = angle / base ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def mix(query, key, value, slope):
    """One head."""
    length = query.shape[1]
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    scores = scores + slope * torch.arange(length)  # ALiBi as Bloom and Baichuan add it
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return torch.softmax(scores.masked_fill(future, -math.inf), -1) @ value


def slopes(heads: int) -> list[float]:
    """For 6 heads: those of 4, then the first odd ones of 8."""
    assert heads == 6
    return [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


class Attention(nn.Module):
    """With one packed matrix: W_pack of Baichuan, wqkv of InternLM2."""

    def __init__(self, sizes, packing: str, alibi: bool):
        super().__init__()
        width, self.heads, self.kv_heads = sizes["embed"], sizes["heads"], sizes["kv_heads"]
        self.head_dim, self.packing, self.alibi = width // self.heads, packing, alibi
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        name, out = ("W_pack", "o_proj") if packing == "thirds" else ("wqkv", "wo")
        self.add_module(name, nn.Linear(width, rows, bias=False))
        self.add_module(out, nn.Linear(width, width, bias=False))

    def forward(self, x):
        modules = dict(self.named_children())
        if self.packing == "thirds":
            query, key, value = modules["W_pack"](x).chunk(3, -1)
            query, key, value = (one.split(self.head_dim, -1) for one in (query, key, value))
            out = modules["o_proj"]
        else:
            query, key, value = [], [], []
            group = self.heads // self.kv_heads
            for part in modules["wqkv"](x).split((group + 2) * self.head_dim, -1):
                *queries, k, v = part.split(self.head_dim, -1)
                query, key, value = [*query, *queries], [*key, *[k] * group], [*value, *[v] * group]
            out = modules["wo"]
        if not self.alibi:
            query, key = [turn(one) for one in query], [turn(one) for one in key]
        by_head = slopes(self.heads) if self.alibi else [0.0] * self.heads
        return out(
            torch.cat([mix(*one) for one in zip(query, key, value, by_head, strict=True)], -1)
        )


class Gated(nn.Module):
    def __init__(self, sizes, gate: str, up: str, down: str):
        super().__init__()
        self.names = gate, up, down
        for name in (gate, up):
            self.add_module(name, nn.Linear(sizes["embed"], sizes["mlp"], bias=False))
        self.add_module(down, nn.Linear(sizes["mlp"], sizes["embed"], bias=False))

    def forward(self, x):
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(functional.silu(gate(x)) * up(x))


class Layer(nn.Module):
    def __init__(self, names, attention, mlp, width):
        super().__init__()
        self.names = names
        for name, module in zip(
            names, (RMSNorm(width), attention, RMSNorm(width), mlp), strict=True
        ):
            self.add_module(name, module)

    def forward(self, x):
        first, attention, second, mlp = (self.get_submodule(name) for name in self.names)
        x = x + attention(first(x))
        return x + mlp(second(x))


class Reference(nn.Module):
    """A decoder under the names of a family."""

    def __init__(self, sizes, embedding: str, head: str, layer, unit_head: bool = False):
        super().__init__()
        self.embedding, self.head, self.unit_head = embedding, head, unit_head
        self.model = nn.Module()
        self.model.add_module(embedding, nn.Embedding(sizes["vocab"], sizes["embed"]))
        self.model.layers = nn.ModuleList([layer() for _ in range(sizes["layers"])])
        self.model.norm = RMSNorm(sizes["embed"])
        self.add_module(head, nn.Linear(sizes["embed"], sizes["vocab"], bias=False))

    def forward(self, tokens):
        x = self.model.get_submodule(self.embedding)(tokens)
        for layer in self.model.layers:
            x = layer(x)
        head = self.get_submodule(self.head).weight
        if self.unit_head:
            head = head / head.norm(dim=1, keepdim=True)
        return self.model.norm(x) @ head.T


def baichuan(sizes, *, alibi: bool, unit_head: bool) -> Reference:
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def layer():
        mlp = Gated(sizes, "gate_proj", "up_proj", "down_proj")
        return Layer(names, Attention(sizes, "thirds", alibi), mlp, sizes["embed"])

    return Reference(sizes, "embed_tokens", "lm_head", layer, unit_head)


def internlm2(sizes) -> Reference:
    names = ("attention_norm", "attention", "ffn_norm", "feed_forward")

    def layer():
        mlp = Gated(sizes, "w1", "w3", "w2")
        return Layer(names, Attention(sizes, "groups", False), mlp, sizes["embed"])

    return Reference(sizes, "tok_embeddings", "output", layer)
