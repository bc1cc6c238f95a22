"""Reports: rows of results as tables of Markdown, and the notes below them. To add a
column: a key of `likelihood.result_rows` and a row of a table here, or for samples a
row of `table_columns` in eval_gen.py."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..checkpoints import Loaded
from ..runtime.command_line import counted
from ..runtime.outputs import markdown_table
from ..sampling.scores import SCORES

UNKNOWN = "unknown"  # a value that the data cannot show


class Column(NamedTuple):
    """A column of a table."""

    title: str
    # a key of a row, "nll.a" for one in a table of the row, or a function of the row
    value: str | Callable[[dict], Any]
    form: str = ""  # how numbers are written

    def cell(self, row: dict) -> str:
        """Return what the column shows of a row."""
        if callable(self.value):
            return number(self.value(row), self.form)
        value: Any = row
        for key in self.value.split("."):
            value = value.get(key)
        return number(value, self.form)


def number(value: Any, form: str) -> str:
    """Return a number as a cell; text stays as it is."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else format(value, form)


def table(columns: Sequence[Column], rows: list[dict], left: int = 2) -> list[str]:
    """Return the lines of a table of Markdown, `left` columns of which are texts."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return markdown_table([column.title for column in columns], cells, left)


# ---- likelihoods ---------------------------------------------------------------------

LABELS = {
    "l2r": "left to right",
    "random": "any order",
    "score_entropy": "any order, score entropy",
}


def orders_of(row: dict) -> str:
    """Return the orders of a row in words."""
    name = row["orders"]
    text = LABELS.get(name, name)
    if name.partition(":")[0] == "oracle":
        text = f"{name} (no likelihood)"
    if name in SCORES:
        text = f"the model's, by {name}"
    if row["group"] > 1:
        text += f", groups of {row['group']}"
    if row["bound"] == "iw":
        text += f", weighted over {row['draws']}"
    return text


def monte_carlo(row: dict) -> float | str | None:
    """Return the Monte Carlo error of a result, or that nothing of it is sampled."""
    if row["orders"].partition(":")[0] == "oracle":
        return "none"
    return "exact" if row["exact"] else row["monte_carlo_error"]


def interval(row: dict) -> str | None:
    """Return the 95% interval of the perplexity."""
    low, high = row["perplexity_95"]
    return None if low is None else f"{low:.3f} to {high:.3f}"


def gain(row: dict) -> str:
    """Return the gain of an ensemble and its error; nothing for single orders."""
    if row["gain"] is None:
        return ""
    return f"{row['gain']:.5f} ± {number(row['gain_error'], '.5f')}"


def difference_in(unit: str) -> Callable[[dict], str]:
    """Return a function that writes the difference of two models in a unit, with half
    of its 95% interval."""

    def cell(row: dict) -> str:
        mean = number(row[unit]["difference"], ".4f")
        return f"{mean} ± {number(row[unit]['half_width_95'], '.4f')}"

    return cell


LIKELIHOODS = (
    Column("text", "dataset"),
    Column("orders", orders_of),
    Column("ensemble", "ensemble"),
    Column("nats/token", "nll", ".4f"),
    Column("std. error", "standard_error", ".4f"),
    Column("by document", "document_error", ".4f"),
    Column("Monte Carlo", monte_carlo, ".5f"),
    Column("bits/token", "bits_per_token", ".4f"),
    Column("bits/byte", "bits_per_byte", ".4f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("95% interval", interval),
)
# Shown where a result has one.
OPTIONAL = (
    ("gain", Column("gain", gain)),
    ("nats_per_record", Column("nats/record", "nats_per_record", ".3f")),
)
COMPARISON = (
    Column("text", "dataset"),
    Column("orders", orders_of),
    Column("A, nats/token", "nll.a", ".4f"),
    Column("B", "nll.b", ".4f"),
    Column("A - B", difference_in("nll")),
    Column("A, bits/byte", "bits_per_byte.a", ".4f"),
    Column("B", "bits_per_byte.b", ".4f"),
    Column("A - B", difference_in("bits_per_byte")),
    Column("p", "p", ".2g"),
)
# Notes by what rows have, in the order in which they are printed.
NOTES = {
    "random": (
        "any order: the mean loss over random orders, of an encoder over masks; an "
        "upper bound of -log of the mean probability over orders (docs/likelihoods.md)"
    ),
    "score_entropy": (
        "score entropy: SEDD's own bound, with which it is published; any order: its "
        "outputs normalised to probabilities"
    ),
    "iw": (
        "weighted over K: -log of the mean probability of a sequence over K orders; "
        "its expectation is between the mean over orders and -log of the mean over "
        "all orders"
    ),
    "oracle": (
        "oracle: next the position whose true token is most probable; it looks at the "
        "answer and is not a likelihood: such probabilities of all texts do not add "
        "up to 1"
    ),
    "exact": (
        "left to right, another fixed order, or the model's own by confidence, entropy "
        "or margin: exact, -log p of the text in that order"
    ),
    "ensemble": "ensemble: orders of the context whose probabilities are averaged",
    "record": "nats/record: of a record given its prompt, with its end or its length",
}
NEEDS = (
    f"{UNKNOWN}: an error needs two sequences, documents (by document) or samples "
    "(Monte Carlo)"
)
PAIRED = (
    "A - B: the mean of the differences of the same sequences, below 0 where A is "
    "better, ± the half-width of the 95% interval, the wider one of over sequences and "
    "by document; p: two-sided t test that the mean is 0"
)


def likelihood_lines(models: list[Loaded], report: dict) -> list[str]:
    """Return the lines of the report of eval_ppl.py: of one model, or of two, A and
    B."""
    if len(models) == 1:
        rows = report["results"]
        columns = list(LIKELIHOODS)
        for key, column in OPTIONAL:
            if any(row[key] is not None for row in rows):
                columns.append(column)
        head = [models[0].description, ""]
        notes = likelihood_notes(rows)
    else:
        first, second = models
        rows = report["differences"]
        columns = list(COMPARISON)
        head = [f"A: {first.description}", "", f"B: {second.description}", ""]
        notes = [*likelihood_notes(rows), PAIRED]
        if first.tokens and second.tokens and first.tokens != second.tokens:
            notes.append(
                f"note: A has trained on {first.tokens:,} tokens, B on "
                f"{second.tokens:,}"
            )
    lines = table(columns, rows)
    if any(UNKNOWN in line for line in lines):
        notes.append(NEEDS)
    return [*head, *lines, "", *notes]


def likelihood_notes(rows: list[dict]) -> list[str]:
    """Return a line for each text, and the notes on the rows of a table."""
    texts = {}
    kinds = set()
    for row in rows:
        sequences = counted(row["sequences"], "sequences")
        if row["sequences"] < row["blocks"]:
            sequences = f"{row['sequences']:,} of {row['blocks']:,} sequences"
        text = (
            f"{row['dataset']} ({row['data']['split']}): {sequences} of "
            f"{counted(row['documents'], 'documents')}, {row['tokens']:,} tokens"
        )
        if "p" in row:
            block_size = row["data"]["block_size"]
            text += f", blocks of {block_size:,}; p by {row['p_by']}"
        texts[row["dataset"]] = text
        kinds |= {row["orders"].partition(":")[0], row["bound"]}
        if "p" in row:  # a comparison, which shows no Monte Carlo error
            continue
        if monte_carlo(row) == "exact":
            kinds.add("exact")
        if row["ensemble"] > 1:
            kinds.add("ensemble")
        if row["nats_per_record"] is not None:
            kinds.add("record")
    notes = [note for kind, note in NOTES.items() if kind in kinds]
    return [*texts.values(), *notes]
