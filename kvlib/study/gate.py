"""The gate that a pair must pass, and how well its two models know held-out text."""

import torch

from kvlib.cache import prefill
from kvlib.divergence import text_reference
from kvlib.errors import KvlibError
from kvlib.handoff import handoff
from kvlib.maps import DirectMap

MODES = ("materialised", "in_place", "absorbed")


@torch.no_grad()
def gate(target, prompts: torch.Tensor, prefix_tokens: int, tolerance: float) -> dict:
    """The target's own cache, taken out and put back through every handoff mode, against native's logits.

    The last prefix token is held back and read with the rest of the prompt, as every path does.
    """
    prompts = prompts[:4]
    prefix_tokens = min(prefix_tokens, prompts.shape[1] - 1)
    head, tail = prompts[:, :prefix_tokens], prompts[:, prefix_tokens:]
    reference = text_reference(target, head, tail)
    native = target.get_output_embeddings()(reference.hidden)
    own = prefill(target, head[:, :-1])
    differences = {}
    for mode in MODES:
        with handoff(target, own.clone(), DirectMap(), mode) as active:
            differences[mode] = float((active.logits(reference.inputs) - native).abs().max())
    record = {
        "prefix_tokens": prefix_tokens,
        "max_abs_difference": differences,
        "logit_scale": float(native.abs().max()),
        "tolerance": tolerance,
        "passed": max(differences.values()) <= tolerance,
    }
    if not record["passed"]:
        raise KvlibError(
            f"the gate failed: the target's own cache handed back over {prefix_tokens} tokens moves its logits by "
            f"{max(differences.values()):.3g}, expected at most {tolerance:g}; no figure of this pair would mean anything: "
            "check dtype and attention of the target"
        )
    return record


@torch.no_grad()
def held_out_nll(model, prompts: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats per token, the first token of each prompt left out."""
    total = 0.0
    for start in range(0, len(prompts), 4):
        part = prompts[start : start + 4]
        reference = text_reference(model, part[:, :1], part[:, 1:])
        logits = model.get_output_embeddings()(reference.hidden).float()
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        )
    return total / prompts[:, 1:].numel()
