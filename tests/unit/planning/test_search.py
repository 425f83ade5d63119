import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from graphtrain.cache import Cache
from graphtrain.cost_model.measured_time import MeasuredTime, PartSeconds
from graphtrain.errors import PlanError
from graphtrain.planning import ranking
from graphtrain.planning.assess import estimate
from graphtrain.planning.candidates import candidates
from graphtrain.planning.costs import Workload
from graphtrain.planning.search import FAMILIES, search
from graphtrain.planning.verify import compile_best


def test_strategies_that_fit_are_ranked_by_time(vary):
    found = search(vary(["program.target=h100:8"]).settings)
    seconds = [float(f"{one.seconds:.3g}") for one in found.ranked]
    assert seconds == sorted(seconds)
    assert all(one.memory.fits for one in found.ranked)


def test_lower_bounds_are_called_so(vary):
    found = search(vary(["program.target=rtx4090:16"]).settings)  # whose network is not known
    printed = io.StringIO()
    Console(file=printed, width=300).print(ranking.table(found.ranked, Workload()))
    assert printed.getvalue().count("at least 0.") == len(found.ranked)
    strategies = ranking.as_json(found, found.ranked, Workload())["strategies"]
    assert all(one["step_seconds_is_lower_bound"] for one in strategies)
    assert "times are lower bounds" in ranking.speeds_note(found.ranked)
    known = search(vary(["program.target=h100:8"]).settings)
    assert not any(one.is_lower_bound for one in known.ranked)
    assert ranking.speeds_note(known.ranked) == ""


def test_a_long_search_says_how_far_it_is(vary, monkeypatch):
    monkeypatch.setattr("graphtrain.planning.search._OBSERVED", 100)
    said = []
    found = search(vary([]).settings, observe=lambda *words: said.append(words))
    assert found.considered >= 100 and said[-1] == ("search", "searched")
    assert said[0] == ("search", "100 strategies") and len(said) == found.considered // 100 + 1


def test_padding_that_no_strategy_has_is_refused(vary):
    padded = ["program.batch.global_batch_size=12", "program.batch.padding_sequences=4"]
    with pytest.raises(PlanError, match=r"without padding; add --set program\.batch\.padding_seq"):
        search(vary(["program.target=h100:8", *padded]).settings)


def test_every_strategy_fills_the_machine_and_is_one_of_a_kind(vary):
    every = list(candidates(vary(["program.target=h100:8"]).settings))
    assert {one.mesh.devices for one in every} == {8}
    assert len({json.dumps(one.settings) for one in every}) == len(every)
    kinds = {family: {one.choice(family) for one in every} for family in FAMILIES}
    assert kinds["zero"] == {"none", "1", "2"} and kinds["sequence"] == {"none", "on", "off"}
    assert kinds["remat"] == {"none", "attention", "dots", "full"}
    schedules = {"1f1b x 1", "1f1b x 2", "circular x 1", "circular x 2"}
    assert schedules | {"circular x 2, stages not recomputed"} <= kinds["schedule"]
    assert kinds["context"] == {"1"}  # short sequences stay whole


def test_a_head_that_stages_cannot_split_leaves_the_other_schedules(vary):
    settings = [
        "program.target=h100:24",
        "program.batch.global_batch_size=24",
        "program.model.layers=6",
    ]
    threes = [one for one in candidates(vary(settings).settings) if one.mesh.axes["stage"] == 3]
    assert {one.program.pipeline.schedule for one in threes} == {"circular"}


def test_long_sequences_may_be_split(vary):
    long = [
        "program.batch.seq_len=8192",
        "program.batch.global_batch_size=4",
        "program.target=h100:8",
    ]
    assert {one.choice("context") for one in candidates(vary(long).settings)} == {
        "1",
        "2",
        "4",
        "8",
    }


def test_every_family_but_the_best_has_its_reason(vary):
    found = search(vary(["program.target=h100:16"]).settings)
    best = found.ranked[0]
    for family in FAMILIES:
        assert f"{family} {best.choice(family)}" not in found.rejected
    assert found.rejected["tensor 16"] == "does not divide kv_heads = 8"
    assert found.rejected["stage 4"].endswith(" s")
    assert "fewer than 8,192 tokens" in found.rejected["context"]


def test_reasons_say_what_is_recomputed(vary):
    large = ["program.model.embed=2048", "program.model.mlp=8192", "program.batch.seq_len=2048"]
    rejected = search(vary(["program.target=h100:2", *large]).settings).rejected
    assert rejected["remat full"].endswith(" s (remat full)")
    assert rejected["schedule 1f1b x 1"].endswith(" s (stages are recomputed)")


def test_where_nothing_fits_the_reasons_name_what_is_too_large(vary):
    found = search(vary(["program.model.vocab=1_000_000_000"]).settings)
    assert found.ranked == ()
    assert "nothing fits: the smallest needs" in found.rejected["tensor 1"]


def test_own_rules_and_ulysses_stay(vary, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[arrays."layers/mlp/*"]\nembed = []\n')
    program = vary([f'program.rules=["data", "ulysses", "{own}"]']).settings
    for one in candidates(program):
        rules = one.program.settings.rules
        assert "ulysses" in rules and rules[-1] == str(own)


def test_a_batch_that_no_mesh_divides_is_an_error(vary):
    odd = [
        "program.target=h100:2048",
        "program.batch.global_batch_size=7",
        "program.model.heads=7",
        "program.model.embed=700",
    ]
    with pytest.raises(PlanError, match=r"no strategy divides batch.global_batch_size = 7"):
        search(vary(odd).settings)


def test_a_model_that_one_device_holds_is_not_cut_by_tensor(vary):
    assert search(vary(["program.target=h100:8"]).settings).ranked[0].mesh.axes["tensor"] == 1


def test_axes_that_a_setting_rules_out_are_not_tried_and_say_so(vary):
    ahead = ["program.model.mtp_loss_weight=0.1", "program.model.dropout=0.1"]
    found = search(vary(["program.target=h100:8", *ahead]).settings)
    reason = "mtp_loss_weight cannot be used with model.dropout with mesh.stage: the last part"
    assert reason in found.rejected["stage"]
    assert {one.mesh.axes["stage"] for one in found.ranked} == {1}


def test_a_chunk_that_only_1f1b_cannot_use_leaves_the_other_schedules(vary):
    """A chunk has all positions of a sequence, which 1F1B splits over the stages."""
    sizes = ["program.target=h100:4", "program.batch.seq_len=128", "program.model.layers=2"]
    program = vary([*sizes, "program.loss.chunk=128"]).settings
    pipelines = [one for one in candidates(program) if one.mesh.axes["stage"] == 2]
    assert {one.program.pipeline.schedule for one in pipelines} == {"circular"}


def test_the_search_imports_no_jax():
    code = "import sys, graphtrain.planning.search; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.fixture
def compiled(monkeypatch):
    """The programs that verify would compile; the compiler's peak is what `peaks` says of them."""
    asked, peaks = [], {}

    def compile_each(programs, cache, observe, *, jobs):
        asked.append(list(programs))
        answers = {}
        for label, program in programs.items():
            guess = estimate(program)
            peak = peaks.get(len(answers) + sum(map(len, asked[:-1])), guess.memory.peak)
            memory = replace(guess.memory, source="compiler", peak=peak)
            answers[label] = replace(guess, memory=memory)
        return answers

    monkeypatch.setattr("graphtrain.planning.verify.compile_each", compile_each)
    return asked, peaks


def test_what_does_not_fit_after_all_comes_last_and_another_is_compiled(vary, tmp_path, compiled):
    asked, peaks = compiled
    ranked = search(vary([]).settings).ranked
    peaks[0] = 10**15
    rows = compile_best(ranked, Cache(tmp_path), 2)
    assert [len(batch) for batch in asked] == [2, 1]
    assert [one.memory.fits for one in rows] == [True, True, False]
    assert rows[-1].program == ranked[0].program
    assert {one.memory.source for one in rows} == {"compiler"}


def test_a_step_that_the_profile_cannot_time_comes_after_those_that_it_can(
    vary, tmp_path, compiled, monkeypatch
):
    """Its bound is far below their times."""
    ranked = search(vary([]).settings).ranked[:3]
    taken = MeasuredTime("", *(PartSeconds(clock=100.0) for _ in range(3)))

    def answered(programs, cache, observe, *, jobs):
        answers = {name: estimate(program) for name, program in programs.items()}
        for index, (name, guess) in enumerate(answers.items()):
            note = "no profile has measured x" if index == 0 else ""
            time = replace(
                guess.time, measured=None if note else taken, compute=index, profile_note=note
            )
            memory = replace(guess.memory, source="compiler")
            unknown = "no memory of collectives" if note else ""
            answers[name] = replace(guess, memory=memory, time=time, note=unknown)
        return answers

    monkeypatch.setattr("graphtrain.planning.verify.compile_each", answered)
    rows = compile_best(ranked, Cache(tmp_path), 3)
    assert [one.program for one in rows] == [ranked[at].program for at in (1, 2, 0)]
    reason = "ranked after those with a time: no profile has measured x"
    assert rows[-1].note == f"no memory of collectives; {reason}"
    assert rows[-1].seconds < rows[0].seconds and not rows[0].note


def slower(one, factor):
    """A strategy as compiled, with a time of compute that is `factor` times the estimate."""
    guess = estimate(one.program)
    time = replace(guess.time, compute=factor * guess.time.compute)
    memory = replace(guess.memory, source="compiler")
    return one.compiled(replace(guess, memory=memory, time=time))


def test_reasons_compare_compiled_steps_with_each_other_and_estimates_with_estimates(vary):
    found = search(vary(["program.target=h100:8"]).settings)
    first, second = found.ranked[:2]
    (family, *_) = (name for name in FAMILIES if first.choice(name) != second.choice(name))
    after = replace(found, compiled=(slower(second, 1), slower(first, 3)))
    assert after.winner is after.compiled[0] and found.winner is first
    lost, taken = (f"{family} {one.choice(family)}" for one in (first, second))
    assert taken in found.rejected and taken not in after.rejected
    seconds = [f"{one.time.total:.3g}" for one in (*reversed(after.compiled), second)]
    assert after.rejected[lost].startswith(f"compiled: {seconds[0]} s per step instead of")
    assert f"instead of {seconds[1]} s" in after.rejected[lost]
    assert f"instead of {seconds[2]} s, with" in after.rejected["stage 4"]
    assert "compiled" not in after.rejected["stage 4"]
    assert ranking.reasons_heading(after).endswith("by estimates unless it says compiled")


def test_reasons_say_what_the_compiler_found(vary):
    found = search(vary(["program.target=h100:8"]).settings)
    first, second = found.ranked[:2]
    (family, *_) = (name for name in FAMILIES if first.choice(name) != second.choice(name))
    lost, winner = f"{family} {first.choice(family)}", slower(second, 1)

    def reason(memory=None, **changes):
        one = replace(slower(first, 1), **changes)
        one = one if memory is None else replace(one, memory=replace(one.memory, **memory))
        return replace(found, compiled=(winner, one)).rejected[lost]

    assert reason(refused=True, note="axes").endswith(f"with {first.mesh}: axes")
    assert "compiled: does not fit" in reason({"peak": 10**15})
    assert "needs 1000000.0 GB of" in reason({"peak": 10**15})
    assert "found no way to fit it" in reason({"compiler_out_of_memory": True})
    failed = replace(first, note="the compiler failed")  # which keeps its estimate
    reasons = replace(found, compiled=(winner, failed)).rejected
    assert reasons[lost].endswith("but was not compiled: the compiler failed")


def test_rows_are_settings_and_say_whose_their_numbers_are(vary, tmp_path, compiled):
    found = search(vary(["program.mesh.fsdp=1", "program.mesh.data=rest"]).settings)
    rows = [*compile_best(found.ranked, Cache(tmp_path), 1), *found.ranked[1:]]
    first, second = ranking.as_json(found, rows, Workload())["strategies"][:2]
    assert (first["source"], second["source"]) == ("compiler", "estimate")
    assert first["remat"] == found.ranked[0].program.model.remat and first["fits"]
    assert first["peak_bytes"] == rows[0].memory.peak and first["step_seconds"] > 0


def test_strategies_with_equal_numbers_share_a_row(vary):
    found = search(vary(["program.target=cpu:8"]).settings, keep=50)
    figures = [one.figures for one in found.ranked]
    assert len(set(figures)) == len(figures)  # no two rows look alike
    assert sum(one.equal for one in found.ranked) > 0
    assert all("unknown" in row and "0 B" not in row for row in figures)
    assert not any("0.00 s" in reason for reason in found.rejected.values())
