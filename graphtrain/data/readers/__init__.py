"""Readers of text and records: JSON lines, JSON arrays, parquet, Arrow, plain text."""
