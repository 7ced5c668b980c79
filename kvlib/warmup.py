"""The warm-up's loss: how far corrected vectors are from the target's own; its gradients come with it, in closed form."""

import torch

from kvlib.kernels.warmup import c_kv_mse
from kvlib.maps.residual import WEIGHTS, ResidualMap, rotate
from kvlib.ragged import RaggedPrefix, parts

POSITIONS = 128  # per prompt


def kv_mse(cache_map: ResidualMap, source: RaggedPrefix, target: RaggedPrefix, rotary=None) -> torch.Tensor:
    """Mean over prompts, layers, heads, K and V of |x' − y|² / |y|², y the target's cached vectors.

    Over evenly spaced positions, about `POSITIONS` of them: neighbours say much the same. Differentiable in the map's
    four weights.
    """
    step = max(1, max(source.lengths) // POSITIONS)
    source, target = source.every(step), target.every(step)
    angles = rotary(source.positions() * step) if rotary else None
    return _Error.apply(*(getattr(cache_map, name) for name in WEIGHTS), cache_map, source, target, angles)


class _Error(torch.autograd.Function):
    """One pass over the layers, each while it is in the processor's cache: nothing of the caches' length is kept.

    In C where there is a compiler, RoPE-stripped maps excepted.
    """

    @staticmethod
    def forward(ctx, key_left, key_right, value_left, value_right, cache_map, source, target, angles):
        if (compiled := c_kv_mse(cache_map, source, target)) is not None:
            loss, gradients = compiled
            ctx.save_for_backward(*gradients)
            return key_left.new_tensor(loss)
        weights = {False: (key_left, key_right), True: (value_left, value_right)}
        gradients = {values: tuple(map(torch.empty_like, pair)) for values, pair in weights.items()}
        wide, lengths, total = key_left.dtype, source.lengths, 0.0
        for layer in range(source.layers):
            xs, ys = source.layer(layer, wide), target.layer(layer, wide)
            bases = _bases(cache_map, layer, xs)
            for values, x, y, base in zip((False, True), xs, ys, bases):
                turn = angles if cache_map.needs_rotary and not values else None
                sigma = (cache_map.value_scale if values else cache_map.key_scale)[layer, :, None, None]
                left, right = (weight[layer] for weight in weights[values])
                features = cache_map.features_of(layer, x[None], values, angles)[0]  # (H, N, F)
                latent = features @ left  # (H, N, r)
                delta = latent @ (right * (cache_map.scale * sigma))
                error = (base - y).add_(delta if turn is None else rotate(delta[None], *turn)[0])
                share = _shares(y, lengths)
                weighted = error * share  # half the gradient of x'
                total = total + (weighted * error).sum()
                back = weighted if turn is None else rotate(weighted[None], turn[0], -turn[1])[0]
                back = back * (2 * cache_map.scale * sigma)
                d_left, d_right = (gradient[layer] for gradient in gradients[values])
                torch.bmm(features.mT, back @ right.mT, out=d_left)
                torch.bmm(latent.mT, back, out=d_right)
        count = 2 * source.layers * source.batch * key_left.shape[1]
        ctx.save_for_backward(*(g.div_(count) for pair in gradients.values() for g in pair))
        return total / count

    @staticmethod
    def backward(ctx, upstream):
        return *(gradient * upstream for gradient in ctx.saved_tensors), None, None, None, None


def _bases(cache_map: ResidualMap, layer: int, xs: tuple) -> tuple:
    """b(x) of keys and values (H, N, D)."""
    return xs if cache_map.base is None else cache_map.base.correct(layer, *xs)


def _shares(y: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """1 / |y|² of each head and prompt, at every position of it: y (H, N, D) -> (H, N, 1)."""
    energy = y.square().sum(-1, keepdim=True)
    for part in parts(lengths):
        energy[:, part] = energy[:, part].sum(1, keepdim=True)
    return energy.reciprocal_()
