"""hugging_face.json: size and SHA-256 of the files in `hugging_face/`, verified before their use.

Without it, a damaged tokenizer would be exported with the weights and used for prompts.
"""

from pathlib import Path

from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.errors import WeightsError
from graphtrain.weights.sources import HF_FILES

_NAME = "hugging_face.json"


def record_hf_files(directory: Path) -> None:
    """Record the digests of the Hugging Face files of a run or of converted weights, if any."""
    if (directory / HF_FILES).is_dir():
        write_manifest(directory / HF_FILES, directory / _NAME)


def verify_hf_files(directory: Path) -> None:
    """Verify the Hugging Face files of a run or of converted weights, if they were recorded.

    Raises:
        WeightsError: a file is missing or not as it was written; the message names it.
    """
    if not (directory / _NAME).is_file():  # written by an earlier version, or no such files
        return
    try:
        verify_files(directory / HF_FILES, directory / _NAME)
    except DamagedCheckpoint as damaged:
        raise WeightsError(
            f"{directory / HF_FILES} is damaged: {damaged.reason}; restore the file from where it "
            f"was copied, and remove {directory / _NAME} if the change was meant"
        ) from None
