"""Memory of the experts of a mixture, by arithmetic: what a layer saves, and what it computes with.

The shapes of a dropless mixture are those of the case that all tokens choose the experts of one
device: as many rows as all devices that share the experts have choices. With a capacity, an expert
has a fixed number of slots.

The factors are fitted to programs compiled for h100:8 and cpu:4 (data, fsdp, expert, tensor; both
kinds of mixture). Of 15 peaks on GPUs 14 are within 10 % of the compiler's, and one, of a mixture
with a capacity and microbatches, is 12 % too low; on CPUs they are up to 20 % too low.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.flops import is_gated
from graphtrain.models.grouped_matmul_support import BLOCK, step_computes_all_experts


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of one layer that one device computes, for one microbatch."""

    rows: float  # rows that are multiplied by the matrices of experts
    choices: float  # results of experts that are added to their tokens, of all gathered tokens
    mlp: float  # hidden width of an expert
    inputs: int  # of the activation function: gate and up, or up alone
    embed: int
    item_bytes: int  # of an element of the rows
    sum_bytes: int  # of an element of the choices: dropless ones are added in float32
    copies: float = 0.0  # of the rows, one for each expert, where XLA expands a ragged product

    @classmethod
    def of(cls, program: ResolvedProgram, sequences: float, seq_len: float) -> ExpertSizes | None:
        """Return the sizes; None for a dense model.

        Args:
            program: the program, with a native model.
            sequences: sequences of a microbatch on the device.
            seq_len: positions of each on the device.
        """
        model, mesh, table = program.model, program.mesh, program.rules.activations
        if (mixture := model.moe) is None:
            return None
        # XLA multiplies in float32 on CPUs, and saves what it has.
        item = 4 if program.target.platform == "cpu" else item_bytes(model.dtype)
        widths = model.mlp / mesh.size(table.get("mlp", ())), 2 if is_gated(model) else 1
        choices = sequences * seq_len * mixture.experts_per_token
        if mixture.capacity_factor is not None:
            rows = choices * mixture.capacity_factor
            return cls(rows, choices, *widths, model.embed, item, item)
        local = mesh.size(table.get("experts", ()))
        choices, experts = choices * local, mixture.experts / local
        if step_computes_all_experts(program):
            return cls(choices, choices, *widths, model.embed, item, 4, experts)
        padding = (experts + 1) * BLOCK if program.target.platform == "cuda" else 0
        return cls(choices + padding, choices, *widths, model.embed, item, 4)

    @property
    def _hidden(self) -> float:
        return self.rows * self.inputs * self.mlp * self.item_bytes

    @property
    def _inputs(self) -> float:
        return self.rows * self.embed * self.item_bytes

    @property
    def _summed(self) -> float:
        return 2 * self.choices * self.embed * self.sum_bytes

    @property
    def _products(self) -> float:
        """Bytes of the results of the products with gate, up and down."""
        return self._hidden + self._inputs

    def saved(self, remat: str) -> float:
        """Return the bytes that a layer saves for its backward pass, by `model.remat`."""
        if remat in ("full", "offload"):
            return 0.0
        if remat == "dots":
            return self._products
        return self._products + self._hidden + self._inputs + self._summed

    def computed(self, remat: str) -> float:
        """Return the bytes of the layer whose backward pass is computed.

        They are hidden values, rows and choices with their gradients; with remat "full" also the
        products, which are computed again. An expanded ragged product masks its input by expert.
        """
        again = self._products if remat == "full" else 0.0
        masked = self.copies * self.rows * (self.embed + self.mlp) * self.item_bytes
        return 2 * self._hidden + 2 * self._inputs + self._summed + masked + again
