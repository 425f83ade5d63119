"""Tokenizers of the Hugging Face `tokenizers` library: tokenizer.json, or GPT-2's two files."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.tokenizers.consistency import check_ids, check_tokenizer
from graphtrain.data.tokenizers.offsets import TokensWithOffsets
from graphtrain.data.tokenizers.piece_bytes import byte_of_piece, bytes_of_byte_level
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE, chat_template_of_config
from graphtrain.data.tokenizers.special_tokens import (
    TOKENIZER_CONFIG,
    added_bos,
    read_companion,
    token_text,
)
from graphtrain.data.tokenizers.word_cache import GPT2_WORDS_PATTERN, WordCache, splits_like_gpt2
from graphtrain.errors import DataError
from graphtrain.files import atomic_write
from lowering.machine.extras import optional_import
from sharding_rules.documents import DocumentError, parse_object, read_bytes

# Files next to tokenizer.json: special tokens by role, and the chat template.
COMPANION_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
_TOKENIZER_JSON = "tokenizer.json"
# End-of-document tokens, if no companion file names one: GPT-2, Llama 3, Gemma, Llama.
_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json; companion files are copied unchanged when it is saved.

    Text is encoded without adding special tokens; `prefix` and `suffix` have those that the
    post-processor puts around a text. Their settings in tokenizer_config.json (add_bos_token) do
    not count next to a tokenizer.json, as in transformers 5. A special token spelled out in the
    text becomes that token, as always with this library.

    Args:
        definition: Content of the tokenizer.json.
        name: Path for error messages.
        eod: Text of the end-of-document token. None: taken from the companion files, or one of
            the common ones.
        companions: Contents of the files of COMPANION_FILES that exist, by name.

    Raises:
        DataError: the definition cannot be used, or has no token `eod`.
    """

    kind = "huggingface"

    def __init__(
        self,
        definition: bytes,
        name: str = _TOKENIZER_JSON,
        *,
        eod: str | None = None,
        companions: Mapping[str, bytes] | None = None,
    ) -> None:
        self._definition = definition
        self._companions = dict(companions or {})
        self._name, self._end = name, eod
        self._tokenizer = _load(definition, name)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        token_ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab: int = max(token_ids, default=-1) + 1  # token ids may have gaps
        self.prefix, self.suffix = _tokens_of_post_processor(self._tokenizer)
        self.eod: int | None = self._eod(eod)
        is_gpt2_split = splits_like_gpt2(json.loads(self._tokenizer.to_str()))
        self._words = WordCache(GPT2_WORDS_PATTERN, self._encode) if is_gpt2_split else None
        self.digest = hashlib.sha256(definition).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._definition, self._name, self._end, self._companions)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._words is not None:
            return self._words.encode(texts)
        return [np.array(token_ids, np.int32) for token_ids in self._encode(list(texts))]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        results = []
        for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            results.append(
                TokensWithOffsets(np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])
            )
        return results

    @property
    def bos(self) -> int | None:
        token = self.special.get("bos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def special(self) -> Mapping[str, str]:
        special: dict[str, str] = {}
        for name in COMPANION_FILES[1::-1]:  # tokenizer_config.json takes precedence
            for role, token in read_companion(self._companions.get(name, b"{}"), name).items():
                text = token.get("content") if isinstance(token, dict) else token
                if role.endswith("_token") and isinstance(text, str):
                    special[role] = text
        if self.eod is not None and (self._end is not None or "eos_token" not in special):
            special["eos_token"] = self._tokenizer.id_to_token(self.eod)
        return special

    @property
    def special_texts(self) -> Sequence[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @property
    def chat_template(self) -> str | None:
        template_file = self._companions.get(COMPANION_FILES[2])
        try:
            return (
                template_file.decode()
                if template_file
                else chat_template_of_config(self._companions.get(TOKENIZER_CONFIG, b"{}"))
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self._name}: cannot read its chat template ({error})") from None

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def piece_bytes(self, token: int) -> bytes | None:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        decoder = self._tokenizer.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        return bytes_of_byte_level(piece) if is_byte_level else byte_of_piece(piece)

    def save(self, directory: Path) -> tuple[str, ...]:
        for name, content in {_TOKENIZER_JSON: self._definition, **self._companions}.items():
            with atomic_write(directory / name) as file:
                file.write(content)
        return _TOKENIZER_JSON, *self._companions

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # The fast variant does not compute the offsets of tokens in the text.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _eod(self, eod_text: str | None) -> int | None:
        if eod_text is not None:
            token_id = self._tokenizer.token_to_id(eod_text)
            if token_id is None:
                raise DataError(
                    f"{self._name}: has no token {eod_text!r}; name another one with --eod-token"
                )
            return token_id
        if self.suffix:
            return self.suffix[-1]
        configured_tokens = [
            _end_of_sequence(self._companions[name], name)
            for name in COMPANION_FILES[:2]
            if name in self._companions
        ]
        for token in (*filter(None, configured_tokens), *_EOD_TOKENS):
            if (token_id := self._tokenizer.token_to_id(token)) is not None:
                return token_id
        return None


def _tokens_of_post_processor(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a post-processor puts before and after a text."""
    if not tokenizer.num_special_tokens_to_add(is_pair=False):
        return (), ()
    for probe in ("a", "1", "."):  # a vocabulary may lack one of them
        mask = tokenizer.encode(probe).special_tokens_mask
        if 0 in mask:
            ids, last = tokenizer.encode(probe).ids, len(mask) - mask[::-1].index(0)
            return tuple(ids[: mask.index(0)]), tuple(ids[last:])
    return (), ()


def _unpickle(
    definition: bytes, name: str, eod: str | None, companions: Mapping[str, bytes]
) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(definition, name, eod=eod, companions=companions)


def read_huggingface(path: Path, eod: str | None = None) -> HuggingFaceTokenizer:
    """Read a tokenizer.json and the companion files that exist next to it.

    Raises:
        DataError: a file cannot be read, or is not a tokenizer.
    """
    companion_names = [name for name in COMPANION_FILES if (path.parent / name).is_file()]
    companions = {name: _read(path.parent / name) for name in companion_names}
    definition = _read(path)
    check_tokenizer(definition, str(path))
    return HuggingFaceTokenizer(definition, str(path), eod=eod, companions=companions)


def read_gpt2(vocab: Path, merges: Path, eod: str | None = None) -> HuggingFaceTokenizer:
    """Read a byte-level BPE tokenizer from GPT-2's vocab.json and merges.txt.

    Raises:
        DataError: a file cannot be read, or is not of this kind.

    Source: Radford et al. 2019, section 2.2; the file format of Hugging Face's GPT2Tokenizer
    """
    _import(str(vocab))
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    if not _read(merges):  # the library would wait for a FIFO
        raise DataError(f"{merges}: is empty")
    try:
        check_ids(parse_object(_read(vocab)))
        table, pairs = models.BPE.read_file(str(vocab), str(merges))
        tokenizer = Tokenizer(models.BPE(table, pairs))
    except Exception as error:  # the library has no other class for its errors
        raise DataError(
            f"{vocab}, {merges}: not the files of a BPE tokenizer ({str(error)[:200]})"
        ) from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, normalized=False) for token in _EOD_TOKENS if token in table]
    tokenizer.add_special_tokens(special)
    config_path = vocab.parent / TOKENIZER_CONFIG
    config = _read(config_path) if config_path.is_file() else b"{}"
    if (bos := added_bos(config, str(config_path), _EOD_TOKENS[0])) in table:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, table[bos])]
        )
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), str(vocab), eod=eod)


def train_bpe(
    texts: Iterable[str], vocab: int, special: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    """Train a byte-level BPE tokenizer as in GPT-2.

    `<|endoftext|>` and the special tokens have the first ids. Memory grows with the number of
    distinct words, not with the length of the text.

    Raises:
        DataError: the vocabulary is too small for the 256 bytes and the special tokens.
    """
    _import("--kind bpe")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = list(dict.fromkeys((*_EOD_TOKENS[:1], *special)))
    min_vocab = 256 + len(tokens)
    if vocab < min_vocab:
        raise DataError(
            f"--vocab {vocab} is too small: 256 bytes and {len(tokens)} special tokens need "
            f"{min_vocab}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    # AutoTokenizer of transformers requires this companion file.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0]}
    companions = {TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), companions=companions)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts line by line: no merge spans lines, and a long text is not copied as one."""
    for text in texts:
        yield from text.splitlines(keepends=True)


def _end_of_sequence(companion: bytes, name: str) -> str | None:
    return token_text(read_companion(companion, name), "eos_token", name)


def _load(definition: bytes, name: str) -> Any:
    tokenizers = _import(name)
    try:
        return tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library has no other class for its errors
        raise DataError(
            f"{name}: not a tokenizer of the tokenizers library ({str(error)[:200]})"
        ) from None


def _import(name: str) -> Any:
    # Parallelism comes from worker processes; threads in each would only compete for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with optional_import(name):
        import tokenizers
    return tokenizers


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except DocumentError as error:
        raise DataError(f"{path}: {error}") from None
