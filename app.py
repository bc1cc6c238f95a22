"""A playground in the browser: fill in the gaps of a text token by token, in any order.

    python app.py
    python app.py out/quickstart --port 7861

It needs gradio: run `make playground`, or pip install -r requirements-playground.txt.
"""

import functools
import html
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from torch import Tensor

import aogpt
from runtime.command_line import run_script, visible
from runtime.devices import pick_device
from runtime.errors import UserError
from runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from runtime.validation import Seed, check_value
from sampling import gaps
from sampling.adaptive import scores_of
from sampling.modes import Context
from sampling.token_choice import TokenChoice, choose_tokens

RULES = {
    "left to right": "l2r",
    "random": "random",
    "most confident first": "confidence",
    "least entropy first": "entropy",
    "largest margin first": "margin",
    "the blank that I click": "click",
}
BOOKS = "results/books_model"
EXAMPLE = "The old horse was tired,[MASK:7] and so they gave him[MASK:2-4] water."


# ---- without a page ------------------------------------------------------------------------------


class Fill:
    """A text whose blanks are filled in one by one. With one rule, temperature and seed throughout
    it takes the tokens that sample.py takes."""

    def __init__(self, text: aogpt.TextModel, context: Context):
        self.text, self.context = text, list(context)
        self.steps: list[tuple[int, int, float]] = []  # position, token, its log p in nats
        self._log_probs: Tensor | None = None

    @property
    def tokens(self) -> Context:
        taken = {position: token for position, token, _ in self.steps}
        return [taken.get(i, token) for i, token in enumerate(self.context)]

    @property
    def blanks(self) -> list[int]:
        return [i for i, token in enumerate(self.tokens) if token is None]

    @property
    def sums(self) -> list[float]:
        """log p of the tokens filled in, in the order in which they were, after each of them."""
        return list(itertools.accumulate((log_p for *_, log_p in self.steps), initial=0.0))

    def log_probs(self, position: int) -> Tensor:
        """log p of every id at a blank given all known tokens, float64 (V,)."""
        if self._log_probs is None:
            x = torch.tensor([[token or 0 for token in self.tokens]], device=self.text.device)
            blank = torch.tensor([[token is None for token in self.tokens]], device=x.device)
            logits = self.text.model.masked_logits(x, blank).cpu().double()
            # ids that only pad the token table are never drawn
            self._log_probs = logits.log_softmax(dim=-1)[:, : self.text.loaded.vocab_size]
        return self._log_probs[self.blanks.index(position)]

    def best(self, position: int, count: int = 1) -> list[tuple[int, float]]:
        """The likeliest ids at a blank, and their probabilities."""
        found = self.log_probs(position).exp().topk(count)
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))

    def next(self, rule: str, seed: int) -> int | None:
        """The blank that comes next by a rule, one of the values of RULES; None: a click says."""
        if not (blanks := self.blanks) or rule == "click":
            return None
        if rule == "l2r":
            return blanks[0]
        if rule == "random":
            return min(blanks, key=self._uniforms(seed, PLANS).__getitem__)
        return blanks[scores_of(torch.stack([*map(self.log_probs, blanks)]), [rule]).argmax()]

    def _uniforms(self, seed: int, stream: int) -> list[float]:
        return to_uniform(philox_bits(seed, 0, range(1), len(self.context), stream))[0].tolist()

    def draw(self, position: int, temperature: float, seed: int) -> None:
        uniforms = torch.tensor([self._uniforms(seed, TOKENS)[position]], dtype=torch.float64)
        choice, log_probs = TokenChoice(temperature=temperature), self.log_probs(position)[None]
        self.put(position, int(choose_tokens(log_probs, uniforms, choice)))

    def put(self, position: int, token: int) -> None:
        self.steps.append((position, token, float(self.log_probs(position)[token])))
        self._log_probs = None

    def write(self, position: int, text: str) -> None:
        """Put one's own text into a blank and those right after it."""
        ids = self.text.tokenizer.encode(text)
        places = range(position, position + len(ids))
        if not ids or not set(places) <= set(self.blanks):
            raise UserError(f"{text!r} has {len(ids)} tokens, which do not fit into these blanks")
        for place, token in zip(places, ids, strict=True):
            self.put(place, token)

    def undo(self) -> None:
        del self.steps[-1:]
        self._log_probs = None

    def left_to_right(self) -> tuple[float, float]:
        """log p of a finished text's filling given the rest, and of the whole text."""
        (scores,) = gaps.score_fillings(self.text.model, [self.context], [self.tokens])
        return scores.filling * self.context.count(None), self.text.log_prob(self.tokens)


class Settings(NamedTuple):
    """What the controls of the page say."""

    model: str
    text: str
    rule: str
    temperature: float
    seed: int
    compare: bool
    beside_rule: str
    beside_seed: int
    own: str
    clicked: str = ""  # a position or a token


class Session:
    """What a visitor sees: a text, and beside it the same in another order, as far filled in."""

    fill: Fill | None = None
    beside: Fill | None = None
    selected: int | None = None  # the blank that the next step fills in
    source: tuple[str, str] | None = None
    note = ""

    def act(self, s: Settings, action: str) -> None:
        """Do what a visitor asks for; then the text beside keeps pace. Raises UserError."""
        check_value(s.seed, Seed, "the seed")
        check_value(s.beside_seed, Seed, "the seed beside")
        getattr(self, action)(s)
        if self.fill and action != "select":
            self.selected = self.fill.next(s.rule, s.seed)
        if not s.compare or action == "compare":
            self.beside = None
        if s.compare and self.fill:
            other = self.beside = self.beside or Fill(self.fill.text, self.fill.context)
            while len(other.steps) > len(self.fill.steps):
                other.undo()
            while len(other.steps) < len(self.fill.steps):
                blank = other.next(s.beside_rule, s.beside_seed)
                other.draw(blank, s.temperature, s.beside_seed)

    def compare(self, s: Settings) -> None:
        """Another order beside, or none."""

    def choose(self, s: Settings) -> None:
        """Another order here, for the steps to come."""

    def restart(self, s: Settings) -> None:
        text, note = load(s.model or ""), ""
        if text.model.config.l2r_only:
            raise UserError("this model only continues texts; choose one that takes any order")
        given = gaps.contexts(s.text, text.tokenizer, text.block_size)
        if len(given) > 1:  # the length after which the text to the right is most probable
            options = {"mode": "l2r", "temperature": s.temperature, "seed": s.seed}
            found = text.fill(s.text, 2 * len(given), num_samples=2, **options)
            given = list(dict.fromkeys(tuple(filling.context) for filling in found))
            best, *others = map(lengths, given[:3])
            note = f"Lengths that fit best: {best} tokens (taken), then {', then '.join(others)}."
        self.fill, self.beside, self.note = Fill(text, given[0]), None, note
        self.selected, self.source = self.fill.next(s.rule, s.seed), (s.model, s.text)

    def step(self, s: Settings) -> None:
        if self.source != (s.model, s.text):  # another text was written meanwhile
            self.restart(s)
        if self.fill.blanks:
            self.fill.draw(self.chosen(), s.temperature, s.seed)
            self.selected = self.fill.next(s.rule, s.seed)

    def run(self, s: Settings) -> None:
        self.step(s)
        while self.fill.blanks:
            self.step(s)

    def undo(self, s: Settings) -> None:
        if self.fill:
            self.fill.undo()

    def select(self, s: Settings) -> None:
        if int(s.clicked) in self.fill.blanks:
            self.selected = int(s.clicked)

    def put(self, s: Settings) -> None:
        self.fill.put(self.chosen(), int(s.clicked))

    def write(self, s: Settings) -> None:
        self.fill.write(self.chosen(), s.own)

    def chosen(self) -> int:
        if self.selected is None:
            raise UserError("click a blank first, or choose another order")
        return self.selected


def lengths(context: Context) -> str:
    runs = itertools.groupby(context, key=lambda token: token is None)
    return " and ".join(str(len(list(run))) for blank, run in runs if blank)


@functools.lru_cache(maxsize=4)
def load(path: str) -> aogpt.TextModel:
    return aogpt.load(path, device=pick_device("auto"))


# ---- as HTML -------------------------------------------------------------------------------------

CLICK = """element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-value]");
  if (button) trigger("click", {value: button.dataset.value});
});"""
CHOICE = (
    '<button class="choice" data-value="{}"><b>{}</b><i style="--p: {:.4f}"></i>{:.1%}</button>'
)


def plain(text: str) -> str:
    """A token by itself: spaces and line ends can be seen."""
    return html.escape(visible(text.replace(" ", "·").replace("\n", "⏎")))


def show_text(fill: Fill, selected: int | None = None, tag: str = "span") -> str:
    """The known text, what was filled in, and blanks with the best guess."""
    parts, tokenizer = [], fill.text.tokenizer
    steps = {position: (i, log_p) for i, (position, _, log_p) in enumerate(fill.steps, 1)}
    for blank, run in itertools.groupby(enumerate(fill.tokens), key=lambda pair: pair[1] is None):
        places, ids = zip(*run, strict=True)
        pieces = ids if blank else tokenizer.pieces(ids)
        for i, piece in zip(places, pieces, strict=True):
            if blank:
                ((token, p),) = fill.best(i)
                name = f"{plain(tokenizer.decode([token]))} <small>{p:.0%}</small>"
                kind = f'class="blank{" next" * (i == selected)}" data-value="{i}"'
                parts.append(f"<{tag} {kind}>{name}</{tag}>")
            else:
                number, log_p = steps.get(i, (None, 0.0))
                told = f"{number}. token: log p {log_p:.2f}, probability {math.exp(log_p):.1%}"
                kind = f'class="filled" title="{told}" style="--p: {math.exp(log_p):.3f}"'
                parts.append(f"<span {kind if number else ''}>{html.escape(visible(piece))}</span>")
    return f'<div class="filling">{"".join(parts)}</div>{show_score(fill)}'


def show_score(fill: Fill) -> str:
    filled, total = len(fill.steps), fill.context.count(None)
    rows = [("in the order taken", fill.sums[-1], filled)]
    if filled == total:
        given, whole = fill.left_to_right()
        rows.append(("the same tokens, left to right", given, total))
        rows.append(("the whole text, left to right", whole, len(fill.context)))
    head = f"<tr><th>{filled} of {total} tokens</th><th>log p</th><th>per token</th></tr>"
    row = "<tr><td>{}</td><td>{:.2f}</td><td>{:.2f}</td></tr>".format
    return f"<table>{head}{''.join(row(name, p, p / max(n, 1)) for name, p, n in rows)}</table>"


def show_choices(fill: Fill, selected: int | None) -> str:
    """The likeliest tokens of the selected blank, to be clicked."""
    if selected is None:
        return "Click a blank." if fill.blanks else "No blank is left."
    name = fill.text.tokenizer.decode
    return "".join(CHOICE.format(i, plain(name([i])), p, p) for i, p in fill.best(selected, 8))


# ---- the page ------------------------------------------------------------------------------------

INTRO = """# AO-GPT playground
The model fills in the gaps of a text one token at a time, in any order. **Step** fills in the
outlined blank. The order chooses that blank, or you do: click one. Then you can also choose its
token, or write your own."""
GAPS = "[MASK:3]: three tokens. [MASK:2-6]: two to six, whichever fits. No space before a mask."
LEGEND = """Dashed: a blank, with its likeliest token and that token's probability (· is a space).
Outlined: it comes next. Green: filled in; the darker, the more probable."""


def page(run: str):
    """The page, gradio's Blocks."""
    import gradio as gr
    import pandas as pd

    runs = [str(path) for path in sorted(Path("out").glob("*")) if (path / "checkpoints").is_dir()]
    models, rules = dict.fromkeys([run, *[BOOKS] * Path(BOOKS).exists(), *runs]), [*RULES.items()]
    any_path = "SPACE_ID" not in os.environ  # visitors of a public space name no paths
    with gr.Blocks(title="AO-GPT playground", analytics_enabled=False) as blocks:
        session = gr.State(Session())
        gr.Markdown(INTRO)
        with gr.Row():
            text = gr.Textbox(EXAMPLE, label="Text with gaps", info=GAPS, lines=2, scale=3)
            label = "Model: from the list, or a path" if any_path else "Model"
            model = gr.Dropdown([*models], label=label, scale=2, allow_custom_value=any_path)
        with gr.Row():
            rule = gr.Dropdown(rules, value="confidence", label="Order")
            temperature = gr.Slider(0, 2, 0.8, step=0.1, label="Temperature")
            seed = gr.Number(0, label="Seed", precision=0)
            compare = gr.Checkbox(label="Compare with another order")
        with gr.Row():
            buttons = [gr.Button(name, min_width=80) for name in ("Step", "Run", "Undo", "Restart")]
        message = gr.HTML()
        with gr.Row():
            with gr.Column(min_width=300):
                here = gr.HTML(js_on_load=CLICK)
            with gr.Column(min_width=300, visible=False) as column:
                beside = gr.HTML()
                with gr.Row():
                    beside_rule = gr.Dropdown(rules[:-1], value="l2r", label="Order beside")
                    beside_seed = gr.Number(0, label="Seed beside", precision=0)
        gr.Markdown(LEGEND)
        with gr.Row():
            with gr.Column(min_width=300):
                gr.Markdown("### What fits into the outlined blank")
                choices = gr.HTML(js_on_load=CLICK)
                own = gr.Textbox(label="Or write your own, and press Enter")
            axes = {"x": "tokens", "y": "log p", "color": "order"}
            plot = gr.LinePlot(label="log p of the tokens filled in", min_width=300, **axes)
        controls = [model, text, rule, temperature, seed, compare, beside_rule, beside_seed, own]
        outputs = [session, message, here, choices, beside, plot, column]

        def on(event, action):
            def act(data: gr.EventData, session, *values):
                s = Settings(*values, (data._data or {}).get("value", ""))
                try:
                    session.act(s, action)
                    told = session.note
                except (UserError, OSError) as error:
                    told = f'<b class="error">{html.escape(visible(error, one_line=True))}</b>'
                fill, other, shown = session.fill, session.beside, ["", ""]
                if fill:
                    shown[0] = show_text(fill, session.selected, "button")
                    shown[1] = show_choices(fill, session.selected)
                sums = [(f, n) for f, n in ((fill, "here"), (other, "beside")) if f]
                sums = [(i, total, n) for f, n in sums for i, total in enumerate(f.sums)]
                shown += other and show_text(other), pd.DataFrame(sums, columns=axes.values())
                return [session, told, *shown, gr.Column(visible=s.compare)]

            options = {"concurrency_id": "model", "show_progress": "minimal"}
            event(act, [session, *controls], outputs, **options)

        for event in (blocks.load, text.submit, model.change):
            on(event, "restart")
        for button in buttons:
            on(button.click, button.value.lower())
        for control in (rule, seed):
            on(control.change, "choose")
        for control in (compare, beside_rule, beside_seed):
            on(control.change, "compare")
        on(here.click, "select")
        on(choices.click, "put")
        on(own.submit, "write")
    return blocks


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = BOOKS
    """Run folder, exported folder, released weights or Hugging Face repo id to begin with."""
    port: int | None = None
    """By default the first free one from 7860."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    load(a.run)
    try:
        blocks = page(a.run)
    except ImportError:
        raise UserError("the playground needs gradio: run make playground") from None
    blocks.launch(server_port=a.port, share=False, css_paths="app.css", ssr_mode=False)


if __name__ == "__main__":
    run_script(main)
