"""The prose of docs/validation.md: each heading has its own, links lead on, numbers are right."""

import re
from pathlib import Path
from statistics import fmean

import pytest
from reproduced import words_of_page

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.report.validation_page import note_name
from axonn_tune.reproduce.reproduction import measured_steps
from axonn_tune.reproduce.runs import Loaders

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "validation.md").read_text()
NOTES = {
    path.stem: path.read_text()
    for path in (ROOT / "axonn_tune" / "reproduce" / "notes").glob("*.md")
}
TITLES = re.findall(r"^##+ (.+)$", PAGE, re.MULTILINE)


def sentences(text):
    """Return the sentences of a text in Markdown; an item of a list begins one, too."""
    parts = re.split(r"\n\n|\n(?=- )", text)
    return [
        sentence for part in parts for sentence in re.split(r"(?<=[.:;?]) ", " ".join(part.split()))
    ]


def test_every_heading_has_a_note_and_no_note_is_left_over():
    beside = {"introduction", "fitted-beside"}
    assert set(NOTES) - beside == {note_name(title) for title in TITLES}


def test_every_table_of_measured_steps_has_a_section():
    loaders = Loaders(load_model, load_machine, load_engine)
    assert set(measured_steps(load_published, loaders)) <= set(TITLES)


def test_links_inside_the_page_lead_to_a_heading():
    # GitHub and Sphinx drop what is no letter, digit, space or hyphen.
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in TITLES}
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(links) > 30
    assert links <= anchors


@pytest.mark.parametrize("name", sorted(NOTES))
def test_no_sentence_is_too_long_to_read(name):
    assert [s for s in sentences(NOTES[name]) if len(s.split()) > 35] == []


def test_systems_and_steps_say_what_was_fitted():
    of_tables = PAGE.split("\n## Measured steps")[1].split("\n## Memory of")[0]
    of_systems = PAGE.split("\n## End results")[1].split("\n## Bandwidth of rings")[0]
    sections = [*of_tables.split("\n### ")[1:], *of_systems.split("\n### ")[1:]]
    assert len(sections) == 32
    assert [s.splitlines()[0] for s in sections if "\n- **Fitted.** " not in s] == []


def percents(comparisons, pattern, *machines):
    """Return the errors of the runs whose subject matches, in per cent and in rising order."""
    return sorted(
        100.0 * c.error_fraction
        for c in comparisons
        if re.search(pattern, c.subject)
        and c.error_fraction is not None
        and (not machines or c.machine in machines)
    )


def spread(errors):
    """Return the least and the largest size of errors of one sign, as the page rounds them."""
    assert min(errors) > 0.0 or max(errors) < 0.0
    sizes = sorted(map(abs, errors))
    return f"{sizes[0]:.0f} to {sizes[-1]:.0f} %"


def mean_size(errors):
    return f"{fmean(map(abs, errors)):.1f} %"


def stated(name):
    return " ".join(NOTES[name].split())


@pytest.fixture(scope="module")
def steps(reproduction):
    """Return the comparisons of measured steps by table."""
    return {name: [t.comparison for t in timed] for name, timed in reproduction.steps.items()}


@pytest.mark.slow
def test_what_is_said_of_mlperf_is_so(steps):
    mlperf = steps["MLPerf"]
    of_group = {name: [c for c in mlperf if c.group == name] for name in {c.group for c in mlperf}}
    note = stated("mlperf")
    high, low = of_group["llama3-405b in 8 bits"], of_group["llama3-405b in 4 bits"]
    assert len(high) == 16 and max(map(abs, percents(high, ""))) < 3.0
    assert f"predicted {spread(percents(low, '', 'gb200-nvl72-64'))} too long" in note
    assert len(low) == 8 and max(map(abs, percents(low, "", "gb300-nvl72-64"))) < 4.0
    small = of_group["llama3-8b in 4 bits"]
    assert len(small) == 12
    assert f"are met within {mean_size(percents(small, ''))} in the mean" in note
    in_8_bits = of_group["llama3-8b in 8 bits"]
    assert f"bits from 7.4 to {mean_size(percents(in_8_bits, ''))}" in note
    most, least = percents(in_8_bits, "", "dgx-h100")
    assert f"They are predicted {-least:.0f} and {-most:.0f} % too short" in note
    gpt3 = of_group["gpt3-175b in 8 bits"]
    assert f"Those of 3.0 are predicted {spread(percents(gpt3[:5], ''))} too short" in note
    many = percents(gpt3, r" (10240|1\d{4}) GPUs")
    assert len(many) == 5 and max(many) < 0.0
    assert f"more than 10,000 GPUs they are predicted {spread(many)} too short" in note


@pytest.mark.slow
def test_what_is_said_of_adapters_is_so(steps):
    lora = steps["LoRA"]
    on_amd = [*lora, *(c for c in steps["MLPerf"] if c.machine.startswith("mi3"))]
    note = stated("lora")
    blackwell = ("dgx-b200", "gb200-nvl72", "gb200-nvl72-64", "gb300-nvl72", "gb300-nvl72-64")
    late = spread(percents(lora, r"v5\.1|v6\.0", *blackwell))
    assert f"Rounds 5.1 and 6.0 on B200 to GB300 are predicted {late} too long" in note
    assert f"MI300X are predicted {spread(percents(on_amd, '', 'mi300x'))} too fast" in note
    machines = words_of_page("machines.md")
    assert f"those on MI300X {spread(percents(on_amd, '', 'mi300x'))}." in machines
    assert f"MI350X are predicted {spread(percents(on_amd, '', 'mi350x'))} too fast" in machines
    assert f"measured, are predicted {spread(percents(on_amd, '', 'mi350x'))} too fast" in note
    assert max(map(abs, percents(on_amd, "", "mi325x"))) < 3.05


@pytest.mark.slow
def test_what_is_said_of_other_steps_is_so(steps):
    oss = percents(steps["Megatron-Bridge"], "gpt-oss")
    said = f"the {len(oss)} steps of GPT-OSS are met within {mean_size(oss)} in the mean"
    assert said in stated("megatron-bridge")
    large = percents(steps["Megatron-Bridge"], "qwen3-235b.* of dgx-h100, fp8")
    assert len(large) == 4 and max(map(abs, large)) < 8.0
    several = percents(steps["several nodes"], "")
    assert f"{spread(several[:4])} too short" in stated("several-nodes")
    assert max(map(abs, several[4:])) < 13.0
    all_steps = f"would be 5.5 % instead of {mean_size(several)}"
    assert all_steps in stated("several-nodes")
    long = percents(steps["FSDP"], "x (16384|32768|65536) ", "dgx-h100")
    assert len(long) == 8
    assert f"are predicted {spread(long)} too short" in stated("fsdp")


@pytest.mark.slow
def test_what_is_said_of_end_results_is_so(reproduction):
    results = reproduction.results
    bigscience = [c for c in results if c.system == "BigScience" and c.metric == "step_seconds"]
    longest, next_longest = percents(bigscience, "")[:2]
    note = stated("bigscience")
    assert f"are predicted up to {-next_longest:.0f} % too fast" in note
    assert f"predicted {-longest:.0f} % too fast" in note
    rates = [c for c in results if c.source.startswith("ZeRO++ blog")]
    others = [c for c in rates if not c.is_fitted]
    assert len(rates) - len(others) == 4
    mean = fmean(map(abs, percents(others, "")))
    said = f"The other {len(others)} rates are missed by {mean:.0f} % in the mean"
    assert said in stated("zero++")
    sharded = [c for c in results if c.system == "DeepSpeed ZeRO-3"]
    of_frontier = {
        c.subject: 100 * c.error_fraction for c in sharded if c.machine == "frontier-202502"
    }
    *few, chosen_by, many = (of_frontier[f"7B on {n}"] for n in (128, 256, 512, 1024, 2048))
    assert f"with `frontier-202502` {-chosen_by:.0f} % too fast" in stated("deepspeed-zero-3")
    said = ", ".join(f"{error:+.0f}" for error in few)
    assert f"the errors are {said} and {many:.0f} %" in stated("deepspeed-zero-3")
    fast = percents(sharded, "on (1024|2048)$", "perlmutter")
    assert f"predicted {-fast[0]:.0f} and {-fast[1]:.0f} % too fast" in stated("deepspeed-zero-3")
    exact = [abs(c.error_fraction) for c in results if c.system == "Megatron-LM 2022"]
    assert len(exact) == 20 and max(exact) < 0.04
