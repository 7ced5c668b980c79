"""The evidence stage's parts on tiny models: what they must give where the answer is known in advance."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama, tokens

from kvlib import DirectMap, KvlibError, PrefixCache, ResidualMap, RidgeAccumulator, prefill
from kvlib.cache import Geometry
from kvlib.divergence import oracle_reference
from kvlib.handoff import handoff
from kvlib.pair import rotary_of
from kvlib.study.corpus import build_word_tokenizer, generated_articles
from kvlib.study.evidence.ablation import summarise_ablation, variants, with_corrections
from kvlib.study.evidence.content import singular_values, sizes
from kvlib.study.evidence.keeping import kept_scores
from kvlib.study.evidence.learning import summarise_learning
from kvlib.study.evidence.lengths import length_prompts, summarise_lengths
from kvlib.study.evidence.power import needed_prompts, power, summarise_power
from kvlib.study.evidence.quality import SquareSums, attention_cosines, measure_quality
from kvlib.study.partitions import encode
from kvlib.study.profile import load_profile
from kvlib.study.progress import Progress
from kvlib.study.statistics import paired

KINDS = [(r, f) for r in ("linear", "quadratic") for f in ("own", "rms", "rope_stripped")]
GEOMETRY = Geometry(3, 2, 16)


def random_cache(seed: int, batch: int = 2, length: int = 11) -> PrefixCache:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: [torch.randn(batch, 2, length, 16, generator=generator) for _ in range(3)]
    return PrefixCache(make(), make())


def fitted_ridge():
    sums = RidgeAccumulator(GEOMETRY)
    sums.add(random_cache(1, length=60), random_cache(2, length=60))
    return sums.solve(1e-3)


def trained(residual="linear", features="own", base=None, rank=4, seed=3) -> ResidualMap:
    """A map as training leaves it: random weights on both sides."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.rand(3, 2, generator=generator) + 0.5
    fresh = ResidualMap.initial(
        sigma, sigma * 2, 16, rank, residual=residual, features=features, base=base, generator=generator
    )
    rights = {
        name: torch.randn(3, 2, rank, 16, generator=generator) * 0.2 for name in ("key_right", "value_right")
    }
    return replace(fresh, **rights).with_scale(0.75)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(ours, theirs)]


# Ablations


@pytest.mark.parametrize(("residual", "features"), KINDS)
@pytest.mark.parametrize("with_ridge", [False, True])
def test_with_every_layer_off_the_map_is_its_base(residual, features, with_ridge):
    base = fitted_ridge() if with_ridge else None
    learned, prefix, rotary = trained(residual, features, base), random_cache(5), rotary_of(tiny_llama())
    off = with_corrections(learned, [False] * 3, [False] * 3).materialise(prefix, rotary)
    expected = (base or DirectMap()).materialise(prefix)
    assert all(same(off.keys, expected.keys) + same(off.values, expected.values))
    assert not any(same(learned.materialise(prefix, rotary).keys, expected.keys))


def test_switching_a_layer_changes_that_layer_and_no_other():
    learned, prefix = trained(), random_cache(5)
    whole, found = learned.materialise(prefix), variants(learned)
    assert list(found) == [("full", -1), ("keys_only", -1), ("values_only", -1)] + [
        (which, layer) for which in ("off", "only") for layer in range(3)
    ]
    for layer in range(3):
        off, only = (found[which, layer].materialise(prefix) for which in ("off", "only"))
        for kind in ("keys", "values"):
            corrected, plain = getattr(whole, kind), getattr(prefix, kind)
            assert same(getattr(off, kind), corrected) == [i != layer for i in range(3)]
            assert same(getattr(off, kind), plain) == [i == layer for i in range(3)]
            assert same(getattr(only, kind), corrected) == [i == layer for i in range(3)]
    keys_only, values_only = (found[which, -1].materialise(prefix) for which in ("keys_only", "values_only"))
    assert all(same(keys_only.keys, whole.keys) + same(keys_only.values, prefix.values))
    assert all(same(values_only.values, whole.values) + same(values_only.keys, prefix.keys))


def test_shares_are_of_what_the_whole_correction_gains():
    rows = [("full", -1, 0.6), ("keys_only", -1, 0.8), ("values_only", -1, 0.7)]
    rows += [("off", 0, 0.7), ("off", 1, 0.65), ("only", 0, 0.9), ("only", 1, 0.95)]
    table = pd.DataFrame(
        [(w, layer, prompt, kl + d, 0.5) for w, layer, kl in rows for prompt, d in ((0, -0.1), (1, 0.1))],
        columns=["which", "layer", "prompt", "kl32", "top1"],
    )
    found = summarise_ablation(table, direct_kl32=1.0)
    assert found["keys_only"]["kl32"] == pytest.approx(0.8) and found["full"]["se"] == pytest.approx(0.1)
    assert [e["change"] for e in found["off"]] == pytest.approx([0.1, 0.05])
    assert [e["share"] for e in found["off"]] == pytest.approx([0.25, 0.125])
    assert [e["gain"] for e in found["only"]] == pytest.approx([0.1, 0.05])
    assert [e["layer"] for e in found["only"]] == [0, 1]
    nothing = summarise_ablation(table, direct_kl32=found["full"]["kl32"])
    assert all(e["share"] is None and e["note"] for e in nothing["off"] + nothing["only"])


# What the correction is made of


@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_singular_values_are_those_of_the_whole_product(residual, features):
    learned = trained(residual, features)
    table = singular_values(learned)
    assert len(table) == 3 * 2 * 2 * 4
    for kind, left, right in (
        ("keys", learned.key_left, learned.key_right),
        ("values", learned.value_left, learned.value_right),
    ):
        expected = torch.linalg.svdvals(0.75 * left.double() @ right.double())[..., :4]
        found = table[table["kind"] == kind].sort_values(["layer", "head", "index"])["value"]
        assert found.to_numpy() == pytest.approx(expected.flatten().numpy(), rel=1e-9)


def test_a_correction_that_adds_a_tenth_has_the_size_of_a_tenth():
    eye = torch.eye(16).expand(3, 2, 16, 16)
    sigma = torch.ones(3, 2)
    learned = ResidualMap(eye, eye * 0.2, eye, eye * 0.4, sigma, sigma, scale=0.5)
    prefixes = [random_cache(1), random_cache(2)]
    table = sizes(learned, prefixes, tiny_llama())
    assert table[table["kind"] == "keys"]["ratio"].to_numpy() == pytest.approx([0.1] * 3, rel=1e-5)
    assert table[table["kind"] == "values"]["ratio"].to_numpy() == pytest.approx([0.2] * 3, rel=1e-5)
    both = torch.cat([prefix.keys[1] for prefix in prefixes])
    row = table[(table["layer"] == 1) & (table["kind"] == "keys")].iloc[0]
    assert row["cache_rms"] == pytest.approx(float(both.pow(2).mean().sqrt()), rel=1e-6)


def test_the_size_is_of_the_correction_and_not_of_the_base():
    learned = with_corrections(trained(base=fitted_ridge()), [False] * 3, [False] * 3)
    assert (sizes(learned, [random_cache(1)], tiny_llama())["correction_rms"] == 0).all()


# How near the caches are


def test_the_targets_own_cache_is_perfect_and_another_is_not():
    target, other = tiny_llama(), tiny_llama(seed=9)
    prompts = tokens(4, 20)
    batches = [
        (prefill(target, part[:, :-1]), oracle_reference(target, part, 5))
        for part in (prompts[:3], prompts[3:])
    ]
    table = measure_quality(target, prompts, batches, {"direct": DirectMap()}, Progress("test", 1))
    assert len(table) == 3 * 3
    assert table["r2"].dropna().tolist() == [1.0] * 6
    assert table["cosine"].dropna().to_numpy() == pytest.approx(np.ones(3), abs=1e-12)
    batches = [(prefill(other, prompts[:, :-1]), oracle_reference(target, prompts, 5))]
    table = measure_quality(target, prompts, batches, {"direct": DirectMap()}, Progress("test", 1))
    assert (table["r2"].dropna() < 0.5).all() and (table["cosine"].dropna() < 0.99).all()
    assert table[table["kind"] == "attention"]["r2"].isna().all()


def test_r2_is_one_minus_error_over_variance_whatever_the_batches():
    own, guess = random_cache(1, batch=5), random_cache(2, batch=5)
    y, x = torch.stack(own.keys).double(), torch.stack(guess.keys).double()  # (L, B, H, T, D)
    variance = (y - y.mean((1, 3), keepdim=True)).pow(2).sum((1, 2, 3, 4))
    expected = 1 - (y - x).pow(2).sum((1, 2, 3, 4)) / variance
    mean = [k.mean((0, 2), keepdim=True).expand_as(k) for k in own.keys]
    sums = SquareSums(GEOMETRY, ("guess", "mean"))
    for part in (slice(0, 2), slice(2, 5)):
        sums.add(
            [k[part] for k in own.keys],
            {"guess": [k[part] for k in guess.keys], "mean": [m[part] for m in mean]},
        )
    assert sums.r2("guess") == pytest.approx(expected.tolist(), rel=1e-9)
    assert sums.r2("mean") == pytest.approx([0.0] * 3, abs=1e-6)


def test_r2_of_what_does_not_vary_is_not_defined():
    still = [torch.full((2, 2, 7, 16), 3.1) for _ in range(3)]
    sums = SquareSums(GEOMETRY, ("direct",))
    sums.add(still, {"direct": random_cache(1, length=7).keys})
    assert sums.r2("direct") == [None] * 3


def test_the_first_layers_cosine_is_that_of_two_whole_handoffs():
    # The first layer's queries are the same whatever cache it reads, so that a real handoff can be compared with.
    target, other = tiny_llama(), tiny_llama(seed=9)
    prompts = tokens(3, 20)
    own, foreign = prefill(target, prompts[:, :-1]), prefill(other, prompts[:, :-1])
    inputs = oracle_reference(target, prompts, 5).inputs
    seen = []
    hook = target.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, x: seen.append(x[0].double())
    )
    with torch.no_grad():
        for prefix in (own, foreign):
            with handoff(target, prefix, DirectMap()) as active:
                active.hidden(inputs)
    hook.remove()
    expected = torch.cosine_similarity(*seen, dim=-1)  # (B, S)
    before = target.config._attn_implementation
    found = attention_cosines(target, own, {"other": foreign}, inputs)["other"]
    assert found.shape == (3, 3, 5)
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
    assert target.config._attn_implementation == before


# Power


@pytest.mark.parametrize(("size", "prompts"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_number_of_prompts_is_that_of_the_textbooks(size, prompts):
    # Cohen's small, medium and large effect in a paired two-sided test: 80 % power at 5 %
    assert math.ceil(needed_prompts(size, 0.8)) == prompts
    assert power(size, prompts) >= 0.8 > power(size, prompts - 1)


def spread(mean: float, sd: float, count: int = 40) -> list[float]:
    """Differences that have exactly this mean and standard deviation."""
    x = np.linspace(-1, 1, count)
    return (mean + sd * x / np.std(x, ddof=1)).tolist()


def test_power_says_how_many_prompts_the_found_effect_needs():
    found = summarise_power(spread(-0.5, 1.0), [f"a{i}" for i in range(40)])
    assert found["effect"] == pytest.approx(-0.5) and found["sd"] == pytest.approx(1.0)
    assert found["needed_80"] == 34 and found["needed_95"] > 34 and found["prompts"] == 40
    # Every prompt an article of its own: clusters change nothing but statsmodels' small-sample correction.
    assert found["design_effect"] == pytest.approx(1, abs=0.03)
    assert power(found["detectable_80"], 40) == pytest.approx(0.8, abs=1e-3)
    assert {entry["prompts"] for entry in found["curve"]} >= {40, 64}
    powers = [entry["power"] for entry in found["curve"]]
    assert powers == sorted(powers) and powers[-1] == pytest.approx(1)


def test_prompts_of_one_article_count_for_less():
    differences, articles = sorted(spread(-0.3, 1.0)), [f"a{i // 5}" for i in range(40)]
    found = summarise_power(differences, articles)
    whole = paired(differences, articles, seed=1)
    assert found["design_effect"] == pytest.approx((whole["se_clustered"] / whole["se"]) ** 2)
    assert found["design_effect"] > 2
    assert found["needed_80_clustered"] > 2 * found["needed_80"] - 2
    assert found["detectable_80_clustered"] > found["detectable_80"]
    entry = next(e for e in found["curve"] if e["prompts"] == 64)
    assert entry["power_clustered"] == pytest.approx(power(0.3, 64 / found["design_effect"]))


@pytest.mark.parametrize(
    ("differences", "known"),
    [
        ([], {}),
        ([0.5], {"effect": 0.5}),
        ([0.2] * 6, {"effect": 0.2, "sd": 0.0}),
        ([-1.0, 1.0], {"effect": 0.0}),
    ],
)
def test_too_little_to_tell_power_from_gives_nulls_and_a_note(differences, known):
    found = summarise_power(differences, [f"a{i}" for i in range(len(differences))])
    assert found["needed_80"] is None and found["needed_80_clustered"] is None
    assert found["note"] and found["prompts"] == len(differences)
    assert {key: found[key] for key in known} == pytest.approx(known)


@given(
    st.lists(st.floats(-10, 10, width=32), max_size=30),
    st.lists(st.integers(0, 4), min_size=30, max_size=30),
)
def test_power_is_never_nan(differences, articles):
    found = summarise_power(differences, articles[: len(differences)])
    json.dumps(found, allow_nan=False)
    for entry in found["curve"]:
        assert all(p is None or 0 <= p <= 1 + 1e-12 for p in (entry["power"], entry["power_clustered"]))


# Prompts of other lengths

ARTICLES = generated_articles(4, 30, seed=1)
TOKENIZER = build_word_tokenizer(ARTICLES)
ENCODED = [(article.title, encode(TOKENIZER, article.text)[0]) for article in ARTICLES]


def test_prompts_take_turns_over_articles_and_never_overlap():
    found, titles = length_prompts(ENCODED, TOKENIZER, 20, 11, seed=0)
    assert found.shape == (11, 20) and titles[:4] == titles[4:8] == [title for title, _ in ENCODED]
    for title, ids in ENCODED:
        spans = [tuple(row.tolist()) for row, owner in zip(found, titles) if owner == title]
        starts = sorted(next(i for i in range(len(ids)) if tuple(ids[i : i + 20]) == span) for span in spans)
        assert all(later - earlier >= 20 for earlier, later in zip(starts, starts[1:]))
    again, _ = length_prompts(ENCODED, TOKENIZER, 20, 11, seed=0)
    assert torch.equal(found, again)
    assert not torch.equal(found, length_prompts(ENCODED, TOKENIZER, 20, 11, seed=1)[0])


def test_short_articles_give_fewer_prompts_than_asked_and_none_where_none_fits():
    room = sum(len(ids) // 100 for _, ids in ENCODED)
    found, titles = length_prompts(ENCODED, TOKENIZER, 100, 1000, seed=0)
    assert 0 < len(found) == len(titles) == room < 1000
    none, titles = length_prompts(ENCODED, TOKENIZER, 5000, 3, seed=0)
    assert none.shape == (0, 5000) and titles == []


def test_a_tokenizer_that_adds_a_bos_has_it_counted():
    from tokenizers.processors import TemplateProcessing

    adding = build_word_tokenizer(ARTICLES)
    adding._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", adding.bos_token_id)]
    )
    found, _ = length_prompts(ENCODED, adding, 20, 6, seed=0)
    assert found.shape == (6, 20) and (found[:, 0] == adding.bos_token_id).all()
    assert not (found[:, 1:] == adding.bos_token_id).any()


def lengths_table(prompts: int, articles: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "prefix_tokens": 64,
            "path": path,
            "prompt": i,
            "article": f"a{i % articles}",
            "kl32": kl,
            "top1": 0.5,
        }
        for path in ("direct", "ridge", "learned")
        for i, kl in enumerate(rng.random(prompts))
    ]
    return pd.DataFrame(rows)


def test_a_length_is_summarised_as_the_final_evaluation_is():
    table = lengths_table(12, 5)
    found, none = summarise_lengths(table, [64, 128], seed=0)
    kl = table.pivot(index="prompt", columns="path", values="kl32")
    assert found["prompts"] == 12 and found["articles"] == 5
    assert found["paths"]["ridge"]["kl32"]["mean"] == pytest.approx(kl["ridge"].mean())
    difference = kl["learned"] - kl["direct"]
    assert found["paired"]["learned-direct"]["mean"] == pytest.approx(difference.mean())
    assert found["paired"]["learned-direct"]["wins"] == int((difference < 0).sum())
    assert found["paired"]["learned-direct"]["se_clustered"] > 0
    assert none["prompts"] == none["articles"] == 0
    assert none["paths"]["direct"]["kl32"]["mean"] is None and none["paths"]["direct"]["top1"] is None
    assert none["paired"]["ridge-direct"]["mean"] is None and none["paired"]["ridge-direct"]["note"]


def test_one_prompt_of_a_length_has_no_error_and_says_so():
    found = summarise_lengths(lengths_table(1, 1), [64], seed=0)[0]
    assert found["paths"]["learned"]["kl32"]["se"] is None and found["paths"]["learned"]["kl32"]["note"]
    assert found["paired"]["learned-direct"]["ci95"] is None
    json.dumps(found, allow_nan=False)


# Learning curves


def test_a_training_that_diverged_is_a_null_with_a_note():
    rows = [("direct", 0), ("ridge", 0), ("windows", 12), ("steps", 4)]
    table = pd.DataFrame(
        [(axis, value, prompt, 0.2 + prompt / 10, 0.5) for axis, value in rows for prompt in range(3)],
        columns=["axis", "value", "prompt", "kl32", "top1"],
    )
    facts = [{"windows": n, "tokens": 64 * n, "articles": 2} for n in (3, 12)]
    found = summarise_learning(table, facts, [4, 12])
    assert found["prompts"] == 3 and found["direct"]["kl32"] == pytest.approx(0.3)
    assert [entry["kl32"] is None for entry in found["windows"]] == [True, False]
    assert [entry["step"] for entry in found["steps"]] == [4, 12] and found["steps"][1]["note"]
    json.dumps(found, allow_nan=False)


# Records and settings


def test_scores_of_other_prompts_are_refused(tmp_path):
    table = pd.DataFrame({"prompt": [0, 1], "kl32": [0.1, 0.2], "top1": [1.0, 0.5]})
    progress = Progress("test", 4)
    arguments = (lambda: table, progress, 2, "scored")
    assert len(kept_scores(tmp_path / "a.parquet", range(2), *arguments)) == 2
    broken = lambda: pytest.fail("scored twice")
    assert len(kept_scores(tmp_path / "a.parquet", range(2), broken, progress, 2, "scored")) == 2
    assert progress.done == 4 and progress.initial == 2
    with pytest.raises(KvlibError, match="does not hold the scores of its 3 prompts"):
        kept_scores(tmp_path / "a.parquet", range(3), broken, progress, 2, "scored")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"evidence.prefix_tokens": [64, 64, 512, 1024, 2048]}, "evidence.prefix_tokens is"),
        ({"evidence.prefix_tokens": [1]}, "evidence.prefix_tokens.0 is 1"),
        ({"evidence.prompts": [3]}, "evidence.prompts has 1 entries, expected 5"),
        ({"evidence.windows": [64, 8]}, "expected different counts, the smallest first"),
        ({"evidence.steps": []}, "evidence.steps is []"),
        ({"evidence.layers": 3}, "unknown key 'evidence.layers'"),
    ],
)
def test_bad_settings_are_one_sentence(overrides, sentence):
    with pytest.raises(KvlibError) as refusal:
        load_profile("laptop", overrides)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)
