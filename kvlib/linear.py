"""A model's linear layers through oneDNN where torch would take a slower kernel.

In float32 on a CPU torch multiplies with MKL, which on some processors reads a weight with one core when there are few
rows, and uses half the vector width when there are many. oneDNN, which torch carries as well and takes for bfloat16,
does neither. Same products, same precision, another order of summation.
"""

import contextlib
import functools

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


@contextlib.contextmanager
def fast_linears(model):
    """Within the block, the model's `nn.Linear` layers go through `linear`; every one is as before afterwards.

    Nothing is copied or packed. Layers of other classes (quantised, adapted), and those whose forward is somebody
    else's already, are left alone.
    """
    changed = []
    try:
        for module in model.modules():
            if type(module) is torch.nn.Linear and "forward" not in vars(module):
                # Into the instance's dict: nn.Module's own __setattr__ looks through its registries each time.
                vars(module)["forward"] = functools.partial(_forward, module)
                changed.append(module)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)
