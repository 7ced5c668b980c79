"""When memory runs out: half as many at once, said aloud, and the same work again."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from kvlib.errors import KvlibError

Result = TypeVar("Result")
# How torch, CUDA's libraries and oneDNN say it where it is no OutOfMemoryError.
SAID = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "could not create a memory object")
LOG = logging.getLogger(__name__)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or the machine has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


class Room:
    """How many prompts or windows go through a model at once; halved whenever memory runs out.

    Args:
        what: they are, in the plural ("prompts"). most: at once, to begin with. remedy: what helps when one is too
            many, the end of a sentence. lowered: called with the new number after each halving, to remember it.
    """

    def __init__(
        self, what: str, most: int, remedy: str, lowered: Callable[[int], None] = lambda number: None
    ):
        self.what, self.most, self.remedy, self.lowered = what, most, remedy, lowered

    def whole(self, work: Callable[[int], Result]) -> Result:
        """`work` with the number at once; from its beginning again with half of it where memory runs out."""
        while True:
            try:
                return work(self.most)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
            # Out here the error is gone, and with it the frames that held the tensors.
            self._halve(reason)

    def over(self, count: int, work: Callable[[slice], Result]) -> list[Result]:
        """`work` over `count` items, as many as there is room for at a time; only the part that failed is done again."""
        found, start = [], 0
        while start < count:
            part, result = self.whole(lambda most, at=start: _part(work, at, min(at + most, count)))
            found.append(result)
            start = part.stop
        return found

    def _halve(self, reason: str) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.most <= 1:
            raise KvlibError(
                f"memory ran out with 1 of the {self.what} at a time ({reason[:160]}), expected room for one: {self.remedy}"
            )
        self.most = self.most // 2
        LOG.warning("memory ran out: %s of the %s at a time from here on (%s)", self.most, self.what, reason)
        self.lowered(self.most)


def _part(work, start: int, stop: int):
    part = slice(start, stop)
    return part, work(part)
