"""Options that name LoRA adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from graphtrain.cli.options import LocalPath


class AdapterFolder(LocalPath):
    """Folder of one adapter, whose name is of no use: as for servers, NAME= may precede it."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[NAME=]FOLDER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _, equals, folder = str(value).partition("=")
        is_named = equals and not Path(str(value)).exists()
        return super().convert(folder if is_named else value, param, ctx)


def named_folders(
    context: click.Context, parameter: click.Parameter, words: Sequence[str]
) -> dict[str, Path]:
    """Return the folders of `--adapter NAME=FOLDER` by name."""
    folders: dict[str, Path] = {}
    directory = LocalPath(exists=True, file_okay=False)
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name.strip() and equals and folder):
            raise click.UsageError(f"--adapter {word!r}: write NAME=FOLDER")
        if name in folders:
            raise click.UsageError(f"--adapter: {name!r} is named twice")
        folders[name] = directory.convert(folder, None, None)
    return folders


adapters_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    callback=named_folders,
    help="LoRA adapter that is chosen by its name: a folder of PEFT, or the directory of a run "
    "with [program.adapter]; repeatable. program.serve.total_adapter_rank makes room for them.",
)

merged_adapter_option = click.option(
    "--adapter",
    type=AdapterFolder(),
    help="LoRA adapter that is merged into the weights: a folder of PEFT, or the directory of a "
    "run with [program.adapter].",
)
