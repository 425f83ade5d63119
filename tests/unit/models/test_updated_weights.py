import dataclasses

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Mesh, Model, Optimizer, Program
from graphtrain.cost_model.traffic import predict_collectives
from graphtrain.models import updated_weights
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.models.updated_weights import gathered_by_layer, gathered_stacks
from sharding_rules.arrays import ArraySpec

MODEL = Model(layers=8, embed=1024, heads=16, kv_heads=4, mlp=2816, vocab=32000, bias="all")


def resolved(target="h100:8", mesh=None, rules=("zero1",), model=MODEL, **settings):
    return resolve(
        Program(
            target=target,
            mesh=mesh or Mesh(data=8),
            rules=rules,
            model=model,
            batch=Batch(global_batch_size=64, seq_len=512, microbatches=4),
            **settings,
        )
    )


def chosen(program):
    return set(gathered_by_layer(program, trained_arrays(program.settings)))


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
@pytest.mark.parametrize("rules", [("zero1",), ("zero2",)])
def test_matrices_of_layers_are_gathered_by_layer(rules, target):
    found = chosen(resolved(target, rules=rules))
    assert {"layers/attention/query", "layers/attention/output", "layers/mlp/down"} <= found
    assert not {path for path in found if "norm" in path or path.startswith(("head", "embedding"))}
    assert "layers/mlp/up_bias" not in found  # not sharded over data


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "cpu:8"},
        {"rules": ("data",)},
        {"rules": ("fsdp",), "mesh": Mesh(fsdp=8)},
        {"model": dataclasses.replace(MODEL, layers=2)},  # saves too little
        {"adapter": Adapter(rank=8, alpha=8.0)},
        {"rules": ("zero1", "pipeline"), "mesh": Mesh(data=4, stage=2)},
    ],
    ids=str,
)
def test_there_is_no_loop_where_it_would_not_save_memory(changes):
    assert not chosen(resolved(**changes))


@pytest.mark.parametrize("kind", ["adamw", "schedule_free"])
def test_a_plan_has_the_bytes_of_all_layers_at_once(kind, monkeypatch):
    program = resolved(
        rules=("zero1", "fsdp"),
        mesh=Mesh(data=4, fsdp=2),
        model=dataclasses.replace(MODEL, layers=16),
        optimizer=Optimizer(kind=kind),
    )
    looped = predict_collectives(program)
    monkeypatch.setattr(updated_weights, "_MIN_SAVING", 1.0)
    at_once = predict_collectives(program)
    assert sum(one.wire_bytes_per_step for one in looped) == pytest.approx(
        sum(one.wire_bytes_per_step for one in at_once)
    )
    assert len(looped) == len(at_once)
    assert sum(one.count for one in looped) > sum(one.count for one in at_once)


def test_a_scalar_weight_is_not_gathered():
    assert gathered_stacks(resolved(), {"scale": ArraySpec((), ())}) == {}
