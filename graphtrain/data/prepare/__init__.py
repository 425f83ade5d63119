"""Preparation: text and conversations to indexed datasets of token ids and loss masks."""
