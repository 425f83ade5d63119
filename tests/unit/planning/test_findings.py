"""Findings: attention without its kernel, needless FLOPs, and a utilization that they bound."""

import pytest

from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from graphtrain.cost_model.compute import compiled_excess, step_flops
from graphtrain.cost_model.findings import findings
from graphtrain.cost_model.time import mfu, step_time
from graphtrain.planning.assess import estimate
from lowering.machine.target import AT_PEAK

H100 = ["program.target=h100:8", "program.model.head_dim=64"]
MIXTURE = "program.model.moe={experts=8, experts_per_token=2}"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("program.model.sliding_window=128", "a sliding window"),
        ("program.model.attn_logit_softcap=50.0", "a soft cap"),
        ("program.model.positions=alibi", "ALiBi"),
        ("program.model.head_dim=256", "head_dim"),
        ("program.model.dtype=float32", "bfloat16"),
        ("program.batch.seq_len=500", "sequence length"),
    ],
)
def test_a_setting_that_loses_the_kernel_names_itself_and_its_bytes(vary, setting, named):
    (finding,) = estimate(vary([*H100, setting])).findings
    length = 500 if "seq_len" in setting else 512
    assert named in finding
    # 2 sequences and 8 heads on a device
    assert f"{4 * 2 * 8 * length**2 / 1e6:,.1f} MB" in finding


def test_global_layers_lose_the_kernel_on_tpus_and_a_window_does_not(vary):
    window = ["program.model.head_dim=64", "program.model.sliding_window=128"]
    assert estimate(vary(window)).findings == ()
    layers = [*window, "program.model.global_attention_every=2"]
    assert "global_attention_every" in estimate(vary(layers)).findings[0]


@pytest.mark.parametrize(
    "change", [H100, [*H100, 'program.model.attention="dense"'], ["program.target=cpu:8"]]
)
def test_what_has_a_kernel_or_was_asked_for_is_no_finding(vary, change):
    assert estimate(vary(change)).findings == ()


def test_experts_that_are_computed_in_vain_are_named_with_the_cause(vary):
    assert estimate(vary([*H100, MIXTURE])).findings == ()  # a kernel computes the chosen ones
    assert estimate(vary([MIXTURE])).findings == ()  # TPU
    (finding,) = estimate(vary([*H100, MIXTURE, "program.model.mlp=1000"])).findings
    assert "8 experts for each token's 2" in finding and "capacity_factor" in finding
    assert "multiples of 16" in finding
    long = "program.batch={global_batch_size=4096, seq_len=4096}"  # 4M choices on a device
    assert "more microbatches" in estimate(vary([*H100, MIXTURE, long])).findings[0]
    assert "cpu:8 has no grouped" in estimate(vary(["program.target=cpu:8", MIXTURE])).findings[0]


def test_the_time_counts_experts_that_are_computed_in_vain(vary):
    good, bad = (estimate(vary([*H100, MIXTURE, f"program.model.mlp={m}"])) for m in (1008, 1000))
    assert bad.time.compute > 3 * good.time.compute


def test_utilization_counts_no_choices_that_the_capacity_drops(vary):
    model = [*H100, "program.model.mlp=32768", "program.model.remat=none"]
    moe = "program.model.moe={experts=8, experts_per_token=8, capacity_factor=%s}"
    all_choices, few = (
        mfu(vary([*model, moe % factor]), 1.0, causal=True) for factor in (1.0, 0.1)
    )
    assert few < 0.2 * all_choices
    assert estimate(vary([*model, moe % 0.1])).mfu < 1


def test_more_compiled_flops_than_expected_are_a_finding(vary):
    program = vary(H100)
    expected = step_flops(program, flash=True, masked=False) / 8
    assert compiled_excess(program, expected, flash=True) == pytest.approx(1)
    assert findings(program, 1.19, is_estimate=False) == ()
    assert "1.30 x the FLOPs" in findings(program, 1.3, is_estimate=False)[0]
    roomy = vary([*H100, "program.model.moe={experts=8, experts_per_token=2, capacity_factor=2}"])
    assert "capacity_factor = 2" in findings(roomy, 1.6, is_estimate=False)[0]


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("length", [512, 8192, 65536])
def test_no_utilization_is_above_one(vary, remat, length):
    change = [*H100, f"program.model.remat={remat}", f"program.batch.seq_len={length}"]
    assessment = estimate(vary(change))
    assert 0 < assessment.mfu_causal <= assessment.mfu <= 1


LLAMA3 = """
[program]
target = "h100:8"
mesh = { fsdp = "rest" }
model = { preset = "llama3-8b", remat = "none" }
batch = { global_batch_size = 8, seq_len = 8192 }

[run]
directory = "run"
steps = 1
data = { train = "data" }
"""


def test_scores_that_the_kernel_skips_are_not_utilization(tmp_path):
    path = tmp_path / "llama3.toml"
    path.write_text(LLAMA3)
    program = resolve(load_config(path).program)
    assessment = estimate(program)
    at_peak = step_time(program, assessment.memory, (), achieved=AT_PEAK, flash=True)
    # All scores, as the kernel does not compute.
    assert (mfu(program, at_peak.compute) or 0) > 1
    assert assessment.mfu == assessment.mfu_causal < 1
