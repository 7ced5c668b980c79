"""A card that is not there: every tensor knows which memory it would lie in, and operations across them are refused."""

import contextlib
import threading

import torch
from torch.overrides import TorchFunctionMode

from kvlib import streaming

CARD = torch.device("cuda", 0)
ON_CARD, ON_HOST = "card", "host"  # tensors that autograd makes by itself carry neither and meet both
DEVICE, GRAD, DATA = (getattr(torch.Tensor, name) for name in ("device", "grad", "data"))
# What CUDA allows across the two: copies, and indices that lie on the host.
ACROSS = ("copy_", "__getitem__", "__setitem__", "_has_compatible_shallow_copy_type")
TO_HOST = (
    "item",
    "tolist",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
    "__len__",
    "__repr__",
    "__format__",
)
NOT_THERE = ("numpy", "__array__")


class HostMeetsCard(AssertionError):
    """A tensor in the machine's memory was used together with one on the card."""


def place(tensor) -> str | None:
    return getattr(tensor, "place_", None)


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _mark(value, where: str) -> None:
    for tensor in _tensors([value]):
        tensor.place_ = where


def _real(device) -> torch.device:
    return torch.device("cpu") if torch.device(device).type == "cuda" else torch.device(device)


class PretendCard(TorchFunctionMode):
    """Within it, `device="cuda"` works: the tensors lie where they always do and say that they are on the card."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if name == "__get__" and owner is DEVICE:
            return CARD if place(args[0]) == ON_CARD else func(*args)
        if name == "__get__" and owner is GRAD:
            found = func(*args)
            if found is not None and place(args[0]):
                found.place_ = place(args[0])
            return found
        if name == "__set__":
            func(*args)
            if owner is DATA:
                args[0].place_ = place(args[1])
            return None
        if func is torch.Tensor.to or name in ("cpu", "cuda"):
            return self._move(func, name, args, kwargs)
        inputs = list(_tensors([args, kwargs]))
        # a single number of the host may go into an operation on the card, one of the card into none on the host
        writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        places = {place(t) for t in inputs if t.ndim > 0 or place(t) == ON_CARD or (writes and t is args[0])}
        allowed = name in ACROSS and not (name == "__getitem__" and place(args[0]) == ON_HOST)
        if {ON_CARD, ON_HOST} <= places and not allowed:
            shapes = ", ".join(f"{place(t) or 'either'} {tuple(t.shape)}" for t in inputs)
            raise HostMeetsCard(f"{name} of {shapes}")
        everywhere = {place(t) for t in inputs}
        if name in NOT_THERE and ON_CARD in everywhere:
            raise HostMeetsCard(f"{name} of a tensor on the card")
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = "cpu"
            if kwargs.get("generator") is not None:
                raise HostMeetsCard(f"{name} on the card with a generator of the host")
        result = func(*args, **kwargs)
        if asked is not None:
            where = ON_CARD if torch.device(asked).type == "cuda" else ON_HOST
        elif name in ACROSS:
            where = place(args[0])
        elif ON_CARD in everywhere:
            where = ON_CARD
        else:
            where = None if inputs and everywhere == {None} else ON_HOST
        if where is not None and name not in TO_HOST:
            _mark(result, where)
        return result

    def _move(self, func, name, args, kwargs):
        tensor, rest = args[0], list(args[1:])
        wanted = {"cpu": torch.device("cpu"), "cuda": CARD}.get(name)
        for index, value in enumerate(rest):
            if isinstance(value, (str, torch.device)):
                wanted, rest[index] = torch.device(value), _real(value)
            elif isinstance(value, torch.Tensor):
                wanted = CARD if place(value) == ON_CARD else torch.device("cpu")
        if kwargs.get("device") is not None:
            wanted, kwargs["device"] = torch.device(kwargs["device"]), _real(kwargs["device"])
        before = place(tensor)
        after = before if wanted is None else ON_CARD if wanted.type == "cuda" else ON_HOST
        found = torch.Tensor.to(tensor, *rest, **kwargs) if name == "to" else tensor
        if after != before and found is tensor:
            found = tensor.clone()  # another memory: what is written to one is not seen in the other
        if after is not None:
            found.place_ = after
        return found


class Lane:
    """In the place of `kvlib.streaming`'s copies by a stream of their own; modes belong to a thread."""

    threads: list[str] = []

    def __init__(self, device):
        self.device = device

    def load(self, load, item):
        Lane.threads.append(threading.current_thread().name)
        with PretendCard():
            return streaming.moved(load(item), self.device)

    def arrived(self, loaded):
        return loaded


@contextlib.contextmanager
def pretend_card(monkeypatch):
    """A CUDA device as far as kvlib asks, without one."""
    Lane.threads = []
    for name, value in {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "a pretended card",
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (2**40, 2**40),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    monkeypatch.setattr(streaming, "_Lane", Lane)
    with PretendCard():
        yield
