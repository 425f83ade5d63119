"""Files of MindSpore, in bytes that Google's protobuf writes; damaged ones are refused."""

import binascii

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from graphtrain.errors import WeightsError
from graphtrain.weights.mindspore.ckpt_file import CkptFile, CkptWriter
from graphtrain.weights.mindspore.rank_files import RankFiles, open_ckpt
from lowering.ascend.strategy import ReadLayout, read_strategy, strategy_file
from lowering.errors import LoweringError
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
HALF = VALUES.astype(np.float16)


def checkpoint_class():
    """The message of MindSpore's checkpoint.proto (mindspore 2.10.0)."""
    field, file = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto()
    file.name, file.package = "checkpoint.proto", "published"

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for field_name, number, kind, label in fields:
            is_message = isinstance(kind, str)
            made.field.add(
                name=field_name,
                number=number,
                label=label,
                type=field.TYPE_MESSAGE if is_message else kind,
                type_name=f".published.{kind}" if is_message else None,
            )

    required, optional, repeated = (
        field.LABEL_REQUIRED,
        field.LABEL_OPTIONAL,
        field.LABEL_REPEATED,
    )
    message("Checkpoint", ("value", 1, "Value", repeated))
    message(
        "Value",
        ("tag", 1, field.TYPE_STRING, required),
        ("tensor", 2, "TensorProto", optional),
        ("maptensor", 3, "MapTensorProto", optional),
    )
    message(
        "TensorProto",
        ("dims", 1, field.TYPE_INT64, repeated),
        ("tensor_type", 2, field.TYPE_STRING, required),
        ("tensor_content", 3, field.TYPE_BYTES, required),
    )
    message("MapTensorProto", ("tensor", 1, "TensorProto", repeated))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("published.Checkpoint"))


CHECKPOINT = checkpoint_class()


def content(*values) -> bytes:
    """A checkpoint of tags, dimensions, types and bytes."""
    made = CHECKPOINT()
    for tag, dims, kind, data in values:
        value = made.value.add(tag=tag)
        value.tensor.dims.extend(dims)
        value.tensor.tensor_type, value.tensor.tensor_content = kind, data
    return made.SerializeToString()


SOUND = content(
    ("epoch_num", (0,), "Int32", b"\1\0\0\0"),
    ("note", (1,), "str", "text".encode("utf-32-le")),
    ("a.weight", (2, 3), "Float32", VALUES.tobytes()[:16]),
    ("a.weight", (2, 3), "Float32", VALUES.tobytes()[16:]),
    ("adam_m.a.weight", (2, 3), "Float32", VALUES.tobytes()),
    ("b.weight", (2, 3), "Float16", HALF.tobytes()),
    ("scalar", (0,), "Float32", b"\0\0\x80\x3f"),
)


def test_weights_are_read_and_state_is_not(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(SOUND)
    file = CkptFile(tmp_path / "a.ckpt")
    assert file.names == ("a.weight", "b.weight", "scalar")
    np.testing.assert_array_equal(file.read("a.weight"), VALUES)
    np.testing.assert_array_equal(file.read("b.weight"), HALF)
    assert file.shape("scalar") == () and file.read("scalar") == 1


def test_what_is_written_is_the_published_message(tmp_path):
    writer = CkptWriter(tmp_path / "a.ckpt")
    writer.write("a.weight", VALUES.T)
    writer.write("scalar", np.float32(3).reshape(()))
    writer.close()
    written = (tmp_path / "a.ckpt").read_bytes()
    assert written[-17:-10] == b"crc_num"
    assert int.from_bytes(written[-10:], "big") == binascii.crc32(written[:-17])
    read = CHECKPOINT.FromString(written[:-17])
    assert [value.tag for value in read.value] == ["a.weight", "scalar"]
    tensor = read.value[0].tensor
    assert (list(tensor.dims), tensor.tensor_type) == ([3, 2], "Float32")
    assert tensor.tensor_content == VALUES.T.tobytes()
    assert list(read.value[1].tensor.dims) == [0]


def refused(path, data) -> str:
    path.write_bytes(data)
    with pytest.raises(WeightsError) as error:
        file = CkptFile(path)
        for name in file.names:
            file.read(name)
    return str(error.value)


def test_a_flipped_bit_contradicts_the_crc(tmp_path):
    writer = CkptWriter(tmp_path / "a.ckpt")
    writer.write("a.weight", VALUES)
    writer.close()
    written = bytearray((tmp_path / "a.ckpt").read_bytes())
    written[-20] ^= 4
    assert "its CRC is not that of its content" in refused(tmp_path / "b.ckpt", written)


def test_every_cut_file_is_refused(tmp_path):
    whole = content(("a.weight", (2, 3), "Float32", VALUES.tobytes()))
    for size in range(len(whole)):
        assert "ckpt" in refused(tmp_path / "cut.ckpt", whole[:size])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a" + b"\xff" * 9 + b"\x01", "byte 11 is damaged"),  # 2^64 - 1 bytes
        (b"\x0a" + b"\xff" * 11, "is damaged"),  # an integer without an end
        (b"\x12\x00", "it has a field 2"),
        (content(("a", (2, 2), "Float32", VALUES.tobytes())), "24 bytes, which are no Float32"),
        (content(("a", (1 << 60,), "Float32", b"")), "a wrong shape"),
        (content(("a", (-1,), "Float32", b"")), "a wrong shape"),
        (content(("a", (1,) * 70, "Float32", b"\0" * 4)), "a wrong shape"),
        (content(("a", (1 << 48, 1 << 48, 0), "Float32", b"")), "a wrong shape"),
        (content(("a", (1,), "Int4", b"\1")), "type 'Int4', which is not supported"),
        (
            content(
                ("a", (1,), "Float32", b"\0" * 4),
                ("b", (1,), "Float32", b"\0" * 4),
                ("a", (1,), "Float32", b"\0" * 4),
            ),
            "has a twice",
        ),
        (
            content(("a", (2,), "Float32", b"\0" * 4), ("a", (3,), "Float32", b"\0" * 4)),
            "parts of a have different types or shapes",
        ),
        (CHECKPOINT(value=[{"tag": "a", "maptensor": {}}]).SerializeToString(), "a MapParameter"),
    ],
)
def test_hostile_bytes_are_refused(data, words, tmp_path):
    assert words in refused(tmp_path / "a.ckpt", data)


def layouts(**split):
    return {
        name: ArrayLayout(ArraySpec((4, 4), (None, None)), axes) for name, axes in split.items()
    }


def test_a_strategy_is_read_as_it_was_written():
    mesh = MeshShape({"data": 2, "tensor": 2})
    written = strategy_file(layouts(a=((), ("tensor", "data")), b=((), ())), mesh, 3)
    read = read_strategy(written)
    assert read == {3: {"a": ReadLayout((2, 2), ((), (1, 0))), "b": ReadLayout((2, 2), ((), ()))}}
    assert [read[3]["a"].index(1, rank) for rank in range(4)] == [0, 2, 1, 3]


def test_a_cut_strategy_is_refused_or_lacks_parameters():
    mesh = MeshShape({"data": 2, "tensor": 2})
    written = strategy_file(layouts(a=((), ("tensor",)), b=(("data",), ())), mesh)
    found = []
    for size in range(len(written)):
        try:
            found.append(set(read_strategy(written[:size])[0]))
        except LoweringError as error:
            assert "no strategy file" in str(error)
    assert found == [{"a"}]  # cut where b begins; then the ranks have a parameter too many


def test_ranks_that_contradict_the_strategy_are_refused(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        shape = (1, 3) if rank == 0 else (3, 1)
        data = content(("a", shape, "Float32", VALUES.tobytes()[:12]))
        (tmp_path / f"rank_{rank}/a.ckpt").write_bytes(data)
    with pytest.raises(WeightsError, match="name their strategy with --strategy"):
        open_ckpt(tmp_path, None)
    files = [CkptFile(tmp_path / f"rank_{rank}/a.ckpt") for rank in range(2)]
    with pytest.raises(WeightsError, match="is of 4 ranks, but there are 2 directories"):
        RankFiles(files, {0: {"a": ReadLayout((4,), ((), ()))}})
    with pytest.raises(WeightsError, match="does not contain a"):
        RankFiles(files, {0: {"b": ReadLayout((2,), ((0,), ()))}})
    found = RankFiles(files, {0: {"a": ReadLayout((2,), ((0,), ()))}})
    with pytest.raises(WeightsError, match=r"rank 1 has no a with the shape \(1, 3\) of rank 0"):
        found.read("a")
    (tmp_path / "rank_1").rename(tmp_path / "rank_2")
    with pytest.raises(WeightsError, match="it needs all from rank_0"):
        open_ckpt(tmp_path, None)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (((1 << 47,), "Float32", b"\0" * 4),) * 2 + ("4 bytes, which are no Float32",),
        (((2,), "Float32", b"\0" * 8), ((2,), "Float16", b"\0" * 4), "or not in float32"),
    ],
)
def test_shards_with_other_bytes_are_refused(first, second, words, tmp_path):
    for rank, tensor in enumerate((first, second)):
        (tmp_path / f"{rank}.ckpt").write_bytes(content(("a", *tensor)))
    files = [CkptFile(tmp_path / f"{rank}.ckpt") for rank in range(2)]
    found = RankFiles(files, {0: {"a": ReadLayout((2,), ((0,),))}})
    with pytest.raises(WeightsError, match=words):
        found.read("a")
