"""graphtrain serve: serve a run over HTTP."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import SERVE
from graphtrain.cli.adapter_options import adapters_option
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    FiniteRange,
    LocalPath,
    Size,
    cache_option,
    chat_template_option,
    config_argument,
    listen_options,
    overrides_option,
    serve_hint,
    step_option,
    target_option,
)
from graphtrain.cli.terminal import say
from lowering.machine import startup

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName

_KEY_VARIABLE = "GRAPHTRAIN_API_KEY"


@click.command("serve")
@config_argument
@listen_options(8000)
@click.option(
    "--name",
    help="Name of the model. [default: name of the run's directory, or of the Hugging Face folder]",
)
@adapters_option
@click.option(
    "--api-key-file",
    type=LocalPath(exists=True, dir_okay=False),
    help=f"File with the API key that clients must send. [default: ${_KEY_VARIABLE}, else none]",
)
@chat_template_option
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Begin prompts with the beginning-of-sequence token. [default: as the documents of "
    "run.data.train begin; without them, as the tokenizer does by itself]",
)
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Maximum number of sequences that wait for a slot; more are refused with status 429.",
)
@click.option(
    "--max-body", type=Size(), default="8MB", show_default=True, help="Maximum size of a request."
)
@click.option(
    "--request-timeout",
    type=FiniteRange(0, min_open=True),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Maximum time from a request to the end of its answer.",
)
@click.option(
    "--drain-timeout",
    type=FiniteRange(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Maximum time for running requests to finish after SIGTERM.",
)
@click.option(
    "--keep-weights/--no-keep-weights",
    default=True,
    show_default=True,
    help="Write the weights as they are served into the run's directory, in place of earlier ones, "
    "so that the next start maps them.",
)
@step_option
@target_option
@overrides_option
@cache_option
def command(
    config: Path,
    host: str,
    port: int,
    name: str | None,
    adapters: Mapping[str, Path],
    api_key_file: Path | None,
    chat_template: str,
    bos: bool | None,
    max_queue: int,
    max_body: int,
    request_timeout: float,
    drain_timeout: float,
    keep_weights: bool,
    step: "StepName",
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
) -> None:
    """Serve a run with OpenAI's interface, and a page to chat with it.

    Nothing is traced or compiled: a missing program is an error (status 3). SIGTERM and Ctrl-C
    finish the requests that run and refuse new ones; a second signal ends at once.
    """
    startup.pause_garbage_collection()
    startup.skip_blas_threads()
    from graphtrain.api.serving import serve

    serve(
        check(config, overrides, target, SERVE),
        name=name,
        adapters=adapters,
        chat_template=chat_template,
        bos=bos,
        step=step,
        cache=cache,
        compile_hint=serve_hint(config, target, overrides, cache),
        log=say,
        host=host,
        port=port,
        max_queue=max_queue,
        max_body=max_body,
        request_seconds=request_timeout,
        drain_seconds=drain_timeout,
        keep_weights=keep_weights,
        api_key=_api_key(api_key_file),
    )


def _api_key(file: Path | None) -> str | None:
    key = os.environ.get(_KEY_VARIABLE) if file is None else file.read_text(errors="replace")
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        source = f"${_KEY_VARIABLE}" if file is None else str(file)
        raise click.UsageError(f"{source}: an API key is one line of ASCII characters")
    return key
