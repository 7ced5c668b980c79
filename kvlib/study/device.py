"""Where a profile computes and in which number format: a CUDA card, or the processor."""

from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.study.profile import Profile


def device_of(profile: Profile) -> torch.device:
    """Where a profile's models live: the first CUDA device, or the processor.

    Raises: KvlibError where CUDA is asked for and there is none, and for a card that does not compute in bfloat16 where
        the profile names it.
    """
    if profile.device == "cpu" or (profile.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why, remedy = "torch sees no card", "check the driver with nvidia-smi"
        if torch.version.cuda is None:
            why, remedy = (
                f"torch {torch.__version__} is a build for processors alone",
                "install a CUDA build of torch, see requirements-gpu.txt",
            )
        raise KvlibError(
            f"device cuda given, but {why}, expected a CUDA device: {remedy}, or set device to cpu"
        )
    device = torch.device("cuda", 0)
    for name, dtype in (("pair.dtype", profile.pair.dtype), ("training.dtype", profile.training.dtype)):
        if dtype == "bfloat16" and not _card_has_bfloat16():
            raise KvlibError(
                f"{name} is bfloat16, which {torch.cuda.get_device_name(device)} does not compute in, expected a card of compute "
                f"capability 8.0 or more: set {name} to float32, or take another card"
            )
    return device


def device_name(device: torch.device) -> str:
    """What records call it: the card's own name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _card_has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def training_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """A profile's training dtype; `auto` asks whether the processor or card multiplies bfloat16 in hardware.

    device: where training computes; a CUDA device where there is one, when None.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" if device is not None else torch.cuda.is_available():
        return torch.bfloat16 if _card_has_bfloat16() else torch.float32
    flags = Path("/proc/cpuinfo")
    text = flags.read_text() if flags.exists() else ""
    return torch.bfloat16 if any(flag in text for flag in ("avx512_bf16", "amx_bf16")) else torch.float32
