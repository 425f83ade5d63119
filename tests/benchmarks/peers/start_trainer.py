"""The first step by Hugging Face's Trainer, with torch.compile and Inductor's cache.

python start_trainer.py RESULT; in the directory that start.py prepares
"""

import json
import sys
from pathlib import Path

from marks import Marks

SEQUENCES, LENGTH = 8, 32


def main() -> None:
    marks = Marks()
    import numpy as np
    import torch

    marks.mark("import torch")
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    marks.mark("import transformers")
    set_seed(0)
    model = json.loads(Path("model.json").read_text())
    config = LlamaConfig(
        hidden_size=model["embed"],
        intermediate_size=model["mlp"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        vocab_size=model["vocab"],
        use_cache=False,
        tie_word_embeddings=False,
    )
    llama = LlamaForCausalLM(config)
    marks.mark("make weights")
    rows = np.memmap("data/train.bin", np.uint16, "r")[: SEQUENCES * LENGTH]
    tokens = torch.from_numpy(rows.reshape(SEQUENCES, LENGTH).astype(np.int64))

    class Finish(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            if logs and "loss" in logs:
                marks.mark("compile from the cache, the step")
                marks.finish(logs["loss"])

    arguments = TrainingArguments(
        output_dir=sys.argv[1] + ".directory",
        max_steps=1,
        per_device_train_batch_size=SEQUENCES,
        torch_compile=True,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(llama, arguments, train_dataset=dataset, callbacks=[Finish()])
    marks.mark("make the trainer")
    trainer.train()


if __name__ == "__main__":
    main()
