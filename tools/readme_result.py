"""Write a run's result into README.md: the table from its records, the picture from its book. Nothing is typed.

.venv/bin/python -m tools.readme_result RUN_FOLDER    (needs the test requirements and Chromium)
"""

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvlib.report import wording
from kvlib.report.summaries import headline, main_forcing, median_times, prefix_lengths
from kvlib.study.run import read_summary

ROOT = Path(__file__).resolve().parents[1]
PICTURE = "book/_static/readme-chart.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATHS = ("native", "learned", "direct", "ridge")


def main() -> None:
    folder = Path(sys.argv[1])
    pair, final, latency = (
        read_summary(folder / stage) for stage in ("pair", "frozen_evaluation", "latency")
    )
    picture(folder / "book" / "chapters" / "03_frozen_evaluation.html", ROOT / PICTURE)
    readme = ROOT / "README.md"
    text = fill(readme.read_text(), "table", table(pair, final, latency))
    alt = "KL32 by path with standard errors, and top-1 agreement, on the final prompts"
    readme.write_text(fill(text, "chart", f"![{alt}]({PICTURE})"))


def fill(text: str, name: str, content: str) -> str:
    opening, closing = f"<!-- result:{name} -->", f"<!-- /result:{name} -->"
    return re.sub(f"{opening}.*{closing}", lambda _: f"{opening}\n{content}\n{closing}", text, flags=re.S)


def table(pair: dict, final: dict, latency: dict) -> str:
    """The four paths at the longest prefix, and one sentence on the paired difference."""
    paths, longest = final["forcing"][main_forcing(final)]["paths"], max(prefix_lengths(latency))
    times, found = median_times(latency, longest), headline(final)["paired"]["learned-direct"]
    rows = [
        f"| path | KL32, lower is better | top-1 agreement | time to first token, {longest:,} tokens, cache resident |",
        "|---|---|---|---|",
    ]
    for name in PATHS:
        said = paths[name]
        rows.append(
            f"| {name} | {wording.number(said['kl32']['mean'])} ± {wording.number(said['kl32']['se'])} | "
            f"{wording.percent(said['top1'])} | {wording.milliseconds(times[(name, 'resident')])} |"
        )
    return "\n".join(rows) + (
        f"\n\nLearned against direct, on {found['prompts']} prompts that nothing before had touched: "
        f"{wording.signed(found['mean'])} nats per token ({wording.signed_percent(found['relative'])}), 95 % interval "
        f"{wording.signed_interval(found['ci95'])}, lower on {found['wins']} of {found['prompts']}. Measured on "
        f"{pair['environment']['processor']}, {pair['environment']['threads']} threads, {pair['target']['dtype']}, in the "
        f"run of {wording.when(final['created'])}. `tools/readme_result.py` wrote this from the run's records."
    )


def picture(page_file: Path, place: Path) -> None:
    """The chart of KL32 by path as the book draws it."""
    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = started.new_page(viewport={"width": 1100, "height": 900})
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        page.add_style_tag(content=".modebar-container { display: none }")
        page.locator(".kv-chart").first.locator("xpath=..").screenshot(path=place)
        started.close()


if __name__ == "__main__":
    main()
