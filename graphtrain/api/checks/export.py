"""Problems of run.export: models that no Hugging Face family has."""

from collections.abc import Iterator

from graphtrain.api.checks.problem import Problem
from graphtrain.config.schema import Config, FlaxModel, Model


def export_problems(config: Config) -> Iterator[Problem]:
    """Yield why the model could not be exported when the run is complete."""
    model, obstacle = config.program.model, None
    if config.run.export is None:
        return
    if isinstance(model, FlaxModel):
        obstacle = "the weights of program.model.flax have no Hugging Face format"
    elif isinstance(model, Model):
        from graphtrain.weights.exportable import export_obstacle

        obstacle = export_obstacle(model)
    if obstacle is not None:
        message = f'run.export = "{config.run.export}": {obstacle}; or remove run.export'
        yield Problem("program", message, (("run", "export"),))
