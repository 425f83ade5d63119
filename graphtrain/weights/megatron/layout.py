"""Division of a model over the ranks of Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError


@dataclass(frozen=True)
class ModelChunk:
    """Consecutive layers that one pipeline rank has."""

    pipeline_rank: int
    key: str  # of the chunk in the file of a rank: model, or model0, model1 ...
    first_layer: int
    num_layers: int
    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the LM head

    def has_layer(self, layer: int) -> bool:
        """Return whether a layer of the model is one of these."""
        return self.first_layer <= layer < self.first_layer + self.num_layers


@dataclass(frozen=True)
class RankLayout:
    """Number of tensor, pipeline and expert ranks, and the layers of each pipeline rank."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1  # chunks of each pipeline rank (virtual pipeline)
    layers: tuple[int, ...] = ()  # of each chunk, in the order of the model; empty: equally many

    def check(self, model: Model) -> None:
        """Check that the ranks can divide a model.

        Raises:
            WeightsError: they cannot; says which number to change.
        """
        assert model.kv_heads
        sizes = {"kv_heads": model.kv_heads, "mlp": model.mlp}
        if model.moe is not None:
            sizes |= {"moe.shared_expert_mlp": model.moe.shared_expert_mlp or self.tensor}
        for name, size in sizes.items():
            if size % self.tensor:
                raise WeightsError(
                    f"program.model.{name} = {size} is not a multiple of {self.tensor} tensor "
                    "ranks; choose another --tensor"
                )
        experts = model.moe.experts if model.moe else 1
        if experts % self.expert:
            raise WeightsError(
                f"{experts} experts cannot be divided over {self.expert} expert ranks; choose "
                "another --expert"
            )
        self._check_layers(model.layers)

    def _check_layers(self, layers: int) -> None:
        count = self.pipeline * self.virtual
        if not self.layers:
            if layers % count:
                raise WeightsError(
                    f"{layers} layers cannot be divided equally over {count} pipeline ranks or "
                    "chunks; list the layers of each with --layers, for example --layers "
                    f"{','.join(map(str, _nearly_equal(layers, count)))}"
                )
            return
        if len(self.layers) != count or sum(self.layers) != layers:
            raise WeightsError(
                f"--layers lists {len(self.layers)} numbers with the sum {sum(self.layers)}; it "
                f"needs {count}, one for each pipeline rank or chunk, with the sum {layers}, the "
                "layers of the model"
            )

    def chunks(self, model: Model) -> list[ModelChunk]:
        """Return the chunks in the order of the model."""
        count = self.pipeline * self.virtual
        sizes = self.layers or (model.layers // count,) * count
        begins = [0, *accumulate(sizes)]
        return [
            ModelChunk(
                pipeline_rank=index % self.pipeline,
                key=f"model{index // self.pipeline}" if self.virtual > 1 else "model",
                first_layer=begins[index],
                num_layers=sizes[index],
                is_first=index == 0,
                is_last=index == count - 1,
            )
            for index in range(count)
        ]

    def folder(self, tensor: int, pipeline: int, expert: int) -> str:
        """Return the name of the folder of a rank.

        Source: Megatron-LM, megatron/training/checkpointing.py, get_checkpoint_name
        """
        name = f"mp_rank_{tensor:02d}"
        name += f"_{pipeline:03d}" if self.pipeline > 1 else ""
        return name + (f"_{expert:03d}" if self.expert > 1 else "")

    def pipeline_layout(self, model: Model) -> str | None:
        """Return --pipeline-model-parallel-layout of Megatron-LM; None if its default is the same.

        E is the embedding, t a layer, and L the LM head; | separates chunks.
        """
        if len({chunk.num_layers for chunk in self.chunks(model)}) == 1:
            return None
        return "|".join(
            "E" * chunk.is_first + "t" * chunk.num_layers + "L" * chunk.is_last
            for chunk in self.chunks(model)
        )


def _nearly_equal(total: int, count: int) -> list[int]:
    quotient, rest = divmod(total, count)
    return [quotient + (index < rest) for index in range(count)]
