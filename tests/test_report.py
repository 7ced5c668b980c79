"""The report floor on made-up records: charts, tables, sentences, and the whole book without a model."""

import copy
import re
import shutil
from pathlib import Path

import jupytext
import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest
from fake_records import write_fake_run
from notebook_runs import execute_all

from kvlib.errors import KvlibError
from kvlib.report import figures, prose, tables, wording
from kvlib.report.agreement import read_raw_tables
from kvlib.report.book import CHAPTERS, build_book
from kvlib.report.comparison import compare, ordering_sentence, read_published, summary_sentence
from kvlib.report.figures.slices import AXES
from kvlib.report.palette import BASES, PATHS, SEQUENCE
from kvlib.report.prose import making
from kvlib.report.renderer import BookRenderer
from kvlib.report.spoken import spoken
from kvlib.study.profile import load_profile
from kvlib.study.records import read_lines, read_table
from kvlib.study.run import read_summary

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")
BACKGROUNDS = ("#ffffff", "#121212")  # of the theme, light and dark
PAGE_BYTES = 2_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("results") / "laptop")


@pytest.fixture(scope="module")
def records(run) -> dict[str, dict]:
    return {stage: read_summary(run / stage) for stage in STAGES}


@pytest.fixture
def changed(records):
    """The records, free to be changed."""
    return copy.deepcopy(records)


def all_figures(run: Path, records: dict[str, dict]) -> dict[str, go.Figure]:
    final, screening, latency = records["frozen_evaluation"], records["screening"], records["latency"]
    prompts = read_table(run / "frozen_evaluation" / "prompts.parquet")
    return {
        "residual_error": figures.residual_error(read_table(run / "pair" / "layers.parquet")),
        "slices": figures.slices(screening, read_table(run / "screening" / "validation.parquet")),
        "curves": figures.curves(read_table(run / "screening" / "curves.parquet"), screening),
        "grid": figures.grid(screening),
        "confirmation": figures.confirmation(records["confirmation"], screening),
        "kl_by_path": figures.kl_by_path(final),
        "controls": figures.controls(final),
        "paired_prompts": figures.paired_prompts(prompts, "oracle"),
        "sorted_differences": figures.sorted_differences(prompts, "oracle"),
        "kl_by_step": figures.kl_by_step(read_table(run / "frozen_evaluation" / "steps.parquet")),
        "time_to_first_token": figures.time_to_first_token(latency),
        "cold_ratio": figures.cold_ratio(read_table(run / "latency" / "raw.parquet")),
        "peak_memory": figures.peak_memory(read_table(run / "latency" / "memory.parquet")),
        "frontier": figures.frontier(final, latency),
        "moved_frontier": figures.moved_frontier(final, latency),
        "step_parts": figures.step_parts(latency),
    }


def test_every_chart_has_a_title_with_a_unit_and_something_to_say_on_hover(run, records):
    found = all_figures(run, records)
    assert found.keys() == set(figures.__all__)
    for name, figure in found.items():
        assert re.search(r"nats|\(ms|MiB|share", figure.layout.title.text), name
        assert "$" not in figure.to_json(), name  # MathJax would take it for a formula
        hovers = [t.hovertemplate for t in figure.data if t.hoverinfo != "skip" and t.x[0] is not None]
        assert hovers and all(hovers), name


def test_legends_stand_above_the_plot(run, records):
    for name, figure in all_figures(run, records).items():
        assert figure.layout.legend.y >= 1 and figure.layout.legend.yanchor == "bottom", name


def test_a_path_has_one_colour_and_one_marker_in_every_chart(run, records):
    found = all_figures(run, records)
    for name in ("kl_by_step", "time_to_first_token", "peak_memory"):
        for trace in found[name].data:
            path = next((p for p, style in PATHS.items() if style.label == trace.name), None)
            if path:
                assert (trace.line.color, trace.marker.symbol) == (PATHS[path].colour, PATHS[path].symbol)
    assert len({(s.colour, s.symbol) for s in PATHS.values()}) == len(PATHS)


@pytest.mark.parametrize("style", [*PATHS.values(), *BASES.values()], ids=lambda s: s.label)
def test_colours_stand_out_on_the_light_and_the_dark_page(style):
    assert all(contrast(style.colour, background) >= 3 for background in BACKGROUNDS)


def test_what_is_no_path_takes_no_paths_colour():
    assert not set(SEQUENCE) & {style.colour for style in PATHS.values()}
    assert all(contrast(colour, background) >= 3 for colour in SEQUENCE for background in BACKGROUNDS)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_prompt_text_cannot_break_out_of_its_hover(run, records):
    text = all_figures(run, records)["paired_prompts"].to_json()
    assert "<small>" not in text and "&lt;small&gt;" in text


def test_hover_text_shows_quotation_marks_and_mode_names_as_they_are_read(run, records):
    prompts = read_table(run / "frozen_evaluation" / "prompts.parquet")
    said = figures.paired_prompts(prompts.assign(text='He said "it\'s <b>"'), "oracle").to_json()
    assert "&quot;" not in said and "&#x27;" not in said and "&lt;b&gt;" in said
    for name, figure in all_figures(run, records).items():
        assert "&quot;" not in figure.to_json() and "&#x27;" not in figure.to_json(), name
        assert not re.search(r"in_place|rope_stripped", str([t.customdata for t in figure.data])), name


def test_the_front_chart_says_on_hover_on_what_it_rests_and_in_the_legend_what_open_markers_are(records):
    figure = figures.frontier(records["frozen_evaluation"], records["latency"], 256)
    said = {trace.name: trace.customdata[0][2] for trace in figure.data if trace.customdata}
    prompts = records["frozen_evaluation"]["forcing"]["oracle"]["paths"]["learned"]["prompts"]
    assert f"{prompts} prompts of 256 tokens" in said["learned correction"]
    assert re.search(r"minus direct: −0\.\d+, 95 % −0\.\d+ to −0\.\d+ nats", said["learned correction"])
    assert "minus direct" not in said["direct reuse"] and "±" in said["direct reuse"]
    assert [t.name for t in figure.data if t.marker.symbol == "circle-open" and t.showlegend is None] == [
        "open: cold"
    ]
    assert all(len(step.args[0]["x"]) == len(figure.data) for step in figure.layout.sliders[0].steps)


def test_native_at_zero_is_spoken_and_drawn_as_zero(run, records):
    figure = all_figures(run, records)["controls"]
    assert "native prefill: native prefill, 0." in spoken(figure.to_dict())
    at = next(trace.x[0] for trace in figure.data if trace.name == "native prefill")
    axis = figure.layout.xaxis
    assert dict(zip(axis.tickvals, axis.ticktext, strict=True))[at] == "0"
    assert any(note.text == "//" for note in figure.layout.annotations)


def test_every_cold_repetition_is_held_against_natives_median(run, records):
    raw = read_table(run / "latency" / "raw.parquet")
    figure = all_figures(run, records)["cold_ratio"]
    cold = raw[(raw.path == "learned") & (raw.residency == "cold")]
    medians = raw[raw.path == "native"].groupby("prefix_tokens").ms.median()
    drawn = next(trace for trace in figure.data if trace.name == PATHS["learned"].label)
    assert sorted(drawn.y) == pytest.approx(sorted(cold.ms / cold.prefix_tokens.map(medians)))
    native = next(trace for trace in figure.data if trace.name == PATHS["native"].label)
    assert len(native.y) == (raw.path == "native").sum()
    assert len(tables.cold(raw)) == sum(len(trace.y) for trace in figure.data)


def test_whiskers_of_the_slices_are_those_of_the_difference_from_the_centre(run, records):
    screening, scores = records["screening"], read_table(run / "screening" / "validation.parquet")
    figure = figures.slices(screening, scores)
    wide = scores.pivot(index="prompt", columns="arm", values="kl32")
    ids = screening["slices"]["rank"]["direct"]
    centre = set.intersection(*(set(bases["direct"]) for bases in screening["slices"].values())).pop()
    drawn = [t for t in figure.data if t.name == BASES["direct"].label][list(AXES).index("rank")]
    expected = [0 if arm == centre else (wide[arm] - wide[centre]).sem() for arm in ids]
    assert list(drawn.error_y.array) == pytest.approx(expected)


def test_lines_join_only_settings_that_have_values_in_between(run, records):
    figure = all_figures(run, records)["slices"]
    modes = [trace.mode for trace in figure.data if trace.name == BASES["direct"].label]
    joined = [axis for axis, mode in zip(AXES, modes, strict=True) if "lines" in mode]
    assert joined == ["learning_rate", "rank", "warmup"]


def test_the_wins_on_the_chart_are_those_of_the_statistics(run, records):
    wins = records["frozen_evaluation"]["forcing"]["oracle"]["paired"]["learned-direct"]["wins"]
    names = [trace.name for trace in all_figures(run, records)["sorted_differences"].data]
    assert any(name.endswith(f"({wins})") for name in names)


def test_an_empty_memory_table_and_missing_times_still_draw(changed):
    empty = pd.DataFrame(columns=["prefix_tokens", "path", "peak_extra_bytes", "mode"])
    assert figures.peak_memory(empty).layout.annotations[0].text == "memory was not measured"
    assert tables.memory(empty).empty
    changed["latency"]["rows"] = [r for r in changed["latency"]["rows"] if r["residency"] == "resident"]
    changed["latency"]["crossover"].pop("cold")
    figures.time_to_first_token(changed["latency"])
    figures.frontier(changed["frozen_evaluation"], changed["latency"])
    assert "does not overtake" in prose.latency_facts(changed["latency"])["cold_crossover"]


def test_a_pair_from_the_hub_has_a_chapter_too(run, changed, tmp_path):
    changed["pair"]["pruning"] = None
    assert "nothing was pruned" in prose.pair_facts(changed["pair"])["source_made"]
    assert (
        figures.residual_error(tables.read_layers(tmp_path))
        .layout.annotations[0]
        .text.startswith("the source")
    )
    assert (
        prose.front_facts(changed, 256, read_raw_tables(run))["source"] == changed["pair"]["source"]["name"]
    )


def test_a_finalist_whose_training_broke_off_is_shown_as_such(changed):
    arm = changed["confirmation"]["arms"][1]
    arm["mean_kl32"] = None
    arm["runs"][0] |= {"status": "not_finite", "kl32": None, "se": None, "top1": None}
    figures.confirmation(changed["confirmation"], changed["screening"])
    assert "not_finite" in tables.confirmation(changed["confirmation"]).note.tolist()
    assert (
        "not two complete arms"
        in prose.confirmation_facts(changed["confirmation"], changed["screening"])["spread"]
    )


def test_the_same_figure_twice_gets_two_places():
    renderer, figure = BookRenderer(), go.Figure(layout={"title": {"text": "KL (nats)"}}).to_dict()
    bundles = [renderer.to_mimebundle(figure) for _ in range(2)]
    ids = [re.search(r'id="(chart-[^"]+)"', bundle["text/html"]).group(1) for bundle in bundles]
    assert len(set(ids)) == 2
    html = bundles[0]["text/html"]
    assert "http" not in html and "<html" not in html
    assert '<p class="kv-title">KL (nats)</p>' in html and 'aria-label="KL (nats)"' in html
    assert bundles[0]["application/vnd.plotly.v1+json"]["layout"]["title"]["text"] == "KL (nats)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (True, "yes"),
        (12345, "12,345"),
        (0.0, "0"),
        (-0.01913, "−0.01913"),
        (0.20051, "0.2005"),
        (12345.6, "12,346"),
        (0.0000123, "1.23e−05"),
        ("<b>", "<b>"),
    ],
)
def test_cells_are_written_for_readers(value, text):
    assert tables.cell_text(value) == text


def test_a_table_keeps_full_values_for_sorting_and_escapes_text():
    html = tables.to_html(pd.DataFrame({"a": ["<b>"], "b": [0.123456789]}))
    assert "&lt;b&gt;" in html and 'data-value="0.123456789"' in html and ">0.1235<" in html


def test_the_paired_verdict_says_which_side_of_zero_the_interval_is():
    result = {"mean": -0.01913, "se": 0.00378, "ci95": [-0.02654, -0.01172], "wins": 54, "prompts": 64}
    result |= {"relative": -0.0954}
    said = prose.paired_verdict("learned", result)
    assert "−0.0191" in said and "54 of 64" in said and "−9.5\u00a0%" in said and "below zero" in said
    assert "does harm" in prose.paired_verdict("ridge", result | {"mean": 0.1, "ci95": [0.05, 0.15]})
    assert "cannot tell" in prose.paired_verdict("learned", result | {"ci95": [-0.02, 0.01]})
    assert "no interval" in prose.paired_verdict("learned", result | {"ci95": None})
    assert "not finite" in prose.paired_verdict("learned", {"mean": None, "note": "2 of 3 are not finite"})


def test_a_slower_handoff_is_called_slower(changed):
    assert wording.ratio(302.69, 38.25) == "is 7.91 times as fast as native"
    for row in changed["latency"]["rows"]:
        if row["path"] == "learned":
            row["p50_ms"] *= 1000
    said = prose.latency_facts(changed["latency"])["resident_verdict"]
    assert "times as long as native" in said


def test_an_arm_that_broke_off_is_named(records):
    said = prose.screening_facts(records["screening"])["broken"]
    assert said.startswith("One arm broke off") and "ridge base" in said


def test_articles_from_one_end_of_the_alphabet_are_called_that():
    said = making.spread_sentence({"Aa", "Ab", "Ac", "Ba"})
    assert said.startswith("Three of four titles begin with “A”") and "not a sample" in said
    assert "three different letters" in making.spread_sentence({"Aa", "Ba", "Ca"})
    assert making.spread_sentence({"12", "34"}) == ""


def test_a_quantised_target_is_called_that_and_another_is_not():
    laptop, paper = (load_profile(name).pair.target for name in ("laptop", "paper"))
    assert "quantised" in making.format_sentence(laptop) and ".gguf" in making.format_sentence(laptop)
    assert making.format_sentence(paper) == ""


def test_the_reason_for_each_finalist_is_told(changed):
    screening = changed["screening"]
    assert "Place 1 goes to the lowest" in prose.screening_facts(screening)["places"]
    rms, own = (
        next(
            arm["id"] for arm in screening["arms"] if arm["base"] == "direct" and arm["features"] == features
        )
        for features in ("rms", "own")
    )
    tied = [{"arm": own, "difference": 0.00125, "se": 0.0025}]
    screening["places"][1] = {"arm": own, "lowest": rms, "tied": tied}
    said = prose.screening_facts(screening)["places"]
    assert "for place 2, one arm cannot be told from the lowest of the rest" in said
    assert "0.0013 nats above it" in said or "0.0012 nats above it" in said
    assert said.endswith("decided by what attention can absorb.")
    screening["places"][1]["arm"] = rms
    assert prose.screening_facts(screening)["places"].endswith("the lowest of the rest is taken.")


def test_no_sentence_is_lost_when_one_forcing_was_not_run(changed):
    whole = prose.final_facts(changed["frozen_evaluation"]).keys()
    del changed["frozen_evaluation"]["forcing"]["text"]
    facts = prose.final_facts(changed["frozen_evaluation"])
    assert facts.keys() == whole and "was not run" in facts["text_learned_verdict"]


def test_what_is_worse_than_the_study_is_called_worse(run, changed):
    published, raw = read_published(), read_raw_tables(run)
    found = changed["frozen_evaluation"]["forcing"]["oracle"]
    found["paired"]["learned-direct"]["relative"] = published["paired"]["learned-direct"]["relative"] / 2
    table = compare(published, changed, raw).set_index("what")
    assert table.loc["learned − direct relative to direct (share)", "verdict"] == "worse"
    assert table.loc["prompts on which learned is lower (share)", "study"] == 54 / 64
    assert "worse than in the study: learned − direct relative to direct (−0.0477 against −0.0954)" in (
        summary_sentence(table.reset_index())
    )
    found["paths"]["learned"]["kl32"]["mean"] = 9.0
    assert "the study has learned, direct and ridge" in ordering_sentence(changed["frozen_evaluation"])


def test_absolute_figures_of_another_pair_are_listed_and_not_judged(run, changed):
    found = changed["frozen_evaluation"]["forcing"]["oracle"]["paths"]
    found["learned"]["kl32"]["mean"], found["learned"]["top1"] = 0.01, 0.99
    table = compare(read_published(), changed, read_raw_tables(run)).set_index("what").verdict
    assert table["KL32 of learned (nats per token)"] == table["top-1 agreement of learned (share)"] == ""


def test_a_ratio_of_times_can_be_worse_than_the_studys_and_never_better(run, changed):
    row, raw = "first token: native ÷ learned with the source cache resident (ratio)", read_raw_tables(run)
    for ms, verdict in ((1.0, "another machine"), (1e6, "worse")):
        for entry in changed["latency"]["rows"]:
            if entry["path"] == "learned":
                entry["p50_ms"] = ms
        table = compare(read_published(), changed, raw)
        assert table.set_index("what").verdict[row] == verdict
        said = summary_sentence(table)
        assert ("which is no merit of the map: first token" in said) == (verdict == "another machine")


def test_what_is_not_distinguishable_from_zero_is_neither_better_nor_worse(run, records):
    table = compare(read_published(), records, read_raw_tables(run))
    row = "top-1 agreement: learned − direct (share)"
    assert table.set_index("what").verdict[row] == "not distinguishable from zero"
    assert "Not distinguishable from zero: top-1 agreement: learned − direct" in summary_sentence(table)


def test_how_often_was_timed_and_which_features_were_frozen_stand_beside_the_studys(run, records):
    table = compare(read_published(), records, read_raw_tables(run)).set_index("what")
    assert table.loc["repetitions at the longest prefix, resident", "study"] == 50
    assert table.loc["warm-ups at the longest prefix", "this run"] == records["latency"]["warmups"]["8192"]
    assert "frozen arm: features" in table.index


def test_what_the_freeze_turned_on_is_told(changed):
    confirmation, screening = changed["confirmation"], changed["screening"]

    def decided() -> str:
        return prose.confirmation_facts(confirmation, screening)["decided"]

    chosen, other = sorted(confirmation["arms"], key=lambda arm: arm["id"] != confirmation["frozen"]["arm"])
    chosen["mean_kl32"], other["mean_kl32"] = 0.1, 0.5
    assert "the lower mean decided" in decided()
    other["mean_kl32"] = 0.1
    assert "says nothing about which of them is better" in decided()
    other["parameters"] *= 2
    assert decided().endswith("fewer parameters decided.")
    other["absorbable"] = False
    assert "what attention can absorb decided" in decided()


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebooks_tell_and_do_not_compute(name):
    notebook = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    parameters = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    assert all("  # " in line for line in parameters[0].splitlines())
    assert not any(
        re.search(r"^\s*(def|class|for|while) ", cell.source, re.M) for cell in code if cell.source
    )
    prose_cells = " ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"\b\d+[.,]?\d* (nats|ms|%|tokens|prompts|arms|MiB)", prose_cells)


def test_hand_written_pages_type_no_measured_number():
    for page in (ROOT / "book").glob("*.md"):
        assert not re.search(r"\b\d+[.,]?\d* ?(nats|ms|%|tokens|prompts|arms|MiB)\b", page.read_text()), (
            page.name
        )


@pytest.fixture(scope="module")
def executed(run) -> Path:
    """The made-up run with its notebooks executed."""
    return execute_all(run, CHAPTERS)


def test_the_book_is_built_whole_from_a_finished_run(executed):
    before = sorted(p for p in (ROOT / "book").rglob("*"))
    index = build_book(executed)
    assert index == executed / "book" / "index.html"
    pages = [p for p in index.parent.rglob("*.html") if "_static" not in p.parts]
    assert {f"{name}.html" for name in CHAPTERS} <= {p.name for p in pages}
    assert max(p.stat().st_size for p in pages) < PAGE_BYTES
    assert sorted(p for p in (ROOT / "book").rglob("*")) == before  # nothing is written into the checkout
    text = {p.name: p.read_text() for p in pages}
    assert not [
        name for name, page in text.items() if re.search(r'(src|href)="(https?:)?//[^"]*\.(js|css)', page)
    ]
    assert all("Run <b>laptop</b>" in page for page in text.values())
    charts = {name: page.count('class="kv-chart"') for name, page in text.items()}
    assert (charts["index.html"], charts["01_screening.html"], charts["03_frozen_evaluation.html"]) == (
        1,
        3,
        4,
    )
    assert (index.parent / "_static" / "mathjax" / "tex-chtml.js").exists()
    assert (
        sum(p.stat().st_size for p in (index.parent / "_static" / "mathjax").rglob("*") if p.is_file()) < 5e6
    )
    assert not list(executed.glob(".book-*"))


def test_a_book_that_does_not_build_leaves_the_old_one_and_says_what_is_wrong(executed, tmp_path):
    run = shutil.copytree(executed, tmp_path / "laptop")
    (run / "book").mkdir(exist_ok=True)
    (run / "book" / "index.html").write_text("the old one")
    path = run / "notebooks" / "04_latency.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("{glue:text}`no_such_key`"))
    nbformat.write(notebook, path)
    with pytest.raises(KvlibError, match="no_such_key"):
        build_book(run)
    assert (run / "book" / "index.html").read_text() == "the old one"
    assert not list(run.glob(".book-*"))


def test_what_a_killed_build_left_is_put_right(executed, tmp_path):
    run = shutil.copytree(executed, tmp_path / "laptop", ignore=shutil.ignore_patterns("book"))
    (run / ".book-half").mkdir()
    (run / ".book-old-book").mkdir()
    (run / ".book-old-book" / "index.html").write_text("the old one")
    path = run / "notebooks" / "04_latency.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("{glue:text}`no_such_key`"))
    nbformat.write(notebook, path)
    with pytest.raises(KvlibError):
        build_book(run)
    assert (run / "book" / "index.html").read_text() == "the old one"
    assert not list(run.glob(".book-*"))


def test_a_missing_failed_or_unfinished_notebook_is_refused(executed, tmp_path):
    run = shutil.copytree(executed, tmp_path / "laptop")
    path = run / "notebooks" / "02_confirmation.ipynb"
    whole = nbformat.read(path, 4)

    failed = copy.deepcopy(whole)
    last = [cell for cell in failed.cells if cell.cell_type == "code"][-1]
    last.outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    nbformat.write(failed, path)
    with pytest.raises(KvlibError, match=r"ended with ValueError: no.*run 02_confirmation --run laptop"):
        build_book(run)

    unfinished = copy.deepcopy(whole)
    [cell for cell in unfinished.cells if cell.cell_type == "code"][-1].metadata.papermill = {
        "status": "pending"
    }
    nbformat.write(unfinished, path)
    with pytest.raises(KvlibError, match="not run to its end"):
        build_book(run)

    path.unlink()
    with pytest.raises(KvlibError, match=r"is missing.*python -m kvlib run 02_confirmation --run laptop"):
        build_book(run)


def test_the_ledger_is_printed(executed, records):
    lines = read_lines(executed / "frozen_evaluation" / "ledger.jsonl")
    found = tables.colophon(records, lines)
    assert found["ledger"].manifest.tolist() == [records["frozen_evaluation"]["frozen"]]
    assert set(found) == {"durations", "machine", "hashes", "seeds", "ledger"}
