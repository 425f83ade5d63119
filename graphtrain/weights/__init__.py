"""Import and export of weights, conversion between formats, and initial weights of a run.

A converted folder contains

- `weights/`: safetensors with the decoder's names and order of axes, one entry per layer, in the
  dtypes of the source and independent of any mesh,
- `model.toml`: the settings of the model, for use as `preset` in a configuration,
- `weights.json`: size and SHA-256 of these files, verified before they are used,
- `hugging_face/`: config.json, tokenizer, chat template and code of the source, for the export to
  Hugging Face; `hugging_face.json`: their sizes and digests.

Does not import JAX.
"""
