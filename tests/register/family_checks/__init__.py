"""Checks of one family of transformers."""
