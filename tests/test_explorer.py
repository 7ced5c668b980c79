"""The prompt explorer's data: what the page shows of every final prompt is what the records hold."""

import json
import re

import pandas as pd
import pytest
from fake_records import PROMPTS, STEPS, write_fake_run

from kvlib.report.explorer import explorer, explorer_data
from kvlib.report.palette import PATHS
from kvlib.study.records import read_table


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> tuple[pd.DataFrame, pd.DataFrame]:
    folder = write_fake_run(tmp_path_factory.mktemp("results") / "laptop") / "frozen_evaluation"
    return read_table(folder / "prompts.parquet"), read_table(folder / "steps.parquet")


def test_every_prompt_has_every_path_and_step_under_every_forcing(tables):
    data = explorer_data(*tables)
    assert [prompt["prompt"] for prompt in data["prompts"]] == list(range(PROMPTS))
    assert [name for name, _ in data["forcings"]] == ["oracle", "text"]
    for prompt in data["prompts"]:
        for found in prompt["forcing"].values():
            assert found["paths"].keys() == {path["id"] for path in data["paths"]}
            series = [found["forced"], found["native"]]
            series += [values for path in found["paths"].values() for values in path.values()]
            assert {len(values) for values in series} == {STEPS}


def test_a_path_says_another_token_exactly_where_the_record_disagrees(tables):
    data, steps = explorer_data(*tables), tables[1]
    for prompt in (0, PROMPTS - 1):
        for path in ("direct", "learned"):
            rows = steps[(steps.prompt == prompt) & (steps.path == path) & (steps.forcing == "text")]
            rows = rows.sort_values("step")
            found = data["prompts"][prompt]["forcing"]["text"]["paths"][path]
            expected = [
                None if agree else token for agree, token in zip(rows.agree, rows.path_token, strict=True)
            ]
            assert found["said"] == expected
            assert found["kl"] == pytest.approx(rows.kl.tolist(), abs=1e-5)
            assert found["p"] == pytest.approx(rows.path_probability.tolist(), abs=1e-5)


def test_paths_look_as_in_every_other_chart(tables):
    data = explorer_data(*tables)
    assert all(path["colour"] == PATHS[path["id"]].colour for path in data["paths"])
    for trace in data["figure"]["data"]:
        style = PATHS[trace["meta"][0]]
        assert (trace["line"]["color"], trace["marker"]["symbol"]) == (style.colour, style.symbol)


def test_no_text_of_a_prompt_can_leave_its_element(tables):
    prompts = tables[0].assign(text="</script><b>&amp; out")
    markup = explorer(prompts, tables[1])
    inside = re.fullmatch(
        r'<div class="kv-explorer"><script type="application/json">(.*?)</script>.*</div>', markup, re.S
    )
    assert json.loads(inside.group(1))["prompts"][0]["prefix"] == "</script><b>&amp; out"
