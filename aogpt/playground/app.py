"""A playground in the browser: fill in the gaps of a text token by token, in any order.

    aogpt playground
    aogpt playground out/quickstart --port 7861

The list of models has those of out/ and the folders of models/, such as a SmolLM2 in
models/smollm2. A plain GPT fills gaps by resampling (`sampling.resampling`).

It needs gradio: run `make playground`, or pip install -r requirements-playground.txt."""

import functools
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from torch import Tensor

from .. import text_model as aogpt
from ..data.pieces import readable_pieces, token_text
from ..runtime.command_line import run_script, visible
from ..runtime.devices import pick_device
from ..runtime.errors import UserError
from ..runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from ..runtime.validation import Seed, check_value
from ..sampling import gaps
from ..sampling.adaptive import scores_of
from ..sampling.modes import Context
from ..sampling.resampling import fill_by_resampling
from ..sampling.token_choice import TokenChoice, choose_tokens
from ..scoring import masked_logits

RULES = {
    "left to right": "l2r",
    "random": "random",
    "most confident first": "confidence",
    "least entropy first": "entropy",
    "largest margin first": "margin",
    "the blank that I click": "click",
}
BOOKS = "results/books_model"
DRAWS_OF_LENGTH = 2  # fillings of each length, from which the best length is chosen
MOST_WORK = 2000  # tokens that are drawn for this
IMPOSSIBLE = -1e4  # nats
EXAMPLE = "The old horse was tired,[MASK:7] and so they gave him[MASK:2-4] water."


class Fill:
    """A text whose blanks are filled in one by one: with one rule, temperature and seed throughout,
    as in the first sample of sample.py."""

    def __init__(self, text: aogpt.TextModel, context: Context):
        self.text = text
        self.context = list(context)
        self.tokens = list(context)
        self.steps: list[
            tuple[int, int, float]
        ] = []  # position, token, its log p in nats
        self._log_probs: Tensor | None = None

    @property
    def blanks(self) -> list[int]:
        return [i for i, token in enumerate(self.tokens) if token is None]

    @property
    def sums(self) -> list[float]:
        """log p of the tokens filled in, in the order in which they were, after each of them."""
        return list(
            itertools.accumulate((log_p for *_, log_p in self.steps), initial=0.0)
        )

    def log_probs(self, position: int) -> Tensor:
        """log p of every id at a blank given all known tokens, float64 (V,). A decoder has read
        them in the order in which they became known."""
        if self._log_probs is None:
            rank = {place: i for i, (place, *_) in enumerate(self.steps)}
            key = [
                (token is None, rank.get(i, -1)) for i, token in enumerate(self.tokens)
            ]
            order = [sorted(range(len(key)), key=key.__getitem__)]
            values = (
                [[token or 0 for token in self.tokens]],
                [[blank for blank, _ in key]],
                order,
            )
            given = (torch.tensor(v, device=self.text.device) for v in values)
            logits = masked_logits(self.text.model, *given).cpu().double()
            # ids that only pad the token table are never drawn
            self._log_probs = logits.log_softmax(dim=-1)[
                :, : self.text.loaded.vocab_size
            ]
        return self._log_probs[self.blanks.index(position)]

    def best(self, position: int, count: int = 1) -> list[tuple[int, float]]:
        """The likeliest ids at a blank, and their probabilities."""
        found = self.log_probs(position).exp().topk(count)
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))

    def next(self, rule: str, seed: int) -> int | None:
        """The next blank by one of RULES; None: the visitor clicks on it."""
        if not (blanks := self.blanks) or rule == "click":
            return None
        if rule == "l2r":
            return blanks[0]
        if rule == "random":
            return min(blanks, key=self._uniforms(seed, PLANS).__getitem__)
        return blanks[
            scores_of(torch.stack([*map(self.log_probs, blanks)]), [rule]).argmax()
        ]

    def _uniforms(self, seed: int, stream: int) -> list[float]:
        return to_uniform(philox_bits(seed, 0, range(1), len(self.context), stream))[
            0
        ].tolist()

    def draw(
        self, position: int, temperature: float, seed: int, top_p: float = 1.0
    ) -> None:
        uniforms = torch.tensor(
            [self._uniforms(seed, TOKENS)[position]], dtype=torch.float64
        )
        choice = TokenChoice(temperature=temperature, top_p=top_p)
        log_probs = self.log_probs(position)[None]
        self.put(position, int(choose_tokens(log_probs, uniforms, choice)))

    def put(self, position: int, token: int) -> None:
        self.steps.append((position, token, float(self.log_probs(position)[token])))
        self.tokens[position] = token
        self._log_probs = None

    def write(self, position: int, text: str) -> None:
        """Put one's own text into a blank and those right after it."""
        ids = self.text.tokenizer.encode(text)
        places = range(position, position + len(ids))
        if not ids or not set(places) <= set(self.blanks):
            raise UserError(
                f"{text!r} has {len(ids)} tokens, which do not fit into these blanks"
            )
        for place, token in zip(places, ids, strict=True):
            self.put(place, token)

    def undo(self) -> None:
        if self.steps:
            self.tokens[self.steps.pop()[0]] = None
            self._log_probs = None

    def left_to_right(self) -> tuple[float, float]:
        """log p of a finished text's filling given the rest, and of the whole text."""
        (scores,) = gaps.score_fillings(self.text.model, [self.context], [self.tokens])
        return scores.filling * self.context.count(None), self.text.log_prob(
            self.tokens
        )


class PlainFill(Fill):
    """The same with a plain GPT. What fits into a blank is estimated from weighted
    fillings of the whole text, those that agree with the tokens filled in so far."""

    def __init__(self, text: aogpt.TextModel, context: Context, seed: int):
        super().__init__(text, context)
        gapped = gaps.gapped_of(context)
        if not gapped.known[0] and text.loaded.scored_from:
            raise UserError("this model has no start token (GPT-2): begin with text")
        self.weighted = fill_by_resampling(
            text.model, gapped, seed=seed, vocab_size=text.loaded.vocab_size
        )

    def log_probs(self, position: int) -> Tensor:
        """log p of every id at a blank, float64 (V,); IMPOSSIBLE where none was drawn."""
        shares = torch.zeros(self.text.loaded.vocab_size, dtype=torch.float64)
        pairs = zip(self.weighted.tokens, self.weighted.weights, strict=True)
        for tokens, weight in pairs:
            if all(tokens[place] == token for place, token, _ in self.steps):
                shares[tokens[position]] += weight
        return (shares / shares.sum()).log().clamp(min=IMPOSSIBLE)

    def put(self, position: int, token: int) -> None:
        if self.log_probs(position)[token] <= IMPOSSIBLE:
            raise UserError(
                "a plain GPT takes tokens of the fillings that it drew: choose one of the "
                "list, or Restart with another seed"
            )
        super().put(position, token)

    def left_to_right(self) -> tuple[float, float]:
        return math.nan, self.text.log_prob(self.tokens)


class Settings(NamedTuple):
    """Values of the page's controls."""

    model: str
    text: str
    rule: str
    temperature: float
    top_p: float
    seed: int
    compare: bool
    beside_rule: str
    beside_seed: int
    own: str
    clicked: tuple[int, int] = (-1, -1)  # a position and a token


class Session:
    """What a visitor sees: a text, and beside it the same in another order, as far filled in."""

    fill: Fill | None = None
    beside: Fill | None = None
    selected: int | None = None  # the blank that the next step fills in
    source: tuple[str, str] | None = None
    seeds = (0, 0)  # of the text and the one beside
    note = ""

    def act(self, s: Settings, action: str) -> None:
        """Do what a visitor asks for; then the text beside keeps pace. Raises UserError."""
        check_value(s.seed, Seed, "the seed")
        check_value(s.beside_seed, Seed, "the seed beside")
        changed = self.source != (s.model, s.text) and action in ("step", "run")
        if action == "run" and self.fill and not self.fill.blanks and not changed:
            # draw again
            s = s._replace(seed=s.seed + 1, beside_seed=s.beside_seed + 1)
            self.restart(s)
        elif self.fill is None or changed or action == "restart":
            self.restart(s)
        self.seeds = (s.seed, s.beside_seed)
        (position, token), fill, blanks = s.clicked, self.fill, self.fill.blanks
        if action in ("step", "run", "write") and blanks and self.selected is None:
            raise UserError("click a blank first, or choose another order")
        match action:
            case "step" | "run" if blanks:
                fill.draw(self.selected, s.temperature, s.seed, s.top_p)
                while (
                    action == "run" and (blank := fill.next(s.rule, s.seed)) is not None
                ):
                    fill.draw(blank, s.temperature, s.seed, s.top_p)
            case "undo":
                fill.undo()
            case "select" if position in blanks:
                self.selected = position
            case "put" if position in blanks:  # a double click comes too late
                fill.put(position, token)
            case "write" if blanks:
                fill.write(self.selected, s.own)
            case "settings":
                self.beside = None
        if action != "select":
            self.selected = fill.next(s.rule, s.seed)
        self.beside = (
            (self.beside or new_fill(fill.text, fill.context, s.beside_seed))
            if s.compare
            else None
        )
        while self.beside and len(self.beside.steps) > len(fill.steps):
            self.beside.undo()
        while self.beside and len(self.beside.steps) < len(fill.steps):
            blank = self.beside.next(s.beside_rule, s.beside_seed)
            self.beside.draw(blank, s.temperature, s.beside_seed, s.top_p)

    def restart(self, s: Settings) -> None:
        """Begin with the text anew. After an error no old text is left."""
        self.fill = None
        self.beside = None
        self.note = ""
        text = load(s.model or "")
        given = gaps.contexts(s.text, text.tokenizer, text.block_size)
        work = DRAWS_OF_LENGTH * sum(context.count(None) for context in given)
        if len(given) > 1 and work > MOST_WORK:
            raise UserError(
                f"these gaps have {len(given)} lengths, {work:,} tokens to draw in all; "
                f"here at most {MOST_WORK:,}: give narrower ranges"
            )
        if len(given) > 1:  # the length that fits best
            found = text.fill(
                s.text,
                DRAWS_OF_LENGTH * len(given),
                num_samples=None if text.model.config.l2r_only else DRAWS_OF_LENGTH,
                mode="l2r",
                temperature=s.temperature or None,
                seed=s.seed,
            )
            given = list(dict.fromkeys(tuple(filling.context) for filling in found))
            fits = (
                " and ".join(map(str, gap_lengths(context))) for context in given[:3]
            )
            self.note = f"Lengths of the gaps in tokens, the best first: {'; then '.join(fits)}."
        self.fill = new_fill(text, given[0], s.seed)
        self.selected = self.fill.next(s.rule, s.seed)
        self.source = (s.model, s.text)


def new_fill(text: aogpt.TextModel, context: Context, seed: int) -> Fill:
    if text.model.config.l2r_only:
        return PlainFill(text, context, seed)
    return Fill(text, context)


def gap_lengths(context: Context) -> list[int]:
    runs = itertools.groupby(context, key=lambda token: token is None)
    return [len(list(run)) for blank, run in runs if blank]


@functools.lru_cache(maxsize=4)
def load(path: str) -> aogpt.TextModel:
    return aogpt.load(path, device=pick_device("auto"))


def view(fill: Fill, selected: int | None = None) -> dict:
    """A text as app.js draws it."""
    tokens = []
    tokenizer = fill.text.tokenizer
    steps = {
        position: (i, log_p) for i, (position, _, log_p) in enumerate(fill.steps, 1)
    }
    for blank, run in itertools.groupby(
        enumerate(fill.tokens), key=lambda pair: pair[1] is None
    ):
        places, ids = zip(*run, strict=True)
        pieces = ids if blank else readable_pieces(tokenizer, list(ids))
        for i, piece in zip(places, pieces, strict=True):
            if blank:
                ((token, p),) = fill.best(i)
                tokens.append(
                    {
                        "blank": i,
                        "next": i == selected,
                        "text": visible(token_text(tokenizer, token)),
                        "p": p,
                    }
                )
            else:
                step, log_p = steps.get(i, (0, 0.0))
                tokens.append(
                    {"step": step, "text": visible(piece), "p": math.exp(log_p)}
                )
    scores = [("in the order taken", fill.sums[-1], len(fill.steps))]
    if not fill.blanks:
        given, whole = fill.left_to_right()
        if not math.isnan(given):
            scores.append(("the same tokens, left to right", given, len(fill.steps)))
        scores.append(("the whole text, left to right", whole, len(tokens)))
    best = fill.best(selected, 8) if selected is not None else []
    choices = [
        (selected, token, visible(token_text(tokenizer, token)), p)
        for token, p in best
        if p > 0
    ]
    return {"tokens": tokens, "scores": scores, "sums": fill.sums, "choices": choices}


INTRO = """# AO-GPT playground
The model fills in the gaps of a text one token at a time, in any order. **Step** fills in the
outlined blank. The order chooses that blank, or you do: click one. Then you can also choose its
token, or write your own."""
GAPS = "[MASK:3]: three tokens. [MASK:2-6]: two to six, whichever fits. No space before a mask."


def page(run: str):
    """The page, gradio's Blocks."""
    try:
        import gradio as gr
    except ImportError:
        raise UserError("the playground needs gradio: run make playground") from None

    runs = [
        str(path)
        for path in sorted(Path("out").glob("*"))
        if (path / "checkpoints").is_dir()
    ]
    found = [
        str(path)
        for path in sorted(Path("models").glob("*"))
        if (path / "config.json").is_file()
    ]
    books = [BOOKS] if Path(BOOKS).exists() else []
    models = dict.fromkeys([run, *books, *found, *runs])
    rules = [*RULES.items()]
    any_path = "SPACE_ID" not in os.environ  # visitors of a public space name no paths
    with gr.Blocks(title="AO-GPT playground", analytics_enabled=False) as blocks:
        session = gr.State(Session())
        gr.Markdown(INTRO)
        with gr.Row():
            text = gr.Textbox(
                EXAMPLE, label="Text with gaps", info=GAPS, lines=2, min_width=320
            )
            label = "Model: from the list, or a path" if any_path else "Model"
            model = gr.Dropdown(
                [*models], label=label, min_width=240, allow_custom_value=any_path
            )
        with gr.Row():
            rule = gr.Dropdown(rules, value="confidence", label="Order", min_width=240)
            temperature = gr.Slider(0, 2, 0.8, step=0.1, label="Temperature")
            top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p")
            seed = gr.Number(0, label="Seed", precision=0)
            compare = gr.Checkbox(label="Compare two orders")
        with gr.Row(visible=False) as row:
            beside_rule = gr.Dropdown(rules[:-1], value="l2r", label="Order beside")
            beside_seed = gr.Number(0, label="Seed beside", precision=0)
        with gr.Row():
            small = {"min_width": 50}
            main = {"min_width": 50, "variant": "primary"}
            step, run_all = (gr.Button(name, **main) for name in ("Step", "Run"))
            undo, restart = (gr.Button(name, **small) for name in ("Undo", "Restart"))
        script = Path(__file__).with_name("app.js")
        drawing = {
            "html_template": "<div></div>",
            "js_on_load": script.read_text("utf-8"),
        }
        board = gr.HTML(apply_default_css=False, **drawing)
        own = gr.Textbox(
            label="Or write your own and press Enter (a word begins with a space)"
        )
        controls = [
            model,
            text,
            rule,
            temperature,
            top_p,
            seed,
            compare,
            beside_rule,
            beside_seed,
            own,
        ]

        def on(event, action):
            def act(data: gr.EventData, session, *values):
                clicked = data.value if action in ("select", "put") else (-1, -1)
                s = Settings(*values, clicked)
                error = ""
                try:
                    session.act(s, action)
                except (UserError, OSError) as problem:
                    error = visible(problem, one_line=True)
                views = [view(session.fill, session.selected)] if session.fill else []
                views += [view(session.beside)] if session.beside else []
                told = {"error": error, "note": session.note, "views": views}
                return session, told, gr.Row(visible=s.compare), *session.seeds

            # one visitor at a time; the others are shown their place in the queue
            event(
                act,
                [session, *controls],
                [session, board, row, seed, beside_seed],
                concurrency_id="model",
                show_progress="full",
                show_progress_on=board,
            )

        for event in (blocks.load, text.submit, model.change, restart.click):
            on(event, "restart")
        for control in (rule, seed, compare, beside_rule, beside_seed):
            on(control.input, "settings")  # not where Run moves the seeds on
        pairs = [(step.click, "step"), (run_all.click, "run"), (undo.click, "undo")]
        pairs += [(board.select, "select"), (board.click, "put"), (own.submit, "write")]
        for event, action in pairs:
            on(event, action)
    return blocks


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = BOOKS
    """Run folder, exported folder, released weights or Hugging Face repo id to begin
    with."""
    port: int | None = None
    """By default the first free one from 7860."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    if a.run == BOOKS and not Path(BOOKS).exists():
        raise UserError("name a model: aogpt playground MODEL")
    load(a.run)
    css = Path(__file__).with_name("app.css")
    page(a.run).launch(
        server_port=a.port,
        share=False,
        css_paths=css,
        footer_links=["gradio", "settings"],
    )


if __name__ == "__main__":
    run_script(main)
