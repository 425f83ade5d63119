"""Tokenizer and chat template of a run's training data, copied for the export of its weights."""

import shutil
from pathlib import Path

from graphtrain.data.indexed.description import check_tokenizer_file, read_description
from graphtrain.data.tokenizers.huggingface import COMPANION_FILES
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE

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
