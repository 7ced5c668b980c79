"""A smaller Llama from a larger one: width pruning in closed form, with the same cache geometry.

Depth, KV heads and head_dim stay; the hidden and MLP widths shrink. Three steps: one rotation of the residual
stream, found from its second moment, whose leading directions are kept (as in SliceGPT, arXiv:2401.15000);
the MLP neurons with the most output energy; then, layer by layer, a ridge refit of what writes to the residual
stream. Q, K and V are left unfitted: refitted to the target's, they would make a ridge cache map the identity.

Axes here: N windows, T positions, C the target's hidden width, W the pruned one, M MLP neurons, Q query heads,
D head dimension. What is held for all windows at once is a few (N, T, C); MLP activations exist for
`chunk_windows` windows at a time. The arithmetic is float32, sums over chunks and solves are float64.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvlib.errors import KvlibError

HEAD_SHARE = 4  # how often the final norm's second moment counts: the head reads it, and nothing after mends it


@dataclass(frozen=True)
class LayerReport:
    """One layer: the share of residual-stream energy missed after it, the share of MLP energy its neurons keep."""

    layer: int
    residual_error: float
    mlp_energy_kept: float


@dataclass(frozen=True)
class PruningReport:
    """What pruning kept, all measured on the calibration windows; shares are fractions."""

    energy_kept: float  # of the normalised residual stream, by the rotation
    layers: list[LayerReport]
    head_error: float  # share of the final norm's energy that the refitted head cannot see
    body_parameters_kept: float  # embedding and head left out
    calibration_tokens: int
    seconds: float


@torch.no_grad()
def prune_width(
    target: LlamaForCausalLM,
    windows: torch.Tensor,
    hidden_size: int,
    intermediate_size: int,
    *,
    chunk_windows: int = 4,
    penalty: float = 1e-2,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[LlamaForCausalLM, PruningReport]:
    """Prune `target` to `hidden_size` x `intermediate_size`, calibrated on `windows`.

    windows        (N, T) int64 token ids; many articles help more than many tokens
    chunk_windows  how many windows pass through a layer together: memory, not the result, depends on it
    penalty        ridge penalty of the refits, in units of the Gram matrix's mean diagonal; pulls to the slice
    progress       called with (layers done, layers to do); every layer counts once in each of the two passes

    Returns an ordinary LlamaForCausalLM (explicit head_dim, untied head) in the target's dtype and on its
    device, and a PruningReport. Deterministic. Raises KvlibError for what it cannot prune.
    """
    _check(target, windows, hidden_size, intermediate_size, chunk_windows, penalty)
    began = time.perf_counter()
    config, device = target.config, target.model.embed_tokens.weight.device
    windows = windows.to(device)
    layers = len(target.model.layers)

    def done(count: int) -> None:
        if progress is not None:
            progress(count, 2 * layers)

    run = _Run(target, windows, chunk_windows)
    moment, importance = _survey(run, done)
    if not (torch.isfinite(moment).all() and all(torch.isfinite(i).all() for i in importance)):
        raise KvlibError(
            "the target's activations on the calibration windows are not finite: expected a target that "
            "computes finite logits on them; check its weights and dtype"
        )
    energy, vectors = torch.linalg.eigh(moment)
    vectors = vectors[:, -hidden_size:].flip(1)
    # An eigenvector's sign is arbitrary: fix it, or rounding could mirror whole weight columns.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    basis = (vectors * largest.sign()).float()  # (C, W)
    kept = [i.topk(intermediate_size).indices.sort().values for i in importance]

    weights, errors, head_error = _slice_and_refit(run, basis, kept, penalty, done)
    source = _assemble(target, weights, hidden_size, intermediate_size)
    report = PruningReport(
        energy_kept=float(energy[-hidden_size:].sum() / energy.sum()),
        layers=[
            LayerReport(n, errors[n], float(importance[n][kept[n]].sum() / importance[n].sum().clamp_min(1e-300)))
            for n in range(layers)
        ],
        head_error=head_error,
        body_parameters_kept=_body_parameters(source) / _body_parameters(target),
        calibration_tokens=windows.numel(),
        seconds=time.perf_counter() - began,
    )
    return source, report


class _Run:
    """The target's constants and the arithmetic that target and source share, for one call."""

    def __init__(self, target: LlamaForCausalLM, windows: torch.Tensor, chunk_windows: int):
        config = target.config
        self.target, self.windows = target, windows
        self.device = windows.device
        self.head_dim = target.model.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.activation = ACT2FN[config.hidden_act]
        self.embedding = target.model.embed_tokens.weight.to(self.device, torch.float32)  # (V, C)
        positions = torch.arange(windows.shape[1], device=self.device)[None]
        self.cos, self.sin = target.model.rotary_emb(self.embedding, positions)  # (1, T, D), scaling included
        self.chunks = [slice(n, n + chunk_windows) for n in range(0, len(windows), chunk_windows)]

    def read(self, linear, gain=None):
        """A linear layer's (weight, bias) in float32, the gain of the norm that it reads folded in."""
        weight = linear.weight.to(self.device, torch.float32)
        if gain is not None:
            weight = weight * gain.to(self.device, torch.float32)
        return weight, None if linear.bias is None else linear.bias.to(self.device, torch.float32)

    def attention(self, layer):
        """The layer's q, k and v, with the norm folded in, and its o, each as (weight, bias)."""
        block, gain = layer.self_attn, layer.input_layernorm.weight
        qkv = [self.read(p, gain) for p in (block.q_proj, block.k_proj, block.v_proj)]
        return qkv, self.read(block.o_proj)

    def mlp(self, layer):
        """The layer's gate and up, with the norm folded in, and its down, each as (weight, bias)."""
        block, gain = layer.mlp, layer.post_attention_layernorm.weight
        return [self.read(block.gate_proj, gain), self.read(block.up_proj, gain)], self.read(block.down_proj)

    def heads(self, x, qkv):
        """Normalised stream x (n, T, *) -> the query heads' outputs side by side (n, T, Q * D)."""
        n, t, _ = x.shape
        q, k, v = (F.linear(x, *p).view(n, t, -1, self.head_dim).transpose(1, 2) for p in qkv)  # (n, heads, T, D)
        q, k = apply_rotary_pos_emb(q, k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(n, t, -1)

    def neurons(self, x, gate_up):
        """Normalised stream x (n, T, *) -> the MLP neurons' activations (n, T, M)."""
        gate, up = gate_up
        return self.activation(F.linear(x, *gate)).mul_(F.linear(x, *up))


def _survey(run: _Run, done: Callable[[int], None]):
    """One pass of the target: second moment of what the norms emit (C, C), and every neuron's output energy [(M)].

    A neuron's energy is that of its activation times the squared norm of its output column.
    """
    moment = torch.zeros(run.embedding.shape[1], run.embedding.shape[1], dtype=torch.float64, device=run.device)
    stream, importance = run.embedding[run.windows], []  # (N, T, C)
    for number, layer in enumerate(run.target.model.layers):
        (qkv, o), (gate_up, down) = run.attention(layer), run.mlp(layer)
        energy = torch.zeros(down[0].shape[1], dtype=torch.float64, device=run.device)
        for chunk in run.chunks:
            x = _normalise(stream[chunk], run.eps)
            moment += _product(x, x)
            stream[chunk] += F.linear(run.heads(x, qkv), *o)
            x = _normalise(stream[chunk], run.eps)
            moment += _product(x, x)
            activations = run.neurons(x, gate_up)
            stream[chunk] += F.linear(activations, *down)
            energy += activations.square_().flatten(0, 1).sum(0)
        importance.append(energy * down[0].double().square().sum(0))
        done(number + 1)
    for chunk in run.chunks:
        x = _normalise(stream[chunk], run.eps)
        moment += HEAD_SHARE * _product(x, x)
    return moment, importance


def _slice_and_refit(run: _Run, basis, kept, penalty: float, done: Callable[[int], None]):
    """The second pass: target and source side by side, each refit seeing the errors of all before it.

    basis (C, W), kept: per layer the neurons that stay. Returns the source's weights by name, the residual
    error after each layer, and the head's.
    """
    wide, width = basis.shape
    eps = run.eps * wide / width  # the same floor under the norm, whose mean runs over fewer directions
    embedding = run.embedding @ basis
    weights, errors = {"model.embed_tokens.weight": embedding}, []
    target, source = run.embedding[run.windows], embedding[run.windows]  # (N, T, C), (N, T, W)
    gap = torch.empty_like(source)  # rotated target minus source
    layers = run.target.model.layers
    tally = _Energy()
    for chunk in run.chunks:
        tally.add(target[chunk], target[chunk] @ basis)

    def keep(name, weight, bias=None):
        weights[f"{name}.weight"] = weight
        if bias is not None:
            weights[f"{name}.bias"] = bias

    def write_refitted(name, target_step, source_inputs, output, start):
        """Advance the target, refit the source's writing layer to it, advance the source; return the error."""
        nonlocal tally
        bias = None if output[1] is None else output[1] @ basis
        tally, fit = _Energy(), _Refit(start)
        for chunk in run.chunks:
            target[chunk] += target_step(chunk)
            rotated = target[chunk] @ basis
            tally.add(target[chunk], rotated)
            gap[chunk] = rotated - source[chunk]
            fit.add(source_inputs(chunk), gap[chunk] if bias is None else gap[chunk] - bias)
        weight = fit.solve(penalty)
        keep(name, weight, bias)
        missed = 0.0
        for chunk in run.chunks:
            step = F.linear(source_inputs(chunk), weight, bias)
            source[chunk] += step
            gap[chunk] -= step
            missed += float(gap[chunk].square().sum())
        return missed / tally.kept

    for number, layer in enumerate(layers):
        name = f"model.layers.{number}"
        qkv, o = run.attention(layer)
        sliced = [(weight @ basis, bias) for weight, bias in qkv]
        for letter, pair in zip("qkv", sliced):
            keep(f"{name}.self_attn.{letter}_proj", *pair)
        gain = tally.norm_gain(wide / width)
        keep(f"{name}.input_layernorm", torch.full((width,), gain, device=run.device))
        # As wide as a residual stream, and attention is dear: held for the second sweep, not computed again.
        heads = torch.cat([run.heads(_normalise(source[c], eps, gain), sliced) for c in run.chunks])
        write_refitted(
            f"{name}.self_attn.o_proj",
            lambda c: F.linear(run.heads(_normalise(target[c], run.eps), qkv), *o),
            lambda c: heads[c],
            o,
            basis.T @ o[0],
        )
        del heads

        gate_up, down = run.mlp(layer)
        chosen = kept[number]
        sliced = [(weight[chosen] @ basis, None if bias is None else bias[chosen]) for weight, bias in gate_up]
        for part, pair in zip(("gate", "up"), sliced):
            keep(f"{name}.mlp.{part}_proj", *pair)
        gain = tally.norm_gain(wide / width)
        keep(f"{name}.post_attention_layernorm", torch.full((width,), gain, device=run.device))
        error = write_refitted(
            f"{name}.mlp.down_proj",
            lambda c: F.linear(run.neurons(_normalise(target[c], run.eps), gate_up), *down),
            lambda c: run.neurons(_normalise(source[c], eps, gain), sliced),
            down,
            basis.T @ down[0][:, chosen],
        )
        errors.append(error)
        done(len(layers) + number + 1)

    gain = tally.norm_gain(wide / width)
    keep("model.norm", torch.full((width,), gain, device=run.device))
    final_gain = run.target.model.norm.weight.to(run.device, torch.float32)
    fit, missed, total = _Refit(final_gain[:, None] * basis), 0.0, 0.0
    for chunk in run.chunks:
        fit.add(_normalise(source[chunk], eps, gain), _normalise(target[chunk], run.eps) * final_gain)
    back = fit.solve(penalty)  # (C, W)
    for chunk in run.chunks:
        wanted = _normalise(target[chunk], run.eps) * final_gain
        missed += float((wanted - F.linear(_normalise(source[chunk], eps, gain), back)).square().sum())
        total += float(wanted.square().sum())
    keep("lm_head", run.read(run.target.lm_head)[0] @ back)
    return weights, errors, missed / total


class _Refit:
    """argmin_W |X Wᵀ - Y|² + penalty · mean diagonal of XᵀX · |W - start|², from sums over chunks."""

    def __init__(self, start):
        self.start = start.double()  # (outputs, inputs)
        outputs, inputs = start.shape
        self.gram = self.start.new_zeros(inputs, inputs)
        self.cross = self.start.new_zeros(inputs, outputs)

    def add(self, x, y):
        self.gram += _product(x, x)
        self.cross += _product(x, y)

    def solve(self, penalty: float):
        ridge = penalty * self.gram.diagonal().mean()
        if ridge == 0:  # inputs that are all zero say nothing
            return self.start.float()
        self.gram.diagonal().add_(ridge)
        return torch.linalg.solve(self.gram, self.cross + ridge * self.start.T).T.float().contiguous()


class _Energy:
    """Energy of the target's residual stream, and of the part of it that the rotation keeps."""

    def __init__(self):
        self.total = self.kept = 0.0

    def add(self, stream, rotated):
        self.total += float(stream.square().sum())
        self.kept += float(rotated.square().sum())

    def norm_gain(self, widening: float) -> float:
        """The norm's constant: what a slice of the stream must be scaled by to be the slice of the norm's output."""
        return math.sqrt(self.kept / self.total * widening)


def _normalise(x, eps: float, gain: float = 1.0):
    return x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain)


def _product(x, y):
    """Xᵀ Y over all leading axes: a float32 product, to be summed in float64."""
    return x.flatten(0, -2).T @ y.flatten(0, -2)


def _assemble(target, weights, hidden_size: int, intermediate_size: int) -> LlamaForCausalLM:
    """An ordinary model around the weights, in the target's dtype."""
    parameter = target.model.embed_tokens.weight
    settings = target.config.to_dict()
    settings.pop("quantization_config", None)  # a GGUF file's record: it forbids saving, and no longer holds
    settings |= {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "head_dim": target.model.layers[0].self_attn.head_dim,
        "rms_norm_eps": target.config.rms_norm_eps * target.config.hidden_size / hidden_size,
        "tie_word_embeddings": False,
        "dtype": parameter.dtype,
    }
    config = LlamaConfig(**settings)
    with torch.device("meta"):  # no random initialisation: quick, and the global generator stays untouched
        source = LlamaForCausalLM(config)
    source.load_state_dict({name: w.to(parameter.dtype) for name, w in weights.items()}, assign=True)
    source.model.rotary_emb = LlamaRotaryEmbedding(config).to(parameter.device)  # the only buffers
    source.generation_config = copy.deepcopy(target.generation_config)
    return source.eval()


def _body_parameters(model: LlamaForCausalLM) -> int:
    return sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()


def _check(target, windows, hidden_size, intermediate_size, chunk_windows, penalty) -> None:
    """Refuse, in one sentence each, what cannot be pruned."""
    if not isinstance(target, LlamaForCausalLM):
        raise KvlibError(
            f"the target is a {type(target).__name__}: expected a LlamaForCausalLM; load a Llama-family model"
        )
    config = target.config
    if not isinstance(hidden_size, int) or not 0 < hidden_size < config.hidden_size:
        raise KvlibError(
            f"hidden_size is {hidden_size}: expected less than the target's {config.hidden_size}; choose a smaller one"
        )
    if hidden_size % config.num_attention_heads:
        raise KvlibError(
            f"hidden_size is {hidden_size}: transformers expects a multiple of the {config.num_attention_heads} "
            f"query heads; choose {max(1, hidden_size // config.num_attention_heads) * config.num_attention_heads}"
        )
    if not isinstance(intermediate_size, int) or not 0 < intermediate_size <= config.intermediate_size:
        raise KvlibError(
            f"intermediate_size is {intermediate_size}: expected 1 to the target's {config.intermediate_size}"
        )
    if chunk_windows < 1:
        raise KvlibError(f"chunk_windows is {chunk_windows}: expected 1 or more; 4 suits most machines")
    if not (penalty > 0 and math.isfinite(penalty)):
        raise KvlibError(f"penalty is {penalty}: expected a positive number; 0.01 suits most targets")
    if not isinstance(windows, torch.Tensor) or windows.dtype != torch.int64 or windows.dim() != 2:
        given = f"{windows.dtype} {tuple(windows.shape)}" if isinstance(windows, torch.Tensor) else type(windows).__name__
        raise KvlibError(f"windows are {given}: expected an int64 tensor (N, T) of token ids; stack equal windows")
    count, length = windows.shape
    if count < 1 or not 2 <= length <= config.max_position_embeddings:
        raise KvlibError(
            f"windows are {count} x {length}: expected at least one, of 2 to {config.max_position_embeddings} "
            "tokens each; cut the text into such windows"
        )
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= config.vocab_size:
        raise KvlibError(
            f"windows hold token ids from {low} to {high}: expected 0 to {config.vocab_size - 1}; "
            "tokenise with the target's own tokenizer"
        )
    for name, parameter in target.named_parameters():
        if not parameter.is_floating_point() or not torch.isfinite(parameter).all():
            raise KvlibError(
                f"the target's weight {name} is not finite or not floating point: expected finite float weights; "
                "load the target unquantised, from an intact file"
            )
