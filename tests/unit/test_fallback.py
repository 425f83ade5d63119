"""Programs for fewer hosts: the same global batch on a smaller mesh, or a refusal that helps."""

from dataclasses import replace

import pytest
from fallback_config import config

from graphtrain.api.checks.fallback import (
    check_hosts,
    fallback,
    fallback_programs,
    fallbacks,
    on_hosts,
)
from graphtrain.api.checks.purpose import PLAN
from graphtrain.api.checks.report import problems
from graphtrain.compile.request_keys import request_keys
from graphtrain.compile.tasks import run_requests, run_tasks
from graphtrain.config.identity import mathematics
from graphtrain.config.resolve import resolve
from graphtrain.errors import ConfigError
from graphtrain.run.report_lines import opening_lines


def mesh_and_batch(hosts: int, *overrides: str) -> tuple[dict[str, int], tuple[int, int, int]]:
    program = fallback(config(*overrides), hosts).program
    batch = program.batch
    axes = {name: size for name, size in program.mesh.axes.items() if size > 1}
    assert batch.global_batch_size == config(*overrides).program.batch.global_batch_size
    return axes, (batch.microbatches, batch.microbatch_rows, batch.padding_sequences)


def refusals(*overrides: str) -> list[str]:
    found = problems(config(*overrides), PLAN)
    return [one.message for one in found if one.settings == (("run", "fallback"),)]


def test_data_shrinks_and_a_device_computes_no_more_sequences_at_once():
    assert mesh_and_batch(2) == ({"data": 2, "fsdp": 8}, (4, 64, 0))
    # 4 sequences a device before. 256 are 11 for each of 24 devices: 3 x 4, of which 32 are empty.
    assert mesh_and_batch(3) == ({"data": 3, "fsdp": 8}, (3, 96, 32))


def test_fsdp_has_the_largest_size_that_all_arrays_allow_where_data_cannot_shrink():
    only_fsdp = "program.mesh.data=1", "program.mesh.fsdp=32"
    assert mesh_and_batch(3, *only_fsdp)[0] == {"data": 3, "fsdp": 8}  # 64 is no multiple of 24
    assert mesh_and_batch(2, *only_fsdp)[0] == {"fsdp": 16}


def test_other_axes_stay_and_what_they_do_not_allow_is_refused_with_what_can_be_used():
    tensor = "program.mesh.fsdp=1", "program.mesh.tensor=4"
    assert mesh_and_batch(3, *tensor)[0] == {"data": 6, "tensor": 4}
    stages = "program.mesh.fsdp=1", "program.mesh.tensor=1", "program.mesh.context=16"
    (found,) = refusals(*stages)
    assert "h100:24 has 24 devices, which is not a multiple of mesh.context = 16" in found
    assert found.endswith("hosts that can be used: 2")


def test_a_batch_that_must_not_be_padded_is_refused_with_the_numbers_of_hosts_that_divide_it():
    experts = "program.model.moe={ experts = 4, experts_per_token = 2 }"
    with pytest.raises(ConfigError, match=r"256 is not a multiple of 24 .*model\.moe.*used: 2, 1$"):
        fallback(config(experts), 3)
    assert mesh_and_batch(2, experts)[1] == (4, 64, 0)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ("[4]", "4 is not less than the 4 hosts of h100:32"),
        ("[3, 3]", "names 3 twice"),
    ],
)
def test_counts_that_mean_nothing_are_refused(counts, words):
    assert words in refusals(f"run.fallback={counts}")[0]


def test_a_target_whose_hosts_are_not_known_is_refused():
    found = refusals("program.target=v5p:2x4x4", "program.mesh.fsdp=1")
    assert "does not determine its number of hosts" in found[0]


def test_a_phase_has_a_batch_of_its_own():
    program = fallback(config("program.phase=[{ until = 5, global_batch_size = 48 }]"), 3).program
    assert program.phases[0].padding_sequences == 0 and program.batch.padding_sequences == 32


def test_a_run_computes_the_same_and_has_other_programs():
    full = config()
    smaller = replace(full, program=fallback(full, 3).program.run_settings)
    assert mathematics(full) == mathematics(smaller)
    tasks = run_tasks(
        {"a": resolve(full.program)},
        {"a": full.run},
        {"a": {str(one.hosts): one.program for one in fallbacks(full)}},
    )
    assert [one.label for one in tasks[::3]] == ["init", "3 init", "2 init"]
    assert len({one.request.digest for one in tasks}) == 9
    assert on_hosts(full, 3) == fallback(full, 3).program
    assert on_hosts(full, 4) == on_hosts(full, 1) == resolve(full.program)


def test_an_explanation_is_of_all_graphs_that_compile_makes():
    loaded = config("run.verify_every=5")
    programs = fallback_programs(loaded)
    asked = run_requests(resolve(loaded.program), loaded.run, programs)
    compiled = run_tasks({"a": resolve(loaded.program)}, {"a": loaded.run}, {"a": programs})
    assert list(asked) == [task.label for task in compiled]
    assert {"train", "3 hosts train", "2 hosts train"} < set(asked)
    assert len(asked) == 3 * len([label for label in asked if "hosts" not in label]) > 9


def test_padding_makes_no_other_program_of_as_many_sequences():
    sizes = "program.batch.microbatches=1", "program.mesh.fsdp=1"
    padded = config(*sizes, "program.batch.padding_sequences=32")
    larger = config(*sizes, "program.batch.global_batch_size=288")
    assert request_keys(resolve(padded.program)) == request_keys(resolve(larger.program))


def test_another_number_of_hosts_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"1 host of 4: run.fallback = \[3, 2\] does not name 1"):
        check_hosts(config(), 1)
    check_hosts(config(), 3)
    check_hosts(config(), 4)


def test_the_log_names_the_mesh_that_ran():
    from pathlib import Path

    from graphtrain.planning.parameters import ParameterCount
    from graphtrain.run.events import RunStart

    full = config()
    start = RunStart(full, Path("run"), 0, ParameterCount(1), fallback(full, 3).program)
    assert (
        "machine: h100:24, mesh data 3 x fsdp 8, 3 x 96 sequences, 32 of them padding, in place of "
        "h100:32 (run.fallback)" in opening_lines(start)
    )
