"""The winner of a search, in the cache."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

import graphtrain as gt
from graphtrain.cache import Cache
from graphtrain.cache.programs import CacheWarning
from graphtrain.cli.run import command
from graphtrain.config import load_config
from graphtrain.config.schema import Batch, Config, Mesh, SearchSettings
from graphtrain.errors import MissingProgram, PlanError, TrainingError
from graphtrain.planning.chosen import (
    remember,
    remembered,
    search_key,
    searched_program,
    strategy_of,
    with_strategy,
)

TEXT = """
[program]
target = "cpu:4"
model = { layers = 4, embed = 64, heads = 4, mlp = 128, vocab = 256 }
batch = { global_batch_size = 8, seq_len = 64 }
[run]
directory = "run"
steps = 1
data = { train = "data" }
"""


@pytest.fixture
def config() -> Config:
    return load_config(TEXT)


@pytest.fixture
def chosen(config: Config) -> Config:
    """The configuration with another strategy."""
    program = config.program
    batch = replace(program.batch, microbatches=2)
    return replace(config, program=replace(program, mesh=Mesh(fsdp=2, tensor=2), batch=batch))


def test_a_strategy_is_found_again_whatever_the_own_one_is(config, chosen, tmp_path):
    cache = Cache(tmp_path)
    assert remembered(cache, config) is None
    remember(cache, config, chosen.program)
    found = remembered(cache, config)
    assert found is not None and found.program == chosen.program
    assert remembered(cache, chosen) == chosen  # its own strategy is no part of the key


@pytest.mark.parametrize(
    "change",
    [
        "program.model.mlp=256",
        "program.batch.global_batch_size=16",
        "program.target=cpu:8",
        "run.search.memory_fraction=0.5",
        "program.optimizer.kind=muon",
    ],
)
def test_what_is_given_to_a_search_is_its_key(config, chosen, tmp_path, change):
    cache = Cache(tmp_path)
    remember(cache, config, chosen.program)
    assert remembered(cache, load_config(TEXT, [change])) is None


@pytest.mark.parametrize("number", ["flops = { bfloat16 = 100e12 }", "link = 30e9"])
def test_the_numbers_of_the_machine_are_its_key(config, chosen, tmp_path, monkeypatch, number):
    """Also those that no program depends on, as they rank strategies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRAPHTRAIN_TARGETS", raising=False)
    cache, on_gpus = Cache(tmp_path / "cache"), load_config(TEXT, ["program.target=h100:4"])
    remember(cache, on_gpus, chosen.program)
    (tmp_path / "targets.toml").write_text(f"[h100]\n{number}\n")
    assert remembered(cache, on_gpus) is None
    (tmp_path / "targets.toml").unlink()
    assert remembered(cache, on_gpus) is not None
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")  # of the memory of a GPU
    assert remembered(cache, on_gpus) is None


def test_every_setting_of_the_strategy_is_no_part_of_the_key(config):
    own = ["program.optimizer.offload_to_host=true", "program.pipeline.virtual_stages=2"]
    own += ["program.model.remat=full", "program.batch.padding_sequences=1"]
    own += ["program.batch.microbatches=3", 'program.rules=["zero1", "tensor"]']
    assert search_key(load_config(TEXT, own)) == search_key(config)
    ulysses = load_config(TEXT, ['program.rules=["data", "ulysses"]'])
    assert search_key(ulysses) != search_key(config)


def test_results_of_a_search_are_about_a_target_a_model_and_a_length(config, chosen):
    about = searched_program(config.program)
    assert searched_program(chosen.program) == about  # the strategy may differ
    batch = replace(config.program.batch, seq_len=128)
    model = replace(config.program.model, layers=5)
    for change in ({"target": "cpu:8"}, {"batch": batch}, {"model": model}):
        assert searched_program(replace(config.program, **change)) != about


def test_a_damaged_strategy_is_none(config, chosen, tmp_path):
    cache = Cache(tmp_path)
    remember(cache, config, chosen.program)
    (file,) = (tmp_path / "v1" / "searches").iterdir()
    file.write_text(file.read_text().replace('"microbatches": 2', '"microbatches": 4'))
    with pytest.warns(CacheWarning, match="digest"):
        assert remembered(cache, config) is None


def test_a_strategy_that_does_not_suit_is_an_error(config, chosen):
    strategy = strategy_of(chosen.program) | {"microbatches": 3}
    with pytest.raises(PlanError, match=r"does not suit .*not a multiple of microbatches = 3"):
        with_strategy(config, strategy)
    with pytest.raises(PlanError, match=r"is damaged, KeyError\('pipeline'\); search again"):
        with_strategy(config, {"mesh": {}})


def test_limits_are_settings_with_a_range():
    with pytest.raises(ValueError, match="less than or equal to 1"):
        SearchSettings(memory_fraction=1.5)
    with pytest.raises(ValueError, match="greater than 0"):
        SearchSettings(device_memory_gb=0.0)


def test_another_batch_is_said_with_its_steps():
    from graphtrain.planning.ranking import batch_change

    before = Batch(global_batch_size=8, seq_len=64)
    assert batch_change(before, replace(before, microbatches=2), 10) == ""
    said = batch_change(before, replace(before, global_batch_size=16), 10)
    assert "run.steps = 10 steps train 10,240 tokens in place of 5,120 (5 steps train" in said


def test_train_takes_the_searched_strategy(config, chosen, tmp_path, make_dataset):
    """In Python as with `run --search`; here up to the first program, which is missing."""
    data = make_dataset([[1, 2, 3] * 400], vocab=256)
    said, given = [], {"cache": tmp_path / "cache", "search": True}
    own = load_config(config, [f'run.data.train="{data}"', f'run.directory="{tmp_path}/run"'])
    with pytest.raises(
        MissingProgram, match=r"no strategy .*train\(..., search=True, compile=True"
    ):
        gt.train(own, **given)
    remember(Cache(tmp_path / "cache"), own, chosen.program)
    with pytest.raises(MissingProgram, match=r"train\(..., search=True, compile=True"):
        gt.train(own, log=said.append, **given)
    assert said == ["strategy of the last search: cpu:4, mesh fsdp 2 x tensor 2, 2 x 4 sequences"]
    with pytest.raises(TrainingError, match="search=True is for runs of one process"):
        gt.train(own, processes=2, rank=0, coordinator="localhost:1", **given)


def test_processes_that_could_find_different_strategies_are_refused(tmp_path):
    path = tmp_path / "my config.toml"
    path.write_text(TEXT)
    several = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--rank", "1"]
    found = CliRunner().invoke(command, [str(path), "--target", "cpu:2x2", "--search", *several])
    assert found.exit_code == 2 and "could find another strategy" in found.output
    written = f"plan search '{path}' --target cpu:2x2 --output searched.toml"
    assert written in " ".join(found.output.split())
