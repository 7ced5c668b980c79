"""A frozen model's matrices through oneDNN, differentiable in their inputs: for training a map on a CPU.

Autograd's own product is as good on other devices. On a CPU, oneDNN multiplies faster than the library that torch uses
by itself, and fastest by weights that it has laid out itself, for the forward product and for the gradient.
"""

import torch
from torch import nn

from kvlib.linear import has_onednn, plain_linears, replaced


class FrozenMatrix:
    """A weight (O, I) that does not change: `times` for x Wᵀ, `back` for y W.

    Args:
        rows: about how many rows x and y have. On a CPU, float32 and bfloat16 (where the processor multiplies it) are kept
        as oneDNN reads them, once for each direction; anything else is multiplied as it is, and so is all for None.
    """

    def __init__(self, weight: torch.Tensor, rows: int | None):
        weight, self.dtype = weight.detach(), weight.dtype
        self.ours = rows is not None and suits_onednn(weight)
        if self.ours:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self.forward, self.backward = reorder(weight, rows), reorder(weight.T.contiguous(), rows)
        else:
            self.forward, self.backward = weight, weight.T

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(..., I) -> (..., O)."""
        return self._product(x, self.forward, bias)

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """(..., O) -> (..., I)."""
        return self._product(y, self.backward, None)

    def _product(self, x, weight, bias):
        if self.ours:
            return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
        return nn.functional.linear(x, weight, bias)


def suits_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by matrices of this dtype on this device."""
    if weight.device.type != "cpu" or not has_onednn():
        return False
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return half or weight.dtype == torch.float32


class _Product(torch.autograd.Function):
    """x Wᵀ + b, differentiable in x alone."""

    @staticmethod
    def forward(ctx, x, matrix, bias):
        ctx.matrix = matrix
        return matrix.times(x, bias)

    @staticmethod
    def backward(ctx, upstream):
        return ctx.matrix.back(upstream), None, None


class FrozenLinears:
    """The linear layers of a frozen model's body as `FrozenMatrix`; `within` puts them in the place of torch's products.

    Args:
        model: its weights must not change while this is used. rows: about how many rows go through a layer at once.
    """

    def __init__(self, model, rows: int):
        self.layers = {
            module: FrozenMatrix(module.weight, rows)
            for module in plain_linears(model.base_model)
            if suits_onednn(module.weight)
        }

    def within(self):
        """A context manager: within it the model's body multiplies through oneDNN; afterwards as before."""
        return replaced({module: _forward(matrix, module.bias) for module, matrix in self.layers.items()})


def _forward(matrix: FrozenMatrix, bias):
    def forward(x):
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, matrix, bias)
        return matrix.times(x, bias)

    return forward
