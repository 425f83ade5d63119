"""Problems of run.samples: its prompts, and hosts that cannot continue them."""

from collections.abc import Iterator
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.purpose import Kind
from graphtrain.config.schema import Config
from graphtrain.config.serving_program import context_of_serving
from graphtrain.errors import DataError, UserError
from lowering.errors import LoweringError
from lowering.machine.target import Target

_PROMPTS = ("run", "samples", "prompts")


def samples_problems(config: Config) -> Iterator[Problem]:
    """Yield what keeps a run from continuing the prompts of run.samples."""
    samples = config.run.samples
    if samples is None:
        return
    target = config.program.target
    if hosts_of(target) > 1:
        message = (
            f'run.samples does not support several hosts (program.target = "{target}"); remove it, '
            "and continue prompts with a checkpoint: graphtrain generate RUN --prompts"
        )
        yield Problem("program", message, (("run", "samples"),))
    if not Path(samples.prompts).exists():
        message = f'run.samples.prompts = "{samples.prompts}": no such file'
        yield Problem("missing_data", message, (_PROMPTS,))
        return
    yield from _prompt_problems(config, Path(samples.prompts))


def _prompt_problems(config: Config, prompts: Path) -> Iterator[Problem]:
    """Yield which prompts cannot be continued: those that cannot be read, or are too long."""
    from graphtrain.run.batch_generation import RequestEncoder
    from graphtrain.run.prompt import prompt_prefix, run_tokenizer
    from graphtrain.run.prompt_file import read_prompt_file
    from graphtrain.run.serving.chat_format import OWN_TEMPLATE, open_chat_format
    from graphtrain.run.serving.engine_protocol import SamplingParameters

    try:
        read = read_prompt_file(prompts)
    except DataError as error:
        yield _of_prompts("data", error)
        return
    try:
        tokenizer = run_tokenizer(config)
        prefix = prompt_prefix(config, tokenizer, None)
    except UserError as error:  # it may be with data or weights that another machine has
        yield _of_prompts("missing_data", error)
        return
    encoder = RequestEncoder(
        tokenizer,
        prefix,
        lambda: open_chat_format(config, OWN_TEMPLATE, tokenizer, None),
        context_of_serving(config.program),
    )
    for prompt in read:
        try:
            encoder.request(prompt, SamplingParameters())
        except DataError as error:
            yield _of_prompts("data", error)


def _of_prompts(kind: Kind, error: UserError) -> Problem:
    return Problem(kind, f"run.samples.prompts: {error}", (_PROMPTS,))


def hosts_of(target: str) -> int:
    """Return the number of hosts of a target; 1 for an unknown one."""
    try:
        return Target.parse(target).processes or 1
    except LoweringError:  # an unknown target, which the checks of the program report
        return 1
