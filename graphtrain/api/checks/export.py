"""Problems of run.export: models that no Hugging Face family has, weights that do not exist."""

from collections.abc import Iterator

from graphtrain.api.checks.problem import Problem
from graphtrain.config.schema import Config, FlaxModel, Model


def export_problems(config: Config) -> Iterator[Problem]:
    """Yield why the model could not be exported when the run is complete."""
    model, obstacle = config.program.model, None
    if config.run.export is None:
        return
    for setting, message in _missing_weights(config):
        yield Problem("program", message, (("run", setting),))
    if isinstance(model, FlaxModel):
        obstacle = "the weights of program.model.flax have no Hugging Face format"
    elif isinstance(model, Model):
        from graphtrain.weights.exportable import export_obstacle

        obstacle = export_obstacle(model)
    if obstacle is not None:
        message = f'run.export = "{config.run.export}": {obstacle}; or remove run.export'
        yield Problem("program", message, (("run", "export"),))


def _missing_weights(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings of weights that the run does not train, with a message for each."""
    program, run = config.program, config.run
    if run.export == "peft" and program.adapter is None:
        yield "export", 'run.export = "peft" needs [program.adapter]; or export "hf"'
    if run.export_weights != "averaged":
        return
    if run.export == "peft" or not isinstance(program.model, Model):
        what = "adapters" if run.export == "peft" else "models that are imported"
        message = f'run.export_weights = "averaged" does not support {what}; remove it'
        yield "export_weights", message
    elif program.optimizer.ema_decay is None:
        yield (
            "export_weights",
            'run.export_weights = "averaged" needs program.optimizer.ema_decay (the weights of '
            'kind = "schedule_free" are averaged already: remove run.export_weights)',
        )
