"""The tokenizer and the chat template of the data a run learns from, for the way back."""

import shutil
from pathlib import Path

from graphtrain.data.indexed.description import read_description
from graphtrain.data.tokenizers.huggingface import COMPANION_FILES
from graphtrain.data.tokenizers.tokenizer import CHAT_TEMPLATE

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def keep_tokenizer(prefix: str, side: Path) -> None:
    """Copy what is beside a dataset: its tokenizer where there is none yet, and its template.

    A dataset that was not made here says nothing of its tokenizer, and nothing is copied.
    """
    description = read_description(prefix)
    if description is None:
        return
    wanted: list[str] = []
    if description.tokenizer_file and not any((side / name).is_file() for name in _TOKENIZERS):
        wanted += [description.tokenizer_file, *COMPANION_FILES]
    if description.conversations is not None:
        wanted.append(CHAT_TEMPLATE)
    for name in dict.fromkeys(wanted):
        if (path := Path(prefix).parent / name).is_file():
            side.mkdir(exist_ok=True)
            shutil.copyfile(path, side / name)
