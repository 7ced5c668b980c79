"""Prefixes of unequal length, kept as views and packed layer by layer: for training a map."""

from dataclasses import dataclass

import torch

from kvlib.cache import PrefixCache

ROOM = 16  # positions: kernels that are made for one shape of matrix find few of them


@dataclass(frozen=True)
class RaggedPrefix:
    """The caches of B prompts, each as long as it is: rows are (L, 2, H, T, D), keys before values, views allowed."""

    rows: list[torch.Tensor]

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        return [row.shape[3] for row in self.rows]

    @property
    def layers(self) -> int:
        return self.rows[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    def select(self, prompts: slice) -> "RaggedPrefix":
        return RaggedPrefix(self.rows[prompts])

    def every(self, step: int) -> "RaggedPrefix":
        """Every `step`-th position, from the first, as views."""
        return RaggedPrefix([row[..., ::step, :] for row in self.rows])

    def positions(self, roomy: bool = False) -> torch.Tensor:
        """Rotary position of every packed entry, (1, N); roomy as in `layer`."""
        lengths = [roomy_length(n) for n in self.lengths] if roomy else self.lengths
        return torch.cat([torch.arange(n, device=self.device) for n in lengths]).unsqueeze(0)

    def layer(
        self, number: int, dtype: torch.dtype, roomy: bool = False, columns: tuple[int, int] = (0, 0)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of one layer, packed: (H, N, D), the prompts one after the other, N the sum of `lengths`.

        roomy: each prompt takes `roomy_length` of its length, zeros behind it. columns: so many are left behind those of
        keys and of values, to be filled; they are zero behind a prompt.
        """
        _, _, heads, _, dim = self.rows[0].shape
        lengths = [roomy_length(n) for n in self.lengths] if roomy else self.lengths
        both = [
            torch.empty(heads, sum(lengths), dim + more, dtype=dtype, device=self.device) for more in columns
        ]
        for row, length, part in zip(self.rows, self.lengths, parts(lengths)):
            for packed, own in zip(both, row[number]):
                packed[:, part.start : part.start + length, :dim] = own
                packed[:, part.start + length : part.stop] = 0
        return tuple(both)

    def padded(self) -> PrefixCache:
        """As a cache with padding on the right."""
        lengths = torch.tensor(self.lengths, device=self.device)
        longest = int(lengths.max())
        layers, _, heads, _, dim = self.rows[0].shape
        whole = torch.zeros(
            layers, 2, len(self.rows), heads, longest, dim, dtype=self.dtype, device=self.device
        )
        for n, row in enumerate(self.rows):
            whole[:, :, n, :, : row.shape[3]] = row
        valid = torch.arange(longest, device=self.device) < lengths[:, None]
        return PrefixCache(list(whole[:, 0]), list(whole[:, 1]), valid)


def roomy_length(length: int) -> int:
    """The next multiple of `ROOM` with at least one place to spare."""
    return (length // ROOM + 1) * ROOM


def parts(lengths: list[int]) -> list[slice]:
    """Where each prompt lies among packed positions."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths)]
