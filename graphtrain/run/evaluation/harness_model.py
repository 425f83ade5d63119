"""A compiled model as a model of lm-eval: log-likelihoods, and texts up to stop strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from graphtrain.data.prepare.conversations import Conversation
from graphtrain.errors import DataError
from graphtrain.run.batch_generation import Continuation
from graphtrain.run.evaluation.answer_journal import Answers, request_key
from graphtrain.run.evaluation.continuation_scores import ScoredText
from graphtrain.run.evaluation.shared_requests import Compute, computation
from graphtrain.run.evaluation.task_settings import Progress
from graphtrain.run.evaluation.text_format import TextFormat
from graphtrain.run.prompt import encode_text
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.row_engine import RowEngine
from graphtrain.run.serving.sequence import SequenceRequest

_MAX_GENERATED = 256  # tokens, for tasks that do not say how many; as in lm-eval
_SHOWN = 60  # characters of a text in a message
_ENCODED_TEXTS = 4096  # kept, because the choices of a question share their context
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class EngineModel(TemplateLM):
    """Model of lm-eval whose requests an engine answers; answers are kept in a journal.

    Texts that are too long lose their beginning, as in lm-eval's own models.

    Args:
        engine: The model.
        text: Its tokenizer and prompt format.
        journal: Answers of earlier evaluations of the same model.
        progress: Called as requests are answered.
        compute: Computes answers; None: the engine alone does.
    """

    def __init__(
        self,
        engine: RowEngine,
        text: TextFormat,
        journal: Answers,
        progress: Progress,
        compute: Compute | None = None,
    ) -> None:
        super().__init__()
        self._engine, self._text, self._journal = engine, text, journal
        self._progress = progress
        self._compute = compute or computation(engine, text.tokenizer)
        self.cut = 0  # texts that were longer than the context, and lost their beginning
        self._encode = lru_cache(_ENCODED_TEXTS)(self._encode_text)

    @property
    def max_length(self) -> int:
        return self._engine.context_length

    @property
    def eot_token_id(self) -> int:
        return self._token("end-of-document", self._text.tokenizer.eod)

    @property
    def prefix_token_id(self) -> int:
        tokenizer = self._text.tokenizer
        bos = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        return self._token("beginning-of-sequence or end-of-document", bos)

    @property
    def tokenizer_name(self) -> str:
        return self._text.tokenizer.digest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        tokens = list(self._encode(string))
        prefix = self._text.prefix
        if add_special_tokens is False or tuple(tokens[: len(prefix)]) == prefix:
            return tokens
        return [*prefix, *tokens]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._text.chat.template.text if self._text.chat and chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text: up to an answer, or to the end of the last message."""
        assert self._text.chat is not None, "lm-eval asks for a template only where it is used"
        template = self._text.chat.template
        messages = tuple({"role": one["role"], "content": one["content"]} for one in chat_history)
        conversation = Conversation(messages)  # type: ignore[arg-type]
        if add_generation_prompt:
            return template.render_prompt(conversation)
        rendered = template.render(conversation, "answers", "prompt of a task").text
        last = messages[-1]["content"]
        for content in (last, last.strip()):
            if (begin := rendered.rfind(content)) >= 0:
                return rendered[: begin + len(content)]
        raise DataError(
            f"the chat template {template.name} does not contain the beginning of an answer that "
            "a task gives; use another one with --chat-template"
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._scored_text(*request) for request in requests]
        keys = [request_key("score", one.tokens, one.begin) for one in texts]
        answers = {key: self._journal.find(key) for key in keys}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if answers[key] is None}
        finished = len(answers) - len(missing)
        self._progress("scoring", finished, len(answers))
        names = list(missing)
        for index, score in self._compute("score", list(missing.values())):
            answers[names[index]] = [score.log_prob, score.is_greedy]
            self._journal.write(names[index], answers[names[index]])
            finished += 1
            self._progress("scoring", finished, len(answers))
        return [(answers[key][0], answers[key][1]) for key in keys]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of complete texts, in windows of the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            string = request.args[0]
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(string),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += disjoint
            counts.append(len(disjoint))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the texts that continue prompts; repeated requests have different seeds."""
        repeats: Counter[str] = Counter()
        asked: dict[str, SequenceRequest] = {}
        keys = []
        for request in requests:
            arguments: Any = request.args
            context, settings = arguments
            same = request_key(context, settings)
            sequence = self._sequence(context, settings, repeats[same], request.task_name)
            repeats[same] += sequence.sampling.temperature > 0
            keys.append(request_key("generate", _facts(sequence)))
            asked[keys[-1]] = sequence
        answers = {key: self._journal.find(key) for key in asked}
        missing = sorted(
            (key for key in asked if answers[key] is None), key=lambda key: asked[key].prompt
        )
        finished = len(answers) - len(missing)
        self._progress("generating", finished, len(answers))
        continued = self._compute("generate", [asked[key] for key in missing])
        for key, (continuation,) in zip(missing, continued, strict=True):
            answers[key] = self._answer(continuation, asked[key].stop)
            self._journal.write(key, answers[key])
            finished += 1
            self._progress("generating", finished, len(answers))
        return [answers[key] for key in keys]

    def check_generation(self, settings: Mapping[str, Any], task: str) -> None:
        """Check that a task's settings of generation are known, and leave room for a prompt.

        Raises:
            DataError: they are not, or do not.
        """
        self._sequence("", settings, 0, task)

    def _scored_text(self, texts: Any, context: list[int], end: list[int]) -> ScoredText:
        """Return a request of lm-eval: (context, end) as text, None of a window; and as tokens."""
        if not context:
            raise DataError(
                "a task asks for the log-likelihood of a text after a context of spaces alone, "
                "which has no token that the first one could follow"
            )
        if not end or len(end) > self.max_length:
            raise DataError(
                f"a task asks for the log-likelihood of a text of {len(end)} tokens, and the "
                f"context has room for 1 to {self.max_length} (program.serve.context_length)"
                + (f"; it begins with {texts[1][:_SHOWN]!r}" if texts else "")
            )
        self.cut += len(context) + len(end) > self.max_length + 1
        tokens = [*context, *end][-(self.max_length + 1) :]
        return ScoredText(tuple(tokens), len(tokens) - len(end))

    def _sequence(
        self, context: str, settings: Mapping[str, Any], repeat: int, task: str | None
    ) -> SequenceRequest:
        """Return the request of a task as that of an engine."""
        options: dict[str, Any] = {**normalize_gen_kwargs(dict(settings), _MAX_GENERATED)}
        until, count = options.pop("until"), int(options.pop("max_gen_toks"))
        is_sampled = options.pop("do_sample")
        if count < 1 or "" in until:
            problem = f"max_gen_toks is {count}" if count < 1 else "until has an empty text"
            raise DataError(f"{task}: {problem}, so nothing would be generated; correct the task")
        if unknown := sorted(set(options) - set(_SAMPLING)):
            raise DataError(
                f"{task}: generation_kwargs has {', '.join(unknown)}, which graphtrain does not "
                f"support; it supports until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
            )
        room = self.max_length - count
        if room < 1:
            raise DataError(
                f"{task}: generates up to {count} tokens, which leaves no room for the prompt in "
                f"the context of {self.max_length}; set program.serve.context_length, and compile"
            )
        # Without sampling, the penalty alone has an effect, in lm-eval's own models too.
        sampling = {
            name: value
            for name, value in options.items()
            if is_sampled or name == "repetition_penalty"
        }
        sampling.setdefault("temperature", 0.0)
        sampling["seed"] = int(sampling.get("seed", 0)) + repeat
        eod, chat = self._text.tokenizer.eod, self._text.chat
        ends = [*(chat.stop_tokens if chat else ()), *(() if eod is None else (eod,))]
        ends += self._text.ends
        stop = [*until, self._end_text, *(chat.stop if chat else ())]
        prompt = self.tok_encode(context)
        self.cut += len(prompt) > room
        return SequenceRequest(
            prompt=tuple(prompt[-room:]),
            sampling=SamplingParameters(
                **sampling, max_tokens=count, stop_tokens=tuple(dict.fromkeys(ends))
            ),
            stop=tuple(dict.fromkeys(filter(None, stop))),
        )

    def _answer(self, continuation: Continuation, stop: Iterable[str]) -> str:
        """Return a text as lm-eval's own models decode it: by itself, without special tokens."""
        kept = [token for token in continuation.tokens if token not in self._special]
        text = self._text.tokenizer.decode(kept)
        # Bytes that are no character: their decoder may replace other bytes beside them too, which
        # a text that grows token by token has already.
        if len(kept) == len(continuation.tokens) and "\ufffd" not in text:
            # Decoders of sentencepiece leave out the space of the first word.
            drops_space = continuation.text.startswith(" ") and not text.startswith(" ")
            return continuation.text[drops_space:]
        for end in stop:
            text = text.partition(end)[0]
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        tokenizer = self._text.tokenizer
        encoded = tokenizer.encode_with_offsets(list(tokenizer.special_texts))
        return frozenset(int(one.tokens[0]) for one in encoded if len(one.tokens) == 1)

    @cached_property
    def _end_text(self) -> str:
        eod = self._text.tokenizer.eod
        return "" if eod is None else self._text.tokenizer.decode([eod])

    def _encode_text(self, string: str) -> tuple[int, ...]:
        return tuple(encode_text(self._text.tokenizer, string))

    def _token(self, name: str, token: int | None) -> int:
        if token is None:
            raise DataError(f"a task needs the {name} token, and the tokenizer has none")
        return token


def _facts(sequence: SequenceRequest) -> list[Any]:
    """Return what the text of a sequence depends on, as JSON."""
    sampling = vars(sequence.sampling) | {"logit_bias": dict(sequence.sampling.logit_bias)}
    return [sequence.prompt, sequence.stop, sampling]
