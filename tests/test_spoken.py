"""What stands around a chart: words for screen readers, and links to the script and the records behind it."""

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from kvlib.report.renderer import BookRenderer
from kvlib.report.sources import link_sources, origin
from kvlib.report.spoken import FEW, SAID, spoken


def chart(y) -> dict:
    figure = go.Figure(layout={"title": {"text": "KL (nats)"}, "xaxis": {"title": {"text": "step"}}})
    figure.add_scatter(x=np.arange(len(y)), y=y, name="direct <b>reuse</b>")
    figure.add_scatter(x=[0], y=[9], name="a band", hoverinfo="skip")
    return figure.to_dict()


def test_few_values_are_said_one_by_one_and_many_as_a_range():
    few = spoken(chart(np.array([0.25, 0.5])))
    assert few == "x axis: step. direct reuse: 0, 0.25; 1, 0.5."
    many = spoken(chart(np.linspace(1, 2, FEW + 1)))
    assert f"{FEW + 1} values from 1 to 2" in many


def test_rows_of_a_dot_chart_are_said_with_their_names():
    figure = go.Figure().add_scatter(x=[0.5], y=["all zero"], name="control")
    assert spoken(figure.to_dict()) == "control: all zero, 0.5."


def test_what_a_chart_draws_away_from_its_value_is_said_in_its_own_words():
    figure = go.Figure().add_scatter(x=[0.1], y=["native"], name="native", meta={SAID: "native, 0"})
    assert spoken(figure.to_dict()) == "native: native, 0."


def test_no_text_of_a_chart_can_leave_its_element():
    figure = go.Figure().add_scatter(x=[1], y=[2], name="</script><b>out")
    markup = BookRenderer().to_html(figure.to_dict())
    inside = markup.split('class="kv-figure">')[1].split("</script>")[0]
    assert json.loads(inside)["data"][0]["name"] == "</script><b>out"


def test_a_chart_is_an_image_with_a_name_and_a_description():
    markup = BookRenderer().to_html(chart(np.array([0.25])))
    place = markup.split('aria-describedby="')[1].split('"')[0]
    assert 'role="img" aria-label="KL (nats)"' in markup and f'id="{place}"' in markup


@pytest.fixture
def book(tmp_path):
    run = tmp_path / "mine"
    (run / "pair").mkdir(parents=True)
    (run / "pair" / "summary.json").write_text("{}")
    page = run / "book" / "chapters" / "page.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        origin("00_pair", "pair/summary.json, pair/none.json, ../../etc/passwd, data/published.yaml")
    )
    link_sources(run / "book", run)
    return page


def test_named_files_are_copied_into_the_book_and_linked(book):
    text = book.read_text()
    assert '<a href="../notebooks/00_pair.py"><code>notebooks/00_pair.py</code></a>' in text
    assert '<a href="../records/pair/summary.json"><code>results/mine/pair/summary.json</code></a>' in text
    assert '<a href="../data/published.yaml"><code>data/published.yaml</code></a>' in text
    for link in ("../notebooks/00_pair.py", "../records/pair/summary.json", "../data/published.yaml"):
        assert (book.parent / link).is_file()


def test_a_name_without_a_file_and_one_outside_the_run_stay_names(book):
    text = book.read_text()
    assert '<code data-kv-file="records/pair/none.json">' in text
    assert '<code data-kv-file="records/../../etc/passwd">' in text
