"""A model's linear layers by better kernels than torch would take.

In float32 on a CPU torch multiplies with MKL, which on some processors reads a weight with one core when there are few
rows, and uses half the vector width when there are many. oneDNN, which torch carries as well and takes for bfloat16,
does neither. A few rows, one token of each prompt, go through C where there is a compiler (`kvlib.kernels.product`). Same
products, same precision, another order of summation.
"""

import contextlib
import functools
from collections.abc import Callable

import torch

from kvlib.kernels.product import product


def has_onednn() -> bool:
    """Whether this build of torch has its kernels (x86 builds do)."""
    found = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return torch.backends.mkldnn.is_available() and found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b as `torch.nn.functional.linear`: x (…, in), weight (out, in), bias (out).

    Through C or oneDNN for float32 on a CPU when no gradient is asked for, which those kernels do not have.
    """
    # torch.compile chooses its own kernels and does not know these outside frozen graphs
    ours = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if not ours or torch.compiler.is_compiling() or x.numel() == 0 or _wants_gradient(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    few = product(x, weight, bias)
    if few is not None:
        return few
    if not has_onednn():
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def plain_linears(model) -> list[torch.nn.Linear]:
    """The model's `nn.Linear` layers that multiply as torch does: not those of other classes (quantised, adapted), nor
    those whose forward is somebody else's already."""
    found, seen, left = [], set(), [model]
    while left:  # `model.modules()` takes several times as long, and every handoff asks
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            found.append(module)
        left.extend(module._modules.values())
    return found


@contextlib.contextmanager
def replaced(forwards: dict[torch.nn.Module, Callable]):
    """Within the block each of these modules has another forward; afterwards its own, unless it was replaced again."""
    try:
        for module, forward in forwards.items():
            # Into the instance's dict: nn.Module's own __setattr__ looks through its registries each time.
            vars(module)["forward"] = forward
        yield
    finally:
        for module, forward in forwards.items():
            # Not what somebody else has put there since, nor another thread.
            if vars(module).get("forward") is forward:
                vars(module).pop("forward", None)


@contextlib.contextmanager
def fast_linears(model):
    """Within the block, the model's `plain_linears` go through `linear`. Nothing is copied or packed."""
    with replaced({module: functools.partial(_forward, module) for module in plain_linears(model)}):
        yield


def _forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)
