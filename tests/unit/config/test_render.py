"""A rendered configuration loads back to the same one."""

import tomllib
from pathlib import Path
from typing import get_args

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from graphtrain.config import (
    Batch,
    Config,
    Data,
    LearningRate,
    Loss,
    Mesh,
    Model,
    Optimizer,
    Program,
    Run,
    load_config,
    render,
)
from graphtrain.config.render import toml
from graphtrain.config.schema import Precision
from graphtrain.config.schema.precision import Compute, Quantizable, Recipe

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
paths = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
).filter(lambda path: "://" not in path)  # a URL is checked
count = st.integers(1, 2**63 - 1)
width, rows = st.integers(1, 10**7), st.integers(1, 10**9)
number = st.floats(allow_nan=False, allow_infinity=False)
# Numbers that float32 has, because others are refused.
above_zero = st.floats(2.0**-126, 2.0**127)
fraction = st.just(0.0) | st.floats(2.0**-126, 1 - 2.0**-24)


@st.composite
def precisions(draw):
    """Settings of precision, with a dtype of the model that they may replace."""
    compute = draw(st.sampled_from([None, *get_args(Compute)]))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    given: dict = {}
    if compute in ("fp8", "int8"):
        excluded = st.lists(st.sampled_from(get_args(Quantizable)), unique=True)
        given["recipe"] = draw(st.none() | st.sampled_from(get_args(Recipe)))
        given["exclude"] = draw(st.none() | excluded.map(tuple))
    elif (compute or dtype) == "float16":
        scale = st.floats(2.0**-100, 2.0**100)
        given["loss_scale"] = draw(st.sampled_from([None, "dynamic"]) | scale)
        if not isinstance(given["loss_scale"], float):
            given["initial_scale"] = draw(st.none() | scale)
            given["growth_interval"] = draw(st.none() | st.integers(1, 2**31 - 1))
            given["growth_factor"] = draw(st.none() | st.floats(1.5, 100))
            given["backoff_factor"] = draw(st.none() | st.floats(0.01, 0.99))
    return dtype, Precision(compute=compute, **given)


@st.composite
def configs(draw):
    heads, groups = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    mesh = draw(st.tuples(st.just("rest") | count, count, count).flatmap(st.permutations))
    steps = draw(count)
    dtype, precision = draw(precisions())
    model = Model(
        dtype=dtype,
        layers=draw(st.integers(1, 10_000)),
        embed=draw(width),
        heads=heads * groups,
        kv_heads=heads,
        head_dim=2 * draw(st.integers(1, 512)),
        mlp=draw(width),
        vocab=draw(rows),
        positions="learned",
        max_position_embeddings=10**9,
        rope_theta=draw(above_zero),
        tie_word_embeddings=draw(st.booleans()),
    )
    batch = Batch(global_batch_size=heads * groups, seq_len=draw(rows), microbatches=groups)
    program = Program(
        target=draw(text),
        rules=tuple(draw(st.lists(paths, max_size=3))),
        mesh=Mesh(**dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))),
        model=model,
        batch=batch,
        precision=precision,
        optimizer=Optimizer(
            beta1=draw(fraction), epsilon=draw(above_zero), clip_norm=draw(above_zero)
        ),
        loss=Loss(z_loss=draw(st.just(0.0) | above_zero)),
    )
    run = Run(
        directory=draw(paths.filter(bool)),
        steps=steps,
        data=Data(train=draw(paths), validation=draw(st.none() | paths)),
        learning_rate=LearningRate(peak=draw(above_zero), warmup_steps=draw(st.integers(0, steps))),
        evaluate_every=draw(st.none() | count),
    )
    return Config(program=program, run=run)


@given(configs())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rendered_configurations_load_back(tmp_path, config):
    path = Path(tmp_path, "config.toml")
    path.write_text(render(config), encoding="utf-8")
    assert load_config(path) == config


@given(text | number | st.lists(st.dictionaries(text, text | st.booleans() | st.integers())))
def test_values_are_toml(value):
    assert tomllib.loads(f"value = {toml(value)}") == {"value": value}


def small(**optimizer):
    return Config(
        program=Program(
            model=Model(layers=2, embed=64, heads=4, mlp=256, vocab=256),
            batch=Batch(global_batch_size=8, seq_len=128),
            optimizer=Optimizer(**optimizer),
        ),
        run=Run(directory="runs/small", steps=100, data=Data(train="data/train")),
    )


def test_settings_come_with_their_meaning():
    lines = render(small()).splitlines()
    assert lines[0] == "[program]  # " + (Program.__doc__ or "")
    assert "embed = 64  # width of the residual stream (hidden size)" in lines
    assert "kv_heads = 4  # number of key and value heads; unset: as many as heads" in lines
    assert 'positions = "rope"  # position encoding' in lines
    assert not any(line.startswith(("max_position_embeddings", "validation")) for line in lines)
