"""Several runs beside one another: what differs is said in numbers, in a file and as a page; what is missing is said too."""

import json
import shutil

import pytest

from kvlib.report.figures import comparison as figures
from kvlib.study.comparing import PAIRED, SETTINGS, compare_runs
from kvlib.study.records import read_record, read_table, write_json, write_table
from kvlib.study.run import Run
from tests.fake_records import write_fake_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two made-up runs of one profile: the second was screened with other scales, and its learned map is better."""
    results = tmp_path_factory.mktemp("compared") / "results"
    for name in ("first", "second"):
        write_fake_run(results / name)
        Run.open("laptop", name, results=results)
    Run.open("laptop", "second", results=results, overrides={"screening.scales": [1.0]})
    path = results / "second" / "frozen_evaluation" / "prompts.parquet"
    table = read_table(path)
    table.loc[table.path == "learned", "kl32"] *= 0.5
    write_table(path, table)
    return results


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "results")
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    return tmp_path


def opened(home, *names: str) -> list[Run]:
    return [Run.open("laptop", name, results=home / "results") for name in names]


def value(found, group: str, what: str) -> tuple:
    return next(row.values for row in found.groups()[group] if row.what == what)


def test_settings_that_differ_are_named_by_their_dotted_key(home):
    found = compare_runs(opened(home, "first", "second"))
    assert [row.what for row in found.groups()[SETTINGS]] == ["screening.scales"]
    assert value(found, SETTINGS, "screening.scales")[1] == [1.0]


def test_figures_are_those_of_the_summaries(home):
    found = compare_runs(opened(home, "first", "second"))
    final = read_record(home / "results" / "first" / "frozen_evaluation" / "summary.json")["forcing"][
        "oracle"
    ]
    assert (
        value(found, "frozen evaluation", "oracle: ridge, KL32 (nats)")[0]
        == final["paths"]["ridge"]["kl32"]["mean"]
    )
    won = value(found, "frozen evaluation", "oracle: learned − direct, prompts won")
    assert won[0] == final["paired"]["learned-direct"]["wins"]
    rows = read_record(home / "results" / "first" / "latency" / "summary.json")["rows"]
    at = {(r["prefix_tokens"], r["path"], r["residency"]): r["p50_ms"] for r in rows}
    ratio = value(found, "latency", "8,192 tokens: native ÷ learned, cold")[0]
    native = at.get((8192, "native", "resident"), at.get((8192, "native", "cold")))
    assert ratio == native / at[8192, "learned", "cold"]


def test_runs_on_the_same_prompts_are_paired(home):
    found = compare_runs(opened(home, "first", "second"))
    tables = [
        read_table(home / "results" / run / "frozen_evaluation" / "prompts.parquet") for run in found.runs
    ]
    chosen = [t[(t.forcing == "oracle") & (t.path == "learned")].set_index("prompt").kl32 for t in tables]
    mean = value(found, PAIRED, "oracle: learned, KL32 minus first's, mean (nats)")
    assert mean[0] is None and mean[1] == pytest.approx((chosen[1] - chosen[0]).mean())
    assert value(found, PAIRED, "oracle: learned, KL32 minus first's, prompts lower")[1] == len(chosen[0])
    assert value(found, PAIRED, "oracle: direct, KL32 minus first's, mean (nats)")[1] == 0


def test_of_a_copy_nothing_prompt_by_prompt_differs(home):
    shutil.copytree(home / "results" / "first", home / "results" / "copy")
    rows = compare_runs(opened(home, "first", "copy")).groups()[PAIRED]
    assert rows and not any(row.differs for row in rows)
    changed = compare_runs(opened(home, "first", "second")).groups()[PAIRED]
    assert {row.what.partition(",")[0] for row in changed if row.differs} == {
        "oracle: learned",
        "text: learned",
    }


def test_runs_on_other_prompts_are_not_paired_and_the_reason_is_said(home):
    path = home / "results" / "second" / "pair" / "summary.json"
    record = {key: entry for key, entry in read_record(path).items() if key != "seal"}
    record["partitions"]["final"]["hash"] = "0" * 64
    write_json(path, record)
    found = compare_runs(opened(home, "first", "second"))
    assert PAIRED not in found.groups()
    assert any("second has other final prompts or another target than first" in note for note in found.notes)


def test_a_missing_stage_is_said_and_nothing_is_put_in_its_place(home, kvlib, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(home))
    shutil.rmtree(home / "results" / "second" / "latency")
    found = compare_runs(opened(home, "first", "second"))
    assert "second: 04_latency is to do" in found.notes
    assert {row.values[1] for row in found.groups()["latency"]} == {None}
    status, out, _ = kvlib("compare", "first", "second")
    assert status == 0 and "second: 04_latency is to do" in out


def test_the_command_prints_what_differs_and_writes_all_of_it(home, kvlib, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(home))
    status, out, _ = kvlib("compare", "first", "second", "--json", str(home / "c.json"))
    written = json.loads((home / "c.json").read_text())
    assert status == 0
    assert "screening.scales" in out and "arms screened" not in out
    assert written["runs"] == ["first", "second"]
    assert {row["what"] for row in written["rows"]} >= {"screening.scales", "arms screened", "frozen arm"}
    assert "arms screened" in kvlib("compare", "first", "second", "--all")[1]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(("first",), "two or more"), (("first", "first"), "each once"), (("first", "x"), "no run 'x'")],
)
def test_what_cannot_be_compared_is_one_sentence(home, kvlib, monkeypatch, names, sentence):
    monkeypatch.setenv("KVLIB_HOME", str(home))
    status, out, err = kvlib("compare", *names)
    assert status == 2 and sentence in err and not out


def test_the_page_is_built_with_its_charts_and_says_what_was_set(home, kvlib, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(home))
    status, out, _ = kvlib("book", "first", "second")
    index = home / "results" / "comparisons" / "first+second" / "index.html"
    text = index.read_text()
    assert status == 0 and out.rstrip().endswith(f"open {index} in a browser")
    assert text.count('class="plotly-graph-div"') == 4
    assert (
        "screening.scales" in text
        and "first" in text
        and (index.parent / "_static" / "plotly.min.js").exists()
    )


def test_charts_leave_out_what_a_run_does_not_have():
    chart = figures.difference_by_prompt({"b": {"learned": (-0.1, None)}}, "a")
    drawn = {trace.name: list(trace.y) for trace in chart.data}
    assert drawn["learned correction"] == [-0.1] and drawn["ridge map"] == []
