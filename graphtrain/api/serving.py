"""Serve a run over HTTP, or chat with it in this process, by compiled programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.checks.purpose import SERVE
from graphtrain.api.configuration import Settings, checked_config, log, open_cache
from graphtrain.api.generation import fixed_step, sampling_parameters

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.config.schema import Config
    from graphtrain.run.serving.chat_session import ChatSession
    from graphtrain.run.serving.worker import OpenedModel
    from graphtrain.weights.named_adapters import NamedAdapter

_COMPILE = "graphtrain compile CONFIG --for serve"


def serve(
    run: Source,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    api_key: str | None = None,
    max_queue: int = 1000,
    max_body: int = 8_000_000,
    request_seconds: float = 600.0,
    drain_seconds: float = 60.0,
    chat_template: str = "own",
    bos: bool | None = None,
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    keep_weights: bool = True,
    compile_hint: str = _COMPILE,
    log: Callable[[str], None] = log,
) -> None:
    """Serve a run with OpenAI's interface, until SIGTERM or Ctrl-C, and finish what runs then.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        name: Name of the model; None: that of the directory of the run, or of the Hugging Face
            folder in its place.
        adapters: LoRA adapters that requests choose by these names: folders of PEFT, or
            directories of runs with [program.adapter]. Their ranks together must not exceed
            program.serve.total_adapter_rank.
        api_key: Key that clients must send; None: none.
        max_queue: Maximum number of sequences that wait for a slot.
        max_body: Maximum size of a request, in bytes.
        request_seconds: Maximum time from a request to the end of its answer.
        drain_seconds: Maximum time for running requests to finish after SIGTERM.
        chat_template: Name of a built-in template, a file, or `own`: that of the training data,
            else that of the tokenizer, else none.
        bos: Whether prompts begin with the beginning-of-sequence token; None: as the training
            documents do.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        keep_weights: Write the weights as they are served into the directory of the run, in place
            of earlier ones, so that the next start maps them.
        compile_hint: What compiles missing programs, for the error message.
        log: Called with what happens; by default the logger "graphtrain".

    Raises:
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.config.hf_folder import served_name
    from graphtrain.run.serving.http.server import ServerSettings
    from graphtrain.run.serving.http.server import serve as serve_model

    config = checked_config(run, SERVE, set=set, target=target).config
    settings = ServerSettings(
        model_name=name or served_name(config.run.directory, config.run.init_from),
        host=host,
        port=port,
        max_queue=max_queue,
        max_body=max_body,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
        api_key=api_key,
    )
    opened: list[NamedAdapter] = []
    if adapters:
        step = fixed_step(config, step) or "last"
        opened = _open_adapters(config, step, settings.model_name, adapters, compile_hint, log)
    opener = _opener(config, chat_template, bos, step, cache, compile_hint, opened, keep_weights)
    serve_model(opener, settings, log)


def chat(
    run: Source,
    *,
    system: str | None = None,
    max_tokens: int = 1024,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    chat_template: str = "own",
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile_hint: str = _COMPILE,
    log: Callable[[str], None] = log,
) -> ChatSession:
    """Open a conversation with the model of a run.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        system: Text of the system message.
        max_tokens: Maximum number of tokens of an answer.
        temperature: Divisor of the logits; 0 always chooses the most likely token.
        top_k: Sample only from this many most likely tokens.
        top_p: Sample only from the fewest most likely tokens with this total probability.
        seed: Seed of the sampling.
        adapters: As for `serve`; the first one answers, until `ChatSession.use` names another.
        chat_template: As for `serve`.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile_hint: What compiles missing programs, for the error message.
        log: Called with what is doubtful about adapters; by default the logger "graphtrain".

    Raises:
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.run.serving.chat_session import BASE, ChatSession
    from graphtrain.run.serving.worker import Worker

    config = checked_config(run, SERVE, set=set, target=target).config
    sampling = sampling_parameters(temperature, top_k, top_p, seed, max_tokens)
    opened: list[NamedAdapter] = []
    if adapters:
        step = fixed_step(config, step) or "last"
        opened = _open_adapters(config, step, BASE, adapters, compile_hint, log)
    opener = _opener(config, chat_template, None, step, cache, compile_hint, opened)
    worker = Worker(opener, max_queue=1)
    worker.start()
    session = ChatSession(worker, sampling, system)
    if opened:
        session.use(opened[0].name)
    return session


def _open_adapters(
    config: Config,
    step: StepName,
    model_name: str,
    adapters: Mapping[str, str | os.PathLike[str]],
    compile_hint: str,
    log: Callable[[str], None],
) -> list[NamedAdapter]:
    """Read and check the adapters of a server.

    Raises:
        UserError: one cannot be served beside the run.
    """
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.errors import GraphtrainError
    from graphtrain.run.serving.adapters import open_adapters

    if model_name in adapters:
        raise GraphtrainError(
            f"adapter {model_name!r} has the name of the model itself; name it otherwise "
            "(--adapter NAME=FOLDER)"
        )
    chosen = named_step(Path(config.run.directory) / "checkpoints", step)
    folders = {name: Path(folder) for name, folder in adapters.items()}
    return open_adapters(resolve(config.program), config.run, chosen, folders, compile_hint, log)


def _opener(
    config: Config,
    chat_template: str,
    bos: bool | None,
    step: StepName,
    cache: str | os.PathLike[str] | None,
    compile_hint: str,
    adapters: Sequence[NamedAdapter] = (),
    keep_weights: bool = False,
) -> Callable[[], OpenedModel]:
    """Return the function that opens the model of a run, in the thread that will use it."""

    def open_model() -> OpenedModel:
        from graphtrain.checkpoints.steps import named_step
        from graphtrain.config.resolve import resolve
        from graphtrain.run.prompt import prompt_prefix, run_tokenizer
        from graphtrain.run.serving.chat_format import open_chat_format
        from graphtrain.run.serving.open_engine import open_engine
        from graphtrain.run.serving.worker import OpenedModel

        tokenizer = run_tokenizer(config)
        prefix = prompt_prefix(config, tokenizer, bos)
        template = open_chat_format(config, chat_template, tokenizer, bos)
        chosen = named_step(Path(config.run.directory) / "checkpoints", step)
        program, store = resolve(config.program), open_cache(cache)
        engine = open_engine(
            program,
            config.run,
            store,
            step=chosen,
            compile_hint=compile_hint,
            vocab=tokenizer.vocab,
            adapters=adapters,
        )

        def finish() -> Iterator[str]:
            yield from engine.load_programs()
            if keep_weights:
                yield from engine.keep_weights()

        return OpenedModel(engine, tokenizer, prefix, template, finish)

    return open_model
