"""Samples of a run in training: continuations of the same prompts after each evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.config.schema import Config, Samples
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.files import atomic_write
from graphtrain.run.batch_generation import Continuation, RequestEncoder, continue_all
from graphtrain.run.prompt import prompt_prefix, run_tokenizer
from graphtrain.run.prompt_file import Prompt, read_prompt_file
from graphtrain.run.serving.chat_format import OWN_TEMPLATE, open_chat_format
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.training_engine import TrainingEngine
from lowering.trees import Tree

SAMPLES_NAME = "samples.jsonl"
WriteText = Callable[[int, str, str], None]  # called with a step, a name and a text


class TrainingSamples:
    """Prompts of a run, and the programs that continue them.

    Args:
        config: The run.
        engine: The programs.

    Raises:
        DataError: the prompts cannot be read or continued.
    """

    def __init__(self, config: Config, engine: TrainingEngine) -> None:
        assert config.run.samples is not None
        self._settings: Samples = config.run.samples
        self._engine = engine
        self._path = Path(config.run.directory) / SAMPLES_NAME
        self._tokenizer = run_tokenizer(config)
        self._prompts = read_prompt_file(Path(self._settings.prompts))
        prefix = prompt_prefix(config, self._tokenizer, None)
        encoder = RequestEncoder(
            self._tokenizer,
            prefix,
            lambda: open_chat_format(config, OWN_TEMPLATE, self._tokenizer, None),
            engine.context_length,
        )
        sampling = SamplingParameters(
            temperature=self._settings.temperature, max_tokens=self._settings.tokens
        )
        self._requests = [encoder.request(prompt, sampling) for prompt in self._prompts]
        self._write_text: WriteText = _write_nothing

    def open(self, after: int, write_text: WriteText) -> None:
        """Drop what was written after a step, from which the run resumes.

        Args:
            after: Last step whose samples are kept.
            write_text: Writes a text for TensorBoard.

        Raises:
            TrainingError: the file cannot be written.
        """
        self._write_text = write_text
        if not self._path.is_file():
            return
        with write_errors(self._path.parent):
            kept = [line for line in self._path.read_bytes().splitlines(keepends=True)
                    if _is_up_to(line, after)]  # fmt: skip
            with atomic_write(self._path) as file:
                file.writelines(kept)

    def write(self, step: int, parameters: Tree, should_stop: Callable[[int], bool]) -> None:
        """Continue the prompts with the weights of a step, and append them to the file.

        Args:
            step: Number of completed steps.
            parameters: Trained parameters, on the devices.
            should_stop: Called before each prompt with its number; if true, nothing is written.
        """
        continued: list[Continuation] = []
        with self._engine.open(parameters, step, self._tokenizer.vocab) as engine:
            answers = continue_all(engine, self._tokenizer, self._requests, 1)
            for number, (one,) in enumerate(answers):
                if should_stop(number):
                    return
                continued.append(one)
        lines = [
            {"step": step, "prompt": _content(prompt), **_facts(one)}
            for prompt, one in zip(self._prompts, continued, strict=True)
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))
        for number, line in enumerate(lines):
            self._write_text(step, f"sample_{number}", _markdown(line["prompt"], line["text"]))


def _is_up_to(line: bytes, step: int) -> bool:
    """Return whether a line is of a step that is not redone; half a line of a killed run is not."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _content(prompt: Prompt) -> Any:
    content = prompt.content
    return list(content.messages) if isinstance(content, Conversation) else content


def _facts(one: Continuation) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "tokens"}


def _markdown(prompt: Any, text: str) -> str:
    """Return a text for TensorBoard, which renders Markdown, with its line breaks."""
    begin = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n\n"
    return "".join(f"    {line}\n" for line in f"{begin}{text}".splitlines())


def _write_nothing(step: int, name: str, text: str) -> None:
    pass
