"""Tokenizers of Hugging Face's `tokenizers` library: tokenizer.json, and GPT-2's two files."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.tokenizers.offsets import Placed
from graphtrain.data.tokenizers.tokenizer import CHAT_TEMPLATE, template_of
from graphtrain.data.tokenizers.word_cache import GPT2, Words, are_exact_for_gpt2
from graphtrain.errors import DataError
from graphtrain.files import replacing

# Beside tokenizer.json: special tokens by their roles, and the template of a chat.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)
_MAIN = "tokenizer.json"
# What ends a document, where no companion says so: GPT-2, Llama 3, Gemma, Llama.
_ENDINGS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


class HuggingFaceTokenizer:
    """A tokenizer.json, and the files beside it, which are kept as they are.

    Text is encoded as it is, without marks around it; a special token spelled out in the text
    becomes that token, as everywhere with these tokenizers.

    Raises:
        DataError: the definition cannot be used, or has no token `eod`.
    """

    kind = "huggingface"

    def __init__(
        self,
        definition: bytes,
        name: str = _MAIN,
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
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab: int = max(numbers, default=-1) + 1  # numbers may have gaps
        self.eod: int | None = self._eod(eod)
        exact = are_exact_for_gpt2(json.loads(self._tokenizer.to_str()))
        self._words = Words(GPT2, self._encode) if exact else None
        self.digest = hashlib.sha256(definition).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._definition, self._name, self._end, self._companions)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._words is not None:
            return self._words.encode(texts)
        return [np.array(numbers, np.int32) for numbers in self._encode(list(texts))]

    def encode_places(self, texts: Sequence[str]) -> list[Placed]:
        found = []
        for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False):
            places = np.array(one.offsets, np.int64).reshape(-1, 2)
            found.append(Placed(np.array(one.ids, np.int32), places[:, 0], places[:, 1]))
        return found

    @property
    def special(self) -> Mapping[str, str]:
        special: dict[str, str] = {}
        for name in COMPANIONS[1::-1]:  # tokenizer_config.json has the last word
            for role, token in _companion(self._companions.get(name, b"{}"), name).items():
                text = token.get("content") if isinstance(token, dict) else token
                if role.endswith("_token") and isinstance(text, str):
                    special[role] = text
        if self.eod is not None and (self._end is not None or "eos_token" not in special):
            special["eos_token"] = self._tokenizer.id_to_token(self.eod)
        return special

    @property
    def chat_template(self) -> str | None:
        alone = self._companions.get(COMPANIONS[2])
        try:
            return (
                alone.decode() if alone else template_of(self._companions.get(COMPANIONS[0], b"{}"))
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self._name}: its chat template cannot be read ({error})") from None

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def save(self, directory: Path) -> tuple[str, ...]:
        for name, content in {_MAIN: self._definition, **self._companions}.items():
            with replacing(directory / name) as file:
                file.write(content)
        return _MAIN, *self._companions

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # Fast: without the place of each token in the text.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in encoded]

    def _eod(self, wanted: str | None) -> int | None:
        if wanted is not None:
            number = self._tokenizer.token_to_id(wanted)
            if number is None:
                raise DataError(f"{self._name}: has no token {wanted!r} to end documents with")
            return number
        said = [
            _end_of_sequence(self._companions[name], name)
            for name in COMPANIONS[:2]
            if name in self._companions
        ]
        for token in (*filter(None, said), *_ENDINGS):
            if (number := self._tokenizer.token_to_id(token)) is not None:
                return number
        return None


def _restored(
    definition: bytes, name: str, eod: str | None, companions: Mapping[str, bytes]
) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(definition, name, eod=eod, companions=companions)


def read_huggingface(path: Path, eod: str | None = None) -> HuggingFaceTokenizer:
    """The tokenizer in a tokenizer.json, with those of its companions that are there.

    Raises:
        DataError: a file cannot be read, or is no tokenizer.
    """
    there = [name for name in COMPANIONS if (path.parent / name).is_file()]
    companions = {name: _read(path.parent / name) for name in there}
    return HuggingFaceTokenizer(_read(path), str(path), eod=eod, companions=companions)


def read_gpt2(vocab: Path, merges: Path, eod: str | None = None) -> HuggingFaceTokenizer:
    """Byte-pair encoding from GPT-2's vocab.json and merges.txt.

    Raises:
        DataError: a file cannot be read, or is not of this kind.

    Source: Radford et al. 2019, section 2.2; the files are those of Hugging Face's GPT2Tokenizer
    """
    _import(str(vocab))
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    for path in (vocab, merges):
        _read(path)
    try:
        table, pairs = models.BPE.read_file(str(vocab), str(merges))
        tokenizer = Tokenizer(models.BPE(table, pairs))
    except Exception as error:  # the library has no other class for its errors
        raise DataError(f"{vocab}, {merges}: not those of a BPE tokenizer ({error})") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, normalized=False) for token in _ENDINGS if token in table]
    tokenizer.add_special_tokens(special)
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), str(vocab), eod=eod)


def train_bpe(
    texts: Iterable[str], vocab: int, special: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    """Learn byte-level pairs as GPT-2 did; `<|endoftext|>` and the special tokens come first.

    Memory grows with the number of distinct words, not with the length of the text.

    Raises:
        DataError: the vocabulary does not hold the 256 bytes and the special tokens.
    """
    _import("--kind bpe")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = list(dict.fromkeys((*_ENDINGS[:1], *special)))
    least = 256 + len(tokens)
    if vocab < least:
        raise DataError(f"a vocabulary of {vocab} is too small; bytes and marks take {least}")
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
    # What transformers' AutoTokenizer wants beside it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0]}
    companions = {COMPANIONS[0]: (json.dumps(config, indent=2) + "\n").encode()}
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), companions=companions)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Texts by the line: a pair never spans two, and a long text is not held twice."""
    for text in texts:
        yield from text.splitlines(keepends=True)


def _end_of_sequence(companion: bytes, name: str) -> str | None:
    token = _companion(companion, name).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _companion(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{name}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{name}: not a JSON object")
    return found


def _load(definition: bytes, name: str) -> Any:
    tokenizers = _import(name)
    try:
        return tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library has no other class for its errors
        raise DataError(f"{name}: not a tokenizer of the tokenizers library ({error})") from None


def _import(name: str) -> Any:
    # Processes are the parallelism; threads beside them would only wait for each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(f"{name}: needs tokenizers; pip install 'graphtrain[data]'") from None
    return tokenizers


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
