"""Train a small language model with torch-xla, in seconds on a CPU: PJRT_DEVICE=CPU python train.py

On 8 devices: CPU_NUM_DEVICES=8 PJRT_DEVICE=CPU python train.py --mesh 2 4
"""

import argparse

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime
from torch import nn

VOCAB, LENGTH, BATCH = 64, 16, 4


class Model(nn.Module):
    """One transformer layer between an embedding and a tied LM head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layer = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        return self.head(self.layer(self.embedding(tokens), src_mask=mask, is_causal=True))


def split(model: Model, mesh: spmd.Mesh) -> None:
    """Shard the MLP column-parallel, then row-parallel, and the embedding, over "model"."""
    spmd.mark_sharding(model.layer.linear1.weight, mesh, ("model", None))
    spmd.mark_sharding(model.layer.linear2.weight, mesh, (None, "model"))
    spmd.mark_sharding(model.embedding.weight, mesh, ("model", None))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--report-every", type=int, default=10, help="steps; 0: never")
    parser.add_argument("--mesh", type=int, nargs=2, help="devices for data and for the model")
    options = parser.parse_args()
    if options.mesh:
        runtime.use_spmd()
    device = torch_xla.device()
    torch.manual_seed(0)
    model = Model(options.width).to(device)
    model.tie()  # .to(device) has copied the tied weight into two arrays
    mesh = None
    if options.mesh:
        devices = list(range(options.mesh[0] * options.mesh[1]))
        mesh = spmd.Mesh(devices, tuple(options.mesh), ("data", "model"))
        split(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(VOCAB, (BATCH, LENGTH + 1))
    for step in range(options.steps):
        tokens, labels = data[:, :-1].to(device), data[:, 1:].to(device)
        if mesh is not None:
            spmd.mark_sharding(tokens, mesh, ("data", None))
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        if options.report_every and (step + 1) % options.report_every == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
