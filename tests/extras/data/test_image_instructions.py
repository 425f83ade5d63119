"""Conversations with images: tokens and pixels are those of transformers' own processor."""

import importlib.metadata
import json
import pickle
import shutil
import struct
import sys
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import transformers
from click.testing import CliRunner
from PIL import Image

from graphtrain.cli.data import command
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.images import ImageFiles
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.indexed.verify import verify
from graphtrain.data.prepare import text
from graphtrain.data.prepare.image_instructions import instruct_images
from graphtrain.data.prepare.image_processor import FolderProcessor
from graphtrain.data.readers.image_files import read_image
from graphtrain.errors import DataError
from lowering.machine.extras import MissingExtra
from tests.extras.data.image_folders import PATCH, chat, write_images, write_llava, write_qwen

WRITERS = {"llava": write_llava, "qwen2_5_vl": write_qwen}
SIZES = [(20, 30), (12, 12), (24, 40), (30, 50), (9, 15)]


@pytest.fixture(scope="module", params=list(WRITERS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of both models."""
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def processor(root, kind):
    return WRITERS[kind](root / kind)


@pytest.fixture(scope="module")
def pictures(root):
    return write_images(root / "pictures", SIZES)


@pytest.fixture(scope="module")
def records(pictures):
    """Records with none, one or two images, of which one has two answers."""
    first, second, third, fourth, fifth = pictures
    two = chat("And which is red?", "The first one.", third, fourth)["messages"]
    return [
        chat("What is it?", "A line.", first),
        chat("What is below?", "A red square.", second, third),
        chat("What is 1 + 1?", "It is 2."),
        {"messages": [*chat("Look.", "I do.", fifth)["messages"], *two]},
    ]


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_absolute_paths(record, root):
    content = json.dumps(record).replace('"path": "', f'"path": "{root}/')
    return json.loads(content)["messages"]


def reference_of(processor, record, root):
    """Return what transformers makes of a record, its images of the wanted size already."""
    return processor.apply_chat_template(
        with_absolute_paths(record, root), tokenize=True, return_dict=True, return_tensors="np"
    )


def normalized(kind, processor, pixels):
    """Return pixel_values of uint8 images, (images, height, width, 3), by NumPy."""
    image_processor = processor.image_processor
    mean, std = (np.array(getattr(image_processor, name)) for name in ("image_mean", "image_std"))
    values = (pixels.astype(np.float64) * image_processor.rescale_factor - mean) / std
    values = values.transpose(0, 3, 1, 2)
    if kind == "llava":
        return values
    # (channel, row, column): blocks of 2 x 2 patches, one after another; each patch in two frames.
    count, _, height, width = values.shape
    patches = []
    for image in range(count):
        for row in range(0, height, 2 * PATCH):
            for column in range(0, width, 2 * PATCH):
                for down, right in ((0, 0), (0, PATCH), (PATCH, 0), (PATCH, PATCH)):
                    top, left = row + down, column + right
                    patch = values[image, :, top : top + PATCH, left : left + PATCH]
                    patches.append(np.repeat(patch[:, None], 2, axis=1).reshape(-1))
    return np.array(patches)


def prepare(root, kind, records, output, **options):
    path = write_records(root / f"{output.name}.jsonl", records)
    return instruct_images([path], output, root / kind, validation=0.0, **options)


def open_images(prefix):
    dataset, description = IndexedDataset(prefix), read_description(prefix)
    return dataset, ImageFiles(dataset, description.images), description


def test_tokens_and_pixels_are_those_of_the_processor(root, kind, processor, tmp_path):
    # Every image has the size that the processor of Qwen2.5-VL keeps, in several aspect ratios.
    names = write_images(root / "alike", [(24, 40), (25, 39), (26, 41), (22, 38)])
    records = [
        chat("What is it?", "A line.", names[0]),
        chat("What is below?", "A red square.", names[1], names[2]),
        chat("What is 1 + 1?", "It is 2."),
        {
            "messages": [
                *chat("Look.", "I do.", names[3])["messages"],
                *chat("And?", "Yes.")["messages"],
            ]
        },
    ]
    prepare(root, kind, records, tmp_path / "data")
    dataset, images, description = open_images(tmp_path / "data" / "train")
    assert len(dataset) == len(records)
    for number, record in enumerate(records):
        made = reference_of(processor, record, root)
        assert dataset.document(number).tolist() == made["input_ids"][0].tolist()
        pixels = images.of(number)
        if not len(pixels):
            assert "pixel_values" not in made
            continue
        assert pixels.shape[1:] == ((12, 12, 3) if kind == "llava" else (24, 40, 3))
        want = made["pixel_values"]
        got = normalized(kind, processor, pixels)
        np.testing.assert_allclose(got, want, atol=1e-5)
    placeholders = 9 if kind == "llava" else 3 * 5
    assert (description.images.tokens, description.images.count) == (placeholders, 4)
    assert description.images.token == processor.image_token_id
    assert verify(tmp_path / "data" / "train")["documents"] == 4


@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_answers_are_trained_on_and_placeholders_never(
    root, kind, processor, records, tmp_path, train_on
):
    prepare(
        root,
        kind,
        records,
        tmp_path / "data",
        image_size=(12, 12) if kind == "llava" else (16, 24),
        train_on=train_on,
    )
    dataset, images, _ = open_images(tmp_path / "data" / "train")
    spans = LossSpans(dataset)
    tokens = dataset.document(3)
    mask = spans.mask(3, len(tokens))
    learned = processor.tokenizer.decode(tokens[mask])
    end = " " if kind == "llava" else "<|im_end|>"
    if train_on == "all":
        # The first token is no target.
        np.testing.assert_array_equal(mask[1:], (tokens != images.settings.token)[1:])
        assert images.counts[3] == 3
    else:
        answers = ["I do.", "The first one."][-1 if train_on == "last" else 0 :]
        assert learned == "".join(answer + end for answer in answers)


def test_a_size_that_is_given_holds_for_every_aspect_ratio(root, records, tmp_path):
    write_qwen(root / "qwen2_5_vl")
    with pytest.raises(
        DataError,
        match=r"line 2: .*pictures/1.jpg: the image processor makes 16 x 16 pixels .* of it, and "
        r"16 x 32 of the first image; .* give --image-size HEIGHT WIDTH",
    ):
        prepare(root, "qwen2_5_vl", records, tmp_path / "own")
    assert not (tmp_path / "own").exists()
    prepare(root, "qwen2_5_vl", records, tmp_path / "data", image_size=(16, 24))
    _, images, _ = open_images(tmp_path / "data" / "train")
    assert images.counts.tolist() == [1, 2, 0, 3]
    with Image.open(root / "pictures" / "0.png") as image:
        resized = np.asarray(image.resize((24, 16), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(images.of(0)[0], resized)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("qwen2_5_vl", (17, 24), "--image-size 17 24: .* makes 16 x 24 pixels of an image of 17"),
        ("llava", (8, 12), "--image-size 8 12: .* makes 12 x 12 pixels of an image of 8 x 12"),
    ],
)  # fmt: skip
def test_a_size_that_the_processor_does_not_keep_is_refused(
    root, records, tmp_path, name, size, message
):
    WRITERS[name](root / name)
    with pytest.raises(DataError, match=message):
        prepare(root, name, records, tmp_path / "data", image_size=size)


def png_of(width, height, bits=8, content=b""):
    """Return an RGB PNG whose header says that it has so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)

    def chunk(name, content):
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    signature = b"\x89PNG\r\n\x1a\n"
    return (
        signature
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", content or zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def save_frames(path):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def bmp_of(pixels):
    """Return a BMP with 16 bits for each pixel: 5 of red, 6 of green and 5 of blue."""
    height, width = pixels.shape
    masks = struct.pack("<3I", 0xF800, 0x07E0, 0x001F)
    about = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 16, 3, pixels.nbytes, 0, 0, 0, 0)
    start = 14 + len(about) + len(masks)
    head = b"BM" + struct.pack("<IHHI", start + pixels.nbytes, 0, 0, start)
    return head + about + masks + pixels.astype("<u2").tobytes()


def test_a_bmp_with_16_bits_for_each_pixel_is_read(tmp_path):
    path = tmp_path / "a.bmp"
    path.write_bytes(bmp_of(np.array([[0xF800, 0x07E0], [0x001F, 0xFFFF]] * 4, np.uint16)))
    read = np.asarray(read_image(path, "a"))
    colors = [[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]
    np.testing.assert_array_equal(read, np.array(colors * 4))


BROKEN = {
    "bomb.png": (
        lambda path: path.write_bytes(png_of(9000, 9000)), "has more than 67 million pixels"),
    "larger.png": (
        lambda path: path.write_bytes(png_of(60000, 60000)), "has more than 67 million pixels"),
    "text.png": (lambda path: path.write_text("no image"), r"cannot be decoded \(cannot identify"),
    "vector.eps": (
        lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        "cannot be decoded .*; graphtrain reads BMP"),
    "cut.png": (
        lambda path: (Image.effect_noise((64, 64), 90).save(path),
                      path.write_bytes(path.read_bytes()[:-900])), "cannot be decoded"),
    "deep.png": (
        lambda path: Image.fromarray(np.full((8, 8), 4096, np.uint16)).save(path),
        "has the mode I;16, whose values do not fit into 8 bits"),
    "deep_rgb.png": (
        lambda path: path.write_bytes(png_of(1, 1, 16, zlib.compress(bytes(7)))),
        "has 16 bits for each channel, of which only 8 would be read"),
    "deep.ppm": (
        lambda path: path.write_bytes(b"P6 1 1 65535\n" + bytes(6)),
        "has 16 bits for each channel"),
    "moving.gif": (save_frames, "has 2 frames; save one of them"),
    "thin.png": (lambda path: Image.new("RGB", (900, 4)).save(path), "aspect ratio"),
    "missing.png": (lambda path: None, "no such file; paths of images are relative to the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_an_image_that_cannot_be_used_is_named_with_its_record(root, tmp_path, name):
    folder = root / "qwen2_5_vl"
    if not folder.exists():
        write_qwen(folder)
    write, message = BROKEN[name]
    write(tmp_path / name)
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    records = [chat("What?", "It.", "good.png"), chat("And?", "This.", name)]
    path = write_records(tmp_path / "records.jsonl", records)
    with pytest.raises(DataError, match=rf"records.jsonl: line 2: .*{name}: .*{message}"):
        instruct_images([path], tmp_path / "data", folder, validation=0.0, image_size=(8, 8))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "url": "https://a/b.png"}, "an image has a 'url'; save the image"),
        ({"type": "image", "path": "data:image/png;base64,AA"}, "is not the path of a file"),
        ({"type": "image", "path": ""}, "an image needs one 'path'"),
        ({"type": "video", "path": "a.mp4"}, "a part of type 'video'; only text"),
        (
            {"type": "text", "text": "<|image_pad|>"},
            r"has 2 times <\|image_pad\|>, .* has 1 images",
        ),
    ],
)
def test_a_part_that_cannot_be_prepared_is_named_with_its_record(root, tmp_path, part, message):
    folder = root / "qwen2_5_vl"
    if not folder.exists():
        write_qwen(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    record = chat("What?", "It.", "good.png")
    record["messages"][0]["content"].append(part)
    path = write_records(tmp_path / "records.jsonl", [record])
    with pytest.raises(DataError, match=rf"records.jsonl: line 1: .*{message}"):
        instruct_images([path], tmp_path / "data", folder, validation=0.0)


def test_the_turned_image_of_a_camera_stands_upright_as_in_transformers(root, tmp_path):
    processor = write_llava(root / "llava")
    pixels = np.random.default_rng(3).integers(0, 256, (12, 12, 4)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    Image.fromarray(pixels).save(root / "turned.png", exif=exif)
    record = chat("What?", "It.", "turned.png")
    prepare(root, "llava", [record], tmp_path / "data")
    _, images, _ = open_images(tmp_path / "data" / "train")
    want = reference_of(processor, record, root)["pixel_values"]
    np.testing.assert_allclose(normalized("llava", processor, images.of(0)), want, atol=1e-5)
    np.testing.assert_array_equal(images.of(0)[0], np.rot90(pixels[..., :3], -1))


def digests_of(directory):
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.name != "manifest.json"
    }


def test_the_command_writes_the_same_in_chunks_and_notices_another_image(
    root, records, tmp_path, monkeypatch
):
    write_qwen(root / "qwen2_5_vl")
    shutil.copytree(root / "pictures", tmp_path / "pictures")
    path = write_records(tmp_path / "records.jsonl", records * 5)
    arguments = [
        "instruct", str(path), "--processor", str(root / "qwen2_5_vl"), "--image-size", "16", "24",
        "--validation", "0.3",
    ]  # fmt: skip
    run = CliRunner().invoke
    made = run(command, [*arguments, "--output", str(tmp_path / "one")], catch_exceptions=False)
    assert "images of 16 x 24 pixels" in made.output and made.exit_code == 0
    monkeypatch.setattr("graphtrain.data.prepare.image_instructions._GROUP_BYTES", 900)
    monkeypatch.setattr(
        "graphtrain.data.prepare.text.encode_chunks",  # as worker processes do
        lambda chunks, encoder, workers: map(pickle.loads(pickle.dumps(encoder)), chunks),
    )
    run(command, [*arguments, "--output", str(tmp_path / "two")], catch_exceptions=False)
    one = digests_of(tmp_path / "one")
    assert one == digests_of(tmp_path / "two")
    assert {"train_images.bin", "validation_images.idx", "chat_template.jinja"} <= one.keys()
    again = run(command, [*arguments, "--output", str(tmp_path / "one")])
    assert "up to date, nothing to do" in again.output
    Image.new("RGB", (30, 20)).save(tmp_path / "pictures" / "0.png")
    changed = run(command, [*arguments, "--output", str(tmp_path / "one")])
    assert "differs in the images, --processor, --image-size or the version of transformers" in str(
        changed.exception
    )
    assert verify(tmp_path / "one" / "validation")["documents"]
    shown = run(command, ["inspect", str(tmp_path / "one" / "train")], catch_exceptions=False)
    assert "image size: 16 x 24" in shown.output


def test_an_interrupted_preparation_resumes_with_the_images_it_has_written(
    root, records, tmp_path, monkeypatch
):
    write_qwen(root / "qwen2_5_vl")
    monkeypatch.setattr("graphtrain.data.prepare.image_instructions._GROUP_BYTES", 900)
    size = {"image_size": (16, 24)}
    prepare(root, "qwen2_5_vl", records * 5, root / "whole", **size)
    encode_chunks, encoded = text.encode_chunks, []

    def encode_until(count, chunks, encoder, workers):
        for chunk in encode_chunks(chunks, encoder, workers):
            if len(encoded) == count:
                raise KeyboardInterrupt
            encoded.append(chunk)
            yield chunk

    monkeypatch.setattr("graphtrain.data.prepare.splits._SAVE_EVERY", 0.0)
    monkeypatch.setattr(text, "encode_chunks", partial(encode_until, 3))
    with pytest.raises(KeyboardInterrupt):
        prepare(root, "qwen2_5_vl", records * 5, root / "parts", **size)
    assert not (root / "parts" / "train.idx").exists()
    before = len(encoded)
    monkeypatch.setattr(text, "encode_chunks", partial(encode_until, 99))
    prepare(root, "qwen2_5_vl", records * 5, root / "parts", **size)
    assert digests_of(root / "parts") == digests_of(root / "whole")
    numbers = [chunk.chunk.first_document for chunk in encoded]
    assert 0 < before < len(numbers) and len(set(numbers)) == len(numbers)


def as_texts(record):
    """Return a record whose messages without images have a text in place of a list of parts."""
    messages = [
        {**message, "content": message["content"][0]["text"]}
        if len(message["content"]) == 1
        else message
        for message in record["messages"]
    ]
    return {"messages": messages}


def test_a_text_as_content_is_that_of_one_part(root, kind, processor, records, tmp_path):
    size = {"image_size": (12, 12) if kind == "llava" else (16, 24)}
    prepare(root, kind, records, tmp_path / "parts", **size)
    prepare(root, kind, list(map(as_texts, records)), tmp_path / "texts", **size)
    parts, texts = (IndexedDataset(tmp_path / name / "train") for name in ("parts", "texts"))
    np.testing.assert_array_equal(texts.tokens, parts.tokens)
    assert "What is 1 + 1?" in processor.tokenizer.decode(texts.document(2))


@pytest.mark.parametrize("written", ["", "{{ message['content'] }}"])
def test_a_template_that_does_not_write_a_text_is_refused(
    root, processor, kind, records, tmp_path, written
):
    template = tmp_path / "lost.jinja"
    template.write_text(
        "{% for message in messages %}{% if message['role'] == 'user' %}" + written + "{% else %}"
        "{% generation %}{{ message['content'][0]['text'] }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"line 1: messages\[0\]: the chat template does not write its text"
    ):
        prepare(root, kind, records, tmp_path / "data", template=str(template))


def test_an_answer_with_an_image_is_refused(root, processor, kind, pictures, tmp_path):
    record = chat("What?", "It.", pictures[0])
    record["messages"][1]["content"].append({"type": "image", "path": pictures[1]})
    with pytest.raises(
        DataError, match=r"line 1: messages\[1\]: an assistant message has an image"
    ):
        prepare(root, kind, [record], tmp_path / "data")


def test_the_template_in_chat_template_json_is_used_as_by_transformers(root, records, tmp_path):
    write_qwen(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "earlier")
    template = tmp_path / "earlier" / "chat_template.jinja"
    text = template.read_text()
    template.write_text("{{ raise_exception('the one of the tokenizer') }}")
    earlier = tmp_path / "earlier" / "chat_template.json"
    earlier.write_text(json.dumps({"chat_template": text}))
    path = write_records(root / "earlier.jsonl", records)
    for name in ("first", "earlier"):
        options = {"validation": 0.0, "image_size": (16, 24)}
        instruct_images([path], tmp_path / f"{name}_data", tmp_path / name, **options)
    first, second = (digests_of(tmp_path / f"{name}_data") for name in ("first", "earlier"))
    # The tokenizer is saved with its own configuration.
    assert first["train.bin"] == second["train.bin"]
    assert first["chat_template.jinja"] == second["chat_template.jinja"] == text.encode()


def test_a_processor_without_the_class_token_of_its_tower_is_refused(root, records, tmp_path):
    write_llava(tmp_path / "llava")
    path = tmp_path / "llava" / "processor_config.json"
    settings = json.loads(path.read_text())
    del settings["num_additional_image_tokens"]
    path.write_text(json.dumps(settings))
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "llava" / "config.json").write_text(json.dumps(config))
    inputs = [write_records(root / "class_token.jsonl", records)]
    with pytest.raises(DataError, match=r"num_additional_image_tokens is 0, but .* set it to 1"):
        instruct_images(inputs, tmp_path / "data", tmp_path / "llava", validation=0.0)


def test_a_missing_extra_is_named(root, tmp_path, monkeypatch):
    write_llava(tmp_path / "llava")

    def no_version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_version)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"graphtrain\[vision\]"):
        FolderProcessor.open(tmp_path / "llava")


def test_chunks_are_bounded_by_the_bytes_of_their_images(root, records, tmp_path, monkeypatch):
    write_qwen(root / "qwen2_5_vl")
    sizes = []
    encode_chunks = text.encode_chunks

    def measured(*arguments):
        for chunk in encode_chunks(*arguments):
            sizes.append(len(chunk.pixels))
            yield chunk

    monkeypatch.setattr(text, "encode_chunks", measured)
    image = 16 * 24 * 3
    monkeypatch.setattr("graphtrain.data.prepare.image_instructions._PIXEL_BYTES", 4 * image)
    prepare(root, "qwen2_5_vl", records * 5, tmp_path / "data", image_size=(16, 24))
    assert sum(sizes) == 5 * 6 * image
    assert max(sizes) <= (4 + 3) * image  # and those of one more record, which has at most 3


def test_the_command_says_which_options_go_together(root, tmp_path):
    run = CliRunner().invoke
    base = ["instruct", "x.jsonl", "--output", str(tmp_path / "x")]
    assert "give --tokenizer, or --processor" in run(command, base).output
    both = run(command, [*base, "--tokenizer", "bytes", "--image-size", "1", "1"])
    assert "--image-size needs --processor" in both.output
    formatted = run(command, [*base, "--processor", "x", "--format", "alpaca"])
    assert "records with images have the format messages" in formatted.output
    absent = run(command, [*base, "--processor", str(tmp_path)])
    assert "its processor is not named by any file" in str(absent.exception)
    Path(tmp_path / "plain.jsonl").write_text('{"messages": []}\n')
    plain = run(
        command, ["prepare", str(tmp_path / "plain.jsonl"), "--output", str(tmp_path / "y")]
    )
    assert "prepare conversations with graphtrain data instruct" in str(plain.exception)


def append_eos(folder):
    """Let the tokenizer of a Llava put an EOS after every text."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    (token,) = (one for one in definition["added_tokens"] if one["content"] == "</s>")
    processor = definition["post_processor"]
    processor["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    processor["special_tokens"]["</s>"] = {"id": "</s>", "ids": [token["id"]], "tokens": ["</s>"]}
    path.write_text(json.dumps(definition))


@pytest.mark.parametrize("begin", ["", "<s>"])
def test_an_eos_of_the_tokenizer_is_appended_as_by_the_processor(
    root, pictures, records, tmp_path, begin
):
    write_llava(tmp_path / "llava")
    append_eos(tmp_path / "llava")
    template = tmp_path / "llava" / "chat_template.jinja"
    template.write_text(begin + template.read_text())
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "llava", backend="pil")
    for train_on in ("answers", "all"):
        path = write_records(root / "ended.jsonl", records)
        output = tmp_path / train_on
        instruct_images([path], output, tmp_path / "llava", validation=0.0, train_on=train_on)
        dataset, _, _ = open_images(output / "train")
        for number, record in enumerate(records):
            want = reference_of(processor, record, root)["input_ids"][0]
            np.testing.assert_array_equal(dataset.document(number), want)
            assert (want[-1] == processor.tokenizer.eos_token_id) == (not begin)
            learned = LossSpans(dataset).mask(number, len(want))
            assert learned[-1] == (train_on == "all" or bool(begin))
