"""Whether a model's weights fit the memory that is free, before any of them is read."""

import math
from pathlib import Path

import psutil
import torch

from kvlib.errors import KvlibError
from kvlib.study.hub import tensors_of


def check_memory(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Raises KvlibError where a model's weights alone are more than the device has free."""
    tensors = [
        tensor for path in sorted(Path(folder).glob("*.safetensors")) for tensor in tensors_of(path).values()
    ]
    needed = sum(math.prod(tensor["shape"]) for tensor in tensors) * dtype.itemsize
    on_card = device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_card else psutil.virtual_memory().available
    if needed > free:
        where = torch.cuda.get_device_name() if on_card else "this machine"
        raise KvlibError(
            f"the weights of {folder} take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')} and {where} has "
            f"{free / 2**30:.1f} GiB free, expected room for them: close what else uses it, choose a narrower pair.dtype or another device"
        )
