"""Tokenizer and chat template of a run's training data, for the export of its weights."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from graphtrain.data.indexed.description import check_tokenizer_file, read_description
from graphtrain.data.tokenizers.huggingface import COMPANION_FILES
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE
from graphtrain.data.tokenizers.special_tokens import TOKENIZER_CONFIG

# transformers 5.24 loads them with a class of their own, whatever tokenizer_config.json says, and
# that class does not read tokenizer.model.
_OWN_TOKENIZER = ("qwen2",)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def copy_tokenizer(prefix: str, side: Path) -> None:
    """Copy a dataset's chat template, and its tokenizer unless `side` contains one already.

    Copies nothing for a dataset that graphtrain did not prepare, because its tokenizer is unknown.

    Args:
        prefix: path of the dataset without its suffix.
        side: folder to copy to.

    Raises:
        DataError: the tokenizer's file is not the one that the dataset was prepared with.
    """
    description = read_description(prefix)
    if description is None:
        return
    if description.tokenizer_file:
        check_tokenizer_file(prefix, description)
    file_names: list[str] = []
    if description.tokenizer_file and not any((side / name).is_file() for name in _TOKENIZERS):
        file_names += [description.tokenizer_file, *COMPANION_FILES]
    if description.conversations is not None:
        file_names.append(CHAT_TEMPLATE)
    for name in dict.fromkeys(file_names):
        if (path := Path(prefix).parent / name).is_file():
            side.mkdir(exist_ok=True)
            shutil.copyfile(path, side / name)


def describe_tokenizer(folder: Path, model_type: str) -> dict[str, Any]:
    """Make transformers read a sentencepiece model as it is; return the special ids of config.json.

    Without a tokenizer_config.json, transformers takes the class of the model's family. That of
    GPT-2 reads tokenizer.model without an error and splits texts into other tokens.

    Args:
        folder: folder of the export, with a copy of the tokenizer.
        model_type: Hugging Face family of the model.
    """
    from graphtrain.data.tokenizers.open import load_tokenizer

    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return {}
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        described = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
        path.write_text(json.dumps(described, indent=2) + "\n")
    if model_type in _OWN_TOKENIZER:
        warnings.warn(
            f"AutoTokenizer makes other tokens of tokenizer.model for a {model_type} model; load "
            "it with transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)",
            stacklevel=3,
        )
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
