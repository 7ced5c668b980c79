"""A model's linear layers through oneDNN where torch would take a slower kernel.

In float32 on a CPU torch multiplies with MKL, which on some processors reads a weight with one core when there are few
rows, and uses half the vector width when there are many. oneDNN, which torch carries as well and takes for bfloat16,
does neither. Same products, same precision, another order of summation.
"""

import contextlib
import functools
from collections.abc import Callable

import torch


def has_onednn() -> bool:
    """Whether this build of torch has its kernels (x86 builds do)."""
    found = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return torch.backends.mkldnn.is_available() and found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b as `torch.nn.functional.linear`: x (…, in), weight (out, in), bias (out).

    Through oneDNN for float32 on a CPU when no gradient is asked for, which that kernel does not have.
    """
    if not _fits(x) or x.numel() == 0 or weight.dtype != x.dtype or _wants_gradient(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _fits(x: torch.Tensor) -> bool:
    # torch.compile chooses its own kernels and does not know this one outside frozen graphs
    cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    return cpu and has_onednn() and not torch.compiler.is_compiling()


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def plain_linears(model) -> list[torch.nn.Linear]:
    """The model's `nn.Linear` layers that multiply as torch does: not those of other classes (quantised, adapted), nor
    those whose forward is somebody else's already."""
    return [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]


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
