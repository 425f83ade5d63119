"""Weights that come from elsewhere and go there: files, conversion, and what a run starts from.

A converted folder holds

- `weights/`: safetensors in the decoder's names and order of axes, a file entry for each layer, in
  the dtypes of the source; nothing in it depends on a mesh,
- `model.toml`: the settings of the model, which a configuration takes by `preset`,
- `hugging_face/`: config.json, tokenizer, chat template and code of the source, for the way back.

Imports no JAX.
"""
