"""Bytes of vocabulary pieces that are parts of characters."""

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>", re.ASCII)  # of sentencepiece, and converted from it


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: Radford et al. 2019, GPT-2's encoder.py, bytes_to_unicode: visible characters of Latin-1
    stand for themselves, and those from 256 on for the other bytes in turn.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def byte_of_piece(piece: str) -> bytes | None:
    """Return the byte that a piece such as <0xF0> stands for; None for another piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def bytes_of_byte_level(piece: str) -> bytes | None:
    """Return the bytes of a piece of a byte-level vocabulary; None if it is not one."""
    codes = [_ALPHABET.get(character) for character in piece]
    return None if None in codes else bytes(code for code in codes if code is not None)
