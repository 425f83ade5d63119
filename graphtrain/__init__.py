"""Training stack: configuration, models, data, program cache, training loop and command line.

    import graphtrain as gt

    config = gt.load_config("examples/quickstart.toml", set={"run.steps": 100})
    gt.compile(config)
    run = gt.train(config)
    print(gt.evaluate(run).validation_loss)

Importing this package imports neither JAX nor `lowering` nor `sharding_rules`; each function
imports what it needs. docs/guides/python.md describes them.
"""

import importlib
from typing import TYPE_CHECKING, Any

# First: importing a module of this folder would bind the name `compile` to the folder, later.
import graphtrain.compile  # noqa: F401
from graphtrain.api.configuration import load_config
from graphtrain.api.dumps import compare, dump
from graphtrain.api.evaluation import evaluate_steps, evaluate_tasks
from graphtrain.api.generation import generate, generate_batch
from graphtrain.api.live_page import watch
from graphtrain.api.programs import compile, plan
from graphtrain.api.runs import evaluate, goodput, metrics, profile, train
from graphtrain.api.serving import chat, serve

if TYPE_CHECKING:
    from graphtrain import errors
    from graphtrain.compile.tasks import CompilationFailed, CompilationReport
    from graphtrain.config.schema import Config
    from graphtrain.planning.answer import Answer
    from graphtrain.planning.serving import ServingAnswer
    from graphtrain.run.batch_generation import Continuation
    from graphtrain.run.callbacks import Callback
    from graphtrain.run.dumps.compare import Comparison
    from graphtrain.run.dumps.files import StoredDump
    from graphtrain.run.evaluate import Evaluation
    from graphtrain.run.evaluation.task_results import TaskResults
    from graphtrain.run.evaluation_curve import EvaluationCurve
    from graphtrain.run.events import RunStart, RunSummary
    from graphtrain.run.generate import Generation
    from graphtrain.run.goodput.account import Goodput
    from graphtrain.run.metric_columns import Metrics
    from graphtrain.run.profiles.account import Profile
    from graphtrain.run.serving.chat_session import ChatSession
    from sharding_rules.errors import UserError

# Types of arguments and results, by the module that is imported when one is named.
_TYPES = {
    "Answer": "graphtrain.planning.answer",
    "Callback": "graphtrain.run.callbacks",
    "ChatSession": "graphtrain.run.serving.chat_session",
    "Comparison": "graphtrain.run.dumps.compare",
    "CompilationFailed": "graphtrain.compile.tasks",
    "CompilationReport": "graphtrain.compile.tasks",
    "Config": "graphtrain.config.schema",
    "Continuation": "graphtrain.run.batch_generation",
    "Evaluation": "graphtrain.run.evaluate",
    "EvaluationCurve": "graphtrain.run.evaluation_curve",
    "Generation": "graphtrain.run.generate",
    "Goodput": "graphtrain.run.goodput.account",
    "Metrics": "graphtrain.run.metric_columns",
    "Profile": "graphtrain.run.profiles.account",
    "RunStart": "graphtrain.run.events",
    "RunSummary": "graphtrain.run.events",
    "ServingAnswer": "graphtrain.planning.serving",
    "StoredDump": "graphtrain.run.dumps.files",
    "TaskResults": "graphtrain.run.evaluation.task_results",
    "UserError": "sharding_rules.errors",
}

__all__ = [
    "Answer",
    "Callback",
    "ChatSession",
    "Comparison",
    "CompilationFailed",
    "CompilationReport",
    "Config",
    "Continuation",
    "Evaluation",
    "EvaluationCurve",
    "Generation",
    "Goodput",
    "Metrics",
    "Profile",
    "RunStart",
    "RunSummary",
    "ServingAnswer",
    "StoredDump",
    "TaskResults",
    "UserError",
    "chat",
    "compare",
    "compile",
    "dump",
    "errors",
    "evaluate",
    "evaluate_steps",
    "evaluate_tasks",
    "generate",
    "generate_batch",
    "goodput",
    "load_config",
    "metrics",
    "plan",
    "profile",
    "serve",
    "train",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("graphtrain.errors")
    if name in _TYPES:
        return getattr(importlib.import_module(_TYPES[name]), name)
    raise AttributeError(f"module 'graphtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
