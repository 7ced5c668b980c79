"""A learned low-rank residual on a base map: the study's correction."""

import functools
from dataclasses import dataclass, fields, replace

import torch

from kvlib.attention import IDENTITY, Affine
from kvlib.cache import Geometry
from kvlib.errors import KvlibError
from kvlib.maps.base import CacheMap
from kvlib.maps.ridge import RidgeMap
from kvlib.products import shares

RESIDUALS = ("linear", "quadratic")
FEATURES = ("own", "rms", "rope_stripped")
WEIGHTS = ("key_left", "key_right", "value_left", "value_right")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding as Llama applies it: x (B, H, T, D), cos and sin (B, T, D)."""
    return x * cos.unsqueeze(1) + half_turn(x) * sin.unsqueeze(1)


def half_turn(x: torch.Tensor) -> torch.Tensor:
    """(x₁, x₂) -> (−x₂, x₁) along the last dimension: what `rotate` multiplies by the sine."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def angle_norm(angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """cos² + sin², one number for all positions: 1, or the square of an attention scaling that some rope types carry."""
    return angles[0][0, 0, 0] ** 2 + angles[1][0, 0, 0] ** 2


@dataclass(frozen=True)
class ResidualMap(CacheMap):
    """x' = b(x) + s · σ · f(x) A B, with f by `residual` and `features`.

        linear, own      f = x / σ                        F = D
        quadratic, own   f = [x / σ, (x / σ)²]            F = 2 D
        rms              f = x / rms(x), per position     F = D (2 D when quadratic)
        rope_stripped    keys: f = R(p)⁻¹ x / σ, and R(p) on the correction; values as own

    key_left, value_left: A (L, H, F, r). key_right, value_right: B (L, H, r, D). key_scale, value_scale: σ (L, H),
    the RMS of the source's cache on the training partition. base: None for direct, or a RidgeMap.
    """

    key_left: torch.Tensor
    key_right: torch.Tensor
    value_left: torch.Tensor
    value_right: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    base: RidgeMap | None = None
    residual: str = "linear"
    features: str = "own"
    scale: float = 1.0

    kind = "residual"

    @classmethod
    def initial(
        cls,
        key_scale,
        value_scale,
        head_dim: int,
        rank: int,
        *,
        residual="linear",
        features="own",
        base=None,
        generator,
    ) -> "ResidualMap":
        """A random, B zero: the untrained map is its base. `generator` is a CPU torch.Generator."""
        if key_scale.ndim != 2 or value_scale.shape != key_scale.shape:
            raise KvlibError(
                f"scales of keys {tuple(key_scale.shape)} and values {tuple(value_scale.shape)} given, expected (L, H) of both: "
                "one RMS per layer and KV head"
            )
        layers, heads = key_scale.shape
        if not isinstance(rank, int) or not 1 <= rank <= head_dim:
            raise KvlibError(f"rank {rank} given, expected 1 to head_dim = {head_dim}")
        if residual not in RESIDUALS or features not in FEATURES:
            raise KvlibError(
                f"residual {residual!r} with features {features!r} given, expected one of {RESIDUALS} and {FEATURES}"
            )
        width = head_dim * (2 if residual == "quadratic" else 1)
        lefts = [torch.randn(layers, heads, width, rank, generator=generator) / width**0.5 for _ in range(2)]
        rights = [torch.zeros(layers, heads, rank, head_dim) for _ in range(2)]
        fresh = cls(
            lefts[0], rights[0], lefts[1], rights[1], key_scale, value_scale, base, residual, features
        )
        fresh.check_fits(Geometry(layers, heads, head_dim))
        return fresh

    @property
    def geometry(self):
        layers, heads, _, dim = self.key_right.shape
        return Geometry(layers, heads, dim)

    @property
    def rank(self) -> int:
        return self.key_right.shape[2]

    @property
    def parameters(self) -> int:
        """Learned numbers only: the base and σ are not trained."""
        return sum(getattr(self, name).numel() for name in WEIGHTS)

    @property
    def why_not_affine(self):
        if self.residual == "quadratic":
            return "a quadratic residual is not affine in the cached vector"
        if self.features == "rms":
            return "RMS-normalised features divide by each position's own norm"
        if self.features == "rope_stripped":
            return "RoPE-stripped features depend on each position's rotation"
        return None

    @property
    def needs_rotary(self):
        return self.features == "rope_stripped"

    def with_scale(self, scale: float) -> "ResidualMap":
        """The same weights with another residual scale s."""
        return replace(self, scale=scale)

    def affine(self, layer):
        if self.why_not_affine:
            return None
        bases = self.base.affine(layer) if self.base is not None else (IDENTITY, IDENTITY)
        lefts = (self.key_left[layer], self.value_left[layer])
        rights = (self.key_right[layer], self.value_right[layer])
        return tuple(Affine(b.dense, b.bias, a, r, self.scale) for b, a, r in zip(bases, lefts, rights))

    @functools.cached_property
    def value_affines(self):
        if self.residual == "quadratic" or self.features == "rms":
            return None
        own = replace(self, features="own")  # values have no rotation to strip
        return [values for _, values in own.affines]

    def correct(self, layer, keys, values, rotary=None):
        keys, values = keys.to(self.key_left.dtype), values.to(self.key_left.dtype)
        new_keys, new_values = (keys, values) if self.base is None else self.base.correct(layer, keys, values)
        key_scale, value_scale = (t[layer][:, None, None] for t in (self.key_scale, self.value_scale))
        delta_keys = self.latent(layer, keys, False, rotary) @ self.key_right[layer]
        if self.needs_rotary:
            delta_keys = rotate(delta_keys, *rotary)
        delta_values = self.latent(layer, values, True) @ self.value_right[layer]
        return (
            new_keys + self.scale * key_scale * delta_keys,
            new_values + self.scale * value_scale * delta_values,
        )

    def latent(self, layer: int, x: torch.Tensor, values: bool, rotary=None) -> torch.Tensor:
        """f(x) A of a layer's keys or values: x (B, H, T, D) -> (B, H, T, r)."""
        return (
            self.features_of(layer, x, values, rotary) @ (self.value_left if values else self.key_left)[layer]
        )

    def features_of(self, layer: int, x: torch.Tensor, values: bool, rotary=None) -> torch.Tensor:
        """f(x) of a layer's keys or values: x (B, H, T, D) -> (B, H, T, F)."""
        if self.needs_rotary and not values:
            cos, sin = rotary
            # R(p)⁻¹ = R(−p); dividing by cos² + sin² undoes an attention scaling that some rope types carry
            x = rotate(x, cos, -sin) / (cos * cos + sin * sin).unsqueeze(1)
        scale = (self.value_scale if values else self.key_scale)[layer][:, None, None]
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12) if self.features == "rms" else x / scale
        return torch.cat([x, x * x], -1) if self.residual == "quadratic" else x

    @property
    def in_one_pass(self) -> bool:
        """Whether z = σ f(x) A can be had from x and x² by products alone, so that nothing of the cache's size is written."""
        return self.base is None and not (self.features == "rope_stripped" and self.residual == "quadratic")

    def low_rank(
        self, layer: int | slice, values: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(rows, rows of the squares or None, right) of a layer's keys or values, each (H, r, D), σ and s worked in.

        `layer` may be a slice of layers: (L, H, r, D) each.

        x' = x + w (x rowsᵀ + w x² squaresᵀ) right, with w = 1 / rms(x) for RMS-normalised features, else 1.
        """
        names = (
            ("value_left", "value_right", "value_scale") if values else ("key_left", "key_right", "key_scale")
        )
        left, right, sigma = (getattr(self, name)[layer] for name in names)
        rows, squares, sigma = left.mT, None, sigma[..., None, None]
        rms = self.features == "rms"
        if self.residual == "quadratic":
            rows, squares = rows.chunk(2, -1)
            squares = squares if rms else squares / sigma
        return rows, squares, right * (self.scale * sigma if rms else self.scale)

    def _correct_chunk_(self, layer, keys, values, angles):
        # prompts and heads as one axis must be a view, or there is nothing to write to
        views = all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (keys, values))
        if not (self.in_one_pass and views and keys.dtype == self.key_left.dtype):
            super()._correct_chunk_(layer, keys, values, angles)
            return
        turn = angles if self.features == "rope_stripped" else None
        self._add_residual_(keys.flatten(0, 1), self.low_rank(layer, False), turn)
        self._add_residual_(values.flatten(0, 1), self.low_rank(layer, True), None)

    def _add_residual_(self, x, weights, turn) -> None:
        """x (N, T, D) += s σ f(x) A B without a copy of x: z = σ f(x) A first, (N, r, T), then z B on top of x."""
        heads, rms = weights[0].shape[0], self.features == "rms"
        rows, squares, right = (None if w is None else w.repeat(x.shape[0] // heads, 1, 1) for w in weights)
        if turn is not None:
            cos, sin = (t.to(x.dtype).unsqueeze(1).expand(-1, heads, -1, -1).flatten(0, 1) for t in turn)
            right = right / angle_norm(turn)
            turned_rows, turned_right = half_turn(rows), half_turn(right)
        for part in shares(*x.shape[:2], x.device):
            block = part.along(x)  # (n, T', D)
            if turn is not None:
                angles = part.along(cos), part.along(sin)
                z = torch.bmm(part.whole(rows), (block * angles[0]).transpose(1, 2))
                z.baddbmm_(part.whole(turned_rows), (block * angles[1]).transpose(1, 2))
                z = z.transpose(1, 2)
                block.addcmul_(torch.bmm(z, part.whole(right)), angles[0])
                block.addcmul_(torch.bmm(z, part.whole(turned_right)), angles[1])
                continue
            z = torch.bmm(part.whole(rows), block.transpose(1, 2))
            weight = torch.rsqrt(block.square().mean(-1) + 1e-12).unsqueeze(1) if rms else 1.0  # (n, 1, T')
            if squares is not None:
                z.add_(torch.bmm(part.whole(squares), block.square().transpose(1, 2)).mul_(weight))
            if rms:
                z.mul_(weight)
            block.baddbmm_(z.transpose(1, 2), part.whole(right))

    def check_shapes(self):
        layers, heads, rank, dim = self.key_right.shape
        if not 1 <= rank <= dim:
            raise ValueError(f"rank {rank}, expected 1 to head_dim = {dim}")
        width = dim * (2 if self.residual == "quadratic" else 1)
        wanted = dict.fromkeys(("key_left", "value_left"), (layers, heads, width, rank))
        wanted |= dict.fromkeys(("key_right", "value_right"), (layers, heads, rank, dim))
        wanted |= dict.fromkeys(("key_scale", "value_scale"), (layers, heads))
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor.shape != shape or not tensor.is_floating_point():
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} floating point"
                )
        if self.residual not in RESIDUALS or self.features not in FEATURES or not abs(self.scale) < 3.4e38:
            raise ValueError(f"residual {self.residual!r}, features {self.features!r}, scale {self.scale!r}")
        if not ((self.key_scale > 0).all() and (self.value_scale > 0).all()):
            raise ValueError("a scale of the source's cache is not positive")
        if self.base is not None:
            if not isinstance(self.base, RidgeMap):
                raise ValueError(
                    f"the base is a {type(self.base).__name__}, expected a RidgeMap or None for direct"
                )
            self.base.check_shapes()
            if self.base.geometry != self.geometry:
                raise ValueError(f"the base is for {self.base.geometry}, the residual for {self.geometry}")

    def tensors(self):
        own = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        if self.base is not None:
            own |= {f"base.{name}": tensor for name, tensor in self.base.tensors().items()}
        return own

    def settings(self):
        base = None if self.base is None else self.base.settings()
        return {"residual": self.residual, "features": self.features, "scale": self.scale, "base": base}

    @classmethod
    def restore(cls, settings, tensors):
        inner = {name.removeprefix("base."): t for name, t in tensors.items() if name.startswith("base.")}
        own = {name: t for name, t in tensors.items() if not name.startswith("base.")}
        base = RidgeMap.restore(settings["base"], inner) if settings["base"] is not None else None
        return cls(**own, base=base, **{name: settings[name] for name in ("residual", "features", "scale")})
