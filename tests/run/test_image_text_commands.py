"""Models of text and images through the real commands: from a folder to a folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from image_text_folders import KINDS, config_of, save_weights
from places import Place

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.images import ImageFiles
from graphtrain.data.indexed.loss_spans import LossSpans
from tests.extras.data.image_folders import chat, write_images, write_llava, write_qwen

CONFIG = """
[program]
target = "cpu:2"
mesh = { fsdp = 2 }
model = { hf = "folder", images = 2, image_size = [SIZE] }
precision = { compute = "float32" }
batch = { global_batch_size = 4, seq_len = 120, cross_document_attention = false }

[run]
directory = "run"
steps = 2
init_from = "folder"
data = { train = "data/train", validation = "data/train", packing = "best_fit" }
learning_rate = { peak = 1e-3, schedule = "constant" }
"""


def write_model(kind: str, place: Path) -> str:
    """Write a folder and records with images; return the size of the images."""
    processor = (write_llava if kind == "llava" else write_qwen)(place / "folder")
    token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    save_weights(config_of(kind, len(processor.tokenizer), token), place / "folder")
    square, tall = (12, 12), (16, 24)
    first, second, third = write_images(place / "pictures", [square, tall, square])
    records = [
        chat("What is it?", "A line.", first),
        chat("Which is red?", "The first one.", second, third),
        chat("What is 1 + 1?", "It is 2."),
        chat("And this?", "A square.", third),
    ]
    (place / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return "12, 12" if kind == "llava" else "16, 24"


def loss_of(folder: Path, data: Path) -> float:
    """The loss of transformers on the answers of a dataset, each document by itself."""
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    dataset, description = IndexedDataset(data), read_description(str(data))
    assert description is not None and description.images is not None
    images, learned = ImageFiles(dataset, description.images), LossSpans(dataset)
    losses: list[float] = []
    for number in range(len(dataset)):
        tokens = torch.tensor(dataset.document(number).astype(np.int64))
        arguments: dict[str, Any] = {"input_ids": tokens[None, :-1]}
        if len(pixels := images.of(number)):
            made = processor(
                images=list(pixels), do_resize=False, do_center_crop=False, return_tensors="pt"
            )
            arguments |= made
            if "image_grid_thw" in made:
                is_image = arguments["input_ids"] == description.images.token
                arguments["mm_token_type_ids"] = is_image.int()
        with torch.no_grad():
            logits = model(**arguments).logits[0]
        each = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        losses += each[torch.tensor(learned.mask(number, len(tokens)))[1:]].tolist()
    return float(np.mean(losses))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_trained_on_images_and_exported_for_transformers(kind, tmp_path):
    place, size = Place(tmp_path, tmp_path / "cache"), write_model(kind, tmp_path)
    words = "chats.jsonl", "--processor", "folder", "--image-size", *size.split(", ")
    place.command("data", "instruct", *words, "--validation", "0", "--output", "data")
    (tmp_path / "config.toml").write_text(CONFIG.replace("SIZE", size))
    place.command("compile", "config.toml")
    place.command("run", "config.toml")
    place.command("convert", "graphtrain-to-hf", "run", "back")

    loss, data = place.journal()[-1]["validation_loss"], tmp_path / "data/train"
    assert loss_of(tmp_path / "back", data) == pytest.approx(loss, rel=1e-5)
    assert loss_of(tmp_path / "folder", data) > loss + 1e-3
