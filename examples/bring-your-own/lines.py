# A dataset: [run.data] train = "examples/bring-your-own/lines.py:Lines".
# Each line of a text file is a document of bytes; its label is not trained on.

import hashlib
from pathlib import Path

import numpy as np

END = 256  # after the 256 bytes


class Lines:
    def __init__(self, file: str = "lines.txt"):
        content = Path(file).read_bytes()
        self.lines = content.splitlines()
        self.digest = hashlib.sha256(content).hexdigest()
        self.sizes = [len(line) + 1 for line in self.lines]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = self.lines[index]
        label = line.find(b":") + 1  # as in "ROMEO: O, she doth teach the torches"
        return np.array([*line, END]), np.arange(len(line) + 1) >= label
