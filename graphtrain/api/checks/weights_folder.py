"""Problems of the folder that a run starts from: another tokenizer, or other pixels, than its data.

Only what both sides have on this machine is compared.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from graphtrain.api.checks.problem import Problem
from graphtrain.config.hf_config import HF_FILES
from graphtrain.config.hf_images import PROCESSOR_FILES, read_normalization
from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import Config, TorchModel
from graphtrain.data.indexed.description import DatasetDescription
from graphtrain.data.indexed.token_range import tokens_in_sample
from graphtrain.errors import DataError, ImportedModelError
from graphtrain.files import content_digest
from sharding_rules.documents import DocumentError, read_object

_INIT_FROM = ("run", "init_from")
_TOKENIZER = "tokenizer.json"


def normalization_problems(config: Config, *, saved: bool = False) -> Iterator[Problem]:
    """Yield that the processor which the run exports normalizes pixels otherwise than the program.

    The program normalizes as the folder of program.model.hf says; a run keeps the files of
    run.init_from. It is no error in a run that trained so before (`saved`).
    """
    model, folder = config.program.model, _init_folder(config)
    if not isinstance(model, TorchModel) or not model.images or model.hf is None or folder is None:
        return
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return
    try:
        of_program, of_weights = read_normalization(model.hf), read_normalization(str(folder))
    except ImportedModelError:  # reported where the model is opened
        return
    if of_program != of_weights:
        differences = " and ".join(
            f"{name} = {value}, there {getattr(of_program, name)}"
            for name, value in vars(of_weights).items()
            if value != getattr(of_program, name)
        )
        message = (
            f"run.init_from = {config.run.init_from}: its image processor, which the run exports, "
            f"does not normalize pixels as that of program.model.hf = {model.hf}, which the "
            f"program follows ({differences}); copy {' or '.join(PROCESSOR_FILES)} from one folder "
            "to the other, or name one folder in both settings"
        )
        settings = _INIT_FROM, ("program", "model", "hf")
        yield Problem("data_doubt" if saved else "program", message, settings)


def tokenizer_problems(
    config: Config,
    prefix: str,
    setting: KeyPath,
    description: DatasetDescription | None,
    *,
    saved: bool = False,
) -> Iterator[Problem]:
    """Yield that tokens of a dataset have other ids in the tokenizer of run.init_from.

    Renamed reserved tokens, added ones and chat templates are no problem. It is an error if text
    may contain the tokens that moved, and a doubt if they were only added to the vocabulary, as
    <pad>, and the dataset does not seem to contain them, or if the run trained so before (`saved`).
    """
    folder = _init_folder(config)
    if folder is None or description is None or description.tokenizer_file != _TOKENIZER:
        return
    own, other = Path(prefix).parent / _TOKENIZER, folder / _TOKENIZER
    if not own.is_file() or not other.is_file():
        return
    if content_digest(other) == description.tokenizer_digest:
        return
    (vocab, added), (other_vocab, other_added) = _read_ids(own), _read_ids(other)
    ids, others = {**vocab, **added}, {**other_vocab, **other_added}
    moved = [text for text, token in ids.items() if others.get(text, token) != token]
    if not moved:
        return
    used = [text for text in moved if text in vocab]
    used = used or _used_tokens(prefix, description, {ids[text]: text for text in moved})
    first = (used or moved)[0]
    unused = "" if used else ", none of which a sample of the dataset contains"
    message = (
        f"{'.'.join(setting)}: {prefix} was prepared with another tokenizer than that of "
        f"run.init_from = {config.run.init_from}: {len(moved)} tokens have other ids, such as "
        f"{first!r}: {ids[first]}, there {others[first]}{unused}; prepare it with {other}"
    )
    yield Problem("data" if used and not saved else "data_doubt", message, (setting, _INIT_FROM))


def processor_problems(
    config: Config, prefix: str, setting: KeyPath, description: DatasetDescription | None
) -> Iterator[Problem]:
    """Yield that the images of a dataset were made by another processor than that of the model.

    The digest covers the versions of transformers and Pillow too, with which pixels may be equal.
    """
    model = config.program.model
    images = description.images if description else None
    if not isinstance(model, TorchModel) or not model.images or model.hf is None or images is None:
        return
    from importlib.metadata import PackageNotFoundError

    from graphtrain.data.prepare.image_processor import processor_digest

    try:
        digest = processor_digest(Path(model.hf))
    except (DataError, PackageNotFoundError):  # the run itself needs neither
        return
    if digest != images.processor_digest:
        message = (
            f"{'.'.join(setting)}: {prefix} was prepared with other settings of the image "
            f"processor than those of program.model.hf = {model.hf}, or with other versions of "
            "transformers or Pillow than this machine has; its pixels may differ from those that "
            "the exported model sees. To be sure, prepare it again with --processor "
            f"{model.hf}"
        )
        yield Problem("data_doubt", message, (setting, ("program", "model", "hf")))


def _init_folder(config: Config) -> Path | None:
    """Return the folder of the Hugging Face files of run.init_from; None if it names none."""
    if config.run.init_from is None:
        return None
    folder = Path(config.run.init_from)
    return folder / HF_FILES if (folder / HF_FILES).is_dir() else folder


def _used_tokens(
    prefix: str, description: DatasetDescription, texts: Mapping[int, str]
) -> list[str]:
    """Return which tokens a dataset contains, by their ids: in every document, or in a sample."""
    in_documents = {*description.bos, description.eod} & texts.keys()
    return [texts[token] for token in in_documents or sorted(tokens_in_sample(prefix, texts))]


def _read_ids(path: Path) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the ids of the vocabulary of a tokenizer.json, and those of tokens added to it."""
    try:
        stat = path.stat()
    except OSError:  # reported where the tokenizer is read
        return {}, {}
    return _parse_ids(path, stat.st_mtime_ns, stat.st_size)


# Datasets of a blend are compared with the same folder, which may take a second to parse.
@lru_cache(maxsize=2)
def _parse_ids(path: Path, mtime: int, size: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the ids of `_read_ids`; none if the file is damaged."""
    try:
        definition: Mapping[str, Any] = read_object(path)
        vocab = definition["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [text, score]
            vocab = {entry[0]: token for token, entry in enumerate(vocab)}
        added = {entry["content"]: entry["id"] for entry in definition.get("added_tokens") or ()}
        return dict(vocab), added
    except (OSError, DocumentError, KeyError, TypeError, ValueError, IndexError):
        return {}, {}  # reported where the tokenizer is read
