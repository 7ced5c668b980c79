"""The evidence chapter on made-up records: whatever the numbers are, its charts draw and its sentences are true."""

import json
import re
from pathlib import Path

import jupytext
import pytest
from fake_evidence import fake_evidence
from test_report import BACKGROUNDS, contrast

from kvlib.report import evidence as worked_out
from kvlib.report import prose, wording
from kvlib.report.figures import evidence as figures
from kvlib.report.figures.evidence_map import KINDS
from kvlib.report.tables import evidence as tables
from kvlib.report.tables.cells import to_html

ROOT = Path(__file__).resolve().parents[1]
HEAD = {"frozen": "0123456789abcdef" * 4, "arm": "direct-linear-r8", "scale": 0.75}
VARIANTS = {
    "plain": {},
    "no prompts at the longest": {"lengths": {64: 64, 512: 30, 4096: 0}},
    "no prompts at all": {"lengths": {64: 0, 512: 0}},
    "one prompt": {"lengths": {64: 1}, "validation": 1},
    "one number of windows": {"windows": (64,), "steps": (100,)},
    "no training": {"windows": (), "steps": ()},
    "no gain": {"gain": 0},
    "harm": {"gain": -0.02},
    "a ridge map that fits worse": {"ridge_fits": False},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request) -> tuple[dict, dict]:
    return made_up(**request.param)


def made_up(**settings) -> tuple[dict, dict]:
    summary, records = fake_evidence(**settings)
    return HEAD | summary, records


def all_figures(summary: dict, records: dict) -> dict:
    return {
        "kl_by_length": figures.kl_by_length(summary),
        "learning": figures.learning(summary, records),
        "correction": figures.correction(records),
        "layers": figures.layers(summary, records),
        "reconstruction": figures.reconstruction(summary, records),
        "power": figures.power(summary),
    }


def all_tables(summary: dict, records: dict) -> list:
    return [
        tables.lengths(summary),
        tables.learning(summary, records),
        tables.correction(records),
        tables.layers(summary, records),
        tables.reconstruction(summary, records),
        tables.power(summary),
    ]


def facts(summary: dict, records: dict) -> dict[str, str]:
    return prose.evidence_facts(summary) | prose.evidence_map_facts(summary, records)


def test_every_variant_has_charts_that_say_something(variant):
    found = all_figures(*variant)
    assert found.keys() == set(figures.__all__)
    for name, figure in found.items():
        assert re.search(r"nats|share", figure.layout.title.text), name
        text = json.dumps(figure.to_plotly_json(), default=str)
        assert "$" not in text, name  # MathJax would take it for a formula
        assert all(trace.x is not None and len(trace.x) for trace in figure.data), name
        hovers = [t.hovertemplate for t in figure.data if t.hoverinfo != "skip" and t.x[0] is not None]
        assert all(hovers), name
        assert hovers or figure.layout.annotations, name  # an empty chart says why it is empty
        assert figure.layout.legend.y >= 1 and figure.layout.legend.yanchor == "bottom", name


def test_every_variant_has_whole_tables(variant):
    for table in all_tables(*variant):
        assert not table.empty
        assert "nan" not in to_html(table).lower()


def test_every_variant_is_told_in_whole_sentences(variant):
    said = facts(*variant)
    whole = facts(*made_up()).keys()
    assert said.keys() == whole
    sentences = [text for key, text in said.items() if key not in ("manifest", "map", "validation_prompts")]
    for text in [*sentences, *prose.evidence_headline(variant[0])]:
        assert not re.search(r"\bnan\b|None|\binf\b|not measured nats| , |\bno of\b", text), text
        assert text == "" or re.match(r"[A-Z0-9].*\.$", text), text
    assert len(prose.evidence_headline(variant[0])) == 5


def test_lengths_are_sorted_by_what_their_intervals_say():
    summary, _ = made_up()
    set_interval(summary, 0, -0.02, [-0.03, -0.01])
    set_interval(summary, 1, -0.01, [-0.03, 0.01])
    set_interval(summary, 2, 0.02, [0.01, 0.03])
    set_interval(summary, 3, -0.02, None)
    summary["lengths"][4] |= {"prompts": 0, "articles": 0, "paths": None, "paired": None}
    said = prose.evidence_facts(summary)["length_gain"]
    assert re.search(r"At 64 tokens the 95 % interval .* below zero: there the gain holds", said)
    assert "At 512 tokens it holds zero" in said
    assert "At 1,024 tokens it lies above zero: there the correction does harm" in said
    assert "At 2,048 tokens there is a difference but no interval" in said
    assert "At 4,096 tokens there was no prompt" in said
    figures.kl_by_length(summary)
    tables.lengths(summary)


def set_interval(summary: dict, index: int, mean: float, ci95, se_clustered: float | None = None) -> None:
    paired = summary["lengths"][index]["paired"]["learned-direct"]
    paired |= {"mean": mean, "ci95": ci95, "se_clustered": se_clustered}


def test_a_gain_that_clustering_takes_away_is_not_claimed_in_the_headline():
    summary, _ = made_up(lengths={64: 64, 2048: 40})
    set_interval(summary, 0, -0.02, [-0.03, -0.01], 0.005)
    set_interval(summary, 1, -0.02, [-0.03, -0.01], 0.02)
    said = prose.evidence_facts(summary)
    assert "verdict changes at 2,048 tokens (−0.0592 to +0.0192)" in said["length_clustered"]
    assert "the gain is not shown there" in said["length_outside"]
    headline = prose.evidence_headline(summary)[0]
    assert "is shown at 64 tokens and is not distinguishable from none at 2,048 tokens" in headline


def test_few_prompts_are_pointed_out_and_counted_on_the_axis():
    summary, records = made_up(lengths={64: 64, 2048: 8})
    said = facts(summary, records)["length_few"]
    assert "2,048 tokens (eight)" in said and "64 tokens" not in said
    assert list(figures.kl_by_length(summary).layout.xaxis2.ticktext) == ["64<br>n = 64", "2,048<br>n = 8"]


def test_the_training_lengths_are_a_band_with_a_place_in_the_legend():
    figure = figures.kl_by_length(made_up()[0])
    bands = [shape for shape in figure.layout.shapes if shape.name == "lengths of its training"]
    assert [(band.x0, band.x1) for band in bands] == [(64, 992)] * 2
    assert [bool(band.showlegend) for band in bands] == [True, False]


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (-0.01, "still falls at its end"),
        (0.01, "rises at its end"),
        (-1e-4, "cannot be told from a flat one"),
    ],
)
def test_a_curve_that_still_falls_is_told_from_one_that_does_not(shift, words):
    summary, records = made_up(windows=(8, 64))
    learning = records["learning"]
    before = learning[(learning.axis == "windows") & (learning.value == 8)].kl32.to_numpy()
    wobble = [0.001 * (-1) ** i for i in range(len(before))]
    learning.loc[(learning.axis == "windows") & (learning.value == 64), "kl32"] = before + shift + wobble
    said = facts(summary, records)["data_end"]
    assert words in said and "from eight to 64 windows" not in said and "from 8 to 64 windows" in said
    assert ("more text would be worth trying" in said) == ("falls" in words)


def test_a_training_that_broke_off_is_named_and_drawn_around():
    summary, records = made_up()
    summary["learning"]["windows"][0] |= {"kl32": None, "se": None, "median_kl32": None, "top1": None}
    said = facts(summary, records)
    assert "One training of these curves gave no finite KL32" in said["data_levels"]
    assert "with 16 windows" in said["data_levels"]
    figures.learning(summary, records)
    tables.learning(summary, records)


def test_shares_are_of_the_gain_and_need_not_add_up():
    summary, records = made_up()
    said = facts(summary, records)
    assert "(30.0\u00a0%)" in said["parts"] and "(80.0\u00a0%)" in said["parts"]
    assert "more of it comes from the values" in said["parts"] and "110.0\u00a0%" in said["parts"]
    sums = [sum(e["share"] for e in summary["ablation"][key]) for key in ("off", "only")]
    assert all(wording.percent(value, 0) in said["layers_sum"] for value in sums)


def test_where_there_is_no_gain_nothing_is_divided():
    summary, records = made_up(gain=-0.02)
    said = facts(summary, records)
    assert "no gain to divide" in said["parts"] and "no shares" in said["layers_sum"]
    assert "%" not in prose.evidence_headline(summary)[2]


def test_the_layer_that_is_missed_most_is_the_tallest_bar():
    summary, records = made_up()
    worst = max(summary["ablation"]["off"], key=lambda entry: entry["change"])
    assert f"missed most is layer {worst['layer']}:" in facts(summary, records)["layers_off"]
    assert f"layer {worst['layer']} is missed most" in prose.evidence_headline(summary)[3]
    bars = [t for t in figures.layers(summary, records).data if t.yaxis == "y2"]
    tallest = max(((y, x) for t in bars for x, y in zip(t.x, t.y, strict=True)))
    assert tallest[1] == worst["layer"] and tallest[0] == pytest.approx(worst["change"])


def test_whiskers_of_layers_are_of_the_paired_difference():
    summary, records = made_up()
    each = worked_out.by_layer(summary, records).set_index("layer")
    ablation = records["ablation"]
    off = ablation[(ablation.which == "off") & (ablation.layer == 3)].kl32.to_numpy()
    full = ablation[ablation.which == "full"].kl32.to_numpy()
    assert each.off_se[3] == pytest.approx((off - full).std(ddof=1) / len(full) ** 0.5)
    assert each.off[3] == pytest.approx((off - full).mean())


def test_layers_are_counted_only_beyond_two_standard_errors():
    summary, records = made_up()
    each = worked_out.by_layer(summary, records)
    rises, falls = ((sign * each.off > 2 * each.off_se).sum() for sign in (1, -1))
    assert 0 < rises < (each.off > 0).sum()
    said = facts(summary, records)["layers_off"]
    assert f"rises for {wording.of(int(rises), 30)} layers and falls for {wording.of(int(falls), 30)}" in said


def test_reconstruction_is_called_no_fidelity_only_if_the_numbers_say_so():
    assert "is not fidelity here" in facts(*made_up())["ridge_reason"]
    agreeing = facts(*made_up(ridge_fits=False))["ridge_reason"]
    assert "reconstruction and fidelity agree" in agreeing and "not fidelity" not in agreeing
    summary, records = made_up()
    summary["learning"]["ridge"]["kl32"] = 0.1
    assert "reconstruction and fidelity agree" in facts(summary, records)["ridge_reason"]
    ridge = records["ridge"]
    ridge.loc[(ridge.kind == "keys") & (ridge.path == "ridge"), "r2"] -= 0.5
    assert "does not point one way" in facts(summary, records)["ridge_reason"]


def test_the_cosine_is_said_to_order_the_paths_only_if_it_does():
    summary, records = made_up()
    assert "orders the paths as KL32 does, which R² does not" in facts(summary, records)["cosine"]
    ridge = records["ridge"]
    ridge.loc[(ridge.kind == "attention") & (ridge.path == "ridge"), "cosine"] = 0.99
    assert "does not order the paths as KL32 does either" in facts(summary, records)["cosine"]
    ridge.loc[ridge.kind == "attention", "cosine"] = float("nan")
    assert "not on record" in facts(summary, records)["cosine"]
    assert "no cosine on record" in figures.reconstruction(summary, records).to_json()


def test_an_r2_far_below_zero_is_counted_and_does_not_flatten_the_rest():
    summary, records = made_up()
    ridge = records["ridge"]
    ridge.loc[(ridge.kind == "keys") & (ridge.path == "direct") & (ridge.layer < 2), "r2"] = -40.0
    figure = figures.reconstruction(summary, records)
    assert "R² of the keys (2 below −1, not shown)" in [a.text for a in figure.layout.annotations]
    assert figure.layout.yaxis2.range[0] > -2 and figure.layout.yaxis3.range is None


def test_power_says_whether_this_runs_prompts_are_enough():
    summary, _ = made_up()
    power = summary["power"]
    power |= {"prompts": 64, "needed_80": 30.2, "needed_80_clustered": 50.1}
    assert "takes 31 independent prompts, and 51" in prose.evidence_facts(summary)["power_needed"]
    assert "64, is enough." in prose.evidence_facts(summary)["power_needed"]
    power["needed_80_clustered"] = 90.0
    assert "is enough by one of these counts only" in prose.evidence_facts(summary)["power_needed"]
    power["needed_80"] = 70.0
    assert "is too few" in prose.evidence_facts(summary)["power_needed"]
    power |= {"effect": -0.02, "detectable_80": 0.01, "detectable_80_clustered": 0.03}
    assert "not larger than the stricter" in prose.evidence_facts(summary)["power_detectable"]


def test_where_power_cannot_be_computed_the_reason_is_given():
    summary, records = made_up(gain=0)
    assert "cannot be computed: every difference is the same" in facts(summary, records)["power_needed"]
    assert "no power to compute" in figures.power(summary).to_json()
    assert prose.evidence_headline(summary)[4].endswith("every difference is the same.")


def test_gaps_in_the_power_curve_are_left_out():
    summary, _ = made_up()
    summary["power"]["curve"][3]["power_clustered"] = None
    figure = figures.power(summary)
    assert all(None not in list(trace.y) for trace in figure.data)
    marked = [t for t in figure.data if t.name == "this run"]
    assert len(marked) == 2 and {t.x[0] for t in marked} == {summary["power"]["prompts"]}


def test_the_spectrum_counts_directions():
    _, records = made_up()
    values = records["singular_values"]
    values["value"] = 0.5
    found = worked_out.spectrum(values)
    assert (found.directions - 8).abs().max() < 1e-9  # eight equal directions carry as much as eight
    values.loc[values["index"] > 0, "value"] = 0.0
    found = worked_out.spectrum(values)
    assert (found.directions - 1).abs().max() < 1e-9 and (found.largest == 0.5).all()


@pytest.mark.parametrize("style", KINDS.values(), ids=KINDS.keys())
def test_colours_of_keys_and_values_stand_out_on_both_pages(style):
    assert all(contrast(style.colour, background) >= 3 for background in BACKGROUNDS)


def test_small_numbers_keep_two_digits():
    assert wording.small(0.000087) == "0.000087"
    assert wording.small(-0.0123456) == "−0.0123"
    assert wording.small(0.0) == "0.0000" and wording.small(None) == wording.UNKNOWN


def test_the_notebook_tells_and_does_not_compute():
    notebook = jupytext.read(ROOT / "notebooks" / "evidence.py")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    parameters = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    assert all("  # " in line for line in parameters[0].splitlines())
    assert not any(re.search(r"^\s*(def|class|for|while) ", cell.source, re.M) for cell in code)
    pages = " ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"\b\d+[.,]?\d* (nats|ms|%|tokens|prompts|arms|MiB)", pages)


def test_every_sentence_that_the_notebook_asks_for_is_there():
    source = (ROOT / "notebooks" / "evidence.py").read_text()
    asked = set(re.findall(r"\{glue:text\}`(\w+)`", source))
    assert asked <= facts(*made_up()).keys()
    assert facts(*made_up()).keys() - asked <= {"manifest", "validation_prompts"}
