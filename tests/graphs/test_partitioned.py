"""One device's program: read from XLA's dump, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.errors import LoweringError
from lowering.hlo.proto import read_module, unknown_fields_of, write_module
from lowering.xla.spmd_module import partition_spmd


def lowered(devices: int) -> jax.stages.Lowered:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    array = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)
    return jax.jit(lambda x: jnp.sum(jnp.sin(x)) * 2).lower(array)


def opcodes(binary: bytes) -> list[str]:
    module = read_module(binary)
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    return [instruction.opcode for instruction in entry.instructions]


def test_the_program_of_one_device_holds_its_part_and_the_collectives():
    binary = partition_spmd(lowered(4)).hlo
    module = read_module(binary)
    assert opcodes(binary).count("all-reduce") == 1
    assert list(module.host_program_shape.parameters[0].dimensions) == [2, 4]


def test_the_program_of_a_single_device_has_no_collectives():
    assert not any(code.startswith("all-") for code in opcodes(partition_spmd(lowered(1)).hlo))


def test_the_schema_names_every_field_that_this_xla_writes():
    assert set(unknown_fields_of(read_module(partition_spmd(lowered(4)).hlo))) == set()


def test_reading_and_writing_a_module_changes_no_byte_of_meaning():
    binary = partition_spmd(lowered(4)).hlo
    assert write_module(read_module(binary)) == binary


def test_what_is_no_module_is_refused():
    with pytest.raises(LoweringError, match="bytes are not an HloModuleProto"):
        read_module(b"module @jit_f {}")
