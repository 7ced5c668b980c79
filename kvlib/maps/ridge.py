"""Ridge regression from the source's cached vectors onto the target's, per layer and KV head."""

import math
from dataclasses import dataclass

import torch

from kvlib.attention import Affine
from kvlib.cache import Geometry, PrefixCache
from kvlib.errors import KvlibError
from kvlib.maps.base import CacheMap


@dataclass(frozen=True)
class RidgeMap(CacheMap):
    """b(x) = x W + c, fitted in closed form.

    key_weight, value_weight: (L, H, D, D). key_bias, value_bias: (L, H, D). penalty: the ridge penalty as a share of
    the mean diagonal of the Gram matrix.
    """

    key_weight: torch.Tensor
    key_bias: torch.Tensor
    value_weight: torch.Tensor
    value_bias: torch.Tensor
    penalty: float

    kind = "ridge"

    @property
    def geometry(self):
        layers, heads, dim, _ = self.key_weight.shape
        return Geometry(layers, heads, dim)

    def affine(self, layer):
        return (
            Affine(self.key_weight[layer], self.key_bias[layer]),
            Affine(self.value_weight[layer], self.value_bias[layer]),
        )

    def correct(self, layer, keys, values, rotary=None):
        key_map, value_map = self.affine(layer)
        return key_map.forward(keys.to(self.key_weight.dtype)), value_map.forward(
            values.to(self.value_weight.dtype)
        )

    def check_shapes(self):
        layers, heads, dim, _ = self.key_weight.shape
        wanted = dict.fromkeys(("key_weight", "value_weight"), (layers, heads, dim, dim))
        for name, shape in (wanted | dict.fromkeys(("key_bias", "value_bias"), (layers, heads, dim))).items():
            tensor = getattr(self, name)
            if tensor.shape != shape or not tensor.is_floating_point():
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} floating point"
                )

    def tensors(self):
        names = ("key_weight", "key_bias", "value_weight", "value_bias")
        return {name: getattr(self, name) for name in names}

    def settings(self):
        return {"penalty": self.penalty}

    @classmethod
    def restore(cls, settings, tensors):
        return cls(**tensors, **settings)


class RidgeAccumulator:
    """Streaming sums for `RidgeMap`: memory does not grow with the number of positions.

    Sums are float64 and of vectors centred on the first batch's mean, so that a large mean costs no digits.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str = "cpu"):
        self.geometry, self.count = geometry, 0
        options = {"dtype": torch.float64, "device": device}
        size = (2, geometry.layers, geometry.heads, geometry.head_dim)  # 2: keys, values
        self.shift_x = self.shift_y = None
        self.sum_x, self.sum_y = (
            torch.zeros(size, **options),
            torch.zeros(size, **options),
        )
        self.gram = torch.zeros(*size, geometry.head_dim, **options)
        self.cross = torch.zeros_like(self.gram)
        self.square_y = torch.zeros(size, **options)

    @torch.no_grad()
    def add(self, source: PrefixCache, target: PrefixCache) -> None:
        """Add one batch of the two models' caches over the same tokens."""
        if (
            source.geometry != self.geometry
            or target.geometry != self.geometry
            or source.tokens != target.tokens
        ):
            raise KvlibError(
                f"caches of {source.geometry}, {source.tokens} tokens and {target.geometry}, {target.tokens} tokens given, "
                f"expected both {self.geometry} over the same tokens: prefill both models with one tensor of ids"
            )
        check_same_prompts(source, target)
        first = self.shift_x is None
        if first:
            self.shift_x, self.shift_y = torch.zeros_like(self.sum_x), torch.zeros_like(self.sum_x)
        for kind, (xs, ys) in enumerate(((source.keys, target.keys), (source.values, target.values))):
            for layer, (x, y) in enumerate(zip(xs, ys)):
                x = x.transpose(0, 1).flatten(1, 2).double()  # (H, B T, D)
                y = y.transpose(0, 1).flatten(1, 2).double()
                if first:
                    self.shift_x[kind, layer], self.shift_y[kind, layer] = x.mean(1), y.mean(1)
                x = x - self.shift_x[kind, layer].unsqueeze(1)
                y = y - self.shift_y[kind, layer].unsqueeze(1)
                self.sum_x[kind, layer] += x.sum(1)
                self.sum_y[kind, layer] += y.sum(1)
                self.gram[kind, layer] += x.transpose(1, 2) @ x
                self.cross[kind, layer] += x.transpose(1, 2) @ y
                self.square_y[kind, layer] += y.pow(2).sum(1)
        self.count += source.batch * source.tokens

    def solve(self, penalty: float = 1e-3, dtype: torch.dtype = torch.float32) -> RidgeMap:
        """min |x W + c − y|² + λ |W|² with centred x and y, λ = penalty × the mean diagonal of the Gram matrix."""
        if not (math.isfinite(penalty) and penalty >= 0):
            raise KvlibError(
                f"a ridge penalty of {penalty} given, expected a finite share of 0 or more: 1e-3 is usual"
            )
        if self.count <= 1:
            raise KvlibError(
                f"a ridge map was asked of {self.count} positions, expected many more than head_dim: add caches first"
            )
        mean_x, mean_y = self.sum_x / self.count, self.sum_y / self.count
        gram = self.gram - self.count * mean_x.unsqueeze(-1) * mean_x.unsqueeze(-2)
        cross = self.cross - self.count * mean_x.unsqueeze(-1) * mean_y.unsqueeze(-2)
        ridge = penalty * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(self.geometry.head_dim, dtype=torch.float64, device=gram.device)
        try:
            weight = torch.linalg.solve(gram + ridge[..., None, None] * eye, cross)
        except torch.linalg.LinAlgError as error:
            raise KvlibError(
                f"{self.count} positions with penalty {penalty} do not determine a ridge map, expected a matrix that can be "
                "inverted: add caches, or raise the penalty"
            ) from error
        centre_x, centre_y = self.shift_x + mean_x, self.shift_y + mean_y
        bias = centre_y - (centre_x.unsqueeze(-2) @ weight).squeeze(-2)
        weight, bias = weight.to(dtype), bias.to(dtype)
        return RidgeMap(weight[0], bias[0], weight[1], bias[1], penalty)


def check_same_prompts(source: PrefixCache, target: PrefixCache) -> None:
    """Raises KvlibError unless two caches are finite, without padding, and over the same prompts as far as is known."""
    if source.batch != target.batch or source.valid is not None or target.valid is not None:
        padded = " with padding" if source.valid is not None or target.valid is not None else ""
        raise KvlibError(
            f"caches of {source.batch} and {target.batch} prompts{padded} given, expected as many of both and no padding: "
            "add the prompts one by one"
        )
    ids = source.input_ids, target.input_ids
    if ids[0] is not None and ids[1] is not None and not torch.equal(ids[0].to(ids[1].device), ids[1]):
        raise KvlibError(
            "caches over different token ids given, expected both models' over the same: prefill both with one tensor of ids"
        )
    source.check_finite("the source")
    target.check_finite("the target")
