"""Reading the book in headless Chromium: charts, sliders, tables, the prompt explorer and every internal link."""

import csv
import re
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
from fake_evidence import write_fake_evidence
from fake_records import PROMPTS, STEPS, write_fake_run
from notebook_runs import execute_all
from playwright.sync_api import Error
from test_browser import DRAWN, browser  # noqa: F401 (a fixture)

from kvlib.report.book import CHAPTERS, EVIDENCE, build_book
from kvlib.study.records import read_table

WIDTHS = (1280, 768, 390)
# Charts whose legend hangs into the plot, or is wider than its chart.
COVERING = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(chart => {
  const legend = chart.querySelector('g.legend');
  if (!legend) return false;
  const [box, whole] = [legend, chart].map(element => element.getBoundingClientRect());
  return box.bottom - whole.top > chart._fullLayout._size.t + 1 || box.width > whole.width + 1;
})"""
TEXT_COLOURS = "() => [...document.querySelectorAll('.js-plotly-plot')].map(c => c._fullLayout.font.color)"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = write_fake_run(tmp_path_factory.mktemp("results") / "laptop")
    write_fake_evidence(folder)
    return execute_all(folder, (*CHAPTERS, EVIDENCE))


@pytest.fixture(scope="module")
def book(run) -> Path:
    return build_book(run).parent


@pytest.fixture
def opened(browser, book):  # noqa: F811
    """Opens a page of the book by name, its charts drawn; closed after the test."""
    pages = []

    def open_page(name: str, **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        pages.append(page)
        page.goto((book / f"{name}.html").as_uri(), wait_until="load")
        page.wait_for_function(DRAWN)
        return page

    yield open_page
    for page in pages:
        page.close()


def fits(page, condition: str, otherwise: str) -> None:
    """Charts follow their boxes and the theme a moment later: wait for it, however busy the machine."""
    try:
        page.wait_for_function(condition, timeout=15_000)
    except Error:
        pytest.fail(f"{page.url}: {otherwise}", pytrace=False)


@pytest.mark.parametrize("name", ["index", "prompts", *(f"chapters/{n}" for n in (*CHAPTERS, EVIDENCE))])
def test_a_page_fits_every_width_and_its_charts_follow_the_theme(opened, name):
    page = opened(name)
    colours = []
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        fits(page, f"() => new Set(({TEXT_COLOURS})()).size <= 1", "charts of two colours")
        colours.append(page.evaluate(TEXT_COLOURS)[:1])
    assert not colours[0] or colours[0] != colours[1]
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        fits(page, f"() => document.documentElement.scrollWidth <= {width}", f"wider than {width}")
        fits(page, f"() => ({COVERING})().length === 0", f"a legend on its chart at {width}")


def test_every_chart_is_named_described_and_has_its_numbers_in_a_table(opened):
    for name in ("index", "chapters/01_screening", "chapters/04_latency"):
        page = opened(name)
        charts = page.locator(".kv-chart").all()
        assert page.locator("details.kv-details table").count() >= len(charts) > 0
        for chart in charts:
            assert chart.get_attribute("role") == "img" and chart.get_attribute("aria-label")
            described = page.locator(f"#{chart.get_attribute('aria-describedby')}")
            assert re.search(r"\d", described.text_content())


def test_a_chart_says_something_on_hover(opened):
    page = opened("chapters/03_frozen_evaluation")
    chart = page.locator(".js-plotly-plot").nth(1)
    chart.scroll_into_view_if_needed()
    chart.locator(".points path").first.hover(force=True)
    said = chart.locator(".hovertext")
    said.first.wait_for()
    assert re.search(r"prompt \d+: Article", said.first.text_content())


TOOLS_ON_LEGEND = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(chart => {
  const boxes = ['.modebar', 'g.legend'].map(part => chart.querySelector(part)?.getBoundingClientRect());
  if (boxes.some(box => !box || !box.width)) return false;
  const [tools, legend] = boxes;
  return tools.left < legend.right && legend.left < tools.right && tools.top < legend.bottom && legend.top < tools.bottom;
}).length"""


def test_the_tool_bar_is_off_the_legend_on_a_desk_and_away_on_a_phone(opened):
    for name in ("index", "chapters/01_screening", "chapters/04_latency", "prompts"):
        page = opened(name)
        page.locator(".modebar").first.wait_for(state="attached")
        assert page.evaluate(TOOLS_ON_LEGEND) == 0, name
        phone = opened(name, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        phone.locator(".modebar-container").first.wait_for(state="attached")
        assert not any(bar.is_visible() for bar in phone.locator(".modebar-container").all()), name


def test_a_page_without_a_chart_does_not_load_the_chart_library(opened):
    assert opened("glossary").evaluate("typeof window.Plotly") == "undefined"
    assert opened("index").evaluate("typeof window.Plotly") == "object"


def test_a_table_that_is_wider_than_its_place_says_so(opened):
    page = opened("chapters/03_frozen_evaluation", viewport={"width": 390, "height": 844})
    page.wait_for_function("document.querySelector('.kv-scroll[data-more]')")
    found = page.evaluate(
        """() => [...document.querySelectorAll('.kv-scroll[data-more]')].filter(s => s.clientWidth).map(
          s => [s.scrollWidth > s.clientWidth + 1, !s.previousElementSibling.hidden, s.dataset.more.includes('right')])"""
    )
    assert any(wide for wide, *_ in found)
    assert all(wide == hint == more for wide, hint, more in found)
    wide = page.locator(".kv-scroll[data-more=right]").first.element_handle()
    wide.evaluate("scroll => { scroll.scrollLeft = scroll.scrollWidth }")
    page.wait_for_function("s => s.dataset.more.trim() === 'left'", arg=wide)


def test_the_slider_moves_the_times_by_keyboard_and_says_so(opened):
    page = opened("index")
    slider, chart = page.locator(".kv-slider input"), page.locator(".js-plotly-plot")
    times = "chart => chart.data.map(trace => trace.x[0]).filter(ms => ms !== null)"
    before = chart.evaluate(times)
    label = page.locator(".kv-slider output").text_content()
    slider.focus()
    slider.press("Home")
    assert page.locator(".kv-slider output").text_content() != label
    assert slider.get_attribute("aria-valuetext") == "prefix: 128 tokens"
    after = chart.evaluate(times)
    assert all(new < old for new, old in zip(after, before, strict=True))


def test_the_front_page_shows_its_figures_and_the_chart_in_one_screen(opened):
    page = opened("index")
    for part in (".kv-tiles > div:last-child", ".js-plotly-plot", ".kv-slider"):
        box = page.locator(part).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900, part


def test_a_table_sorts_up_down_and_back_with_numbers_as_numbers(opened):
    page = opened("chapters/03_frozen_evaluation")
    table = page.locator("details table.kv-numbers").filter(has_text="direct KL32").first
    table.locator("xpath=ancestor::details").evaluate("details => { details.open = true }")
    heads = table.locator("thead th").all_text_contents()
    column = heads.index("direct KL32")

    def values() -> list[float]:
        cells = table.locator(f"tbody td:nth-child({column + 1})").all()
        return [float(cell.get_attribute("data-value")) for cell in cells]

    original, head = values(), table.locator("thead th").nth(column)
    head.locator("button").focus()
    for sort, expected in (
        ("ascending", sorted(original)),
        ("descending", sorted(original, reverse=True)),
        (None, original),
    ):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == sort
        assert values() == expected


SAID = {  # cells as they stand, and in the order of what they say
    "a share": (["62 of 64", "–", "8 of 64", "9 of 64"], ["8 of 64", "9 of 64", "62 of 64", "–"]),
    "durations": (["2 min", "1 h 02 min", "45 s"], ["45 s", "2 min", "1 h 02 min"]),
    "times": (["20,050 ms", "49.5 ms", "−3 ms"], ["−3 ms", "49.5 ms", "20,050 ms"]),
    "errors": (["0.2 ± 0.01", "1.2e−05", "82.5 %"], ["1.2e−05", "0.2 ± 0.01", "82.5 %"]),
    "some": (["the baseline", "+0.06 (a)", "−0.03 (b)"], ["−0.03 (b)", "+0.06 (a)", "the baseline"]),
    "words": (["direct", "absorbed", "Cold"], ["absorbed", "Cold", "direct"]),
}
ADD_TABLE = """texts => {
  const table = document.createElement('table');
  table.className = 'kv-numbers';
  table.innerHTML = '<thead><tr><th>it</th></tr></thead><tbody></tbody>';
  for (const text of texts) table.tBodies[0].insertRow().insertCell().textContent = text;
  document.querySelector('article').prepend(table);
  table.parentElement.dispatchEvent(new CustomEvent('kv-content', { bubbles: true }));
}"""


def test_cells_that_are_written_as_text_sort_by_what_they_say(opened):
    page, sorted_texts = opened("glossary"), {}
    for name, (texts, _) in SAID.items():
        page.evaluate(ADD_TABLE, texts)
        table = page.locator("table.kv-numbers").first
        table.locator("button").click()
        sorted_texts[name] = table.locator("td").all_text_contents()
    assert sorted_texts == {name: expected for name, (_, expected) in SAID.items()}


def test_a_table_is_downloaded_with_its_full_values(opened, run, tmp_path):
    page = opened("chapters/03_frozen_evaluation")
    details = page.locator("details.kv-details").nth(1)
    details.locator("summary").click()
    with page.expect_download() as waiting:
        details.locator(".kv-download").click()
    assert waiting.value.suggested_filename.endswith(".csv")
    waiting.value.save_as(tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()))
    prompts = read_table(run / "frozen_evaluation" / "prompts.parquet")
    direct = prompts[(prompts.forcing == "oracle") & (prompts.path == "direct")].set_index("prompt").kl32
    assert {int(row["prompt"]): float(row["direct KL32"]) for row in rows} == direct.to_dict()


def test_every_table_of_numbers_has_its_download(opened):
    page = opened("chapters/20_trust")
    assert page.locator("table.kv-numbers").count() == page.locator(".kv-download").count() > 3


def test_the_explorer_shows_the_prompt_that_is_chosen(opened, run):
    page = opened("prompts")
    steps = read_table(run / "frozen_evaluation" / "steps.parquet")
    chooser = page.get_by_label("Prompt", exact=False).first
    assert chooser.locator("option").count() == PROMPTS
    chooser.select_option(index=5)
    page.get_by_label("Forcing").select_option("text")
    assert page.url.endswith("#prompt-5-text")
    rows = steps[(steps.prompt == 5) & (steps.forcing == "text")].sort_values("step")
    native = rows[rows.path == "native"]
    assert page.locator(".kv-token").all_text_contents() == native.forced_token.tolist()
    learned = rows[rows.path == "learned"]
    first = learned[~learned.agree].step.min()
    assert f"learned correction: {first}" in page.locator(".kv-said").text_content()
    drawn = page.locator(".js-plotly-plot").evaluate(
        "chart => chart.data.find(t => t.meta[0] === 'learned' && t.meta[1] === 'kl').y"
    )
    assert drawn == pytest.approx(learned.kl.tolist(), abs=1e-5)
    assert page.locator("details.kv-details tbody tr").count() == STEPS


def test_the_explorer_is_turned_by_keyboard_and_reached_by_address(opened):
    page = opened("prompts")
    page.get_by_role("button", name="next").focus()
    page.keyboard.press("Enter")
    assert "Prompt 1," in page.locator(".kv-said").text_content()
    page.get_by_role("button", name="previous").click()
    page.get_by_role("button", name="previous").click()
    assert f"Prompt {PROMPTS - 1}," in page.locator(".kv-said").text_content()
    page.evaluate("location.hash = '#prompt-7-oracle'")
    page.wait_for_function("document.querySelector('.kv-said').textContent.startsWith('Prompt 7,')")


def test_the_explorers_tokens_are_reached_by_keyboard_and_the_box_says_where_the_prompt_begins(opened):
    page = opened("prompts")
    page.evaluate("""() => { document.querySelector('.kv-prefix').textContent += '\\n'.repeat(60);
      document.querySelector('.kv-prompt').scrollTop = 1e6 }""")
    above, box = page.locator(".kv-above"), page.locator(".kv-prompt")
    page.wait_for_function("document.querySelector('.kv-above').textContent.includes('above')")
    above.click()
    page.wait_for_function("document.querySelector('.kv-above').disabled")
    assert box.evaluate("box => box.scrollTop") == 0
    page.locator(".kv-token").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.kv-token')[1]")
    assert "step 2, probability: native prefill 0." in page.locator(".kv-token-said").text_content()
    assert page.locator(".kv-token[tabindex='0']").count() == 1


def test_the_explorer_explains_a_token_that_is_a_part_of_a_character(opened):
    note = opened("prompts").locator(".kv-explorer > .kv-caption")
    assert note.is_hidden() and "part of a character" in note.text_content()


def test_every_internal_link_leads_somewhere(book):
    pages = {
        path: path.read_text(encoding="utf-8") for path in book.rglob("*.html") if "_static" not in path.parts
    }
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    lost = []
    for path, text in pages.items():
        for link in set(re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text)):
            whole, anchor = urldefrag(urljoin(path.as_uri(), link))
            if urlparse(whole).scheme != "file":
                continue
            target = Path(unquote(urlparse(whole).path))
            if not target.exists() or (anchor and target in places and unquote(anchor) not in places[target]):
                lost.append((path.name, link))
    assert lost == []


def test_every_figure_links_to_its_script_and_its_records(book):
    for name in (*CHAPTERS, EVIDENCE):
        text = (book / "chapters" / f"{name}.html").read_text(encoding="utf-8")
        charts, origins = text.count('class="kv-chart"'), text.count('class="kv-origin"')
        assert origins >= charts, name
        assert "data-kv-file" not in text, name
        assert not charts or f'href="../notebooks/{name}.py"' in text, name
    assert (book / "records" / "frozen_evaluation" / "steps.parquet").is_file()
