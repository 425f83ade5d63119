"""A conversation with a model in this process."""

from __future__ import annotations

import queue
from collections.abc import Generator
from dataclasses import replace

from graphtrain.data.prepare.conversations import Conversation, Message
from graphtrain.errors import DataError
from graphtrain.run.serving.chat_format import ChatFormat
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.scheduler import Job
from graphtrain.run.serving.sequence import SequenceRequest, Update
from graphtrain.run.serving.worker import NotReady, OpenedModel, Worker

BASE = "base"  # name of the model without an adapter


class ChatSession:
    """Conversation that continues with each question; its beginning is computed once.

    Args:
        worker: Thread of the engine, started.
        sampling: How answers are chosen; max_tokens is the length of an answer, at most.
        system: Text of a message that comes before the first question.

    Raises:
        DataError: the model has no chat template.
    """

    def __init__(self, worker: Worker, sampling: SamplingParameters, system: str | None) -> None:
        self._worker, self._sampling, self._system = worker, sampling, system
        self._model: OpenedModel = worker.opened()
        if self._model.chat is None:
            raise DataError(
                "the tokenizer of this model has no chat template; name one with --chat-template, "
                "or use graphtrain generate"
            )
        self._chat: ChatFormat = self._model.chat
        self._messages: list[Message] = []
        self._adapter: str | None = None
        self.reset()

    @property
    def models(self) -> tuple[str, ...]:
        """Names that `use` accepts: that of the base, and those of the adapters."""
        return BASE, *self._model.engine.adapters

    @property
    def model(self) -> str:
        """Name of the one that answers now."""
        return self._adapter or BASE

    def use(self, name: str) -> None:
        """Let the base or an adapter answer from now on; the conversation stays.

        Raises:
            DataError: there is no model of this name.
        """
        if name not in self.models:
            raise DataError(f"no model {name[:80]!r}; there are {', '.join(self.models)}")
        self._adapter = None if name == BASE else name

    def reset(self) -> None:
        """Forget all questions and answers."""
        system: Message = {"role": "system", "content": self._system}
        self._messages = [] if self._system is None else [system]

    def answer(self, question: str) -> Generator[str, None, None]:
        """Yield the text of the answer to a question, as it is generated.

        An iterator that is closed ends the answer, which is part of the conversation as it is.

        Raises:
            DataError: the conversation is longer than the context, or the template refuses it.
        """
        asked = [*self._messages, {"role": "user", "content": question}]
        request = self._request(asked)
        updates: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        job = Job((request,), updates.put)
        try:
            self._worker.submit(job)
        except NotReady:  # it failed between two questions
            raise self._worker.error or DataError("the conversation is closed") from None
        text, is_over = "", False
        try:
            while not is_over:
                for update in updates.get():
                    if update.error is not None:
                        raise self._worker.error or update.error
                    text, is_over = text + update.text, update.is_last
                    yield update.text
        finally:
            self._worker.cancel(job)
            if text:
                self._messages = [*asked, {"role": "assistant", "content": text}]

    def _request(self, messages: list[Message]) -> SequenceRequest:
        prompt = tuple(self._chat.prompt(Conversation(tuple(messages))))
        room = self._model.engine.context_length - len(prompt)
        if room < 1:
            is_first = all(message["role"] != "assistant" for message in messages)
            raise DataError(
                f"the conversation has {len(prompt)} tokens, and the context of the model "
                f"{self._model.engine.context_length}; "
                + ("shorten the question or --system" if is_first else "/reset begins a new one")
            )
        eod = self._model.tokenizer.eod
        sampling = replace(
            self._sampling,
            max_tokens=min(room, self._sampling.max_tokens),
            stop_tokens=(*self._chat.stop_tokens, *(() if eod is None else (eod,))),
        )
        return SequenceRequest(
            prompt=prompt, sampling=sampling, stop=self._chat.stop, adapter=self._adapter
        )

    def close(self) -> None:
        """End the thread of the engine."""
        self._worker.stop()
        self._worker.join()
