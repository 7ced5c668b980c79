"""Every map against a naive loop, its absorbed form against its materialised one, and its file format."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny import is_one_sentence, tiny_llama, tokens

from kvlib import (
    DirectMap,
    KvlibError,
    PrefixCache,
    ResidualMap,
    RidgeAccumulator,
    handoff,
    load_map,
    prefill,
    save_map,
)
from kvlib.cache import Geometry
from kvlib.maps.base import hash_map, map_provenance
from kvlib.maps.residual import rotate
from kvlib.pair import rotary_of

GEOMETRY = Geometry(3, 2, 16)
KINDS = [
    (residual, features)
    for residual in ("linear", "quadratic")
    for features in ("own", "rms", "rope_stripped")
]


def random_cache(seed: int, batch: int = 2, length: int = 11) -> PrefixCache:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: [torch.randn(batch, 2, length, 16, generator=generator) for _ in range(3)]  # noqa: E731
    return PrefixCache(make(), make())


def fitted_ridge():
    sums = RidgeAccumulator(GEOMETRY)
    sums.add(random_cache(1, length=60), random_cache(2, length=60))
    return sums.solve(1e-3)


def random_residual(residual="linear", features="own", base=None, rank=4, seed=3) -> ResidualMap:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(3, 2, generator=generator) + 0.5
    fresh = ResidualMap.initial(
        scale, scale * 2, 16, rank, residual=residual, features=features, base=base, generator=generator
    )
    weights = fresh.tensors() | {
        name: torch.randn(getattr(fresh, name).shape, generator=generator) * 0.2
        for name in ("key_right", "value_right")
    }
    return ResidualMap.restore(fresh.settings(), weights).with_scale(0.75)


def test_direct_changes_nothing():
    prefix = random_cache(0)
    assert all(torch.equal(a, b) for a, b in zip(prefix.keys, DirectMap().materialise(prefix).keys))


def test_ridge_is_the_least_squares_solution_of_a_naive_loop():
    source, target = random_cache(1, length=60), random_cache(2, length=60)
    ridge = fitted_ridge()
    for layer in range(3):
        for head in range(2):
            for x, y, weight, bias in (
                (source.keys, target.keys, ridge.key_weight, ridge.key_bias),
                (source.values, target.values, ridge.value_weight, ridge.value_bias),
            ):
                a, b = (t[layer][:, head].reshape(-1, 16).double() for t in (x, y))
                centred, wanted = a - a.mean(0), b - b.mean(0)
                gram = centred.T @ centred
                solved = torch.linalg.solve(
                    gram + 1e-3 * gram.diagonal().mean() * torch.eye(16), centred.T @ wanted
                )
                assert torch.allclose(weight[layer, head].double(), solved, atol=1e-5)
                assert torch.allclose(bias[layer, head].double(), b.mean(0) - a.mean(0) @ solved, atol=1e-5)


def test_ridge_sums_can_be_added_in_parts():
    source, target = random_cache(1, length=60), random_cache(2, length=60)
    sums = RidgeAccumulator(GEOMETRY)
    for prompt in range(2):
        sums.add(source.select([prompt]), target.select([prompt]))
    assert torch.allclose(sums.solve(1e-3).key_weight, fitted_ridge().key_weight, atol=1e-6)


def test_ridge_of_a_linear_relation_finds_it():
    source = random_cache(1, length=200)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    target = PrefixCache([k @ turn + 1 for k in source.keys], [v * 2 for v in source.values])
    sums = RidgeAccumulator(GEOMETRY)
    sums.add(source, target)
    ridge = sums.solve(1e-9)
    assert torch.allclose(ridge.key_weight[0, 0], turn, atol=1e-4) and torch.allclose(
        ridge.key_bias, torch.ones(3, 2, 16), atol=1e-4
    )


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_residual_against_a_loop_over_prompts_heads_and_positions(residual, features, based):
    model = tiny_llama()
    base = fitted_ridge() if based else None
    cache_map, prefix = random_residual(residual, features, base), random_cache(5)
    rotary = rotary_of(model)
    corrected = cache_map.materialise(prefix, rotary)
    cos, sin = rotary(prefix.positions)
    for kind, before, after in (
        ("key", prefix.keys, corrected.keys),
        ("value", prefix.values, corrected.values),
    ):
        left, right, scale = (getattr(cache_map, f"{kind}_{part}") for part in ("left", "right", "scale"))
        for layer in range(3):
            for b in range(2):
                for h in range(2):
                    for t in range(0, 11, 5):
                        x = before[layer][b, h, t]
                        stripped = kind == "key" and features == "rope_stripped"
                        turn = lambda v, s: rotate(
                            v.view(1, 1, 1, 16), cos[b : b + 1, t : t + 1], s * sin[b : b + 1, t : t + 1]
                        ).view(16)  # noqa: E731, B023
                        f = turn(x, -1) if stripped else x
                        f = x / x.pow(2).mean().sqrt() if features == "rms" else f / scale[layer, h]
                        f = torch.cat([f, f**2]) if residual == "quadratic" else f
                        delta = f @ left[layer, h] @ right[layer, h]
                        delta = turn(delta, 1) if stripped else delta
                        start = x
                        if based:
                            weight, bias = (
                                getattr(base, f"{kind}_{part}")[layer, h] for part in ("weight", "bias")
                            )
                            start = x @ weight + bias
                        assert torch.allclose(
                            after[layer][b, h, t], start + 0.75 * scale[layer, h] * delta, atol=1e-4
                        )


WITH_BASES = [
    (r, f, b) for r in ("linear", "quadratic") for f in ("own", "rms", "rope_stripped") for b in (False, True)
]


@pytest.mark.parametrize(("residual", "features", "based"), WITH_BASES)
@pytest.mark.parametrize(
    ("chunk_tokens", "threads", "batch"), [(1, 1, 1), (4, 1, 2), (400, 2, 1), (300, 3, 2)]
)
def test_in_place_equals_a_copy(residual, features, based, chunk_tokens, threads, batch):
    cache_map = random_residual(residual, features, fitted_ridge() if based else None)
    prefix, rotary = (
        random_cache(5, batch=batch, length=11 if chunk_tokens < 9 else 701),
        rotary_of(tiny_llama()),
    )
    copy = cache_map.materialise(prefix, rotary)
    pointer, before = prefix.keys[0].data_ptr(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache_map.apply_(prefix, rotary, chunk_tokens)
    finally:
        torch.set_num_threads(before)
    assert prefix.keys[0].data_ptr() == pointer
    for ours, theirs in zip(prefix.keys + prefix.values, copy.keys + copy.values):
        # one float32 rounding of the largest intermediate, twice summed in another order
        assert (ours - theirs).abs().max() < 4e-6 * theirs.abs().max()


def test_in_place_reaches_a_cache_whose_prompts_are_not_side_by_side():
    cache_map, whole = random_residual(), random_cache(5, batch=4, length=20)
    prefix = whole.select(slice(0, 4, 2))
    copy = cache_map.materialise(prefix)
    cache_map.apply_(prefix)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(prefix.keys, copy.keys))
    assert all(torch.equal(a[::2], b) for a, b in zip(whole.keys, prefix.keys))


def test_the_studys_residual_has_its_published_parameter_count():
    scale = torch.ones(32, 8)  # Llama 3.1 8B: 32 layers, 8 KV heads, head_dim 128
    cache_map = ResidualMap.initial(scale, scale, 128, 8, generator=torch.Generator().manual_seed(0))
    assert cache_map.parameters == 1_048_576


def test_an_untrained_residual_is_its_base():
    scale, prefix = torch.ones(3, 2), random_cache(5)
    for base in (None, fitted_ridge()):
        fresh = ResidualMap.initial(
            scale, scale, 16, 4, base=base, generator=torch.Generator().manual_seed(0)
        )
        wanted = prefix if base is None else base.materialise(prefix)
        assert torch.allclose(fresh.materialise(prefix).keys[1], wanted.keys[1], atol=1e-6)


@pytest.mark.parametrize(
    "cache_map",
    [DirectMap(), fitted_ridge(), random_residual(), random_residual("quadratic", "rms", fitted_ridge())],
)
def test_a_saved_map_is_loaded_as_it_was(cache_map, tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(cache_map, path, pair="a pair", provenance={"seed": 3})
    back, prefix = load_map(path, pair="a pair"), random_cache(5)
    assert back.settings() == cache_map.settings() and type(back) is type(cache_map)
    assert torch.equal(back.materialise(prefix).values[2], cache_map.materialise(prefix).values[2])
    assert map_provenance(path) == {"seed": 3}


def test_another_pairs_map_is_refused_unless_asked_for(tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(random_residual(), path, pair="one pair")
    with pytest.raises(KvlibError, match="another|one pair"):
        load_map(path, pair="other pair")
    assert load_map(path, pair=None).rank == 4


def test_broken_map_files_are_refused(tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(random_residual(), path, pair="p")
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"not safetensors at all"):
        path.write_bytes(content)
        with pytest.raises(KvlibError, match="cannot be read"):
            load_map(path, pair="p")
    tiny_llama().save_pretrained(tmp_path / "foreign")
    with pytest.raises(KvlibError, match="no kvlib-map-1"):
        load_map(tmp_path / "foreign" / "model.safetensors", pair="p")
    with pytest.raises(KvlibError, match="cannot be read"):
        load_map(tmp_path / "nowhere.safetensors", pair="p")


def test_a_map_whose_scales_are_one_tensor_is_saved_too(tmp_path):
    scale = torch.ones(3, 2)
    fresh = ResidualMap.initial(scale, scale, 16, 4, generator=torch.Generator().manual_seed(0))
    save_map(fresh, tmp_path / "m.safetensors", pair="p")
    assert torch.equal(load_map(tmp_path / "m.safetensors", pair="p").value_scale, scale)


def test_what_cannot_be_written_or_read_as_a_map_is_one_sentence(tmp_path):
    for call, sentence in (
        (lambda: save_map(DirectMap(), tmp_path / "m", pair=None), "pair=NoneType given"),
        (lambda: save_map(DirectMap(), tmp_path / "m", pair="p", provenance={"a": {1}}), "no JSON"),
        (lambda: map_provenance(tmp_path / "nowhere"), "cannot be read"),
        (lambda: map_provenance(tmp_path), "cannot be read"),
        (lambda: load_map(tmp_path, pair="p"), "cannot be read"),
    ):
        with pytest.raises(KvlibError, match=sentence):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, settings: tensors.update(value_right=tensors["value_right"][:2]),
        lambda tensors, settings: tensors.update(key_scale=torch.zeros(3, 2)),
        lambda tensors, settings: tensors.update(key_left=tensors["key_left"].int()),
        lambda tensors, settings: tensors.pop("key_left"),
        lambda tensors, settings: settings.update(scale=float("nan")),
        lambda tensors, settings: settings.update(residual="cubic"),
        lambda tensors, settings: settings.pop("features"),
    ],
)
def test_a_map_whose_parts_do_not_go_together_is_refused(tmp_path, damage):
    whole = random_residual()
    tensors, changed = whole.tensors(), whole.settings()
    damage(tensors, changed)
    description = {
        "format": "kvlib-map-1",
        "kind": "residual",
        "settings": changed,
        "pair": "p",
        "provenance": {},
    }
    tensors = {n: t.contiguous() for n, t in tensors.items()}
    description["sha256"] = hash_map(description, tensors)  # only what is wrong with the parts is at fault
    save_file(
        tensors,
        tmp_path / "m.safetensors",
        {"kvlib": json.dumps(description)},
    )
    with pytest.raises(KvlibError) as refusal:
        load_map(tmp_path / "m.safetensors", pair="p")
    assert "write it again" in str(refusal.value) or "holds NaN" in str(refusal.value)


@pytest.mark.parametrize("rank", [0, 17])
def test_a_rank_outside_the_head_is_refused(rank):
    with pytest.raises(KvlibError, match=f"rank {rank}"):
        ResidualMap.initial(torch.ones(3, 2), torch.ones(3, 2), 16, rank, generator=torch.Generator())


def test_a_map_of_another_geometry_or_with_nan_is_refused():
    with pytest.raises(KvlibError, match="use a map fitted on this pair"):
        random_residual().check_fits(Geometry(4, 2, 16))
    broken = random_residual()
    broken.key_left[0, 0, 0, 0] = float("nan")
    with pytest.raises(KvlibError, match="key_left"):
        broken.check_fits(GEOMETRY)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"key_scale": torch.zeros(3, 2)}, "not positive"),
        ({"value_scale": torch.full((3, 2), float("nan"))}, "not positive"),
        ({"key_left": torch.zeros(3, 2, 16, 5)}, "key_left is"),
        ({"key_right": torch.zeros(3, 2, 17, 16)}, "rank 17"),
        ({"scale": float("nan")}, "scale nan"),
        ({"features": "other"}, "features 'other'"),
        ({"base": DirectMap()}, "base is a DirectMap"),
        ({"key_right": torch.zeros(3, 2, 4)}, "do not go together"),
        ({"key_left": None}, "do not go together"),
    ],
)
def test_a_map_that_is_not_whole_is_refused_by_the_handoff_too(change, sentence):
    model, ids = tiny_llama(), tokens(1, 5)
    with pytest.raises(KvlibError, match=sentence) as refusal:
        handoff(model, prefill(model, ids), replace(random_residual(), **change))
    assert is_one_sentence(refusal.value)


@pytest.mark.parametrize(
    ("scale", "rank", "base", "sentence"),
    [
        (torch.zeros(3, 2), 4, None, "not positive"),
        (torch.ones(3), 4, None, r"expected \(L, H\)"),
        (torch.ones(3, 2), 4.5, None, "rank 4.5"),
        (torch.ones(4, 2), 4, fitted_ridge(), "the base is for"),
    ],
)
def test_a_residual_cannot_be_begun_on_what_is_not_there(scale, rank, base, sentence):
    with pytest.raises(KvlibError, match=sentence):
        ResidualMap.initial(scale, scale, 16, rank, base=base, generator=torch.Generator().manual_seed(0))


def test_a_rotary_embedding_of_part_of_a_head_cannot_be_stripped():
    cache = random_cache(0)
    partial = lambda positions: (torch.ones(2, 11, 8), torch.zeros(2, 11, 8))
    for apply in (
        random_residual(features="rope_stripped").materialise,
        random_residual(features="rope_stripped").apply_,
    ):
        with pytest.raises(KvlibError, match="of 8 dimensions, expected all 16"):
            apply(cache, partial)


def test_ridge_refuses_caches_that_are_not_of_the_same_prompts():
    source, target = tiny_llama(1), tiny_llama(0)
    ids = tokens(2, 9)
    one, other = prefill(source, ids), prefill(target, ids)
    broken = prefill(source, ids)
    broken.keys[2][1, 1, 3, 3] = float("inf")
    padded = PrefixCache(one.keys, one.values, torch.ones(2, 9, dtype=torch.bool))
    for given, wanted, sentence in (
        (one, prefill(target, ids.flip(0)), "different token ids"),
        (one.select([0]), other, "1 and 2 prompts"),
        (padded, other, "with padding"),
        (broken, other, "keys of layer 2"),
        (one, broken, "keys of layer 2"),
        (one, other.slice(8), "over the same tokens"),
    ):
        sums = RidgeAccumulator(GEOMETRY)
        with pytest.raises(KvlibError, match=sentence) as refusal:
            sums.add(given, wanted)
        assert is_one_sentence(refusal.value) and sums.count == 0


@pytest.mark.parametrize("penalty", [-1e-3, float("nan"), float("inf")])
def test_a_penalty_that_is_none_is_refused(penalty):
    sums = RidgeAccumulator(GEOMETRY)
    sums.add(random_cache(1), random_cache(2))
    with pytest.raises(KvlibError, match=f"penalty of {penalty}"):
        sums.solve(penalty)


def test_too_few_positions_for_no_penalty_are_refused():
    sums = RidgeAccumulator(GEOMETRY)
    constant = PrefixCache([torch.ones(1, 2, 5, 16)] * 3, [torch.ones(1, 2, 5, 16)] * 3)
    sums.add(constant, random_cache(2, batch=1, length=5))
    with pytest.raises(KvlibError, match="do not determine a ridge map"):
        sums.solve(0.0)


def test_rope_stripping_undoes_the_models_own_rotation():
    model, ids = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 777.0}), tokens(1, 9)
    prefix = prefill(model, ids)
    cos, sin = rotary_of(model)(prefix.positions)
    layer = model.model.layers[0]
    raw = (
        layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(ids)))
        .view(1, 9, 2, 16)
        .transpose(1, 2)
    )
    assert torch.allclose(rotate(prefix.keys[0], cos, -sin), raw, atol=1e-5)
