"""Width pruning in closed form: a smaller Llama from a larger one, with the same cache geometry.

One rotation of the residual stream, whose leading directions are kept (as in SliceGPT, arXiv:2401.15024); the
MLP neurons of most output energy; layer by layer, a ridge refit of what writes to the stream. Q, K and V stay
unfitted: refitted to the target's, they would make a ridge cache map the identity.
Axes here: N windows, T positions, C the target's hidden width, W the pruned one, M MLP neurons, Q heads.
A few (N, T, C) are held; MLP activations, chunk by chunk. Float32; sums and solves float64.
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
from kvlib.linear import linear


@dataclass(frozen=True)
class LayerReport:
    """One layer; both figures are shares, on the calibration windows."""

    layer: int
    residual_error: float  # energy of the rotated target stream that the source misses after this layer
    mlp_energy_kept: float  # by the neurons that stay


@dataclass(frozen=True)
class PruningReport:
    """What pruning kept, as shares; all but the parameters are measured on the calibration windows."""

    energy_kept: float  # of the normalised residual stream, by the rotation
    layers: list[LayerReport]
    head_error: float  # energy of the final norm's output that the refitted head cannot see
    body_parameters_kept: float  # of the layers: embedding, final norm and head left out
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
    """Prune `target` to `hidden_size` x `intermediate_size`, calibrated on `windows`; deterministic.

    windows        (N, T) int64 token ids; many articles help more than many tokens
    chunk_windows  windows that pass through a layer together: memory depends on it, the result does not
    penalty        of the refits, in units of the Gram matrix's mean diagonal; it pulls to the plain slice
    progress       called with (layers done, layers to do); every layer counts once in each of two passes

    Returns an ordinary LlamaForCausalLM (explicit head_dim, untied head) in the target's dtype and on its
    device, and the report. Raises KvlibError for what it cannot prune.
    """
    _check(target, windows, hidden_size, intermediate_size, chunk_windows, penalty)
    began = time.perf_counter()
    progress = progress or (lambda done, total: None)
    run = _Run(target, windows, chunk_windows)
    moment, importance = _survey(run, progress)
    finite = all(sums.isfinite().all() for sums in (moment, *importance))
    _demand(finite, "the target's activations are not finite: expected finite ones; check its weights")
    energy, vectors = torch.linalg.eigh(moment)
    basis = vectors[:, -hidden_size:].flip(1)  # (C, W)
    # An eigenvector's sign is arbitrary: fix it, or rounding could mirror whole columns of weights.
    basis = (basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()).float()
    stay = [neurons.topk(intermediate_size).indices.sort().values for neurons in importance]

    weights, errors, head_error = _slice_and_refit(run, basis, stay, penalty, progress)
    source = _assemble(target, weights, hidden_size, intermediate_size)
    kept = [float(e[s].sum() / e.sum().clamp_min(1e-300)) for e, s in zip(importance, stay)]
    body, full_body = (sum(p.numel() for p in m.model.layers.parameters()) for m in (source, target))
    return source, PruningReport(
        energy_kept=float(energy[-hidden_size:].sum() / energy.sum()),
        layers=[LayerReport(n, *shares) for n, shares in enumerate(zip(errors, kept))],
        head_error=head_error,
        body_parameters_kept=body / full_body,
        calibration_tokens=windows.numel(),
        seconds=time.perf_counter() - began,
    )


class _Run:
    """One call's constants, and the arithmetic that target and source share."""

    def __init__(self, target: LlamaForCausalLM, windows: torch.Tensor, chunk_windows: int):
        self.target, self.device = target, target.model.embed_tokens.weight.device
        self.windows = windows.to(self.device)
        self.chunks = [slice(n, n + chunk_windows) for n in range(0, len(windows), chunk_windows)]
        self.embedding = self.read(target.model.embed_tokens)  # (V, C)
        self.eps, self.head_dim = target.config.rms_norm_eps, target.model.layers[0].self_attn.head_dim
        self.activation = ACT2FN[target.config.hidden_act]
        positions = torch.arange(windows.shape[1], device=self.device)[None]
        self.cos, self.sin = target.model.rotary_emb(self.embedding, positions)  # (1, T, D), scaled

    def read(self, module):
        return module.weight.to(self.device, torch.float32)

    def read_layer(self, layer):
        """The weights ([q, k, v], o, [gate, up], down), the gains of the norms that they read folded in."""
        block, gain = layer.self_attn, self.read(layer.input_layernorm)
        qkv = [self.read(linear) * gain for linear in (block.q_proj, block.k_proj, block.v_proj)]
        mlp, gain = layer.mlp, self.read(layer.post_attention_layernorm)
        gate_up = [self.read(linear) * gain for linear in (mlp.gate_proj, mlp.up_proj)]
        return qkv, self.read(block.o_proj), gate_up, self.read(mlp.down_proj)

    def heads(self, x, qkv):
        """Normalised stream x (n, T, *) -> the query heads' outputs side by side (n, T, Q * D)."""
        q, k, v = (
            linear(x, w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in qkv
        )  # (n, ·, T, D)
        q, k = apply_rotary_pos_emb(q, k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)

    def neurons(self, x, gate_up):
        """Normalised stream x (n, T, *) -> the MLP neurons' activations (n, T, M)."""
        return self.activation(linear(x, gate_up[0])).mul_(linear(x, gate_up[1]))


def _survey(run: _Run, progress: Callable[[int, int], None]):
    """Pass 1, the target: second moment of what its norms emit (C, C); per layer its neurons' energy (M)."""
    stream, importance = run.embedding[run.windows], []  # (N, T, C)
    moment = torch.zeros(stream.shape[-1], stream.shape[-1], dtype=torch.float64, device=run.device)
    for number, layer in enumerate(run.target.model.layers):
        qkv, o, gate_up, down = run.read_layer(layer)
        energy = torch.zeros(down.shape[1], dtype=torch.float64, device=run.device)
        for c in run.chunks:
            x = _normalise(stream[c], run.eps)
            moment += _product(x, x)
            stream[c] += linear(run.heads(x, qkv), o)
            x = _normalise(stream[c], run.eps)
            moment += _product(x, x)
            stream[c] += linear(activations := run.neurons(x, gate_up), down)
            energy += activations.square_().sum((0, 1))
        # What a neuron writes: its activation's energy times the squared norm of its output column.
        importance.append(energy * down.double().square().sum(0))
        progress(number + 1, 2 * len(run.target.model.layers))
    for c in run.chunks:
        x = _normalise(stream[c], run.eps)
        moment += 4 * _product(x, x)  # the head reads this one, and no layer after mends it
    return moment, importance


def _slice_and_refit(run: _Run, basis, stay, penalty: float, progress: Callable[[int, int], None]):
    """Pass 2, target and source side by side, so that each refit makes up for the errors before it.

    basis (C, W); stay: the neurons kept, by layer. Returns weights by name, the layers' errors, the head's.
    """
    layers, (wide, width) = run.target.model.layers, basis.shape
    eps = run.eps * wide / width  # the same floor under a norm whose mean runs over fewer directions
    embedding = run.embedding @ basis
    target, source = run.embedding[run.windows], embedding[run.windows]  # (N, T, C), (N, T, W)
    gap = torch.zeros_like(source)  # rotated target minus source
    weights, errors = {"model.embed_tokens.weight": embedding}, []

    def set_gain(name):
        """The norm's constant: it turns the normalised slice into the slice of the normalised stream."""
        gain = math.sqrt(_energy(gap + source) / _energy(target) * wide / width)
        weights[f"{name}.weight"] = torch.full((width,), gain, device=run.device)
        return gain

    def refit(name, target_step, inputs, start):
        """Advance the target; fit what the source's layer makes of its inputs to that; advance the source."""

        def pairs():
            for c in run.chunks:
                target[c] += target_step(c)
                gap[c] = linear(target[c], basis.T) - source[c]
                yield inputs(c), gap[c]

        weights[f"{name}.weight"] = fitted = _ridge(pairs(), start, penalty)
        for c in run.chunks:
            source[c] += (step := linear(inputs(c), fitted))
            gap[c] -= step

    def slice_and_refit_layer(name, layer, chosen):
        qkv, o, gate_up, down = run.read_layer(layer)
        gain = set_gain(f"{name}.input_layernorm")
        small_qkv = [w @ basis for w in qkv]
        weights.update({f"{name}.self_attn.{part}_proj.weight": w for part, w in zip("qkv", small_qkv)})
        # No wider than a residual stream, and attention is dear: held for both of the refit's sweeps.
        heads = torch.cat([run.heads(_normalise(source[c], eps, gain), small_qkv) for c in run.chunks])
        refit(
            f"{name}.self_attn.o_proj",
            lambda c: linear(run.heads(_normalise(target[c], run.eps), qkv), o),
            lambda c: heads[c],
            basis.T @ o,
        )
        gain = set_gain(f"{name}.post_attention_layernorm")
        small = [w[chosen] @ basis for w in gate_up]
        weights.update({f"{name}.mlp.{part}_proj.weight": w for part, w in zip(("gate", "up"), small)})
        refit(
            f"{name}.mlp.down_proj",
            lambda c: linear(run.neurons(_normalise(target[c], run.eps), gate_up), down),
            lambda c: run.neurons(_normalise(source[c], eps, gain), small),
            basis.T @ down[:, chosen],
        )

    for number, layer in enumerate(layers):
        slice_and_refit_layer(f"model.layers.{number}", layer, stay[number])
        errors.append(_energy(gap) / _energy(gap + source))
        progress(len(layers) + number + 1, 2 * len(layers))

    gain, final_gain = set_gain("model.norm"), run.read(run.target.model.norm)
    read = [_normalise(source[c], eps, gain) for c in run.chunks]
    wanted = [_normalise(target[c], run.eps) * final_gain for c in run.chunks]
    back = _ridge(zip(read, wanted), final_gain[:, None] * basis, penalty)  # (C, W)
    weights["lm_head.weight"] = run.read(run.target.lm_head) @ back
    missed = sum(_energy(y - x @ back.T) for x, y in zip(read, wanted))
    return weights, errors, missed / sum(map(_energy, wanted))


def _normalise(x, eps: float, gain: float = 1.0):
    return x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain)


def _energy(x) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _product(x, y):
    """Xᵀ Y over all leading axes: a float32 product, to be summed in float64."""
    return linear(x.flatten(0, -2).T.contiguous(), y.flatten(0, -2).T.contiguous())


def _ridge(pairs, start, penalty: float):
    """argmin over W of |X Wᵀ - Y|² + penalty · mean diagonal of XᵀX · |W - start|², from chunks (X, Y)."""
    outputs, inputs = start.shape
    gram, cross = (start.new_zeros(inputs, n, dtype=torch.float64) for n in (inputs, outputs))
    for x, y in pairs:
        gram += _product(x, x)
        cross += _product(x, y)
    ridge = (penalty * gram.diagonal().mean()).clamp_min(1e-30)  # inputs that are all zero leave the start
    gram.diagonal().add_(ridge)
    return torch.linalg.solve(gram, cross + ridge * start.double().T).T.float().contiguous()


def _assemble(target, weights, hidden_size: int, intermediate_size: int) -> LlamaForCausalLM:
    """An ordinary model around the weights, in the target's dtype."""
    embedding = target.model.embed_tokens.weight
    settings = target.config.to_dict() | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": target.config.rms_norm_eps * target.config.hidden_size / hidden_size,
        "tie_word_embeddings": False,
        "dtype": embedding.dtype,
    }
    settings.pop("quantization_config", None)  # a GGUF file's record: it forbids saving, and no longer holds
    config = LlamaConfig(**settings)
    with torch.device("meta"):  # no random initialisation: quick, and the global generator stays untouched
        source = LlamaForCausalLM(config)
    source.load_state_dict({name: w.to(embedding.dtype) for name, w in weights.items()}, assign=True)
    source.model.rotary_emb = LlamaRotaryEmbedding(config).to(embedding.device)  # the only buffers
    source.generation_config = copy.deepcopy(target.generation_config)
    return source.eval()


def _demand(holds, sentence: str) -> None:
    if not holds:
        raise KvlibError(sentence)


def _check(target, windows, hidden_size, intermediate_size, chunk_windows, penalty) -> None:
    """Refuse, in one sentence each, what cannot be pruned."""
    given = f"the target is a {type(target).__name__}:"
    _demand(isinstance(target, LlamaForCausalLM), f"{given} expected a LlamaForCausalLM; load a Llama")
    for name, weight in target.named_parameters():
        fits = weight.is_floating_point() and weight.isfinite().all()
        _demand(fits, f"the target's {name} is not finite float: load it unquantised, from an intact file")
        _demand(not name.endswith(".bias"), f"the target has {name}: expected no biases; choose one without")
    config, given = target.config, f"hidden_size is {hidden_size}:"
    wide, heads, neurons = config.hidden_size, config.num_attention_heads, config.intermediate_size
    nearest = max(1, hidden_size // heads) * heads
    _demand(0 < hidden_size < wide, f"{given} expected less than the target's {wide}; choose a smaller width")
    _demand(hidden_size == nearest, f"{given} expected a multiple of the {heads} heads; choose {nearest}")
    given = f"intermediate_size is {intermediate_size}:"
    _demand(0 < intermediate_size <= neurons, f"{given} expected 1 to the target's {neurons}; choose fewer")
    _demand(chunk_windows >= 1, f"chunk_windows is {chunk_windows}: expected 1 or more; 4 suits most")
    _demand(0 < penalty < math.inf, f"penalty is {penalty}: expected more than 0; 0.01 suits most targets")
    is_tensor = isinstance(windows, torch.Tensor)
    what = f"{windows.dtype} {tuple(windows.shape)}" if is_tensor else type(windows).__name__
    given = f"windows are {what}:"
    fits = is_tensor and windows.dtype == torch.int64 and windows.dim() == 2
    _demand(fits, f"{given} expected an int64 tensor (N, T) of token ids; stack windows of one length")
    longest, last = config.max_position_embeddings, config.vocab_size - 1
    fits = len(windows) >= 1 and 2 <= windows.shape[1] <= longest
    _demand(fits, f"{given} expected at least one window, of 2 to {longest} tokens; cut the text so")
    low, high = int(windows.min()), int(windows.max())
    given = f"windows hold token ids {low} to {high}: expected 0 to {last}"
    _demand(low >= 0 and high <= last, f"{given}; tokenise with the target's own tokenizer")
