"""graphtrain plan and its subcommands, as a shell sees them."""

import json
import math
import re

import pytest
from places import CUBE

TOO_LARGE = [
    "--target", "v5e:2x2", "--no-compile",
    "--set", "program.batch.global_batch_size=4096", "--set", "program.batch.seq_len=8192",
]  # fmt: skip
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries")


@pytest.fixture
def plan(place):
    """`graphtrain plan WORDS`; gives what it printed."""
    return lambda *words, status=0: place.command("plan", *words, status=status)


def test_a_plan_of_what_is_compiled_is_from_the_compiler_and_compiles_nothing(plan):
    out, err = plan("config.toml", "--json", *CUBE)
    answer = json.loads(out)
    assert err.strip() == "train: cached"
    assert answer["devices"] == 8 and answer["mesh"]["tensor"] == 2
    memory = answer["memory"]
    assert sum(memory[f"{part}_bytes"] for part in PARTS) == memory["peak_bytes"]
    assert memory["source"] == "compiler" and answer["fits"] is True
    assert {"all-gather", "all-reduce"} <= {one["op"] for one in answer["collectives"]}
    assert answer["step_seconds"] > 0 and answer["step_seconds_is_lower_bound"]
    assert answer["mfu"] is answer["step_seconds_by_part"]["memory"] is None  # unknown of a CPU
    assert answer["parameter_count"] == sum(
        math.prod(row["shape"]) for row in answer["arrays"] if row["role"] == "parameter"
    )
    assert [part["replicas"] for part in answer["flops_by_part"]] == [1, 1, 1, 1]
    assert {row["path"] for row in answer["arrays"]} >= {"state/parameters/layers/mlp/up"}
    assert answer["sources"]["collectives"] == "compiler"


@pytest.mark.usefixtures("compiled_quickly")
def test_what_a_plan_compiled_is_there_for_the_run(cold):
    cold.command("plan", "config.toml")
    cold.command("compile", "config.toml", "--report", "report.json")
    report = json.loads((cold.path / "report.json").read_text())
    assert {one["label"]: one["status"] for one in report["graphs"]}["train"] == "cached"


def test_every_number_says_whose_it_is(plan, place):
    (place.cache / "ledger.jsonl").unlink(missing_ok=True)  # runs of other tests
    out, _ = plan("config.toml", *CUBE)
    words = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.strip()}
    assert words["peak"] == words["parameters"] == words["tensor"] == "compiler"
    assert words["gradients"] == words["step"] == "estimate"
    assert "fits cpu:8: " in out and "error bar: none yet" in out
    unknown = [line.split()[:4] for line in out.splitlines() if " unknown " in line]
    assert ["communication", "over", "fsdp", "unknown"] in unknown
    assert ["memory", "unknown"] in [words[:2] for words in unknown]
    assert "MFU" not in out and " parameters\n" in out


def test_every_collective_has_a_reason(plan):
    out, _ = plan("config.toml", "--blame", *CUBE)
    lines = out.splitlines()
    assert any("layers/mlp/up is gathered over fsdp" in line for line in lines)
    collectives = json.loads(plan("config.toml", "--json", *CUBE)[0])["collectives"]
    assert len(collectives) == len(lines)
    for line, one in zip(lines, collectives, strict=True):
        assert line == ("  " if one["explained"] else "! ") + one["why"]
    flags = sum(not one["explained"] and one["significant"] for one in collectives)
    told = f"no strategy explains {flags} of {len(lines)}" in plan("config.toml", *CUBE)[0]
    assert told == bool(flags)


def test_an_estimate_is_marked_and_needs_no_compiler(plan):
    out, err = plan("config.toml", "--no-compile", "--target", "v5p:2x2x2", "--json")
    answer = json.loads(out)
    assert answer["memory"]["source"] == answer["sources"]["collectives"] == "estimate"
    assert answer["compile_seconds"] is None and err == ""


def test_results_of_a_search_are_looked_at_before_anything_is_compiled(plan, place):
    _, err = plan("config.toml", "--results", "none.json", *CUBE, status=2)
    assert "--results is only shown on a page; add --html FILE" in err
    (place.path / "other.json").write_text("[]")
    (place.path / "another.json").write_text('{"program": "0", "strategies": []}')
    for name, said in (
        ("none", "cannot be read"),
        ("other", "is not the output of graphtrain plan search"),
        ("another", "is of another target, model or sequence length"),
    ):
        words = ["--html", "page.html", "--results", f"{name}.json"]
        _, err = plan("config.toml", *words, *CUBE, status=2)
        assert f"error: {name}.json {said}" in err and not (place.path / "page.html").exists()


def test_one_array_is_shown_without_compiling(plan):
    out, err = plan("config.toml", "--array", "*mu*mlp/up", *CUBE)
    assert "optimizer/adam/mu/layers/mlp/up" in out and len(out.splitlines()) == 2 and err == ""
    _, err = plan("config.toml", "--array", "*mpl*", status=2)
    assert "no array matches '*mpl*'; an example of a path is " in err


def test_what_does_not_fit_is_status_4_with_changes_that_would(plan):
    out, _ = plan("config.toml", *TOO_LARGE, status=4)
    assert "does not fit v5e:2x2: " in out and "changes that would fit" in out
    out, _ = plan("config.toml", *TOO_LARGE, "--json", status=4)
    remedy = json.loads(out)["remedies"][0]
    words = [word for change in remedy["change"] for word in ("--set", change)]
    out, _ = plan("config.toml", *TOO_LARGE, *words, "--json")
    assert json.loads(out)["memory"]["peak_bytes"] == remedy["peak_bytes"]


def test_several_targets_make_one_table_and_one_that_cannot_stops_no_other(plan):
    out, _ = plan("config.toml", "--targets", "cpu:1,cpu:8,h100:3", "--no-compile")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:4]}
    assert "yes" in rows["cpu:1"] and "estimate" in rows["cpu:8"]
    assert rows["h100:3"][-1] == "error"
    out, _ = plan("config.toml", "--targets", "cpu:1,h100:3", "--json")
    one, other = json.loads(out)
    assert one["memory"]["source"] == "compiler" and "batch" in other["error"]
    plan("config.toml", "--targets", "h100:3,h100:5", "--no-compile", status=2)


def test_a_number_of_tokens_takes_days_and_money(plan, tmp_path):
    (tmp_path / "prices.toml").write_text("[device_hour]\nh100 = 2.5\nh200 = 1.2\n")
    options = "--tokens", "3B", "--prices", str(tmp_path / "prices.toml"), "--no-compile"
    targets = "--targets", "h100:8,h200:8"
    out, _ = plan("config.toml", *options, *targets)
    assert out.splitlines()[0].split()[-5:] == ["tokens/s", "days", "USD", "compile", "s"]
    first, second = json.loads(plan("config.toml", *options, *targets, "--json")[0])
    for row, price in ((first, 2.5), (second, 1.2)):
        cost = row["cost"]
        assert cost["days"] == pytest.approx(3e9 / cost["tokens_per_second"] / 86400)
        assert cost["price"] == pytest.approx(cost["days"] * 24 * 8 * price)
    out, _ = plan("config.toml", *options, "--target", "h100:8")
    assert f"3,000,000,000 tokens: {first['cost']['days']:.3g} days at" in out
    assert "nothing was fitted to published steps of h100 in float32: no range" in out
    narrow = "--set", "program.model.dtype=bfloat16"
    out, _ = plan("config.toml", *options, "--target", "h100:8", *narrow)
    assert "nothing was fitted to published steps of less than 0.1 s: no range" in out
    large = "{layers=24, embed=2048, heads=16, mlp=8192, vocab=32000, remat='full'}"
    long = "{global_batch_size=64, seq_len=2048}"
    larger = "--set", f"program.model={large}", "--set", f"program.batch={long}"
    out, _ = plan("config.toml", *options, "--target", "h100:8", *larger)
    assert re.search(r"3,000,000,000 tokens: [0-9.]+ \([0-9.]+ to [0-9.]+\) days at", out)
    _, err = plan("config.toml", *options, "--target", "a100:8", status=2)
    assert "no price of a100" in err


def test_a_difference_is_what_a_setting_does(plan):
    out, _ = plan("diff", "config.toml", "--with", "program.model.remat=full", "--no-compile")
    kinds = {line.split()[0] for line in out.splitlines()[1:]}
    assert "memory" in kinds and "placement" not in kinds
    out, _ = plan("diff", "config.toml", "config.toml", "--no-compile")
    assert out == "no difference\n"
    _, err = plan("diff", "config.toml", status=2)
    assert "--with" in err


def test_a_lock_holds_until_placement_memory_or_communication_change(place, plan):
    plan("lock", "config.toml", *CUBE)
    assert (place.path / "config.plan").read_text().startswith("# Lock of a plan")
    out, _ = plan("check", "config.toml", *CUBE)
    assert out == "config.plan is up to date\n"
    out, err = plan(
        "check", "config.toml", *CUBE, "--set", "program.batch.global_batch_size=16", status=5
    )
    assert "-batch/tokens  int32  1x8(data+fsdp)x32  256" in out.splitlines()
    assert "graphtrain plan lock" in err
    _, err = plan("check", "config.toml", "--lock", "none.plan", status=2)
    assert "graphtrain plan lock config.toml" in err


def test_a_file_named_as_a_subcommand_is_reached_by_its_path(place, plan):
    (place.path / "diff").write_text((place.path / "config.toml").read_text())
    out, _ = plan("./diff", "--no-compile")
    assert "fits cpu:1" in out


def test_help_lists_options_and_subcommands(plan):
    out, _ = plan("--help")
    assert "--targets" in out and "diff" in out and "check" in out


@pytest.mark.usefixtures("compiled_quickly")
def test_runs_make_the_error_bar_of_later_plans(cold):
    for directory in ("one", "two"):
        words = ["--set", f"run.directory={directory}", "--compile", "--set", "run.steps=6"]
        cold.command("run", "config.toml", *words)
    lines = (cold.cache / "ledger.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["target"] == "cpu:1" and first["steps"] == 5
    assert first["measured"]["step_seconds"] > 0 and first["measured"]["peak_bytes"] > 0
    assert first["predicted"]["peak_bytes"] > 0 and first["predicted"]["compile_seconds"] is None
    took = first["measured"]["compile_seconds"]
    assert second["predicted"]["compile_seconds"] == pytest.approx(took)
    out, _ = cold.command("plan", "config.toml")
    assert "step time was" in out and "in the worst case; runs on cpu:1: 2" in out
    assert "compile time was 1.00 x the prediction" in out


@pytest.mark.usefixtures("compiled_quickly")
def test_a_compiled_step_without_rules_is_never_faster_than_data_parallelism(cold):
    (cold.path / "empty.toml").write_text("# nothing is split\n")
    parallel, repeated = (
        json.loads(
            cold.command("plan", "config.toml", "--json", "--target", "cpu:4", "--set", rules)[0]
        )
        for rules in ('program.rules=["data"]', 'program.rules=["empty.toml"]')
    )
    assert parallel["memory"]["source"] == repeated["memory"]["source"] == "compiler"
    assert repeated["step_seconds"] > 2 * parallel["step_seconds"]
    assert repeated["flops_excess"] == pytest.approx(4 * parallel["flops_excess"], rel=0.2)
    assert "the whole step is computed 4 x over data" in repeated["findings"][0]


@pytest.mark.usefixtures("compiled_quickly")
def test_a_plan_of_serving_compiles_what_the_server_loads(cold):
    serving = ["--target", "cpu:1", "--set", "program.serve.prefill=[16]"]
    out, _ = cold.command(
        "plan", "config.toml", "--for", "serve", "--no-confirm", "--json", *serving
    )
    answer = json.loads(out)
    memory = answer["memory"]
    assert answer["fits"] is True and answer["largest_slots"]["value"] > answer["slots"]
    assert {one["source"] for one in memory["programs"].values()} == {"compiler"}
    held = [memory[f"{name}_bytes"] for name in ("weights", "kv_cache", "sampling")]
    largest = max(one["temporaries_bytes"] for one in memory["programs"].values())
    assert memory["peak_bytes"] == max(sum(held) + largest, memory["loading_bytes"])
    cold.command("compile", "config.toml", "--for", "serve", "--report", "report.json", *serving)
    report = json.loads((cold.path / "report.json").read_text())
    assert report["cached"] == report["total"] == len(memory["programs"]) + 1


def test_options_of_training_steps_are_refused_for_serving(plan):
    _, err = plan("config.toml", "--for", "serve", "--blame", status=2)
    assert "--blame is for training steps; remove --for serve" in err
