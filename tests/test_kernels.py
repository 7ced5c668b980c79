"""The correction in C: against the map in float64, through every kind, shape and layout; and how it is compiled and kept."""

import ctypes
import os
import platform
import re
from dataclasses import dataclass

import pytest
import torch
from tiny import refused, tiny_llama, tokens

from kvlib import PrefixCache, ResidualMap, handoff, prefill
from kvlib.geometry import rotary_of
from kvlib.kernels import compiler
from kvlib.kernels.correct import SOURCE, c_correction
from kvlib.study.run import code_files

pytestmark = pytest.mark.usefixtures("compiled_code")

KINDS = [
    (residual, features)
    for residual in ("linear", "quadratic")
    for features in ("own", "rms", "rope_stripped")
]


@dataclass(frozen=True)
class Case:
    """A map of two layers, keys and values (B, H, T, D) of one of them, and their angles."""

    cache_map: ResidualMap
    keys: torch.Tensor
    values: torch.Tensor
    angles: tuple

    def found(self, layer: int = 1):
        self.correction()(layer, self.keys, self.values)
        return self.keys, self.values

    def correction(self):
        prefix = PrefixCache([self.keys] * 2, [self.values] * 2)
        return c_correction(self.cache_map, prefix, self.angles)

    def exact(self, layer: int = 1):
        """`CacheMap.correct` in float64, and how large what it adds up is."""
        wide = self.cache_map.to(torch.float64)
        angles = tuple(None if a is None else a.double() for a in self.angles)
        before = self.keys.double(), self.values.double()
        after = wide.correct(layer, *before, angles)
        return [(new, old.abs() + (new - old).abs()) for new, old in zip(after, before)]


def case(
    residual="linear",
    features="own",
    rank=8,
    dim=64,
    heads=3,
    batch=1,
    length=37,
    dtype=torch.float32,
    longer=0,
) -> Case:
    """Weights a few times as large as trained ones: the correction is as large as what it corrects."""
    generator = torch.Generator().manual_seed(rank + dim)
    scale = torch.rand(2, heads, generator=generator) + 0.5
    fresh = ResidualMap.initial(
        scale, scale * 2, dim, rank, residual=residual, features=features, generator=generator
    )
    rights = {
        n: torch.randn(getattr(fresh, n).shape, generator=generator) * 0.3
        for n in ("key_right", "value_right")
    }
    cache_map = ResidualMap.restore(fresh.settings(), fresh.tensors() | rights).with_scale(0.75)
    keys, values = (torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in range(2))
    angles = (None, None)
    if features == "rope_stripped":  # 1.1: an attention scaling, as yarn carries one
        turn = torch.rand(batch, length + longer, dim // 2, generator=generator).mul(6).repeat(1, 1, 2)
        angles = turn.cos() * 1.1, turn.sin() * 1.1
    return Case(cache_map.to(dtype if dtype == torch.float64 else torch.float32), keys, values, angles)


def error(given: Case) -> float:
    """The largest error, of keys and values, over the size of what was added up there."""
    exact, found = given.exact(), given.found()
    return max(
        float(((ours - new).abs() / size.amax(-1, True)).max()) for (new, size), ours in zip(exact, found)
    )


# A sum of D products, then one of r, then one more addition, each in order: the error of x' is at most (D + r + 1) / 2 units
# in the last place of what is added up, and grows like the square root of that where signs are mixed. 2⁻²⁴ is half a unit.
UNITS = 16
FLOAT32 = UNITS * 2**-24


@pytest.mark.parametrize(("residual", "features"), KINDS)
@pytest.mark.parametrize("layout", [{}, {"rank": 5, "dim": 48, "batch": 3, "heads": 2, "length": 1}])
def test_every_kind_is_what_the_map_says(residual, features, layout):
    assert error(case(residual, features, **layout)) < FLOAT32


@pytest.mark.parametrize("rank", [1, 4, 5, 8, 16, 32])
def test_every_rank_is_what_the_map_says(rank):
    assert error(case(rank=rank)) < FLOAT32


@pytest.mark.parametrize("dim", [5, 17, 33, 64, 128])
def test_every_head_dim_is_what_the_map_says(dim):
    assert error(case("quadratic", "rms", rank=5, dim=dim, heads=2, batch=2)) < FLOAT32


@pytest.mark.parametrize("without", ["avx512f", "avx"])
def test_narrower_vectors_say_the_same(without, monkeypatch):
    if platform.machine() == "x86_64":  # elsewhere vectors are narrow as it is
        monkeypatch.setenv("CC", f"cc -mno-{without}")
    assert error(case("quadratic", "rms", rank=12)) < FLOAT32
    assert error(case("linear", "rope_stripped", dtype=torch.float64)) < 2**-22  # its angles are float32


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 24, 25, 200])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_length_is_corrected_to_its_end_and_nothing_behind_it_is_touched(length, batch):
    given = case("linear", "rope_stripped", batch=batch, length=length, longer=3)
    beyond = torch.full((batch, 3, length + 5, 64), 7.0)
    beyond[:, :, :length] = given.keys
    turned = tuple(a[:, :length] for a in given.angles)
    (wanted, _), _ = Case(given.cache_map, given.keys, given.values, turned).exact()
    given.correction()(1, beyond[:, :, :length], given.values)
    assert torch.allclose(beyond[:, :, :length].double(), wanted, atol=1e-5)
    assert (beyond[:, :, length:] == 7).all()


def test_a_cache_may_lie_in_memory_as_it_likes():
    for lay in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # positions before heads
        lambda x: x.mT.contiguous().mT,  # a vector's numbers apart
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],  # a cut of a longer one
    ):
        given = case(batch=2)
        other = Case(given.cache_map, lay(given.keys), lay(given.values), given.angles)
        assert error(other) < FLOAT32
        assert torch.equal(other.keys, given.found()[0])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_threads_are_torchs_and_do_not_change_a_bit(threads):
    one, many = case(length=203), case(length=203)
    one.found()
    torch.set_num_threads(threads)
    many.found()
    assert torch.equal(one.keys, many.keys) and torch.equal(one.values, many.values)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, half_unit):
    # a number between two powers of two is at most half a unit of the upper one away: 2 half units of itself
    assert error(case("quadratic", "own", dtype=dtype)) < 2 * half_unit
    given = case(dtype=dtype)
    wide = Case(given.cache_map, given.keys.float(), given.values.float(), given.angles)
    assert torch.equal(given.found()[0], wide.found()[0].to(dtype))


def test_double_precision_is_computed_in_it():
    assert error(case("quadratic", "rms", rank=5, dim=17, dtype=torch.float64)) < UNITS * 2**-53


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_where_it_is_and_stays_not_finite(dtype):
    for bad in (float("nan"), float("inf")):
        given = case(dtype=dtype)
        clean = case(dtype=dtype)
        given.values[0, 1, 20, 3] = bad
        found, wanted = given.found()[1], clean.found()[1]
        assert not found[0, 1, 20].isfinite().any()
        found[0, 1, 20] = wanted[0, 1, 20]
        assert torch.equal(found, wanted)


def test_what_it_was_not_compiled_for_is_refused_before_a_number_is_written():
    given = case()
    correct_ = given.correction()
    for keys, values in (
        (given.keys, given.values[:, :, :5]),
        (given.keys[..., :32], given.values[..., :32]),
        (given.keys[:, :2], given.values[:, :2]),
        (given.keys.half(), given.values.half()),
        (given.keys.double(), given.values),
    ):
        before = keys.clone()
        refused(
            lambda keys=keys, values=values: correct_(0, keys, values), match="was compiled for 3 heads of 64"
        )
        assert torch.equal(before, keys)
    refused(lambda: correct_(2, given.keys, given.values), match="of layer 2")
    wide = Case(given.cache_map, given.keys.double(), given.values.double(), given.angles)
    refused(wide.correction, match="convert one of them")
    turned = case(features="rope_stripped")
    short = tuple(a[:, :5] for a in turned.angles)
    correct_ = Case(turned.cache_map, turned.keys, turned.values, short).correction()
    refused(lambda: correct_(0, turned.keys, turned.values), match="begin a handoff of this very cache")


@pytest.mark.parametrize("mode", ["in_place", "background"])
def test_a_handoff_corrects_by_it_and_says_so(mode):
    model, ids = tiny_llama(), tokens(2, 31)
    cache_map, prefix = case(rank=4, dim=16, heads=2).cache_map, prefill(tiny_llama(1), ids[:, :-1])
    cache_map = ResidualMap.restore(
        cache_map.settings(), {n: torch.cat([t, t[:1]]) for n, t in cache_map.tensors().items()}
    )  # three layers
    copy = cache_map.materialise(prefix.clone(), rotary_of(model))
    with torch.no_grad(), handoff(model, prefix, cache_map, mode, compiled=True) as active:
        for step in range(4):
            active.logits(ids[:, step : step + 1])
    assert active.compiled and active.compile_seconds > 0
    said = (
        f"asked for by name; corrected in place by a pass compiled by the C compiler {compiler.command()[0]}"
    )
    assert active.mode == mode and active.reason.startswith(said)
    assert active.folded == 3 and prefix.corrected_by == "residual"
    for ours, theirs in zip(prefix.keys + prefix.values, copy.keys + copy.values):
        assert torch.allclose(ours, theirs, atol=1e-5)


# --- compiling and keeping


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A small C source, a folder of its own, and the calls of the compiler that made a library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, calls, run = tmp_path / "one.c", [], compiler._run
    source.write_text("int answer(void) { return ANSWER; }\n")

    def counting(arguments):
        if "-shared" in arguments:
            calls.append(arguments)
        return run(arguments)

    def answer(value=42):
        compiler._library.cache_clear()  # as a new process
        return compiler.library(source, {"ANSWER": value}).answer()

    monkeypatch.setattr(compiler, "_run", counting)
    answer.source, answer.calls, answer.folder = source, calls, tmp_path / "cache" / "kvlib" / "compiled"
    return answer


def test_it_is_compiled_once_for_all_processes_of_a_user(counted):
    assert [counted(), counted(), counted()] == [42] * 3 and len(counted.calls) == 1
    assert counted(43) == 43 and len(counted.calls) == 2
    counted.source.write_text("int answer(void) { return ANSWER + 1; }\n")
    assert counted() == 43 and len(counted.calls) == 3
    names = sorted(path.name for path in counted.folder.iterdir())
    assert len(names) == 3 and all(re.fullmatch(r"[0-9a-f]{32}-[0-9a-f]{32}\.so", name) for name in names)
    assert counted.folder.stat().st_mode & 0o077 == 0


def test_another_compiler_or_processor_is_another_library(counted, monkeypatch):
    counted()
    described = compiler._described
    monkeypatch.setattr(compiler, "_described", lambda command: described(command) + b"#define __OTHER__ 1\n")
    assert counted() == 42 and len(counted.calls) == 2


def test_a_file_that_is_not_whole_or_not_what_was_compiled_is_made_again(counted):
    for damage in (lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data + b"more"):
        counted()
        (kept,) = counted.folder.iterdir()
        copy = kept.with_name("copy")  # a new file: the old one is mapped into this process
        copy.write_bytes(damage(kept.read_bytes()))
        os.replace(copy, kept)
        before = len(counted.calls)
        assert counted() == 42 and len(counted.calls) == before + 1
    assert [path.suffix for path in counted.folder.iterdir()] == [".so"]


def test_a_folder_that_others_can_write_to_is_not_used(counted):
    counted.folder.mkdir(parents=True)
    counted.folder.chmod(0o777)
    assert [counted(), counted()] == [42, 42]
    assert len(counted.calls) == 2 and not list(counted.folder.iterdir())
    counted.folder.rmdir()
    elsewhere = counted.folder.with_name("elsewhere")
    elsewhere.mkdir()
    counted.folder.symlink_to(elsewhere)
    assert counted() == 42 and not list(elsewhere.iterdir())


def test_without_a_folder_it_is_compiled_every_time(counted, monkeypatch):
    counted.folder.parents[1].write_text("a file where the folder would be")
    assert [counted(), counted()] == [42, 42] and len(counted.calls) == 2


def test_a_compiler_that_is_missing_or_refuses_is_one_sentence(counted, monkeypatch, tmp_path):
    counted.source.write_text("int answer(void) { return no_such_name; }\n")
    refused(counted, match="refuses .*no_such_name")
    model, ids = tiny_llama(), tokens(1, 12)

    def enter():
        cache_map = case("quadratic", rank=4, dim=16, heads=2).cache_map
        cache_map = ResidualMap.restore(
            cache_map.settings(), {n: torch.cat([t, t[:1]]) for n, t in cache_map.tensors().items()}
        )
        with handoff(model, prefill(model, ids[:, :-1]), cache_map, compiled=True):
            pass

    useless = tmp_path / "useless"
    useless.write_text("#!/bin/sh\necho 'no OpenMP: error of the day' >&2\nexit 1\n")
    useless.chmod(0o755)
    for name, why in (("no-such-compiler", "no C compiler"), (str(useless), "error of the day")):
        monkeypatch.setenv("CC", name)
        assert why in compiler.why_not()
        refused(enter, match=why)
    assert model(ids).logits.isfinite().all() and model.config._attn_implementation == "sdpa"


def test_the_compiler_may_be_named_with_options(counted, monkeypatch):
    monkeypatch.setenv("CC", "cc -DEXTRA=1")
    counted.source.write_text("int answer(void) { return ANSWER + EXTRA; }\n")
    assert compiler.why_not() is None and counted() == 43


def test_the_source_counts_as_code_and_ships_with_the_package():
    assert SOURCE in code_files()
    settings = (SOURCE.parents[2] / "pyproject.toml").read_text()
    assert '"kvlib.kernels" = ["*.c", "*.h"]' in settings
    assert isinstance(compiler.library(SOURCE, {
        "DIM": 4, "RANK": 8, "REAL": "float", "STORED": 0, "RMS": 0, "SQUARES": 0, "TURN": 0,
    }), ctypes.CDLL)  # fmt: skip
