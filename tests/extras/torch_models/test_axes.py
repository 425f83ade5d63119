"""Array axes of parameters that are no matrices: how they are split, and that they do not decay."""

import torch

from graphtrain.graphs.optimizer import _is_matrix
from graphtrain.torch_frontend.axes import name_axes
from sharding_rules.arrays import ArraySpec

EMBED = 8


class Shapes(torch.nn.Module):
    """Parameters of several dimensions that are no matrices, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, EMBED)
        self.conv = torch.nn.Conv1d(EMBED, EMBED, kernel_size=3, groups=EMBED, padding=2)
        self.experts = torch.nn.Module()
        self.experts.down_proj = torch.nn.Parameter(torch.zeros(2, EMBED, EMBED))
        self.experts.down_proj_bias = torch.nn.Parameter(torch.zeros(2, EMBED))
        self.A_log = torch.nn.Parameter(torch.zeros(EMBED, 4))
        self.mix = torch.nn.Parameter(torch.zeros(1, 1, EMBED))


def test_only_weights_of_products_and_convolutions_decay_and_no_kernel_is_split():
    module = Shapes()
    axes = {name: one.axes for name, one in name_axes(module, 16, {}).items()}
    assert axes["conv.weight"] == ("embed", None, None)
    assert axes["experts.down_proj_bias"] == ("experts", None)
    decayed = {
        name
        for name, parameter in module.named_parameters()
        if _is_matrix(ArraySpec(tuple(parameter.shape), axes[name]))
    }
    assert decayed == {"table.weight", "conv.weight", "experts.down_proj"}
