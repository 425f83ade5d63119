"""Transfers across TPU slices, in the text of libtpu 0.0.42 for 2xv5e:2x2, shortened."""

from lowering.hlo.collectives import read
from sharding_rules.mesh import MeshShape

TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: f32[1024,1024]) -> f32[512,1024] {
  %w = f32[1024,1024]{1,0} parameter(0)
  %scattered = f32[256,1024]{1,0} reduce-scatter(%w), channel_id=4, replica_groups={{0,2},{1,3}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add
  %after-all = token[] after-all()
  %bits = f32[256,8,128]{2,1,0} bitcast(%scattered)
  %send = (f32[256,8,128]{2,1,0}, u32[], token[]) send(%bits, %after-all), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[256,8,128]{2,1,0}, u32[], token[]) recv(%after-all), channel_id=1, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %done = (f32[256,8,128]{2,1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %received = f32[256,8,128]{2,1,0} get-tuple-element(%done), index=0
  %summed = f32[256,1024]{1,0} bitcast(%received)
  ROOT %gathered = f32[512,1024]{1,0} all-gather(%summed), channel_id=5, \
replica_groups={{0,2},{1,3}}, dimensions={0}, use_global_device_ids=true
}
"""
MESH = MeshShape({"data": 4, "fsdp": 2})  # data 2 across slices, data 2 x fsdp 2 inside


def test_a_sum_across_slices_is_read_with_its_parts_inside_of_a_slice():
    found = {each.op: each for each in read(TEXT, MESH, slices=2).collectives}
    assert {op: (each.axes, each.devices, each.network) for op, each in found.items()} == {
        "all-reduce": (("data",), 2, "dcn"),
        "reduce-scatter": (("data",), 2, ""),
        "all-gather": (("data",), 2, ""),
    }
    assert found["all-reduce"].bytes == 256 * 1024 * 4  # what the reduce-scatter leaves
    assert found["all-reduce"].wire_bytes == 256 * 1024 * 4


def test_what_a_record_says_of_the_network_is_read_again():
    facts = read(TEXT, MESH, slices=2)
    assert type(facts).from_record(facts.to_record()) == facts
    inside = [each for each in facts.to_record()["collectives"] if "network" not in each]
    assert len(inside) == 2


def test_a_program_without_slices_has_no_transfers_across_them():
    assert all(
        not each.network for each in read(TEXT, MeshShape({"data": 2, "fsdp": 2})).collectives
    )
