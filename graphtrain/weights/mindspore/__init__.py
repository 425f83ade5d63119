"""Checkpoints of MindSpore, `.ckpt`, with MindFormers' names of Llama; MindSpore is not needed.

Source: mindspore 2.10.0, mindspore.train.checkpoint_pb2 for the field numbers and
mindspore.train.serialization for the content; MindFormers, mindformers/models/llama/
convert_weight.py for the names
"""
