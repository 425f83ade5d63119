#!/usr/bin/env bash
# Import a Hugging Face checkpoint, train it on text, fine-tune it on instructions, and export it.
#
#   pip install 'graphtrain[data,hf]'
#   examples/story/story.sh DIRECTORY [--set KEY=VALUE ...]
#
# All files are made in DIRECTORY, from text that is part of Python; about a minute on 2 cores. Arguments
# after DIRECTORY are passed to compile and run. Run the script again to resume where it stopped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
shift

# 1. Train a tokenizer that has the chat markers as special tokens.
graphtrain data sample text.jsonl --megabytes 1
graphtrain data tokenizer text.jsonl --output tokenizer --kind bpe --vocab 1024 \
  --special '<|im_start|>' --special '<|im_end|>'

# 2. Make a Hugging Face checkpoint with random weights, in place of a downloaded one, and import it.
python "$here/checkpoint.py" tokenizer arrived
[ -d weights ] || graphtrain convert hf-to-graphtrain arrived weights

# 3. Tokenize text and continue the pre-training on it.
graphtrain data prepare text.jsonl --output text --tokenizer tokenizer
graphtrain compile "$here/text.toml" "$@"
graphtrain run "$here/text.toml" "$@"

# 4. Prepare conversations, and train a LoRA adapter on their answers.
graphtrain data sample chat.jsonl --kind instructions --megabytes 0.4
graphtrain data instruct chat.jsonl --output chat --tokenizer tokenizer --chat-template chatml
graphtrain compile "$here/chat.toml" "$@"
graphtrain run "$here/chat.toml" "$@"
graphtrain evaluate "$here/chat.toml"

# 5. Export the model, with the adapter merged, and load it in transformers.
[ -d better ] || graphtrain convert graphtrain-to-hf runs/chat better
python "$here/ask.py" better
