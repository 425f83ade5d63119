"""Commands of `graphtrain data` that get text and datasets: samples, the hub, object stores."""

from pathlib import Path
from typing import Any

import click

from graphtrain.cli.data_options import LOCAL_PATH
from graphtrain.cli.data_output import progress
from graphtrain.cli.options import FiniteRange
from graphtrain.cli.terminal import say
from graphtrain.files import counted


@click.command()
@click.argument("output", type=LOCAL_PATH)
@click.option(
    "--megabytes",
    type=FiniteRange(min=0),
    default=8.0,
    show_default=True,
    help="Maximum size of the corpus, in MB.",
)
@click.option(
    "--kind",
    type=click.Choice(["text", "instructions", "preferences"]),
    default="text",
    show_default=True,
    help="Kind of documents to write.",
)
def sample(output: Path, megabytes: float, kind: str) -> None:
    """Write a sample corpus from the docs and sources of this Python; no network is needed.

    --megabytes limits its size. With --kind instructions, each document is a question about a
    function and its docstring as the answer; with --kind preferences, a question with a right and a
    wrong answer.
    """
    from graphtrain.data.samples.instructions import write_instructions, write_preferences
    from graphtrain.data.samples.text import write_sample

    writers = {"instructions": write_instructions, "preferences": write_preferences}
    written = writers.get(kind, write_sample)(output, limit=int(megabytes * 1e6))
    say(f"{output}: {counted(written.documents, 'document')}, {written.text_bytes / 1e6:.1f} MB")


@click.command()
@click.argument("url")
@click.argument("directory", type=LOCAL_PATH)
@click.option(
    "--endpoint",
    help="Server of an S3-compatible store. [default: $AWS_ENDPOINT_URL]",
)
def pull(url: str, directory: Path, endpoint: str | None) -> None:
    """Download the folder at URL into a new DIRECTORY, and verify the datasets in it.

    URL is s3://, gs:// or az://, or a directory. The folder may also be a Hugging Face model, text
    to prepare, or configurations; only datasets are verified.
    """
    from graphtrain.cache.sizes import format_size
    from graphtrain.checkpoints.download import download_folder
    from graphtrain.data.indexed.images import is_images_prefix
    from graphtrain.data.indexed.verify import verify as verify_data

    verified = []

    def verify_datasets(folder: Path) -> None:
        for index in sorted(folder.rglob("*.idx")):
            prefix = index.with_suffix("")
            if is_images_prefix(prefix):  # verified with its dataset
                continue
            verify_data(prefix)
            verified.append(directory / prefix.relative_to(folder))

    sizes = download_folder(url, directory, verify_datasets, endpoint)
    count = counted(len(sizes), "file")
    say(f"{directory}: {count}, {format_size(sum(sizes.values()))} from {url}")
    for prefix in verified:
        click.echo(f"{prefix}: intact")


@click.command()
@click.argument("name")
@click.argument("output", type=LOCAL_PATH)
@click.option("--config", "configuration", help="Configuration. [default: the only one]")
@click.option(
    "--split", default="train", show_default=True, help="Split, or a part of it: train[:1%]."
)
@click.option("--revision", help="Commit, branch or tag. [default: the newest]")
@click.option(
    "--streaming",
    is_flag=True,
    help="Read row by row over the network, without a copy in the cache of `datasets`.",
)
@click.option(
    "--column", "columns", multiple=True, help="Column to write. May be repeated. [default: all]"
)
@click.option("--rows", "limit", type=click.IntRange(min=1), help="Number of rows. [default: all]")
def hub(
    name: str, output: Path, columns: tuple[str, ...], limit: int | None, **choice: Any
) -> None:
    """Write a dataset of the Hugging Face hub to OUTPUT as JSON lines, for `prepare`.

    NAME is its name on the hub, OWNER/NAME, or a folder of data files. No code of it is run.
    """
    from graphtrain.data.readers.hub import HubDataset, write_rows

    dataset = HubDataset(name, **choice)
    with progress() as report:
        rows = write_rows(dataset, output, columns=columns, limit=limit, report=report)
    say(f"{output}: {counted(rows, 'row')} of {dataset}")
