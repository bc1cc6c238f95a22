"""The page of generation order: as text, and in a real Chromium (skipped where there is
none)."""

import math
import re

import pytest
from helpers import chromium, data_of, wait_for

from aogpt.sampling.page import PageSample, render

HOSTILE = [
    "</script><img src=x onerror=\"document.title='broken'\">",
    "<!--<script>",
    "-->\u2028\u2029",
    "\"'`${document.title='broken'}\\",
    "&lt;b&gt;<b>",
    "\x00\x07\x1b\x7f\ud800\ufffd\u202e",
    "__DATA__",
    "]]>",
]
# 0 and 1 are given; steps 1 and 3 unmask nothing; position 4 is the first half of a
# character
MIXED = PageSample(
    ["Once", " upon", "\n\n", " a", "", "é", " time"],
    [-1, -1, 5, 0, 4, 2, 4],
    [math.nan, 0.0, -1.5, -20.0, -0.25, -2.1, math.log(0.123)],
)
# after each of the page's steps
UNMASKED = [{0, 1}, {0, 1, 3}, {0, 1, 3, 5}, {0, 1, 3, 4, 5, 6}, set(range(7))]


def in_one_step(pieces):
    return PageSample(pieces, [0] * len(pieces), [-1.0] * len(pieces))


def test_the_document_holds_its_data_whatever_the_text_and_names_no_other_resource():
    settings = {"mode": "mdm", "steps": None, HOSTILE[0]: HOSTILE[1]}
    document = render([in_one_step(HOSTILE), MIXED], settings)
    data = data_of(document)
    hostile, sample = data["samples"]
    assert hostile["pieces"] == HOSTILE
    assert data["settings"] == settings
    assert (sample["pieces"], sample["step"]) == (MIXED.pieces, MIXED.step)
    assert sample["log_probs"] == [None, *MIXED.log_probs[1:]]  # JSON has no NaN
    assert not set("\x00\x07\x1b\x7f\u2028\u2029\u202e") & set(document)
    document = render([MIXED], {})
    assert not re.search(
        r"https?:|//\w|url\(|@import|<(img|iframe|object|base)\b", document
    )
    assert re.findall(r'\b(?:src|href)="([^"]*)"', document) == ["data:,"]


IN_BROWSER = pytest.mark.slow(reason="starts a browser")


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser, tmp_path):
    """Opens a document as a file; nothing else may be asked for and nothing complained
    of."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    context.set_default_timeout(600_000)  # as helpers.wait_for
    requests = []
    complaints = []
    addresses = set()

    def show(samples, settings=None, fragment=""):
        path = tmp_path / "page.html"
        path.write_text(render(samples, settings or {}), encoding="utf-8")
        tab = context.new_page()
        tab.on("request", lambda request: requests.append(request.url.split("#")[0]))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        addresses.add(path.as_uri())
        tab.goto(path.as_uri() + fragment)
        return tab

    yield show
    context.close()
    assert set(requests) <= addresses | {"data:,"}
    assert complaints == []


def state(tab) -> tuple[set[int], str]:
    """Return positions whose text can be seen, by its computed colour, and the
    counter."""
    seen = tab.evaluate(
        """() => [...document.querySelectorAll("#text .token")].flatMap((token, i) =>
            getComputedStyle(token).color === "rgba(0, 0, 0, 0)" ? [] : [i])"""
    )
    return set(seen), tab.locator("#count").inner_text()


def wait_until(tab, condition: str) -> None:
    """Playwright's own wait uses eval, which the page's security policy refuses."""
    wait_for(lambda: tab.evaluate(condition))


def slide(tab, step: int) -> None:
    change = "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }"
    tab.locator("#slider").evaluate(change, step)


@IN_BROWSER
def test_the_slider_and_keys_show_what_is_unmasked_by_then(show):
    tab = show([MIXED])
    boxes = """() => [...document.querySelectorAll(".token")].map(
        (token) => JSON.stringify(token.getClientRects()))"""
    before = tab.evaluate(boxes)
    assert state(tab)[0] == UNMASKED[4], "it opens with the whole text"
    assert tab.locator("#choice").is_hidden()
    for step in (0, 3, 1, 4, 2):
        slide(tab, step)
        counter = (
            f"step {step} of 4, {len(UNMASKED[step]) - 2} of 5 tokens (and 2 given)"
        )
        assert state(tab) == (UNMASKED[step], counter)
        now = tab.evaluate(
            "[...document.querySelectorAll('#text .now')].map(t => t.position)"
        )
        assert set(now) == (UNMASKED[step] - UNMASKED[step - 1] if step else set())
        assert tab.evaluate(boxes) == before, "the layout jumps"
    # a range has arrow keys of its own: one step all the same
    tab.locator("#slider").focus()
    for key, step in [("Right", 3), ("Right", 4), ("Right", 4), ("Left", 3)]:
        tab.keyboard.press(f"Arrow{key}")
        assert state(tab)[0] == UNMASKED[step]


@IN_BROWSER
def test_play_pause_and_speed(show):
    tab = show([PageSample(["a"] * 2000, list(range(2000)), [-1.0] * 2000)])
    assert tab.locator("#speed").input_value() == "128"
    tab.keyboard.press("Space")
    assert tab.locator("#play").inner_text() == "Pause"
    wait_until(tab, "shown >= 20 && shown < 1000")  # it began again from nothing
    tab.locator("#play").focus()
    tab.keyboard.press("Space")
    assert tab.locator("#play").inner_text() == "Play"
    paused = state(tab)
    tab.evaluate(
        "new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
    )
    assert state(tab) == paused
    slide(tab, 1990)
    tab.locator("#play").click()
    wait_until(tab, "shown === 2000")
    assert tab.locator("#play").inner_text() == "Play"


@IN_BROWSER
def test_every_token_tells_its_probability(show):
    log_probs = [*MIXED.log_probs[:5], -math.inf, MIXED.log_probs[6]]
    tab = show([PageSample(MIXED.pieces, MIXED.step, log_probs)])
    expected = {  # the text, when, and the model's probability
        0: ["Once", "given"],
        2: ["↵↵", "step 4 of 4 (6 in the plan)", "22.3%, -1.500 nats"],
        3: ["␣a", "step 1 of 4", "2.1e-9, -20.000 nats"],
        5: ["é", "step 2 of 4 (3 in the plan)", "not finite"],
        6: ["␣time", "step 3 of 4 (5 in the plan)", "12.3%, -2.096 nats"],
    }
    for position, (text, when, *probability) in expected.items():
        lines = [text, f"position {position + 1} of 7", when]
        lines += [f"model's probability {value}" for value in probability]
        token = tab.locator("#text .token").nth(position)
        # its first line
        box = token.evaluate("token => token.getClientRects()[0].toJSON()")
        tab.mouse.move(box["x"] + 3, box["y"] + 8)
        assert tab.locator("#tip").inner_text().split("\n") == lines
        tab.mouse.move(5, 5)
        assert tab.locator("#tip").is_hidden()
        token.focus()
        assert tab.locator("#tip").inner_text().split("\n") == lines
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden()


@IN_BROWSER
def test_the_fragment_is_the_state(show):
    samples = [in_one_step(["x"]), MIXED, PageSample(["y"], [-1], [0.0])]
    tab = show(samples, fragment="#sample=2&step=1")
    assert state(tab)[0] == UNMASKED[1]
    tab.keyboard.press("ArrowRight")
    tab.wait_for_url("**#sample=2&step=2")
    tab.locator("#sample").select_option("2")
    assert state(tab) == ({0}, "step 0 of 0, 0 of 0 tokens (and 1 given)")
    tab.wait_for_url("**#sample=3&step=0")
    tab = show([MIXED], fragment="#play")
    wait_until(tab, "shown === steps.length && playing === null")


@IN_BROWSER
def test_hostile_text_is_shown_and_runs_nothing(show):
    tab = show([in_one_step(HOSTILE)], {HOSTILE[0]: HOSTILE[0]})
    texts = tab.locator("#text .token").evaluate_all(
        "tokens => tokens.map(t => t.textContent)"
    )
    # a lone surrogate does not travel back from the browser
    assert texts[:5] + texts[6:] == HOSTILE[:5] + HOSTILE[6:]
    assert tab.locator("#settings dd").evaluate("e => e.textContent") == HOSTILE[0]
    assert tab.locator("#text *:not(span), #tip img, img").count() == 0
    assert tab.title() == "Generation order"
    assert tab.locator("body > *").count() == 9


@IN_BROWSER
def test_boards_are_drawn_cell_by_cell_with_their_boxes_and_a_gap_between_two(show):
    """Two boards of 4 x 4 in boxes of 2 x 2: what is given, and its solution."""
    pieces = list("1203" * 8)
    step = [-1] * 16 + list(range(16))
    board = [pieces, step, [-0.5] * 32, (4, 4, 2, 2)]
    tab = show([PageSample(*board, caption) for caption in ("right", "wrong")])
    boxes = tab.evaluate(
        """() => [...document.querySelectorAll("#text .token")].map((token) => {
            const b = token.getBoundingClientRect();
            return [b.x, b.y, b.width]; })"""
    )
    columns = [box[0] for box in boxes]
    rows = [box[1] for box in boxes]
    assert all(columns[i] == columns[i % 4] for i in range(32))
    assert len(set(columns[:4])) == 4
    assert all(rows[i] == rows[i - i % 4] for i in range(32))
    assert len(set(rows)) == 8
    gaps = [rows[4 * i + 4] - rows[4 * i] for i in range(7)]
    assert gaps[3] > 1.5 * max(gaps[:3] + gaps[4:])
    assert tab.locator("#caption").inner_text() == "right"
    tab.locator("#sample").select_option("1")
    assert tab.locator("#caption").inner_text() == "wrong"
