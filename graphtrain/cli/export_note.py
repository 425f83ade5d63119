"""The note, before training, that a model could not be exported to Hugging Face."""

from typing import TYPE_CHECKING

from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.config.schema import Program


def say_export_obstacle(program: "Program") -> None:
    """Print a note if the model of a program could not be exported to Hugging Face."""
    from graphtrain.config.schema import is_imported
    from graphtrain.weights.exportable import export_obstacle

    if not is_imported(program.model) and (obstacle := export_obstacle(program.model)):
        say(f"note: graphtrain convert graphtrain-to-hf could not export this model: {obstacle}")
