"""[run]: everything that does not change compiled code."""

import re
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.checkpoints import CheckpointSettings
from graphtrain.config.schema.learning_rate import LearningRate
from graphtrain.config.schema.search import SearchSettings
from graphtrain.config.schema.stream import DatasetPlace, StreamSettings, is_streamed
from graphtrain.config.schema.types import (
    STRICT,
    LocalPath,
    NotNegative,
    NotNegativeFloat,
    Plain,
    Positive,
    PositiveFloat,
)
from graphtrain.config.schema.upload import UploadSettings
from graphtrain.config.user_code import UserCode, is_user_code

# concat: documents are concatenated and cut into sequences. best_fit: as many whole documents as
# fit into each sequence. pad: one document in each sequence, padded.
Packing = Literal["concat", "best_fit", "pad"]


# Weights & Biases, MLflow, and a file for the node exporter of Prometheus.
Tracker = Literal["wandb", "mlflow", "prometheus"]


_MOST_PROFILED = 100  # steps; a trace of more is too large for its viewers


def _profiled_steps(text: str) -> str:
    match = re.fullmatch(r"([1-9]\d{0,17}):([1-9]\d{0,17})", text)
    if match is None or not 0 <= int(match[2]) - int(match[1]) < _MOST_PROFILED:
        raise ValueError(
            f'"{text}" should be the first and the last step, at most {_MOST_PROFILED} steps, as '
            'in "100:105"'
        )
    return text


ProfiledSteps = Annotated[str, AfterValidator(_profiled_steps)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlendPart:
    """One dataset of a blend, with either a weight or epochs."""

    dataset: DatasetPlace  # path or URL of the dataset, without .bin and .idx
    weight: PositiveFloat | None = None  # share of the sequences, relative to the other weights
    epochs: PositiveFloat | None = None  # passes over the dataset, relative to the other epochs

    def __post_init__(self) -> None:
        if (self.weight is None) == (self.epochs is None):
            raise ValueError(f"set either weight or epochs for {self.dataset}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    """Datasets made by `graphtrain data prepare`, without their .bin and .idx, or by your code.

    Those at a URL of an object store (s3://, gs://, az://, https://) are streamed.
    """

    train: DatasetPlace | Annotated[tuple[BlendPart, ...], Field(min_length=1)]  # dataset or blend
    validation: DatasetPlace | None = None  # validation dataset; unset: no evaluation
    arguments: dict[str, Plain] | None = None  # arguments of datasets that are "file.py:name"
    packing: Packing | None = None  # unset: concat for text, best_fit or pad for conversations
    overlong: Literal["error", "truncate", "drop"] = "error"  # documents longer than seq_len
    stream: StreamSettings = StreamSettings()

    def __post_init__(self) -> None:
        if self.arguments is not None and not self.user_code:
            raise ValueError('arguments are those of a dataset that is "file.py:name"')
        if isinstance(self.train, str):
            return
        if len({entry.weight is None for entry in self.train}) > 1:
            raise ValueError("the parts of a blend must all have a weight, or all have epochs")

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable

    @property
    def train_datasets(self) -> tuple[str, ...]:
        """Return the training dataset, or those of a blend."""
        if isinstance(self.train, str):
            return (self.train,)
        return tuple(part.dataset for part in self.train)

    @property
    def datasets(self) -> tuple[str, ...]:
        """Return all datasets, each once."""
        return tuple(dict.fromkeys([*self.train_datasets, *filter(None, [self.validation])]))

    def only(self, dataset: str) -> "Data":
        """Return the settings for one dataset alone."""
        return replace(self, train=dataset, validation=None, arguments=None)

    @property
    def local(self) -> "Data":
        """Return these settings with path prefixes in the cache in place of URLs."""

        def place(prefix: str) -> str:
            return self.stream.local_prefix(prefix) if is_streamed(prefix) else prefix

        train = (
            place(self.train)
            if isinstance(self.train, str)
            else tuple(replace(part, dataset=place(part.dataset)) for part in self.train)
        )
        return replace(self, train=train, validation=self.validation and place(self.validation))

    @property
    def user_code(self) -> tuple[UserCode, ...]:
        """Return the datasets that are code of the user."""
        named = [("run.data.train", one) for one in self.train_datasets]
        named += [("run.data.validation", self.validation)] if self.validation else []
        return tuple(
            UserCode(setting, "", reference)  # no entry points: their names look like paths
            for setting, reference in named
            if is_user_code(reference)
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watchdog:
    """Limits after which a run that hangs is ended, with status 75, so that it can be restarted."""

    step_timeout: NotNegativeFloat = 60.0  # seconds, or 5 x the median step if longer; 0: off
    phase_timeout: NotNegativeFloat = 1800.0  # seconds of loading, restoring, first step, saving
    join_timeout: PositiveFloat = 60.0  # seconds for all processes to start and join the run


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Spikes:
    """Limits of a step's loss and gradient norm, and what a step above them does.

    A loss or gradient norm that is not finite is above every limit.
    """

    # stop: end the run. skip: leave the state as it is. rewind: return to the last checkpoint, and
    # leave out the batches since then.
    on_spike: Literal["stop", "skip", "rewind"] = "stop"  # skip needs optimizer.skip_spikes
    loss_zscore: PositiveFloat | None = None  # loss: standard deviations above the window's mean
    window: Annotated[int, Field(ge=2)] = 100  # steps without a spike; fewer have no loss_zscore
    grad_norm: PositiveFloat | None = None  # gradient norm, before clipping; unset: no limit
    max_consecutive: Positive = 10  # skipped steps in a row, or rewinds to a step; then stop


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Samples:
    """Continuations of prompts after each evaluation, in samples.jsonl of the run's directory."""

    prompts: LocalPath  # file of prompts, as of graphtrain generate --prompts
    tokens: Positive = 64  # maximum number of tokens of a continuation
    temperature: NotNegativeFloat = 0.8  # divisor of the logits; 0: the most likely tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tasks:
    """Scores on tasks of lm-eval while the run trains, with its metrics; needs the extra eval."""

    names: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]  # tasks
    data: LocalPath | None = None  # directory of their data, as of graphtrain evaluate --data
    limit: Positive | None = None  # rows of each task; unset: all
    fewshot: NotNegative | None = None  # examples in a prompt; unset: as each task says
    apply_chat_template: bool = False  # make each prompt a conversation
    every: Positive | None = None  # steps between scores; unset: with each evaluation


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Run:
    """Everything that does not change compiled code; changing it compiles nothing."""

    directory: Annotated[LocalPath, Field(min_length=1)]  # for checkpoints, metrics and config.toml
    steps: Positive  # training steps
    data: Data
    learning_rate: LearningRate = LearningRate()
    checkpoints: CheckpointSettings = CheckpointSettings()
    upload: UploadSettings | None = None  # unset: none
    # hf: a Hugging Face folder, hf-STEP; peft: the adapter as a folder for PEFT, peft-STEP.
    export: Literal["hf", "peft"] | None = None  # folder that is written when the run ends
    # best needs checkpoints.keep_best, averaged needs program.optimizer.ema_decay.
    export_weights: Literal["last", "best", "averaged"] = "last"  # which weights it has
    watchdog: Watchdog = Watchdog()
    spikes: Spikes = Spikes()
    search: SearchSettings = SearchSettings()
    samples: Samples | None = None  # unset: none
    tasks: Tasks | None = None  # unset: none
    init_from: LocalPath | None = None  # initial weights: a converted folder or a run's directory
    init_adapter_from: LocalPath | None = None  # initial adapter: a PEFT folder; needs adapter
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of initial weights and of the data order
    report_every: Positive = 10  # steps between reports of metrics
    evaluate_every: Positive | None = None  # steps between evaluations; unset: after the last step
    evaluate_batches: Positive | None = None  # global batches per evaluation; unset: all data
    early_stopping_patience: Positive | None = None  # evaluations without a lower loss, then stop
    # Programs for them are compiled too, so that a restart on fewer hosts goes on at once.
    fallback: tuple[Positive, ...] = ()  # smaller numbers of hosts that the run may have
    # Against silent data corruption; costs one step more each time, and memory for a second state.
    verify_every: Positive | None = None  # steps between repetitions of a step; unset: never
    # First and last step, as in "100:105", into profiles/ of the run's directory.
    profile: ProfiledSteps | None = None  # traced by XLA's profiler; unset: none, or on SIGUSR2
    tensorboard: bool = True  # write TensorBoard event files too
    trackers: tuple[Tracker, ...] = ()  # services that get the metrics too; each needs its extra

    def __post_init__(self) -> None:
        self._check_learning_rate()
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers = {list(self.trackers)} names one twice")
        if self.export_weights != "last" and self.export is None:
            raise ValueError("export_weights needs export, which is not set")
        if self.export_weights == "best" and not self.checkpoints.keep_best:
            raise ValueError('export_weights = "best" needs checkpoints.keep_best = true')
        if self.upload is not None and self.upload_place is None:
            raise ValueError("upload.remote is not set, and checkpoints.remote neither; set one")
        if self.data.validation is None:
            needing_validation = {
                "checkpoints.keep_best": self.checkpoints.keep_best,
                "early_stopping_patience": self.early_stopping_patience,
            }
            for name, value in needing_validation.items():
                if value:
                    raise ValueError(f"{name} needs data.validation, which is not set")

    @property
    def upload_place(self) -> tuple[str, str | None] | None:
        """Return URL and endpoint of the store for files of the run; None if none is uploaded."""
        if self.upload is None:
            return None
        if self.upload.remote is None:
            return self.checkpoint_place
        return self.upload.remote, self.upload.endpoint

    @property
    def checkpoint_place(self) -> tuple[str, str | None] | None:
        """Return URL and endpoint of the store for checkpoints; None if none is uploaded."""
        url, endpoint = self.checkpoints.remote, self.checkpoints.endpoint
        return None if url is None else (url, endpoint)

    def _check_learning_rate(self) -> None:
        rate, steps = self.learning_rate, self.steps
        if rate.warmup_steps > steps:
            raise ValueError(
                f"learning_rate.warmup_steps = {rate.warmup_steps} is more than steps = {steps}"
            )
        decaying = rate.steps_of_decay(steps)
        if rate.schedule == "wsd" and rate.warmup_steps + decaying > steps:
            raise ValueError(
                f"learning_rate.warmup_steps = {rate.warmup_steps} and the {decaying} steps of the "
                f"decay are more than steps = {steps}; lower warmup_steps, decay_steps or "
                "decay_fraction"
            )
