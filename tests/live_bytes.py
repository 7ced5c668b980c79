"""How many bytes of tensors are alive: what torch's operators allocate and nothing has let go of yet."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make within the block; `peak` is the most that were alive at any time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self._sizes = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._sizes.keys() | given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_of(call) -> int:
    """Bytes at the worst moment of a call, beside what was there before; what it returns counts until it is dropped."""
    with LiveBytes() as counted:
        call()
    return counted.peak
