"""graphtrain chat: a conversation with a run in the terminal."""

import contextlib
import signal
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import SERVE
from graphtrain.cli.adapter_options import adapters_option
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    cache_option,
    chat_template_option,
    config_argument,
    overrides_option,
    sampling_options,
    serve_hint,
    step_option,
    target_option,
)
from graphtrain.cli.terminal import say
from lowering.machine import startup

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.run.serving.chat_session import ChatSession

_HELP = (
    "Ctrl-C stops an answer; /reset begins a new conversation; /model NAME chooses an adapter or "
    "base; /quit or Ctrl-D ends."
)


@click.command("chat")
@config_argument
@click.option("--system", metavar="TEXT", help="System prompt: a message before the first one.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@sampling_options
@adapters_option
@chat_template_option
@step_option
@target_option
@overrides_option
@cache_option
def command(
    config: Path,
    system: str | None,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    adapters: Mapping[str, Path],
    chat_template: str,
    step: "StepName",
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
) -> None:
    """Chat with the model of a run in the terminal, by the chat template of its tokenizer.

    Nothing is traced or compiled: a missing program is an error (status 3). Ctrl-C stops an
    answer. The line /reset begins a new conversation; /model NAME lets another adapter answer, or
    the base; /quit, or the end of the input, ends.
    """
    startup.pause_garbage_collection()
    startup.skip_blas_threads()
    from graphtrain.api.serving import chat

    session = chat(
        check(config, overrides, target, SERVE),
        system=system,
        max_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        adapters=adapters,
        chat_template=chat_template,
        step=step,
        cache=cache,
        compile_hint=serve_hint(config, target, overrides, cache),
        log=say,
    )
    converse(session)


def converse(session: "ChatSession") -> None:
    """Read questions and print answers until the end of the input, and close the session."""
    with contextlib.closing(session), _interrupts():
        _read_questions(session)


def _read_questions(session: "ChatSession") -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, edits the lines of input()
        say(_HELP)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except KeyboardInterrupt:
            say("")
            continue
        except EOFError:
            if is_terminal:
                say("")  # what follows is not in the line of the prompt
            return
        if line == "/quit":
            return
        if line == "/reset":
            session.reset()
        elif line.split()[:1] == ["/model"]:
            _choose_model(session, line.removeprefix("/model").strip())
        elif line.startswith("/"):
            say(_HELP)
        elif line:
            _answer(session, line)


def _choose_model(session: "ChatSession", name: str) -> None:
    """Let a model answer from now on; without a name, say which there are."""
    if name:
        with _shown_errors():
            session.use(name)
    say(f"{session.model} answers, of {', '.join(session.models)}")


def _answer(session: "ChatSession", question: str) -> None:
    with _shown_errors():
        try:
            with contextlib.closing(session.answer(question)) as pieces:
                for piece in pieces:
                    click.echo(_printable(piece) if sys.stdout.isatty() else piece, nl=False)
        except KeyboardInterrupt:
            pass
        click.echo()


@contextlib.contextmanager
def _shown_errors() -> Iterator[None]:
    """Print what is wrong with a line; from a pipe, where nobody can ask otherwise, raise it."""
    from sharding_rules.errors import UserError

    try:
        yield
    except UserError as error:
        if not sys.stdin.isatty():
            raise
        say(f"error: {error}")


def _printable(text: str) -> str:
    """Return a text with control characters escaped, by which a model could steer a terminal."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc"
        else character.encode("unicode_escape").decode()
        for character in text
    )  # fmt: skip


@contextlib.contextmanager
def _interrupts():
    """Raise KeyboardInterrupt at Ctrl-C, in place of ending the command."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
