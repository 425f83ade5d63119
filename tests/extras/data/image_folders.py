"""Folders of models of text and images: tokenizer, chat template and processor, as published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from graphtrain.data.tokenizers.huggingface import train_bpe

# Source: chat_template.json of https://huggingface.co/llava-hf/llava-1.5-7b-hf
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Source: chat_template.json of https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct
_QWEN_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>"
    "{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' "
    "or 'image' in content or 'image_url' in content %}{% set image_count.value = "
    "image_count.value + 1 %}{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' or 'video' in "
    "content %}{% set video_count.value = video_count.value + 1 %}{% if add_vision_id %}Video "
    "{{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = ["USER: ASSISTANT: What is in the picture? A red square, and a line below it."] * 20
_QWEN_MARKS = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
PATCH = 4


def write_llava(folder: Path) -> Any:
    """Write the folder of a Llava whose tokenizer begins texts with BOS; return its processor."""
    _tokenizer(folder, ["<s>", "</s>", "<image>"], _LLAVA_TEMPLATE, bos="<s>", eos="</s>")
    size = {"height": 12, "width": 12}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 12}, crop_size=size),
        transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_LLAVA_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def write_qwen(folder: Path) -> Any:
    """Write the folder of a Qwen2.5-VL; return its processor without that of videos."""
    _tokenizer(folder, _QWEN_MARKS, _QWEN_TEMPLATE, bos=None, eos="<|im_end|>")
    size = {"shortest_edge": 64, "longest_edge": 4096}
    transformers.Qwen2VLImageProcessor(patch_size=PATCH, size=size).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    processor = object.__new__(transformers.Qwen2_5_VLProcessor)  # that of videos needs torchvision
    processor.image_processor = transformers.AutoImageProcessor.from_pretrained(
        folder, backend="pil"
    )
    processor.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor.video_token_id = processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    processor.chat_template = _QWEN_TEMPLATE
    return processor


def write_images(folder: Path, sizes: list[tuple[int, int]], seed: int = 0) -> list[str]:
    """Write random images of these heights and widths; return the names of their files."""
    folder.mkdir(exist_ok=True)
    random, names = np.random.default_rng(seed), []
    for index, size in enumerate(sizes):
        small = random.integers(0, 256, (3, 3, 3)).astype(np.uint8)
        name = f"{index}.{('png', 'jpg', 'webp')[index % 3]}"
        Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC).save(folder / name)
        names.append(f"{folder.name}/{name}")
    return names


def chat(question: str, answer: str, *images: str) -> dict[str, Any]:
    """Return a record: a question with images before it, and its answer."""
    parts = [{"type": "image", "path": image} for image in images]
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


def _tokenizer(folder: Path, marks: list[str], template: str, *, bos: str | None, eos: str) -> None:
    """Write a byte-level tokenizer with these special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(_TEXTS, 300, marks).save(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos}
    if bos is not None:
        config["bos_token"] = bos
        definition = json.loads((folder / "tokenizer.json").read_text())
        (token,) = (one for one in definition["added_tokens"] if one["content"] == bos)
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [token["id"]], "tokens": [bos]}},
        }
        (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
