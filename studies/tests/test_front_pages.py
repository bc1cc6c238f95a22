"""The front pages say no more than the pages that they link to: each number and each
verdict of a row stands on one of them."""

import functools
import re
from typing import NamedTuple

import audit_findings
import pytest
from helpers import ROOT

FRONT = {"README.md": (600, 900), "results/README.md": (1200, 2200)}
"""The least and largest number of words of each page."""
NUMBER = re.compile(
    r"""-?\d+\.\d+\ ±\ \d+\.\d+     # a difference with its interval
    |\b\d+\ of\ \d+\b               # a count
    |\b\d+(?:\.\d+)?%               # a share
    |(?<![\w.])-?\d+\.\d+(?![\w.])  # a decimal that is no size, such as 0.14M
    """,
    re.X,
)
LINK = re.compile(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)")
VERDICT = re.compile(r"\*\*(confirmed|opposite|undecided|no verdict)\*\*", re.I)
CONTRARY = {"confirmed": "opposite", "opposite": "confirmed"}


class Statement(NamedTuple):
    """A cell with links of its own, a row of a table, an item of a list or a
    paragraph."""

    text: str
    links: tuple[str, ...]


def statements_of(page: str) -> list[Statement]:
    """Return the statements of a page, without code, pictures and what needs no source:
    the scale, the meaning of the words, and the first cell of a row."""
    text = re.sub(r"(?m)^    .*$", "", page)
    text = re.sub(r"(?ms)^## The words\n.*?(?=^## )", "", text)
    text = re.sub(
        r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|\[arXiv [\d.]+\]\([^)]*\)|a 95% interval",
        "",
        text,
    )
    statements = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("**Scale.**"):
            continue
        if block.lstrip().startswith("|"):
            for row in block.strip().splitlines():
                statements += statements_of_row(row)
        else:
            for part in re.split(r"\n(?=- |\d\. )", block):
                statements.append(statement_of(part))
    return statements


def statements_of_row(row: str) -> list[Statement]:
    cells = row.strip().strip("|").split("|")
    *texts, last = cells[1:]
    rest = []
    statements = []
    for cell in texts:
        if LINK.search(cell) and NUMBER.search(without_links(cell)):
            statements.append(statement_of(cell))
        else:
            rest.append(cell)
    return [*statements, statement_of(" | ".join([*rest, last]))]


def statement_of(text: str) -> Statement:
    return Statement(" ".join(without_links(text).split()), tuple(LINK.findall(text)))


def without_links(text: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", text)


@functools.cache
def words_of(path) -> str:
    return " ".join(path.read_text().split())


def stands_on(number: str, page: str) -> bool:
    """Return whether a page has a number, also as a negative one, or a count in other
    words, such as 1 against 20 of 20."""
    number = number.lstrip("-")
    if re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", page):
        return True
    if count := re.fullmatch(r"(\d+) of (\d+)", number):
        first, second = count.groups()
        return bool(re.search(rf"\b{first} (against \d+ )?of {second}\b", page))
    return False


def faults_of(page: str) -> list[str]:
    """Return what the page at this path says without a source."""
    path = ROOT / page
    faults = []
    for statement in statements_of(path.read_text()):
        sources = [(path.parent / link).resolve() for link in statement.links]
        pages = [words_of(source) for source in sources]
        for number in NUMBER.findall(statement.text):
            if not any(stands_on(number, one) for one in pages):
                faults.append(f"{number} is on no linked page: {statement.text}")
        for word in VERDICT.findall(statement.text):
            if not any(has_claim(word.lower(), source) for source in sources):
                faults.append(f"no claim is {word} on a linked page: {statement.text}")
    return faults


@functools.cache
def has_claim(verdict: str, path) -> bool:
    """Return whether a page has a claim with a verdict, or with the contrary one, since
    a front page may make the contrary statement."""
    words = {verdict, CONTRARY.get(verdict, verdict)}
    for line in path.read_text().splitlines():
        if line.startswith("- *") and any(f"**{word}" in line for word in words):
            return True
    return False


@pytest.mark.parametrize("page", FRONT)
def test_numbers_and_verdicts_stand_on_a_linked_page(page):
    assert faults_of(page) == []


README_INTERVALS = {
    "0.411 ± 0.005": ("E20", "fast", "fixed", "l2r"),
    "0.270 ± 0.056": ("E27", "learned", "l2r0:eval_l2r", "l2r10:eval_l2r"),
    "0.117 ± 0.053": ("E27", "learned", "l2r0", "l2r10"),
    "0.045 ± 0.011": ("E29", "fast", "best_encoder", "mask_query"),
    "0.021 ± 0.011": ("E29", "fast", "best_encoder", "rotary"),
    "0.073 ± 0.014": ("E22", "fast", "adaln_11", "encoder_ce"),
    "0.049 ± 0.014": ("E39", "tables", "encoder_ce", "adaln_11"),
    "0.005 ± 0.001": ("E21", "chorales", "adaln:gain_random_m64", None),
    "0.067 ± 0.025": ("E21", "chorales", "adaln", "encoder"),
}
"""What each interval of README is of: experiment, recipe, and the figures whose
difference it is."""


def test_intervals_of_readme_are_those_that_an_independent_script_computes():
    written = re.findall(r"-?\d+\.\d+ ± \d+\.\d+", (ROOT / "README.md").read_text())
    assert set(written) == README_INTERVALS.keys()
    for text, (name, recipe, higher, lower) in README_INTERVALS.items():
        experiment = audit_findings.read(name)
        mean, half_width = experiment.interval(recipe, higher, lower)
        assert f"{mean:.3f} ± {half_width:.3f}" == text


@pytest.mark.parametrize("page", FRONT)
def test_a_front_page_is_short(page):
    """Also in its parts: no cell has more than 40 words."""
    text = (ROOT / page).read_text()
    least, largest = FRONT[page]
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert least <= len(words) <= largest
    for line in text.splitlines():
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                assert len(without_links(cell).split()) <= 40, cell


def test_the_picture_is_of_the_sentence_that_readme_shows():
    picture = (ROOT / "docs" / "filling.svg").read_text()
    _, last = picture.split('class="label">complete<')
    sentence = "".join(re.findall(r'xml:space="preserve">([^<]*)<', last))
    assert f'"{sentence}"' in (ROOT / "README.md").read_text()


def test_a_number_or_a_verdict_without_a_source_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_front_pages.ROOT", tmp_path)
    claim = "- *fast*: a is better: +0.411 ± 0.005: **opposite**\n"
    (tmp_path / "E1.md").write_text(f"Found by 13 of 20 runs, 99.7%.\n\n{claim}")
    for text, faults in (
        ("| 0.5 | by 0.411 ± 0.005, **confirmed**, 13 of 20 | [E1](E1.md) |", 0),
        ("| a | **undecided** | [E1](E1.md) |", 1),
        ("| a | by 0.41 | [E1](E1.md) |", 1),
        ("By 0.411 ± 0.005, 9.7%, 3 of 20 ([E1](E1.md)).", 2),
        ("By 0.411 ± 0.005.", 1),
        ("- By 99.7% ([E1](E1.md)).\n- By 99.7%.", 1),
        ("| a | 99.7% ([E1](E1.md)) | 99.7% |", 1),
        ("**Scale.** 0.1 nats, 0.14M.\n\n## The words\n\n0.2\n\n## Next\n\n0.14M", 0),
    ):
        (tmp_path / "page.md").write_text(text)
        has_claim.cache_clear()
        assert len(faults_of("page.md")) == faults, text
