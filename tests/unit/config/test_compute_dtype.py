"""program.precision.compute, and its older name program.model.dtype."""

import dataclasses

import pytest

from graphtrain.config import load_config, render
from graphtrain.config.identity import identity_changes, mathematics
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Precision
from graphtrain.config.serving_program import serving_program
from graphtrain.errors import ConfigError

BATCH = {"global_batch_size": 2, "seq_len": 8}
RUN = {"directory": "r", "steps": 1, "data": {"train": "x"}}
MODEL = {"layers": 1, "embed": 8, "heads": 2, "mlp": 16, "vocab": 32}


def config(*overrides, dtype=None, compute=None):
    model = MODEL | ({"dtype": dtype} if dtype else {})
    precision = {"compute": compute} if compute else {}
    program = {"model": model, "precision": precision, "batch": BATCH}
    return load_config({"program": program, "run": RUN}, overrides)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_names_are_the_same_setting(dtype):
    named = config(compute=dtype)
    assert named == config(dtype=dtype) == config(dtype=dtype, compute=dtype)
    assert named.program.model.dtype == named.program.compute == dtype
    text = render(named)
    assert f'\ncompute = "{dtype}"' in text and "\ndtype = " not in text.partition("[program.b")[0]
    assert load_config(text) == named
    assert mathematics(named)["program.precision.compute"] == dtype
    assert "program.model.dtype" not in mathematics(named)


def test_the_rest_of_8_bits_is_bfloat16():
    named = config(compute="int8")
    assert (named.program.model.dtype, named.program.compute) == ("bfloat16", "int8")
    assert load_config(render(named)) == named == config(dtype="bfloat16", compute="int8")


def test_two_values_are_refused_and_a_flag_counts():
    words = r'dtype = "float32" is the older name of program\.precision\.compute, which is "fp8"'
    with pytest.raises(ConfigError, match=words):
        config(dtype="float32", compute="fp8")
    set_new = "program.precision.compute=float16"
    assert config(set_new, dtype="float32").program.compute == "float16"
    assert config("program.model.dtype=float16", compute="fp8").program.compute == "float16"


def test_a_checkpoint_of_the_older_name_is_of_the_same_run():
    now = mathematics(config(compute="float16"))
    old = {name: value for name, value in now.items() if name != "program.precision.compute"}
    assert identity_changes(old | {"program.model.dtype": "float16"}, now) == {}
    changed = identity_changes(old | {"program.model.dtype": "float32"}, now)
    assert changed == {"program.precision.compute": ("float32", "float16")}


def test_a_preset_has_no_dtype_of_its_own(tmp_path):
    file = tmp_path / "model.toml"
    lines = [f"{name} = {value}" for name, value in MODEL.items()]
    file.write_text("\n".join(["[program.model]", *lines, 'dtype = "float32"']))
    program = {"model": {"preset": str(file)}, "batch": BATCH}
    older = load_config({"program": program, "run": RUN})
    assert older.program.compute == "float32"
    program["precision"] = {"compute": "float16"}
    assert load_config({"program": program, "run": RUN}).program.compute == "float16"


def test_a_program_of_python_has_the_dtype_of_either():
    made = config(compute="float32").program
    model = dataclasses.replace(made.model, dtype="float16")
    assert dataclasses.replace(made, model=model).compute == "float16"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_program_of_python_in_8_bits_computes_the_rest_in_bfloat16_as_its_file_does(dtype):
    made = config(compute=dtype)
    program = dataclasses.replace(made.program, precision=Precision(compute="fp8"))
    assert (program.model.dtype, program.compute) == ("bfloat16", "fp8")
    written = dataclasses.replace(made, program=program)
    assert load_config(render(written)) == written


@pytest.mark.parametrize("precision", [Precision(compute="fp8"), Precision(loss_scale=1024.0)])
def test_what_serves_a_run_has_the_dtype_of_serving_and_no_precision_of_training(precision):
    made = config(compute="float16").program
    served = serving_program(resolve(dataclasses.replace(made, precision=precision))).settings
    assert (served.model.dtype, served.precision) == ("float32", Precision())  # on a CPU
