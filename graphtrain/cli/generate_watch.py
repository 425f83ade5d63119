"""graphtrain generate --watch: generate again with each new checkpoint of a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig


def watch_checkpoints(
    checked: "CheckedConfig",
    prompt: str | None,
    prompts: Path | None,
    output: Path | None,
    options: dict[str, Any],
) -> None:
    """Print or append what follows from each new checkpoint, until the run or a signal ends it.

    Args:
        checked: The configuration.
        prompt: Text to continue; its text is printed, unless it is written to a file.
        prompts: File of prompts in place of it.
        output: File to append lines to; None: print.
        options: As of `generate_batch`, without `step` and `adapter`.
    """
    from graphtrain.api.generation import PromptBatch, beam_settings, sampling_parameters
    from graphtrain.api.watching import watch
    from graphtrain.cli import SignalReceived
    from graphtrain.cli.compile import progress
    from graphtrain.run.batch_generation import continuations_as_json
    from graphtrain.run.prompt_file import read_prompt_file

    chosen = {name: options[name] for name in ("temperature", "top_k", "top_p", "seed")}
    batch = PromptBatch.prepare(
        checked,
        [prompt or ""] if prompts is None else read_prompt_file(prompts),
        samples=options["samples"],
        sampling=sampling_parameters(**chosen, max_tokens=options["max_tokens"]),
        search=beam_settings(options["beams"], options["length_penalty"]),
        chat_template=options["chat_template"],
        bos=options["bos"],
    )
    file = None if output is None else _open_to_append(output)
    try:
        with progress(is_main=False) as observe:
            for step, continued in watch(batch, cache=options["cache"], observe=observe, log=say):
                documents = [{"step": step, **continuations_as_json(one)} for one in continued]
                lines = [json.dumps(document) for document in documents]
                if file is not None:
                    file.write("".join(f"{line}\n" for line in lines).encode())
                elif prompts is not None:
                    click.echo("\n".join(lines))
                else:
                    click.echo(f"step {step}: {prompt}{continued[0][0].text}")
    except SignalReceived:
        return
    finally:
        if file is not None:
            file.close()
    say("the run has ended")


def _open_to_append(path: Path) -> BinaryIO:
    """Open a file whose lines are each written at once; half a line, of a kill, is ended first."""
    file = path.open("ab", buffering=0)
    if file.tell() and path.read_bytes()[-1:] != b"\n":
        file.write(b"\n")
    return file
