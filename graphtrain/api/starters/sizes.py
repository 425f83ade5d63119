"""Size of a model, its batch and its tokenizer, chosen by the amount of training text."""

from dataclasses import dataclass

_EPOCHS = 4  # at most; more passes over a small text mostly memorize it
_MIN_STEPS, _MAX_STEPS = 100, 2000


@dataclass(frozen=True)
class Size:
    """Sizes that train in minutes on a few CPU cores, up to those of GPT-2 small."""

    tokens: float  # largest number of training tokens that it is for
    layers: int
    embed: int
    heads: int
    global_batch_size: int
    seq_len: int

    @property
    def gated_mlp(self) -> int:
        """Hidden width of a gated MLP: 8/3 of `embed`, rounded up to a multiple of 64."""
        return -(-8 * self.embed // 3 // 64) * 64


_SIZES = (
    Size(3e6, layers=4, embed=128, heads=4, global_batch_size=16, seq_len=128),
    Size(30e6, layers=6, embed=256, heads=8, global_batch_size=16, seq_len=256),
    Size(300e6, layers=8, embed=512, heads=8, global_batch_size=32, seq_len=512),
    Size(float("inf"), layers=12, embed=768, heads=12, global_batch_size=64, seq_len=1024),
)


def size_for(tokens: int) -> Size:
    """Return the size of a model for a number of training tokens."""
    return next(size for size in _SIZES if tokens <= size.tokens)


def steps_for(tokens: int, batch_tokens: int) -> int:
    """Return the number of steps for a few passes over the training tokens."""
    return max(_MIN_STEPS, min(_EPOCHS * tokens // batch_tokens, _MAX_STEPS) // 100 * 100)


def tokenizer_for(text_bytes: int) -> str:
    """Return the tokenizer for a number of bytes of text."""
    for limit, vocab in ((1e6, None), (5e6, 2048), (30e6, 4096), (300e6, 8192)):
        if text_bytes < limit:
            return f"sentencepiece:{vocab}" if vocab else "bytes"
    return "sentencepiece:32000"
