#!/usr/bin/env bash
# From a checkpoint of Hugging Face to a better one: more text, then instructions, and back.
#
#   pip install 'graphtrain[data,hf]'
#   examples/story/story.sh DIRECTORY [--set KEY=VALUE ...]
#
# Everything is made in DIRECTORY, from text that every Python carries; about a minute on 2 cores. What
# follows DIRECTORY goes to compile and run. Run again, it goes on where it was stopped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
shift

# 1. A tokenizer of one's own, with the marks of a chat as tokens.
graphtrain data sample text.jsonl --megabytes 1
graphtrain data tokenizer text.jsonl --output tokenizer --kind bpe --vocab 1024 \
  --special '<|im_start|>' --special '<|im_end|>'

# 2. The checkpoint that a user arrives with. Others download one; this one knows nothing.
python "$here/checkpoint.py" tokenizer arrived
[ -d weights ] || graphtrain convert hf-to-graphtrain arrived weights

# 3. Text becomes tokens, and training goes on with it.
graphtrain data prepare text.jsonl --output text --tokenizer tokenizer
graphtrain compile "$here/text.toml" "$@"
graphtrain run "$here/text.toml" "$@"

# 4. Instructions become conversations, of which the answers are learned by adapters.
graphtrain data sample chat.jsonl --kind instructions --megabytes 0.4
graphtrain data instruct chat.jsonl --output chat --tokenizer tokenizer --template chatml
graphtrain compile "$here/chat.toml" "$@"
graphtrain run "$here/chat.toml" "$@"
graphtrain evaluate "$here/chat.toml"

# 5. The rest of the world loads it.
[ -d better ] || graphtrain convert graphtrain-to-hf runs/chat better
python "$here/ask.py" better
