from graphtrain.api.doctor import run_checks
from graphtrain.run.loss_curve import loss_curve


def test_a_curve_shows_training_and_validation():
    records = [{"step": step, "loss": 1 / step} for step in range(1, 50)]
    chart = loss_curve([*records, {"step": 49, "validation_loss": 0.5}])
    assert "training" in chart and "validation" in chart and "49" in chart


def test_the_doctor_finds_this_machine_whole(tmp_path):
    findings = {finding.subject: finding for finding in run_checks(tmp_path)}
    assert findings["target cpu"].ok and findings["jax and jaxlib"].ok


def test_the_doctor_names_the_command_that_mends_a_missing_store(tmp_path):
    findings = {finding.subject: finding for finding in run_checks(tmp_path / "no" / "cache")}
    assert not findings["cache"].ok and findings["cache"].remedy.startswith("mkdir -p ")
