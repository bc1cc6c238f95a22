"""The playground: filling in step by step, exact against the model, and the page in
Chromium (skipped where gradio or Chromium is missing)."""

import dataclasses
import json
import socket
import subprocess
import sys
import urllib.request

import pytest
import torch
from helpers import ROOT, assert_user_error, chromium, run_script, wait_for
from reference import make_system

import aogpt
from aogpt.checkpoints import Loaded
from aogpt.sampling import modes
from aogpt.scoring import masked_logits, token_log_probs
from extras.playground import app
from extras.playground import fill as filling
from extras.playground import session as sessions

GAPPED = "a[MASK:2]c d[MASK]f[MASK:3]."
SYSTEMS = ["AO-GPT", "target rotary", "two_stream", "RADD", "SEDD"]
RULES = [rule for rule in sessions.RULES.values() if rule != "click"]
SETTINGS = sessions.Settings(
    model="tiny",
    text=GAPPED,
    rule="confidence",
    temperature=1.0,
    top_p=1.0,
    seed=0,
    compare=False,
    beside_rule="random",
    beside_seed=0,
    own="",
)


def small(system, dtype=torch.float64):
    """Return a random model over bytes."""
    model = make_system(system, 3, tokens=257, block_size=32, dtype=dtype).eval()
    return aogpt.TextModel(Loaded(model, "x", 0, "raw", "bytes", 257))


def gapped(text, written=GAPPED):
    encoded = modes.encode_gaps(written, text.tokenizer, text.block_size)
    return filling.Fill(text, encoded)


@pytest.fixture
def visit(monkeypatch):
    """Act as a visitor of a page with one tiny model; settings that are given stay."""
    text = small("target rotary")
    session = sessions.Session()
    settings_so_far = {}
    monkeypatch.setattr(sessions, "load", lambda path: text)

    def act(action, **settings):
        settings_so_far.update(settings)
        session.act(dataclasses.replace(SETTINGS, **settings_so_far), action)
        return session

    return act


def test_ones_own_text_goes_on_with_the_text_before_it(monkeypatch):
    """No space is added to it, as tokenizers of words do at the beginning of a text."""
    text = small("AO-GPT")
    fill = gapped(text)
    tokenizer = text.tokenizer
    monkeypatch.setattr(tokenizer, "encode_after", tokenizer.encode)
    monkeypatch.setattr(tokenizer, "encode", lambda text: list(f" {text}".encode()))
    fill.write(1, "b")
    assert fill.tokens[:3] == [ord("a"), ord("b"), None]


@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_are_factors_of_the_probability_along_the_order_taken(system):
    text = small(system)
    tolerance = 1e-5 if system == "SEDD" else 1e-9
    fill = gapped(text)
    states = []
    T = len(gapped(text).context)
    given = [i for i in range(T) if fill.context[i] is not None]
    for number, position in enumerate([9, 1, 6, 8, 2, 10]):
        states.append((list(fill.tokens), {i: fill.log_probs(i) for i in fill.blanks}))
        filled_positions = given + [i for i, *_ in fill.steps]
        order = [
            *filled_positions,
            position,
            *(i for i in fill.blanks if i != position),
        ]
        x = torch.tensor([[token or 0 for token in fill.tokens]]).repeat(257, 1)
        x[:, position] = torch.arange(257)
        along = token_log_probs(text.model, x, torch.tensor([order]).expand(257, T))
        got = fill.log_probs(position)
        expected = along[:, len(filled_positions)].double()
        assert (got - expected).abs().max() < tolerance
        assert got.dtype == torch.float64
        if number == 0 or text.model.config.is_encoder:
            masked = torch.tensor([[token is None for token in fill.tokens]])
            logits = masked_logits(text.model, x[:1].where(~masked, 0), masked)
            every = torch.stack([fill.log_probs(i) for i in fill.blanks])
            assert (every - logits.log_softmax(dim=-1)[:, :257]).abs().max() < 1e-12
        assert len(fill.best(position, 300)) == 257  # no more than there are
        best = fill.best(position, 8)
        assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
        assert best[0][0] == int(expected.argmax())
        if number % 2:
            fill.draw(position, 0.8, seed=1)
        else:
            fill.put(position, 97 + number)
    tokens = torch.tensor([fill.tokens])
    prompt_length = T - 6

    def total(order, start):
        log_probs = token_log_probs(text.model, tokens, torch.tensor([order]))
        return float(log_probs[0, start:].double().sum())

    blanks = [i for i in range(T) if fill.context[i] is None]
    taken = [position for position, *_ in fill.steps]
    assert abs(fill.sums[-1] - total(given + taken, prompt_length)) < tolerance
    assert fill.sums[0] == 0
    assert len(fill.sums) == 7
    expected = total(given + blanks, prompt_length), total(list(range(T)), 0)
    for got, value in zip(fill.left_to_right(), expected, strict=True):
        assert abs(got - value) < tolerance
    for tokens, log_probs in reversed(states):  # undo restores every state, bit for bit
        fill.undo()
        assert fill.tokens == tokens
        assert fill.blanks == list(log_probs)
        assert all(
            torch.equal(fill.log_probs(i), values) for i, values in log_probs.items()
        )
    fill.undo()
    assert fill.tokens == fill.context
    assert fill.sums == [0.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
def test_one_rule_and_seed_throughout_takes_the_tokens_of_sample_py(rule, system):
    text = small(system)
    for seed in (0, 1, 2):
        fill = gapped(text)
        while (blank := fill.next(rule, seed)) is not None:
            fill.draw(blank, 0.7, seed)
        (sample,) = text.fill(
            [GAPPED], mode=rule, temperature=0.7, seed=seed, num_samples=1
        )
        assert fill.tokens == sample.tokens


def test_a_visitor_clicks_chooses_writes_and_takes_back(visit):
    session = visit("restart", rule="click")
    assert session.selected is None
    assert session.fill.blanks == [1, 2, 6, 8, 9, 10]
    for action in ("step", "run", "write"):
        with pytest.raises(ValueError, match="click a blank first"):
            visit(action)
    assert visit("select", clicked=(9, -1)).selected == 9
    assert visit("select", clicked=(0, -1)).selected == 9  # that is no blank
    assert visit("step").fill.tokens[9] is not None
    assert session.selected is None
    visit("select", clicked=(6, -1))
    assert visit("put", clicked=(6, 120)).fill.tokens[6] == 120
    # of a double click only the first
    assert len(visit("put", clicked=(6, 120)).fill.steps) == 2
    visit("select", clicked=(1, -1))
    for own in ("three", ""):
        with pytest.raises(ValueError, match="do not fit"):
            visit("write", own=own)
    assert visit("write", own="to").fill.tokens[1:3] == [*b"to"]
    assert [position for position, *_ in session.fill.steps] == [9, 6, 1, 2]
    assert visit("undo").fill.blanks == [2, 8, 10]
    assert visit("undo").fill.blanks == [1, 2, 8, 10]
    visit("select", clicked=(10, -1))
    visit("run", rule="l2r")  # the outlined blank first, then by the rule
    assert visit("settings").selected is None
    positions = [position for position, *_ in session.fill.steps]
    assert positions == [9, 6, 10, 1, 2, 8]
    for action in ("step", "write", "put"):
        assert visit(action).fill.blanks == []  # nothing is left, and nothing is wrong


def test_the_text_beside_keeps_pace_in_its_own_order(visit):
    session = visit("restart", compare=True, beside_rule="random", beside_seed=5)
    for action, count in (("step", 1), ("step", 2), ("undo", 1), ("run", 6)):
        assert len(visit(action).beside.steps) == count == len(session.fill.steps)
    alone = gapped(session.fill.text)
    while (blank := alone.next("random", 5)) is not None:
        alone.draw(blank, 1.0, 5)
    assert session.beside.steps == alone.steps != session.fill.steps
    again = visit("settings", beside_rule="confidence", beside_seed=0)
    assert again.beside.steps == again.fill.steps
    assert visit("settings", compare=False).beside is None


@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
def test_what_is_drawn_is_the_text_its_blanks_and_their_best_tokens(system):
    text = small(system)
    fill = gapped(text, "é\x07[MASK:2]\n<b>[MASK]")
    fill.put(9, 98)
    drawn = json.loads(json.dumps(filling.view(fill, 3)))
    token_texts = [token["text"] for token in drawn["tokens"] if "step" in token]
    assert "".join(token_texts) == "é\\x07\n<b>b"  # control characters are escaped
    blanks = [token for token in drawn["tokens"] if "blank" in token]
    first, second = blanks
    assert first["blank"] == 3
    assert first["next"]
    assert second["blank"] == 4
    assert not second["next"]
    assert [token["p"] for token in blanks] == [fill.best(i)[0][1] for i in (3, 4)]
    assert drawn["choices"][0][:2] == [3, fill.best(3)[0][0]]
    assert len(drawn["choices"]) == 8
    assert drawn["scores"] == [["in the order taken", fill.sums[-1], 1]]
    for position in (3, 4):
        fill.draw(position, 1.0, 0)
    drawn = filling.view(fill)
    scores = [score for _, score, _ in drawn["scores"]]
    assert scores == [fill.sums[-1], *fill.left_to_right()]
    assert not drawn["choices"]
    assert len(drawn["sums"]) == 4


def test_run_draws_again_with_the_next_seed(visit):
    session = visit("run", rule="l2r", seed=3, compare=True, beside_seed=7)
    first = list(session.fill.tokens)
    assert session.seeds == (3, 7)
    assert not session.fill.blanks
    again = visit("run").fill.tokens
    assert again != first
    assert session.seeds == (4, 8)
    alone = gapped(session.fill.text)
    while (blank := alone.next("l2r", 4)) is not None:
        alone.draw(blank, 1.0, 4)
    assert again == alone.tokens
    assert not session.beside.blanks
    greedy = visit("run", top_p=0.0, seed=10).fill.tokens
    assert greedy == visit("run", seed=20).fill.tokens != again


def test_no_half_character_is_shown():
    text = small("AO-GPT")
    fill = gapped(text, "a[MASK:3]b[MASK]")
    for position, byte in ((1, 0xE2), (2, 0x80), (5, 0xC3)):
        fill.put(position, byte)
    texts = [token["text"] for token in filling.view(fill)["tokens"] if "step" in token]
    assert texts == ["a", "<0xE2>", "<0x80>", "b", "<0xC3>"]
    fill.put(3, 0x99)
    drawn = filling.view(fill)
    texts = [token["text"] for token in drawn["tokens"]]
    assert texts[:5] == ["a", "", "", "\u2019", "b"]


def test_the_list_has_folders_of_models_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/smollm2", "models/empty", "out/run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "smollm2" / "config.json").touch()
    assert app.models_of("mine") == ["mine", "models/smollm2", "out/run"]


def test_mistakes_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match="pip install gradio, or make playground"):
        app.page("x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sessions, "load", lambda path: pytest.fail("it was loaded"))
    monkeypatch.setattr(sys, "argv", ["app", "x"])
    with pytest.raises(ValueError, match="pip install gradio"):
        app.main()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "gradio")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        for port, words in (
            (busy.getsockname()[1], "Address already in use; give another"),
            (99999, "port is 99999, but it must be at least 1 and at most 65535"),
        ):
            monkeypatch.setattr(sys, "argv", ["aogpt", "x", "--port", str(port)])
            with pytest.raises(ValueError, match=words):
                app.main()
    assert_user_error(
        run_script("-m", "extras.playground.app", "no/such/run", check=False),
        "no/such/run",
    )


# ---- in the browser ------------------------------------------------------------------

IN_BROWSER = pytest.mark.slow(reason="starts a browser and the playground's server")
LONGEST = 60_000  # milliseconds that a test waits for the page


@pytest.fixture(scope="module")
def tab():
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    complaints = []
    command = [sys.executable, "-m", "extras.playground.app", "--port", str(port)]

    def answers():
        try:
            return urllib.request.urlopen(address, timeout=10).status == 200
        except OSError:
            return False

    with chromium() as browser:
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            wait_for(answers, server)
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.set_default_timeout(LONGEST)
            page.on(
                "request",
                lambda r: r.url.startswith(address) or complaints.append(r.url),
            )
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(address)
            yield page
        finally:
            server.terminate()
        server.wait(timeout=60)
    assert not complaints  # and nothing was asked of any other address


def begin(tab, text):
    tab.get_by_label("Text with gaps").fill(text)
    tab.get_by_role("button", name="Restart").click()


def filled(tab, count, column=0):
    tab.locator("section .scores th", has_text=f"{count} of").nth(column).wait_for()


@IN_BROWSER
def test_a_text_is_filled_in_by_clicks(tab):
    begin(tab, "The old horse[MASK:4] home.")
    # another one was there
    tab.locator("section .filling", has_text="The old horse").wait_for()
    filled(tab, 0)
    assert tab.locator("button.blank").count() == 4
    assert tab.locator(".choice").count() == 8
    tab.get_by_role("button", name="Step").click()
    filled(tab, 1)
    first = tab.locator(".scores td").nth(1).inner_text()
    # A blank that the order would not take next: the first one, or the second.
    is_next = "next" in tab.locator("button.blank").first.get_attribute("class")
    blank = tab.locator("button.blank").nth(1 if is_next else 0)
    blank.click()
    blank.and_(tab.locator(".next")).wait_for()
    choice = tab.locator(".choice b").nth(1).inner_text()
    tab.locator(".choice").nth(1).click()
    filled(tab, 2)
    filled_token = tab.locator(
        ".filled", has_text=choice.replace("·", "").strip()
    ).first
    assert "token" in filled_token.get_attribute("title")
    assert float(tab.locator(".scores td").nth(1).inner_text()) < float(first) <= 0
    tab.get_by_role("button", name="Undo").click()
    filled(tab, 1)
    assert tab.locator(".scores td").nth(1).inner_text() == first
    tab.get_by_label("Compare two orders").check()
    filled(tab, 1, column=1)
    tab.get_by_role("button", name="Run").click()
    filled(tab, 4, column=1)
    assert tab.locator(".blank").count() == 0
    assert tab.locator(".scores").count() == 2
    text = tab.locator(".filling").first.inner_text()
    assert text.startswith("The old horse")
    assert text.endswith(" home.")
    assert tab.locator("polyline").count() == 2
    assert tab.locator("circle").count() == 10
    assert tab.locator(".scores tr").count() == 8
    tab.get_by_label("Compare two orders").uncheck()
    tab.locator(".scores").nth(1).wait_for(state="detached")


@IN_BROWSER
def test_own_words_are_put_in_and_hostile_text_is_shown_as_it_is(tab):
    image = "<img src=x onerror=\"document.title='y'\">"
    hostile = "${document.title='x'}" + image + "`{{value}}\\u0041"
    begin(tab, hostile + "[MASK:9]")
    filled(tab, 0)
    box = tab.get_by_label("Or write your own")
    box.fill("<b>")
    box.press("Enter")
    tab.locator(".scores th", has_text="of 9").filter(has_not_text="0 of 9").wait_for()
    assert tab.locator(".filling").text_content().startswith(hostile)
    assert tab.title() == "AO-GPT playground"
    assert tab.locator(".filling img, .filling b").count() == 0


@IN_BROWSER
def test_a_second_visitor_is_told_that_he_waits(tab):
    other = tab.context.browser.new_page()
    other.set_default_timeout(LONGEST)
    other.goto(tab.url)
    filled(other, 0)
    hint = "queue: 1 means that another visitor comes first"
    assert hint in other.locator("body").inner_text()
    begin(tab, "The old horse was tired,[MASK:100] and so they went home.")
    filled(tab, 0)
    tab.get_by_role("button", name="Run").click()
    begin(other, "a[MASK:2] b")
    other.locator(".progress-text, .meta-text", has_text="queue: 1").first.wait_for()
    other.locator("section .scores th", has_text="0 of 2").wait_for()
    filled(tab, 100)
    other.close()


@IN_BROWSER
def test_an_error_is_told_in_one_line(tab):
    begin(tab, "no gap")
    tab.locator(".error", has_text="there is no mask").wait_for()
    begin(tab, "a[MASK:2] b")
    filled(tab, 0)
    assert tab.locator(".error").count() == 0
    model = tab.get_by_role("combobox", name="Model")
    model.fill("no/such/run")
    model.press("Enter")
    tab.locator(".error", has_text="no/such/run").wait_for()


def test_a_model_of_records_whose_end_is_given_is_refused():
    text = aogpt.load("results/molecules_model")
    context = modes.encode_gaps("CC[MASK]O", text.tokenizer, text.block_size)
    with pytest.raises(aogpt.UserError, match="records whose end is given"):
        filling.new_fill(text, context)
