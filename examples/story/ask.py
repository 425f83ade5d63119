"""Load an exported model in transformers and generate an answer with its chat template."""

import sys

import torch
import transformers

QUESTION = "What does os.path.join do?"


def main(folder: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        answered = model.generate(
            **asked,
            max_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        )
    answer = answered[0, asked["input_ids"].shape[1] :]
    print(f"{QUESTION}\n{tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
