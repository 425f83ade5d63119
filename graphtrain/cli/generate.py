"""graphtrain generate: generate text that continues a prompt, or each prompt of a file."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.api.checks.purpose import GENERATE
from graphtrain.cli.adapter_options import merged_adapter_option
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    FiniteNumber,
    LocalPath,
    cache_option,
    chat_template_option,
    config_argument,
    json_option,
    overrides_option,
    sampling_options,
    step_option,
    target_option,
)
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig

# Options that need another one, and those that have no effect with another one.
_NEEDS = {
    "length_penalty": ("beams",),
    "samples": ("prompts",),
    "output": ("prompts", "watch"),
    "chat_template": ("prompts",),
}
_EXCLUDES = {
    "beams": ("temperature", "top_k", "top_p", "seed", "stream"),
    "prompts": ("prompt", "stream", "as_json"),
    "stream": ("as_json",),
    "watch": ("step", "stream", "as_json", "adapter"),
}


def search_options(command: Callable) -> Callable:
    """Add the options of a beam search."""
    options = (
        click.option(
            "--beams",
            type=click.IntRange(2),
            help="Search for the most likely text with this many beams, in place of sampling.",
        ),
        click.option(
            "--length-penalty",
            type=FiniteNumber(),
            default=1.0,
            show_default=True,
            help="Exponent of the number of tokens by which a beam search divides "
            "log-probabilities: above 0, longer texts are preferred.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def prompt_options(command: Callable) -> Callable:
    """Add the options of prompts and of what is written."""
    options = (
        click.option(
            "--bos/--no-bos",
            default=None,
            help="Begin the prompt with the beginning-of-sequence token. [default: as the "
            "documents of run.data.train begin; without them, as the tokenizer does by itself]",
        ),
        click.option(
            "--stream", is_flag=True, help="Print the text as it is generated; Ctrl-C ends it."
        ),
        click.option(
            "--prompts",
            type=LocalPath(allow_dash=True, exists=True, dir_okay=False),
            metavar="FILE",
            help="Continue every prompt of a file of JSON lines, or of standard input (-), in "
            "place of PROMPT; print JSON lines in the same order.",
        ),
        click.option(
            "--samples",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Number of continuations of each line of --prompts; the most likely one is first. "
            "With --beams, number of the best beams.",
        ),
        click.option(
            "--output",
            type=LocalPath(),
            metavar="FILE",
            help="Write the lines of --prompts to FILE; with --watch, append them.",
        ),
        click.option(
            "--watch",
            is_flag=True,
            help="Generate again with each new checkpoint, until the run that is being trained "
            "ends, or Ctrl-C. Lines of --prompts or --output begin with the step.",
        ),
        merged_adapter_option,
        chat_template_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("generate")
@config_argument
@click.argument("prompt", required=False)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Maximum number of tokens to generate.",
)
@sampling_options
@search_options
@prompt_options
@step_option
@target_option
@overrides_option
@cache_option
@json_option
def command(
    config: Path,
    prompt: str | None,
    prompts: Path | None,
    beams: int | None,
    samples: int,
    output: Path | None,
    target: str | None,
    overrides: Sequence[str],
    tokens: int,
    as_json: bool,
    stream: bool,
    watch: bool,
    **options: Any,
) -> None:
    """Generate text that continues PROMPT, or each prompt of a file, with the weights of a run.

    For a run without checkpoints, uses the weights that it would start from (run.init_from). The
    programs of generation are compiled into the cache on first use. Generation ends at the
    end-of-document token, or after --tokens tokens. A token follows from the tokens before it, of
    which program.batch.seq_len fit into the context; a longer text loses its beginning.
    """
    _check_options()
    if watch and not config.exists():
        raise click.UsageError(
            f"{config} does not exist; a run makes its directory when it begins, so start it first "
            "(graphtrain run), or name its configuration file"
        )
    options["max_tokens"] = tokens
    if prompts is not None:
        if beams is not None and samples > beams:
            raise click.UsageError(f"--samples {samples} is more than --beams {beams} finds")
        if samples > 1 and options["temperature"] == 0:
            raise click.UsageError("--samples are all the same with --temperature 0")
    else:
        _check_prompt(prompt)
    outputs = {"--output": output}
    checked = check(config, overrides, target, GENERATE, outputs=outputs)
    options |= {"beams": beams}
    if watch:
        from graphtrain.cli.generate_watch import watch_checkpoints

        watch_checkpoints(checked, prompt, prompts, output, options | {"samples": samples})
    elif prompts is not None:
        _continue_file(checked, prompts, output, options | {"samples": samples})
    else:
        del options["chat_template"]
        assert prompt is not None
        _continue_one(checked, prompt, options, as_json=as_json, stream=stream)


def _check_prompt(prompt: str | None) -> None:
    if prompt is None:
        raise click.UsageError("give a PROMPT, or a file of prompts with --prompts")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("the prompt is not UTF-8 text", param_hint="PROMPT") from None


def _continue_one(
    checked: "CheckedConfig", prompt: str, options: dict[str, Any], *, as_json: bool, stream: bool
) -> None:
    """Print the text that continues a prompt."""
    from graphtrain.api.generation import generate
    from graphtrain.cli.compile import progress

    printed: list[str] = []

    def print_text(text: str) -> None:
        click.echo(text, nl=False)
        printed.append(text)

    if stream:
        options["on_text"] = print_text
    try:
        with progress(is_main=False) as observe:
            result = generate(checked, prompt, observe=observe, **options)
    finally:
        if printed:  # also after Ctrl-C
            click.echo()
    if result.is_complete:
        say(f"the document ended after {len(result.tokens)} tokens")
    if len(result.prompt) + len(result.tokens) > (result.context_length or math.inf):
        say(
            f"longer than program.batch.seq_len = {result.context_length}: later tokens follow "
            "from the end of the text alone"
        )
    document = {"prompt": result.prompt, "tokens": result.tokens, "text": result.text}
    if not stream:
        click.echo(json.dumps(document) if as_json else result.text)


def _continue_file(
    checked: "CheckedConfig", prompts: Path, output: Path | None, options: dict[str, Any]
) -> None:
    """Print or write one line of JSON for each prompt of a file."""
    from graphtrain.api.generation import generate_batch
    from graphtrain.cli.compile import progress
    from graphtrain.files import atomic_write, output_exists
    from graphtrain.run.batch_generation import continuations_as_json
    from graphtrain.run.prompt_file import read_prompt_file

    if output is not None and output.exists():
        raise output_exists(output)
    read = read_prompt_file(prompts)
    with progress(is_main=False) as observe:
        continued = generate_batch(checked, read, observe=observe, **options)
    if output is None:
        for continuations in continued:
            click.echo(json.dumps(continuations_as_json(continuations)))
        return
    with atomic_write(output) as file:
        for continuations in continued:
            file.write(f"{json.dumps(continuations_as_json(continuations))}\n".encode())


def _check_options() -> None:
    """Refuse options that would have no effect."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    words = {one.name: _word(one) for one in context.command.params if one.name}
    given = {name for name in words if context.get_parameter_source(name) is not default}
    for name in words:
        needed = _NEEDS.get(name, (name,))
        if name in given and given.isdisjoint(needed):
            listed = " or ".join(words[one] for one in needed)
            raise click.UsageError(f"{words[name]} needs {listed}")
        for other in _EXCLUDES.get(name, ()) if name in given else ():
            if other in given:
                raise click.UsageError(f"{words[name]} leaves {words[other]} without effect")


def _word(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.name.upper()
