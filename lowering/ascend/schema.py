"""Fields of MindIR's protocol buffers: name, number, type.

Source: mindspore 2.10.0, mindspore.train.mind_ir_pb2, with its field numbers. Fields that
graphtrain never writes (quantisation, layouts of MindSpore's own parallelism, preprocessing) are
left out.
"""

MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ModelProto": {
        "ir_version": (1, "string"),
        "producer_name": (2, "string"),
        "producer_version": (3, "string"),
        "model_version": (5, "string"),
        "graph": (7, "GraphProto"),
        "functions": (8, "[GraphProto]"),
        "little_endian": (10, "bool"),
        "primitives": (12, "[PrimitiveProto]"),
        "mind_ir_version": (13, "int64"),
    },
    "GraphProto": {
        "node": (1, "[NodeProto]"),
        "name": (2, "string"),
        "parameter": (3, "[TensorProto]"),
        "input": (5, "[ValueInfoProto]"),
        "output": (6, "[ValueInfoProto]"),
        "attribute": (8, "[AttributeProto]"),
    },
    "NodeProto": {
        "input": (1, "[string]"),
        "output": (2, "[string]"),
        "name": (3, "string"),
        "op_type": (4, "string"),
        "attribute": (5, "[AttributeProto]"),
        "domain": (7, "string"),
    },
    "PrimitiveProto": {
        "name": (1, "string"),
        "op_type": (2, "string"),
        "attribute": (3, "[AttributeProto]"),
        "instance_name": (4, "string"),
        "prim_type": (5, "int32"),
    },
    "AttributeProto": {
        "name": (1, "string"),
        "f": (2, "float"),
        "i": (3, "int64"),
        "d": (4, "double"),
        "s": (5, "bytes"),
        "ints": (10, "[int64]"),
        "strings": (11, "[bytes]"),
        "tensors": (12, "[TensorProto]"),
        "type": (16, "int32"),
        "values": (17, "[AttributeProto]"),
        "seq_info": (18, "SeqInfoProto"),
    },
    "SeqInfoProto": {"is_dyn_len": (1, "bool")},
    "TensorProto": {
        "dims": (1, "[int64]"),
        "data_type": (2, "int32"),
        "name": (7, "string"),
        "raw_data": (9, "bytes"),
        "ref_key": (13, "string"),
        "compression_type": (16, "int32"),
    },
    "ValueInfoProto": {
        "name": (1, "string"),
        "tensor": (2, "[TensorProto]"),
        "denotation": (4, "string"),
        "attr_info": (5, "AttributeProto"),
    },
}

# TensorProto.DataType by HLO's type names, then AttributeProto.AttributeType.
TENSOR_TYPES = {
    "f32": 1, "u8": 2, "s8": 3, "u16": 4, "s16": 5, "s32": 6, "s64": 7, "pred": 9, "f16": 10,
    "f64": 11, "u32": 12, "u64": 13, "bf16": 16,
}  # fmt: skip
INT64, STRING, BOOL, TENSORS, TUPLE, LIST, UMONAD, NONE = 7, 8, 9, 19, 20, 21, 23, 25
GRAPH, CLOSURE, CHOICE = 27, 28, 29  # what Switch chooses from, a Partial, and a Switch
FLOAT = 1
PRIMITIVE, FUNCTION = 1, 2  # PrimitiveProto.PrimType

# mindspore.dtype as the numbers that Cast and Argmax accept.
TYPE_IDS = {
    "pred": 30, "s8": 32, "s16": 33, "s32": 34, "s64": 35, "u8": 37, "u16": 38, "u32": 39,
    "u64": 40, "f16": 42, "f32": 43, "f64": 44, "bf16": 45,
}  # fmt: skip
