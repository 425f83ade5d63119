"""Lines in which a run reports its beginning, its progress and its evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtrain.config.phases import describe_placement
from graphtrain.config.tokens import tokens_of_run
from graphtrain.data.indexed.description import read_description

if TYPE_CHECKING:
    from graphtrain.config.schema import Config, Program
    from graphtrain.run.events import Metrics, RunStart


_SCORES = 6  # on tasks that one line names


def opening_lines(start: RunStart) -> list[str]:
    """Describe a run at its beginning: model, batch, data, machine, directory."""
    program, run = start.config.program, start.config.run
    remaining = f"steps {start.step + 1} to {run.steps}"
    origin = f"resumes from step {start.step}" if start.step else "a new run"
    return [
        f"model: {start.parameters}",
        f"batch: {'; '.join(_describe_batches(program))}",
        f"data: {_describe_data(start.config)}",
        f"machine: {_describe_machine(start)}",
        f"directory: {start.directory}, {origin}, {remaining}",
    ]


def _describe_machine(start: RunStart) -> str:
    """Name the machine; on fewer hosts than it has, also what this changes."""
    target = start.config.program.target
    if start.program is None:
        return target
    return f"{describe_placement(start.program)}, in place of {target} (run.fallback)"


def _describe_batches(program: Program) -> list[str]:
    """Describe the batch of every phase of a run."""
    ends = [f" up to step {phase.until}" for phase in program.phases]
    batches = [program.in_phase(phase).batch for phase in program.phases]
    return [
        f"{batch.tokens:,} tokens a step ({batch.global_batch_size} x {batch.seq_len}){end}"
        for batch, end in zip([*batches, program.batch], [*ends, ""], strict=True)
    ]


def _describe_data(config: Config) -> str:
    """Name the training data, with its tokens and the epochs of the run where they are known."""
    train = config.run.data.train
    if not isinstance(train, str):
        return f"a blend of {', '.join(part.dataset for part in train)}"
    description = read_description(config.run.data.local.train_datasets[0])
    if description is None:
        return train
    text = f"{train}, {description.tokens:,} tokens"
    if config.run.data.packing not in (None, "concat") or description.conversations is not None:
        return text  # how many tokens fill a step depends on the documents
    epochs = tokens_of_run(config) / max(1, description.tokens)
    return f"{text}; {config.run.steps} steps are {epochs:.2f} epochs"


@dataclass
class MeanSpeed:
    """Mean speed of the steps since the last report.

    The speed of a single step is not worth a report: metrics of two steps may arrive together, and
    then the first appears too slow and the second far too fast.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    utilized_seconds: float = 0.0  # seconds that the steps would take at the peak FLOP/s

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a step."""
        seconds = metrics["step_seconds"]
        self.seconds += seconds
        self.tokens += metrics["tokens_per_second"] * seconds
        self.utilized_seconds += (metrics["mfu"] or 0.0) * seconds

    def take(self) -> tuple[float, float]:
        """Return the mean tokens per second and the mean MFU, and start anew."""
        seconds = self.seconds or 1.0
        means = self.tokens / seconds, self.utilized_seconds / seconds
        self.seconds = self.tokens = self.utilized_seconds = 0.0
        return means


def step_line(metrics: Metrics, speed: MeanSpeed) -> str:
    """Describe a step, with the mean speed since the last description."""
    tokens_per_second, mfu = speed.take()
    fields = [
        _loss_field(metrics),
        _gradient_field(metrics),
        f"lr {metrics['learning_rate']:.2e}",
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if "accuracy" in metrics:
        fields.insert(1, f"margin {metrics['margin']:.3f}  accuracy {metrics['accuracy']:.0%}")
    if "loss_scale" in metrics:
        fields.append(f"scale {metrics['loss_scale']:g}, {metrics['skipped_steps']} skipped")
    if metrics.get("spike"):
        fields.append("skipped")
    if metrics["mfu"] is not None:
        fields.append(f"mfu {mfu:.1%}")
    return "  ".join(fields)


def _loss_field(metrics: Metrics) -> str:
    loss = metrics["loss"]
    return f"loss {_missing(metrics)}" if loss is None else f"loss {loss:.4f}"


def _gradient_field(metrics: Metrics) -> str:
    norm = metrics["grad_norm"]
    return f"gradient {_missing(metrics)}" if norm is None else f"grad norm {norm:.3f}"


def _missing(metrics: Metrics) -> str:
    return "not finite" if metrics.get("spike") else "overflow"


def evaluation_line(metrics: Metrics) -> str:
    """Describe an evaluation: the validation loss, or the first scores on tasks."""
    if "validation_loss" in metrics:
        loss, average = metrics["validation_loss"], metrics.get("averaged_validation_loss")
        of_average = "" if average is None else f"  of averaged weights {average:.4f}"
        return f"validation loss {'not finite' if loss is None else f'{loss:.4f}'}{of_average}"
    words = [f"{name} {value:.4f}" for name, value in metrics.items()]
    more = f"  and {len(words) - _SCORES} more" if len(words) > _SCORES else ""
    return "  ".join(words[:_SCORES]) + more
