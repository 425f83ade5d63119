"""`import graphtrain` in a script of the user, without `if __name__ == "__main__"`."""

import json

import pytest

SCRIPT = """
import gc
import json
import graphtrain as gt

print("the script runs")
events = []


class Events(gt.Callback):
    def on_run_start(self, start):
        events.append(["start", start.step])

    def on_step(self, step, metrics):
        events.append(["step", step, metrics["loss"]])

    def on_evaluate(self, step, metrics):
        events.append(["evaluate", step, metrics["validation_loss"]])

    def on_checkpoint(self, step, path):
        events.append(["checkpoint", step, path.is_dir()])

    def on_run_end(self, summary):
        events.append(["end", summary.steps])


config = gt.load_config("config.toml", set={"run.steps": 6, "run.checkpoints.local_every": 4})
try:
    gt.train(config)
except gt.errors.MissingProgram as error:
    print("not compiled")
report = gt.compile(config, jobs=2)
from graphtrain.run.loop import TrainingLoop

gc.disable()
run = gt.train(config, callbacks=[Events()])
# Without a cycle: a rewound run must not hold the weights of the loop before.
loops = sum(type(one) is TrainingLoop for one in gc.get_objects())
gc.enable()
evaluation = gt.evaluate(run)
text = gt.generate(run, "def ", max_tokens=3)
try:
    gt.train(config, target="cpu:8", compile=True, set={"run.directory": "other"})
except gt.UserError as error:
    print(error)


class Broken(gt.Callback):
    def on_step(self, step, metrics):
        raise ValueError("disk full")


try:
    gt.train(config, callbacks=[Broken()], set={"run.directory": "broken"})
except gt.errors.CallbackError as error:
    print(error)
results = {
    "events": events,
    "compiled": report.count("compiled"),
    "loss": evaluation.validation_loss,
    "tokens": len(text.tokens),
    "losses": gt.metrics(run).loss.tolist(),
    "loops": loops,
}
print(json.dumps(results))
"""


@pytest.mark.usefixtures("compiled_quickly")
def test_a_script_compiles_trains_evaluates_and_generates(cold):
    (cold.path / "script.py").write_text(SCRIPT)
    process = cold.start_python("script.py")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    started, missing, devices, broken, results = out.splitlines()
    assert (started, missing) == ("the script runs", "not compiled")
    assert "cpu:8 needs 8 devices; JAX has 1 in this process" in devices
    assert broken == "callback Broken.on_step raised ValueError: disk full"
    found = json.loads(results)
    losses = [loss for _, loss, _ in cold.curve()]
    events = found["events"]
    checkpoints = [event for event in events if event[0] == "checkpoint"]
    assert checkpoints == [["checkpoint", 4, True], ["checkpoint", 6, True]]
    assert [event for event in events if event[0] != "checkpoint"] == [
        ["start", 0],
        *[["step", step, loss] for step, loss in enumerate(losses, 1)],
        ["evaluate", 6, found["loss"]],
        ["end", 6],
    ]
    assert (found["compiled"], found["tokens"], found["losses"]) == (3, 3, losses)
    assert found["loops"] == 0
