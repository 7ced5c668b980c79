"""Whether this machine can run a pair: its device, its number format, its memory, before any weight is read."""

import math
from pathlib import Path

import psutil
import torch

from kvlib.errors import KvlibError
from kvlib.study.hub import tensors_of


def check_device(device: str, dtype: str) -> None:
    """Raises KvlibError unless torch can use the profile's device, and the device computes in its dtype."""
    if device == "cuda" and torch.version.cuda is None:
        raise KvlibError(
            f"device: cuda is asked for and torch {torch.__version__} is a build for processors only, expected one with CUDA: install "
            "requirements-gpu.txt, or say device: cpu"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise KvlibError(
            "device: cuda is asked for and torch finds no CUDA device, expected one: check the driver with `nvidia-smi`, or say "
            "device: cpu"
        )
    on_card = device != "cpu" and torch.cuda.is_available()
    if on_card and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise KvlibError(
            f"pair.dtype is bfloat16 and {torch.cuda.get_device_name()} does not compute in it, expected a card of compute capability "
            "8.0 or more: say pair.dtype: float16 or float32, or use another card"
        )


def check_memory(folder: Path, dtype: torch.dtype, device: str) -> None:
    """Raises KvlibError where a model's weights alone are more than the device has free."""
    tensors = [
        tensor for path in sorted(Path(folder).glob("*.safetensors")) for tensor in tensors_of(path).values()
    ]
    needed = sum(math.prod(tensor["shape"]) for tensor in tensors) * dtype.itemsize
    on_card = device != "cpu" and torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if on_card else psutil.virtual_memory().available
    if needed > free:
        where = torch.cuda.get_device_name() if on_card else "this machine"
        raise KvlibError(
            f"the weights of {folder} take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')} and {where} has "
            f"{free / 2**30:.1f} GiB free, expected room for them: close what else uses it, choose a narrower pair.dtype or another device"
        )
