"""Tokenizers: sentencepiece and Hugging Face, opened by name, trained from a corpus."""
