"""Attention as MindSpore's fused operators: what is in the files, and that nothing else changes."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mindir_graphs import operators, settings, shapes, translated
from programs import CUBE, LLAMA, program
from test_graphs import compiled

from graphtrain.config.schema import Batch, Mesh
from graphtrain.models.attention.dot_product import dot_product_attention
from graphtrain.models.attention.operator_region import fused_attention
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.segment_mask import isolate_documents
from lowering.ascend import mindir
from lowering.tracing.operator_regions import enable_regions

LENGTH = 40  # as long as nothing else
MODEL = dataclasses.replace(LLAMA, head_dim=16, dtype="bfloat16")
BATCH = Batch(global_batch_size=8, seq_len=LENGTH)
ALL = 2147483647


def fused(model) -> dict[str, list]:
    """The fused operators of a graph: what each is given, by name."""
    found = {}
    for name, node in operators(model):
        if name.startswith("FlashAttention"):
            found.setdefault(name, []).append(settings(model, node))
    return found


def sides(model) -> Counter:
    """How often shapes have the length of sequences twice, as scores and masks do."""
    return Counter(
        shape
        for _, node in operators(model)
        for shape, _ in shapes(node)
        if shape.count(LENGTH) > 1
    )


def test_a_step_has_one_operator_for_each_pass_and_keeps_no_scores():
    model = dataclasses.replace(
        MODEL, layers=4, sliding_window=5, global_attention_every=2, remat="full"
    )
    artifact = compiled(program(**CUBE | {"model": model, "batch": BATCH}), "train", "ascend910b:8")
    graph = mindir.read(artifact.payload)
    found = fused(graph)
    forward, backward = found["FlashAttentionScore"], found["FlashAttentionScoreGrad"]
    assert len(forward) == 2 * model.layers and len(backward) == model.layers  # computed again
    # head_num of a device, keep_prob, scale_value; next_tokens, inner_precise, BSND
    for given in (*forward, *backward):
        assert given[-8:-5] == [2, 1.0, 0.25] and given[-4:-1] == [0, 0, 3]
    # pre_tokens and sparse_mode: a band of 5 tokens, or all before
    for given in (forward, backward):
        limits = Counter((each[-5], each[-1]) for each in given)
        assert limits == {(4, 4): len(given) // 2, (ALL, 2): len(given) // 2}
    assert not sides(graph)
    # Batch over data and fsdp, heads over tensor.
    results = [shapes(node) for name, node in operators(graph) if name == "FlashAttentionScore"]
    assert all(each[3][0] == (2, LENGTH, 2, 16) for each in results)
    assert artifact.record["ascend"]["attention_left"] == []


def test_documents_are_apart_by_a_mask_that_all_layers_share():
    of = program(
        target="cpu:1",
        mesh=Mesh(),
        model=dataclasses.replace(MODEL, remat="attention"),
        batch=dataclasses.replace(BATCH, cross_document_attention=False),
    )
    graph = mindir.read(compiled(of, "train", "ascend910b:1").payload)
    found = fused(graph)
    assert len(found["FlashAttentionScore"]) == len(found["FlashAttentionScoreGrad"]) == 2
    assert {given[-1] for name in found for given in found[name]} == {0}  # sparse_mode
    assert {given[-4] for name in found for given in found[name]} == {0}  # next_tokens
    nodes = {node.name: node for _, node in operators(graph)}
    masks = {
        node.input[6 if name == "FlashAttentionScore" else 7]
        for name, node in operators(graph)
        if name.startswith("FlashAttention")
    }
    (mask,) = masks
    assert shapes(nodes[mask])[0][0] == (8, 1, LENGTH, LENGTH)
    assert set(sides(graph)) == {(8, 1, LENGTH, LENGTH)}  # masks, and no scores


def arrays(dtype, head_dim=16):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 12, heads, head_dim) for heads in (4, 2, 2)]
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


def both_passes(function, window, documents):
    """What is mixed, and the gradients of query, key and value."""

    def passes(query, key, value, numbers):
        def mixed(*three):
            with isolate_documents(numbers if documents else None):
                return function(*three, ScoreTransform(0.25), jnp.int32(5) if window else None)

        result, back = jax.vjp(mixed, query, key, value)
        return result, *back(jnp.sin(result))

    def in_regions(*inputs):
        with enable_regions("attention"):
            return passes(*inputs)

    return in_regions


DOCUMENTS = np.array([[0] * 5 + [1] * 7, [0] * 12], np.int32)


@pytest.mark.parametrize(
    ("dtype", "window", "documents"), [("float32", True, True), ("bfloat16", False, False)]
)
def test_a_region_computes_what_attention_does(dtype, window, documents):
    given = (*arrays(dtype), DOCUMENTS)
    ours = jax.jit(both_passes(fused_attention, window, documents))(*given)
    theirs = jax.jit(both_passes(dot_product_attention, window, documents))(*given)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        tolerance = 1e-6 if dtype == "float32" else 0.03
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(other, np.float32), atol=tolerance
        )


def test_on_a_cpu_a_region_is_the_arithmetic_that_it_is(both):
    for ours, theirs in both(
        both_passes(fused_attention, True, True), *arrays("float32"), DOCUMENTS
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    graph = translated(both_passes(fused_attention, True, True), *arrays("bfloat16"), DOCUMENTS)
    assert not fused(mindir.read(graph.mindir))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [("float32", 16, "attention in f32"), ("bfloat16", 8, "4 heads of size 8;")],
)
def test_what_the_operators_do_not_take_stays_as_it_is(dtype, head_dim, reason):
    function = both_passes(fused_attention, False, False)
    graph = translated(function, *arrays(dtype, head_dim), DOCUMENTS, native=True)
    assert not fused(mindir.read(graph.mindir))
    assert reason in graph.left[0]


def test_operators_are_written_as_mindspore_exports_them(mindspore, tmp_path):
    from mindspore.ops.auto_generate.gen_ops_prim import FlashAttentionScore

    class Forward(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            self.attend = FlashAttentionScore(4, 1.0, 0.25, 4, 0, 0, "BSND", 4)

        def construct(self, query, key, value, mask):
            return self.attend(query, key, value, None, None, None, mask)[3]

    class Both(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            self.forward, self.back = Forward(), mindspore.ops.GradOperation(get_all=True)

        def construct(self, *arrays):
            return self.back(self.forward)(*arrays)

    def tensor(shape, dtype):
        return mindspore.Tensor(np.zeros(shape, np.uint8)).astype(dtype)

    inputs = [tensor(one.shape, mindspore.bfloat16) for one in arrays("bfloat16")]
    path = str(tmp_path / "theirs")
    mask = tensor((2048, 2048), mindspore.bool_)
    mindspore.export(Both(), *inputs, mask, file_name=path, file_format="MINDIR")
    theirs = mindir.read((tmp_path / "theirs.mindir").read_bytes())
    function = both_passes(fused_attention, True, False)
    graph = translated(function, *arrays("bfloat16"), DOCUMENTS, native=True)
    ours = mindir.read(graph.mindir)
    assert fused(ours) == fused(theirs)
    results = [
        {
            name: (shapes(node), kinds[node.op_type.removeprefix("REF::")].prim_type)
            for name, node in operators(model)
            if name.startswith("FlashAttention")
        }
        for model in (ours, theirs)
        for kinds in [{one.name: one for one in model.primitives}]
    ]
    assert len(results[0]) == 2 and results[0] == results[1]
