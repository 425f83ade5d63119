"""Language models of PyTorch, each of which does one thing that traces are known to get wrong."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, EMBED = 16, 8


class Model(nn.Module):
    """Embedding, a matrix, what a subclass does in between, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, EMBED)
        self.inner = nn.Linear(EMBED, EMBED)
        self.head = nn.Linear(EMBED, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.inner(self.tokens(tokens))))


class NoGrad(Model):
    def between(self, x):
        with torch.no_grad():
            scale = x.square().mean(-1, keepdim=True)
            first = x[:, :1]
        return x * scale * first


class Stateful(Model):
    """Marked as transformers marks Mamba."""

    _is_stateful = True

    def between(self, x):
        return x.cumsum(1)


class Entropy(Model):
    """A distribution, which checks the values of its arguments."""

    def between(self, x):
        return x * torch.distributions.Categorical(logits=x).entropy()[..., None]


class Detached(Model):
    def between(self, x):
        return x * x.detach()


class NormOfZeros(Model):
    """A norm at zero has the gradient 0 in PyTorch and none, NaN, in JAX."""

    def between(self, x):
        weight = self.inner.weight
        return x + torch.linalg.vector_norm(weight - weight.detach())


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        context.factor = 3.0
        return x.square()

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return context.factor * x * gradient


class Filled(torch.autograd.Function):
    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(context, inputs, output):
        context.factor = inputs[1]

    @staticmethod
    def backward(context, gradient):
        return 10 * context.factor * gradient, None


class OwnGradient(Model):
    def between(self, x):
        return Filled.apply(Tripled.apply(x), 2.0)


class Arange(Model):
    def between(self, x):
        return x + torch.arange(x.shape[1])[:, None] / 10


class InPlace(Model):
    def between(self, x):
        y = x.clone()
        y[:, 1:] += 1
        y.mul_(2).clamp_(min=-1)
        return y


class ThroughAView(Model):
    def between(self, x):
        y = x.clone()
        y.view(-1, EMBED).mul_(2)
        return y


class ClampedWeight(Model):
    """As Gemma 3n does in training."""

    def between(self, x):
        self.inner.weight.data.clamp_(-1, 1)
        return x


class OutOfSight(Model):
    """Through memory that no operation of PyTorch's is seen to share."""

    def between(self, x):
        y = x.clone()
        with torch._C.DisableTorchFunction():
            other = y.view(-1, EMBED)
        return y.mul_(1) + other.mul_(2).view_as(y)


class Autocast(Model):
    def between(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class Checkpointed(Model):
    def between(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class RunningStatistics(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(EMBED)

    def between(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class PlainTensor(Model):
    def __init__(self):
        super().__init__()
        self.offset = torch.linspace(0, 1, EMBED)

    def between(self, x):
        return x + self.offset


class ByValue(Model):
    def between(self, x):
        return x if x.sum().item() > 0 else -x


class RandomBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(EMBED))


class Dropped(Model):
    def between(self, x):
        return functional.dropout(functional.dropout(x, 0.5, self.training), 0.5, self.training)


class DroppedByModule(Model):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x):
        return self.drop(x)


class Unused(Model):
    """A parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(EMBED))


class Broken(Model):
    def between(self, x):
        return x @ x.new_ones(EMBED + 1, EMBED)


class Raising(Model):
    def __init__(self, early: bool = False):
        if early:
            raise KeyError("width")
        super().__init__()

    def between(self, x):
        raise KeyError("depth")


class Short(Model):
    """A table of fewer rows than the head has."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB - 1, EMBED)


class LeftPadded(Model):
    """Attention in which some queries see no key."""

    def between(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(-2)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
        return mixed.transpose(1, 2).flatten(-2)


class Attending(Model):
    """Causal attention beside a table of positions, and maybe neighbours added up before it."""

    def __init__(self, neighbours: bool = False) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, EMBED)
        self.neighbours = neighbours

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.tokens(tokens) + self.positions(position_ids)
        if self.neighbours:
            x = x + functional.pad(x, (0, 0, 1, 0))[:, :-1]
        heads = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(-2))


class Blocks(nn.Module):
    """Blocks that may depend on their number, be of several kinds, or be used each in its way."""

    def __init__(self, count: int = 4, use: str = "alike", kinds: str = "") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, EMBED)
        kinds = kinds or "a" * count
        self.blocks = nn.ModuleList(
            Block(number, use == "numbered", kind) for number, kind in enumerate(kinds)
        )
        if use == "tied":
            self.blocks[3].up.weight = self.blocks[1].up.weight
        if use == "beside a tower":  # of images, which are not given
            self.tower = nn.ModuleList(Block(number, False) for number in range(count))
        self.head = nn.Linear(EMBED, VOCAB)
        self.use = use

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in [*self.blocks] * (2 if self.use == "twice" else 1):
            x = block(x)
            if self.use == "between":
                x = x * 2
        return self.head(x)


class Block(nn.Module):
    def __init__(self, number: int, numbered: bool, kind: str = "a") -> None:
        super().__init__()
        self.layer_idx, self.numbered, self.kind = number, numbered, kind
        self.up = nn.Linear(EMBED, EMBED)
        if kind == "c":
            self.down = nn.Linear(EMBED, EMBED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin() if self.kind == "b" else self.down(x) if self.kind == "c" else x
        return x + self.up(x).tanh() / (self.layer_idx + 1 if self.numbered else 1)


class Given(nn.Module):
    """Blocks that are given something beside the hidden state, and a head that may be odd."""

    def __init__(self, use: str = "tokens", drop: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, EMBED)
        self.table = nn.Parameter(torch.ones(EMBED))
        self.blocks = nn.ModuleList(GivenBlock(drop) for _ in range(4))
        self.more = nn.ModuleList(nn.Linear(EMBED, EMBED) for _ in range(2 * (use == "two")))
        self.head = nn.Linear(EMBED, VOCAB)
        self.use, self.drop = use, nn.Dropout(drop)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(tokens) * self.table)
        beside = (tokens > 3).to(x.dtype)[..., None]
        if self.use == "weights":
            beside = beside * self.table
        if self.use == "slice":
            beside = self.table[None, None]
        if self.use == "longer":
            x, beside = (torch.cat((one[:, :1], one), 1) for one in (x, beside))
        for block in self.blocks:
            x = block(x, beside)
        for block in self.more:
            x = block(x)
        if self.use == "longer":
            x = x[:, 1:]
        if self.use == "after":
            x = x * beside
        if self.use == "mixed":
            x = x.cumsum(1)
        if self.use == "dropped":
            x = functional.dropout(x, 0.1, self.training)
        return self.head(x)


class GivenBlock(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(EMBED, EMBED), nn.Dropout(drop)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.up(x).tanh()) * beside


class HashRouted(torch.nn.Module):
    """A table of integers that folders contain, a matrix that chooses, and one that is not used."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.chooser = torch.nn.Linear(EMBED, EMBED, bias=False)
        self.unused = torch.nn.Linear(EMBED, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.register_buffer("experts", torch.arange(vocab) % EMBED)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        chosen = self.chooser(x).topk(2, dim=-1).indices
        mask = torch.zeros_like(x).scatter(-1, chosen, 1.0)
        return self.head(x * (mask + torch.nn.functional.one_hot(self.experts[tokens], EMBED)))


class Decay(torch.nn.Module):
    """Initial values computed from those of parameters, as in Kimi Linear and Bailing."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.rate = torch.nn.Parameter(torch.empty(64))
        self.nothing = torch.nn.Parameter(torch.empty(64))
        with torch.no_grad():
            self.rate.copy_(torch.nn.init.uniform_(self.rate, a=1.0, b=16.0).log())
            torch.nn.init.normal_(self.nothing, std=3.0)
            twice = self.nothing + self.nothing
            self.nothing.copy_(twice - self.nothing * 2.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.rate.mean() + self.nothing.mean())


class RandomLike(torch.nn.Module):
    """Random numbers of a parameter's shape, copied into zeros, as in OLMo Hybrid and Zamba."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.steps = torch.nn.Parameter(torch.zeros(64))
        self.shift = torch.nn.Parameter(torch.zeros(64))
        with torch.no_grad():
            self.steps.copy_(torch.rand_like(self.steps) * 2.0 + 1.0)
            self.shift.copy_(torch.randn_like(torch.empty(64)) * 3.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.steps.mean() + self.shift.mean())


class DrawnIntoZeros(torch.nn.Module):
    """A router whose numbers are drawn into a tensor of zeros, as gpt-oss's."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.router = torch.nn.Parameter(torch.zeros(vocab, EMBED))
        torch.nn.init.normal_(self.router, std=3.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.table(tokens), self.router)


class TimeSteps(torch.nn.Module):
    """A bias that begins as the inverse softplus of random time steps, as in Mamba."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.bias = torch.nn.Parameter(torch.empty(4 * EMBED))
        steps = torch.exp(torch.rand(4 * EMBED) * 2.0 - 3.0).clamp(min=0.06)
        with torch.no_grad():
            self.bias.copy_(steps + torch.log(-torch.expm1(-steps)))
            self.head.weight.data.normal_(std=3.0)
            self.head.bias.fill_(2.0)
            self.head.bias /= 4.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.bias.mean())


class Drawing(torch.nn.Module):
    """A layer that adds numbers drawn in its forward pass, by the operation that it is given."""

    def __init__(self, vocab: int = 16, operation: str = "exponential") -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, vocab)
        self.operation = operation

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens) * 0.0
        match self.operation:
            case "exponential":
                return hidden + torch.empty_like(hidden).exponential_(2.0)
            case "cauchy":
                return hidden + torch.empty_like(hidden).cauchy_(1.0, 2.0).clamp(-3.0, 5.0)
            case "random":
                return hidden + torch.empty_like(hidden).random_(2, 9)
            case "normal":
                return hidden + torch.normal(hidden + 1.0, hidden + 2.0)
            case "normal of a size":
                return hidden + torch.normal(1.0, 2.0, tuple(hidden.shape), device=hidden.device)
            case "normal of 16 bits":
                drawn = torch.randn_like(hidden.bfloat16())
                assert drawn.dtype == torch.bfloat16
                return hidden + drawn
            case "logarithm of 16 bits":
                drawn = torch.rand_like(hidden.bfloat16())
                return hidden + torch.log1p(-drawn) + torch.empty_like(drawn).uniform_(0.0, to=0.5)
            case "normal of a deviation":
                return hidden + torch.normal(1.0, hidden + 2.0)
            case "random by name":
                return hidden + torch.empty_like(hidden).random_(to=9)
            case "noise of 16 bits":
                drawn = torch.empty_like(hidden, dtype=torch.bfloat16).exponential_()
                return hidden - drawn.log()
            case "multinomial" | "multinomial without replacement":
                weights = torch.arange(16.0, device=hidden.device).expand(tokens.numel(), 16)
                count, again = (16, True) if self.operation == "multinomial" else (8, False)
                drawn = torch.multinomial(weights, count, again).float()
                return hidden + drawn.mean(-1).reshape(*tokens.shape, 1)
            case _:
                return torch.nn.functional.gumbel_softmax(hidden, tau=0.5)


class MaskedLogits(torch.nn.Module):
    """A mask of logits among the parameters, infinite by its own code."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.mask = torch.nn.Parameter(torch.zeros(vocab))
        with torch.no_grad():
            self.mask[3] = -torch.inf

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens)) + self.mask.detach()


class Truncated(torch.nn.Module):
    """Truncated normal numbers in parameters with data and without, copied, and drawn before."""

    def __init__(self, vocab: int = 16, drawn_before: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab, EMBED)
        self.head = torch.nn.Linear(EMBED, vocab)
        self.zeros = torch.nn.Parameter(torch.zeros(64, 8))
        self.copied = torch.nn.Parameter(torch.empty(64, 8))
        bounds = {"mean": 1.0, "std": 0.5, "a": 0.5, "b": 2.0}
        torch.nn.init.trunc_normal_(self.head.weight, **bounds)
        torch.nn.init.trunc_normal_(self.zeros, **bounds)
        with torch.no_grad():
            self.copied.copy_(torch.nn.init.trunc_normal_(torch.empty(64, 8), **bounds))
        if drawn_before:
            self.zeros = torch.nn.Parameter(torch.nn.init.trunc_normal_(torch.zeros(64, 8)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.zeros.mean() + self.copied.mean())
