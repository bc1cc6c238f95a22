"""The README.md of an exported folder: what the model is, how it was trained, how to
use it."""

import re
from pathlib import Path
from typing import Any

import tomli_w

from ..runtime.command_line import visible
from ..runtime.outputs import commit
from ..runtime.validation import read_json
from ..systems import parameter_counts
from . import store
from .load import Loaded

# Parts of model_card.md, by name.
TEXTS = Path(__file__).with_suffix(".md").read_text("utf-8").split("%% ")[1:]
TEXTS = dict(text.split("\n", 1) for text in TEXTS)
# tables of a run's configuration that the card shows
TABLES = ("model", "order", "objective", "optim")
ORDER_TITLES = {
    "l2r": "left to right",
    "random": "any order",
    "fixed": "the run's own order",
    "own": "the run's own orders, in its groups",
}


def model_card(
    loaded: Loaded,
    rows: list[dict],
    writes_start: bool = False,
    adds_space: bool = False,
) -> str:
    """Return the card in Markdown. Facts of the training are left out where the source
    has no run. rows: the rows of the run's metrics.jsonl. writes_start: the tokenizer
    writes a begin-of-text; adds_space: and a space before the text after a [MASK]."""
    state_file = Path(loaded.path) / store.STATE
    state = None
    if state_file.is_file():
        state = read_json(state_file, dict[str, Any], store.ADVICE)
    parts = [TEXTS["front"].strip(), _summary(loaded), _usage(loaded, writes_start)]
    if state is not None:
        parts += [_data(state["data"]), _recipe(state), _losses(loaded, state, rows)]
    parts += [
        _limits(loaded, adds_space),
        f"Converted by the AO-GPT code at commit {commit()}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: Any) -> str:
    """Return any text as one line of Markdown that shows it as it is, without HTML,
    links, emphasis or new cells of a table."""
    line = visible(text, one_line=True)
    return re.sub(r"[^\w .-]|_", lambda match: f"&#{ord(match[0])};", line)


def number(values: dict, key: str) -> float | None:
    """Return a number of a row or table; None where it has none of this name."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None


def _summary(loaded: Loaded) -> str:
    c = loaded.model.config
    count = sum(parameter_counts(loaded.model).values())
    kind = (
        "An any-order GPT: it predicts the tokens of a text, and scores the text, in "
        "any order."
    )
    if c.is_encoder:
        kind = (
            "An encoder for masked diffusion: it predicts each [MASK] from all other "
            "tokens."
        )
    elif c.l2r_only:
        kind = "A GPT that predicts the tokens of a text from left to right."
    origin = ""
    if loaded.system:
        origin = f" They have the released layout of {plain(loaded.system)}."
    weights = "averaged (EMA)" if loaded.weights == "ema" else "last"
    return (
        f"{kind} It has {count:,} parameters and takes up to {c.block_size:,} tokens "
        f"of the tokenizer <code>{plain(loaded.tokenizer)}</code> "
        f"({loaded.vocab_size:,} ids). The weights are the {weights} ones of step "
        f"{loaded.step:,}.{origin}"
    )


def _usage(loaded: Loaded, writes_start: bool) -> str:
    """Return code for transformers, which the tests run, and for the project."""
    c = loaded.model.config
    parts = ["use", "score", "score in any order", "gap", "continue"]
    arguments = ', return_tensors="pt"'
    ours = "--infill 'The cat[MASK:3] home.'"
    if c.is_encoder:
        parts[1:3] = ["score with an encoder"]
    elif c.l2r_only:
        parts[2:4] = []
        ours = "--prompt 'The cat'"
    if writes_start:
        arguments = f", add_special_tokens=False{arguments}"
    text = "".join(TEXTS[part] for part in parts)
    return text.replace("{how}", arguments).replace("{ours}", ours).strip()


def _data(data: dict) -> str:
    lines = ["| split | tokens | documents |", "|---|---:|---:|"]
    for split, values in data.get("splits", {}).items():
        cells = [plain(split)]
        for key in ("tokens", "documents"):
            count = number(values, key)
            cells.append("" if count is None else f"{count:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    name = ""
    if data.get("name"):
        name = f"Data set <code>{plain(data['name'])}</code>.\n\n"
    return f"## Data\n\n{name}" + "\n".join(lines)


def _recipe(state: dict) -> str:
    config = state["config"]
    tokens = number(state, "tokens")
    shown = {}
    for key in ("seed", "schedule", *TABLES):
        if config.get(key):
            shown[key] = config[key]
    model = config["model"]
    # TOML has no None.
    shown["model"] = {key: value for key, value in model.items() if value is not None}
    train = config["train"]
    shown["train"] = {
        "steps": train["steps"],
        "batch_size": train["batch_size"],
        "init_from": train["init_from"],
    }
    amount = f"{tokens:,.0f} tokens, with " if tokens else ""
    version = plain(state.get("torch", "of an unknown version"))
    heading = f"On {amount}PyTorch {version}:"
    return f"## Training\n\n{heading}\n\n```toml\n{tomli_w.dumps(shown)}```"


def _losses(loaded: Loaded, state: dict, rows: list[dict]) -> str:
    """Return the newest validation of these weights up to their step; "" if there was
    none. Rows without a step, and values that are no numbers, are left out."""
    key = "val_loss_{}_raw" if loaded.weights == "raw" else "val_loss_{}"
    newest = None
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int) or step > loaded.step:
            continue
        if any(number(row, key.format(kind)) is not None for kind in ORDER_TITLES):
            newest = row
    if newest is None:
        return ""
    lines = ["| orders | nats per token | standard error |", "|---|---:|---:|"]
    for kind, orders in ORDER_TITLES.items():
        loss = number(newest, key.format(kind))
        if loss is None:
            continue
        error = None
        if loaded.weights != "raw":
            error = number(newest, f"val_error_{kind}")
        shown_error = "unknown" if error is None else f"{error:.4f}"
        lines.append(f"| {orders} | {loss:.4f} | {shown_error} |")
    text = (
        f"Of step {newest['step']:,}. The standard error is over random orders; it is "
        "unknown where one order was drawn."
    )
    best = state.get("best")
    if best:
        text += (
            f" The run's lowest loss so far: {best['loss']:.4f} at step "
            f"{best['step']:,}."
        )
    return f"## Validation losses\n\n{text}\n\n" + "\n".join(lines)


def _limits(loaded: Loaded, adds_space: bool) -> str:
    c = loaded.model.config
    limits = [
        "A base model: it continues texts like those of its training, not "
        "instructions.",
        "Do not rely on it for facts. It was not made safe for users.",
        f"At most {c.block_size:,} tokens.",
    ]
    if c.l2r_only:
        limits.append(
            "It knows no order but left to right, and fills in [MASK] only at the end."
        )
    else:
        limits.append("The number of [MASK] fixes the length of what is filled in.")
    if adds_space:
        limits.append(
            "transformers' tokenizer adds a space to the text after a [MASK], which "
            "the AO-GPT code does not: there a gap goes on as the text is written."
        )
    if c.is_encoder:
        limits.append(
            "It has no cache: each generated token takes a pass over the whole text."
        )
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)
