"""A step of training against its floor: the matrix products that it cannot do without, alone, by the best kernel here.

    python benchmarks/train.py                     # random weights in the shapes of the laptop pair
    python benchmarks/train.py --run results/laptop
    python benchmarks/train.py --tiny --out FILE

Per phase (warm-up, KL) and kind of arm. `step_ms` is one whole step of `kvlib.training.train`, windows read and weights
updated. `plain_ms` is the same step in torch's own products over one padded batch; a warm-up has one way only, and runs
once more. All three are timed in the same rounds, on the same windows and cuts.

The floor's products: the body forward and the gradients of its inputs, attention over each prompt's own prefix, the head
twice forward and once back, the map's own; each distinct shape by the fastest of torch's product and oneDNN's, tried
beforehand. Weight gradients, masks and everything between products cost it nothing. A warm-up step in C can lie below its
floor: what it multiplies has not left the processor's cache. The windows' pages are in reach after the first rounds, as
they are in a study whose windows are small for the machine's memory (`kvlib.study.store`).
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Clocked, interleave, machine, timing_row, write_table
from shapes import SMOLLM2_135M, SMOLLM2_PRUNED, TINY_SOURCE, TINY_TARGET, random_model

from kvlib.cache import Geometry
from kvlib.maps import ResidualMap
from kvlib.packed import FrozenLinears, FrozenMatrix
from kvlib.pair import load_model
from kvlib.study.device import training_dtype
from kvlib.study.progress import Progress
from kvlib.study.store import WindowStore
from kvlib.training import Frozen, train

ARMS = {"affine": {}, "not affine": {"residual": "quadratic"}}
PROMPTS, RANK, LEARNING_RATE = 4, 8, 3e-3
TRIES = 5  # of each kernel, before the fastest is taken


@dataclass(frozen=True)
class Size:
    """windows, window_tokens: what is cached. forced: steps S. shortest: prefix. repetitions: rounds after two warm-ups."""

    windows: int
    window_tokens: int
    forced: int
    shortest: int
    repetitions: int


FULL, TINY = Size(4, 1024, 32, 64, 9), Size(4, 48, 4, 8, 2)


class Steps:
    """Steps of one training, one after the other, on cuts that are drawn from `seed` alone."""

    def __init__(self, target, head, store: WindowStore, size: Size, settings: dict, warm: bool, plain: bool):
        self.cuts: list[int] = []
        initial = ResidualMap.initial(
            *store.source_scale(), store.geometry.head_dim, min(RANK, store.geometry.head_dim),
            generator=torch.Generator().manual_seed(0), **settings,
        )  # fmt: skip

        def batch(number: int, with_target: bool):
            return store.batch(list(range(PROMPTS)), self.cuts, size.forced, with_target=with_target)

        steps = 10_000
        self._steps = train(
            target, initial, batch, steps=steps, warmup_steps=steps if warm else 0,
            learning_rate=LEARNING_RATE, head_weight=head, frozen=Frozen.of(target, head, None) if plain else None,
        )  # fmt: skip

    def __call__(self, cuts: list[int]) -> None:
        self.cuts = cuts
        with torch.enable_grad():
            next(self._steps)


class Floor:
    """The products of a step, given the lengths of its prefixes."""

    def __init__(self, target, head: torch.Tensor, size: Size, warm: bool, features: int):
        config, self.geometry = target.config, Geometry.of(target)
        self.rows, self.steps = PROMPTS * size.forced, size.forced
        self.group = config.num_attention_heads // self.geometry.heads
        self.warm, self.features = warm, features
        self.choice: dict = {}
        if not warm:
            self.linears = FrozenLinears(target, self.rows)
            layers = [m for m in target.base_model.modules() if type(m) is torch.nn.Linear]
            own = [self.linears.layers.get(m) or FrozenMatrix(m.weight, None) for m in layers]
            self.matrices = [self._either(m.weight, matrix) for m, matrix in zip(layers, own)]
            self.head = self._either(head, FrozenMatrix(head, self.rows))

    def _either(self, weight, matrix: FrozenMatrix) -> FrozenMatrix:
        """Torch's product or oneDNN's for this shape, whichever is the faster."""
        plain, key = FrozenMatrix(weight, None), (weight.shape, weight.dtype)
        if key not in self.choice:
            x, y = (torch.randn(self.rows, n, dtype=weight.dtype) for n in reversed(weight.shape))
            times = [_best(lambda m=m: (m.times(x), m.back(y))) for m in (plain, matrix)]
            self.choice[key] = times.index(min(times))
        return (plain, matrix)[self.choice[key]]

    def products(self, cuts: list[int]) -> list:
        """The step's products as functions to call, operands made beforehand."""
        lengths = [cut - 1 for cut in cuts]
        if self.warm:
            step = max(1, max(lengths) // 128)
            return self._map_products(sum(-(-n // step) for n in lengths))
        found = []
        for number, matrix in enumerate(self.matrices):
            out, inner = self._shape(matrix)
            x, y = (torch.randn(self.rows, n, dtype=matrix.dtype) for n in (inner, out))
            found.append(lambda m=matrix, x=x: m.times(x))
            if number > 2:  # the first layer's queries, keys and values hang on no weight of the map
                found.append(lambda m=matrix, y=y: m.back(y))
        width, vocabulary = self._shape(self.head)[1], self._shape(self.head)[0]
        x, y = torch.randn(self.rows, width), torch.randn(self.rows, vocabulary)
        found += [lambda x=x: self.head.times(x)] * 2 + [lambda y=y: self.head.back(y)]
        heads, dim, rows = self.geometry.heads, self.geometry.head_dim, self.group * self.steps
        for length in (
            lengths
        ):  # a quadratic map is affine in [x, f(x)]: twice as wide, and no longer a matter of its own
            q, k = torch.randn(heads, rows, self.features), torch.randn(heads, length, self.features)
            p = torch.rand(heads, rows, length)
            wide, narrow = (self._attention(*pair) for pair in ((q, k.mT), (p, k)))
            found += ([wide] * 2 + [narrow] * 2) * self.geometry.layers
        q, k = torch.randn(PROMPTS * heads, rows, dim), torch.randn(PROMPTS * heads, self.steps, dim)
        s = torch.rand(PROMPTS * heads, rows, self.steps)
        one = [lambda: q @ k.mT, lambda: s @ k] * 2 + [lambda: s.mT @ q] * 2
        found += one * self.geometry.layers
        # one matrix before and behind attention, its input's gradient and its own
        m, x = torch.randn(heads, dim, self.features), torch.randn(heads, PROMPTS * rows, dim)
        y = torch.randn(heads, PROMPTS * rows, self.features)
        found += [lambda: x @ m, lambda: y @ m.mT, lambda: x.mT @ y] * (2 * self.geometry.layers)
        return found

    def _map_products(self, positions: int) -> list:
        """f(x) A B over so many positions, and the gradients of A, of B and of f(x) A."""
        heads, dim, layers = self.geometry.heads, self.geometry.head_dim, self.geometry.layers
        f, a = torch.randn(heads, positions, self.features), torch.randn(heads, self.features, RANK)
        z, b, y = f @ a, torch.randn(heads, RANK, dim), torch.randn(heads, positions, dim)
        one = [lambda: f @ a, lambda: z @ b, lambda: f.mT @ z, lambda: z.mT @ y, lambda: y @ b.mT]
        return one * (2 * layers)

    def _attention(self, x: torch.Tensor, y: torch.Tensor):
        """x (H, R, ·) times y: all heads in one of torch's products, or one of oneDNN's for each, whichever is faster."""
        turned = y.mT
        ways = [lambda: x @ y]
        if FrozenMatrix(turned[0], 1).ours:
            product = torch.ops.mkldnn._linear_pointwise
            ways.append(lambda: [product(a, b, None, "none", [], "") for a, b in zip(x, turned)])
        return min(ways, key=_best)

    @staticmethod
    def _shape(matrix: FrozenMatrix) -> tuple[int, int]:
        return tuple(matrix.forward.shape)


def _best(call) -> float:
    """Seconds of the fastest of a few calls."""
    found = []
    for _ in range(TRIES + 1):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def run_products(products: list) -> None:
    for product in products:
        product()


def measure(target, head, store: WindowStore, size: Size) -> list[dict]:
    """One row per phase and kind of arm."""
    draw, rows, timings = random.Random(0), [], {}
    for phase in ("warmup", "kl"):
        for arm, settings in ARMS.items():
            warm = phase == "warmup"
            features = store.geometry.head_dim * (2 if settings else 1)
            step, plain = (Steps(target, head, store, size, settings, warm, plain) for plain in (False, True))
            floor = Floor(target, head, size, warm, features)
            cuts = []

            def same_cuts(cuts=cuts):
                """New ones after each has had its turn."""
                if len(cuts) % 3 == 0:
                    latest = [
                        draw.randint(size.shortest, size.window_tokens - size.forced) for _ in range(PROMPTS)
                    ]
                else:
                    latest = cuts[-1]
                cuts.append(latest)
                return latest

            calls = [
                Clocked("step", step, same_cuts),
                Clocked("plain", plain, same_cuts),
                Clocked("floor", run_products, lambda floor=floor, same=same_cuts: floor.products(same())),
            ]
            timings = interleave(calls, warmups=2, repetitions=size.repetitions, seed=0)
            ms = {name: timing_row(timing)["p50_ms"] for name, timing in timings.items()}
            rows.append(
                {
                    "phase": phase, "arm": arm, "step_ms": ms["step"], "floor_ms": ms["floor"], "plain_ms": ms["plain"],
                    "step_to_floor": ms["step"] / ms["floor"], "plain_to_floor": ms["plain"] / ms["floor"],
                    "plain_to_step": ms["plain"] / ms["step"], "repetitions": size.repetitions,
                }
            )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run", type=Path, help="a run's folder, whose pair is taken")
    where.add_argument(
        "--tiny", action="store_true", help="random models of a few thousand weights: a test, no figure"
    )
    parser.add_argument("--out", type=Path, help="where the table is written as JSON")
    given = parser.parse_args(arguments)
    dtype, size = training_dtype("auto"), TINY if given.tiny else FULL
    if given.run:
        target, source = (load_model(given.run / "pair" / role, dtype=dtype) for role in ("target", "source"))
    else:
        shapes = (TINY_TARGET, TINY_SOURCE) if given.tiny else (SMOLLM2_135M, SMOLLM2_PRUNED)
        target, source = (random_model(shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes))
    head = target.get_output_embeddings().weight.detach().float()
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(1, target.config.vocab_size, (size.windows, size.window_tokens), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        store = WindowStore(
            Path(folder), windows, Geometry.of(target), target.config.hidden_size, torch.bfloat16
        ).fill(source, target, Progress("benchmark", size.windows), 1)
        rows = measure(target, head, store, size)
    facts = {"dtype": str(dtype).removeprefix("torch."), "prompts": PROMPTS, "forced_steps": size.forced}
    return write_table(given.out, "train", rows, machine=machine("cpu", tiny=given.tiny), **facts)


if __name__ == "__main__":
    main()
