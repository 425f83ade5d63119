"""Models of text and images through the real commands: from a folder to a folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from image_text_folders import MAKERS, SIZES, folder_of
from places import Place
from small_datasets import write_image_dataset

from graphtrain.config.hf_images import ImageLayout, image_layout
from graphtrain.config.schema import TorchModel

CONFIG = """
[program]
target = "cpu:2"
mesh = {{ fsdp = 2 }}
model = {{ hf = "{folder}", images = 2{size} }}
precision = {{ compute = "float32" }}
batch = {{ global_batch_size = 4, seq_len = 48, cross_document_attention = false }}

[run]
directory = "run"
steps = 2
init_from = "{folder}"
data = {{ train = "data", validation = "data", packing = "best_fit" }}
learning_rate = {{ peak = 1e-3, schedule = "constant" }}
"""


def documents(layout: ImageLayout) -> list[tuple[list[int], np.ndarray]]:
    """Text with 0, 1 or 2 images, so short that some share a row."""
    random, found = np.random.default_rng(0), []
    for number in range(12):
        count = number % 3
        tokens = random.integers(0, 59, 4).tolist()
        for _ in range(count):
            tokens += [layout.token] * layout.tokens + random.integers(0, 59, 3).tolist()
        shape = count, layout.height, layout.width, 3
        found.append((tokens, random.integers(0, 256, shape, np.uint8)))
    return found


def loss_of(folder: Path, layout: ImageLayout, data: list[tuple[list[int], np.ndarray]]) -> float:
    """The mean loss of transformers on the last token of each document, each by itself."""
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    losses = []
    for tokens, images in data:
        ids = torch.tensor([tokens[:-1]])
        arguments: dict[str, Any] = {"input_ids": ids}
        if len(images):
            made = processor(
                images=list(images), do_resize=False, do_center_crop=False, return_tensors="pt"
            )
            arguments |= made
            if "image_grid_thw" in made:
                arguments["mm_token_type_ids"] = (ids == layout.token).int()
        with torch.no_grad():
            last = model(**arguments).logits[0, -1]
        losses.append(torch.nn.functional.cross_entropy(last, torch.tensor(tokens[-1])).item())
    return float(np.mean(losses))


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_folder_is_trained_on_images_and_exported_for_transformers(kind, tmp_path):
    place, folder, size = (
        Place(tmp_path, tmp_path / "cache"),
        folder_of(kind, tmp_path),
        SIZES[kind],
    )
    model = TorchModel(hf=str(folder), images=2, image_size=size)
    layout = image_layout(model)
    assert layout is not None
    data = documents(layout)
    write_image_dataset(
        tmp_path / "data",
        data,
        token=layout.token,
        tokens=layout.tokens,
        size=(layout.height, layout.width),
    )
    stated = f", image_size = {list(size)}" if size else ""
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=folder, size=stated))

    place.command("compile", "config.toml")
    out, _ = place.command("evaluate", "config.toml", "--json")
    before = json.loads(out)["validation_loss"]
    assert before == pytest.approx(loss_of(folder, layout, data), rel=1e-5)
    place.command("run", "config.toml")
    after = place.journal()[-1]["validation_loss"]
    assert after < before - 1e-3
    place.command("convert", "graphtrain-to-hf", "run", "back")
    assert loss_of(tmp_path / "back", layout, data) == pytest.approx(after, rel=1e-5)

    _, err = place.command("generate", "config.toml", "It was", status=2)
    assert "program.model.images = 2: generation, serving" in err
