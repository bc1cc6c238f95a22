"""What eval_ppl.py reports: a row for every data set, order and ensemble size, or of
two models one for every data set and order, as JSON and as a Markdown table with the
notes that it needs."""

import math

from ..runtime.outputs import markdown_table
from .estimates import Estimate
from .likelihood import Scores, Task

LABELS = {
    "l2r": "left to right",
    "random": "any order",
    "score_entropy": "any order, score entropy",
    "confidence": "the model's, by confidence",
    "entropy": "the model's, by entropy",
    "margin": "the model's, by margin",
    "oracle": "oracle (no likelihood)",
}
HEAD = [
    "text",
    "orders",
    "M",
    "nats/token",
    "std. error",
    "by document",
    "Monte Carlo",
    "bits/token",
    "bits/byte",
    "perplexity",
    "95% interval",
]
NOTES = {
    "score_entropy": "score entropy: SEDD's own bound, with which it is published; any order: its "
    "outputs normalised to probabilities",
    "iw": "weighted over K: -log of the mean probability of a sequence over K orders; its "
    "expectation is between the mean over orders and -log of the mean over all orders",
    "oracle": "oracle: next the position whose true token is most probable; it looks at the answer "
    "and is not a likelihood: such probabilities of all texts do not add up to 1",
}
COMPARED = [
    "text",
    "orders",
    "A, nats/token",
    "B",
    "A - B",
    "A, bits/byte",
    "B",
    "A - B",
    "p",
]
PAIRED = (
    "A - B: the mean of the differences of the same sequences, below 0 where A is better, ± the "
    "half-width of the 95% interval, the wider one of over sequences and by document; p: two-sided "
    "t test that the mean is 0"
)


def result_rows(
    task: Task,
    scores: Scores,
    draws: int,
) -> list[dict]:
    """Return the results of a task for the JSON report, one per ensemble size."""
    rows = []
    eval_set = task.eval_set
    bytes_per_token = task.bytes_per_token()
    for size, (loss, change) in scores.items():
        row = {
            "model": task.loaded.path,
            "dataset": eval_set.name,
            "data": eval_set.description(),
            "orders": task.name,
            "group": task.scorer.group,
            "bound": "iw" if task.scorer.weighted else "mean",
            "ensemble": size,
            **vars(loss),
            "perplexity": loss.perplexity,
            "perplexity_95": loss.interval(),
            "bits_per_token": loss.nll / math.log(2),
            "bits_per_byte": loss.nll / math.log(2) / bytes_per_token,
            "bytes_per_token": bytes_per_token,
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "blocks": eval_set.dataset.num_blocks,
            "tokens": int(task.scored_tokens().sum()),
            "draws": 1 if task.scorer.exact else draws,
        }
        rows.append(row)
    return rows


def difference_row(rows: list[dict], gap: Estimate) -> dict:
    """Return the comparison of two models on one text, along one order, for the JSON
    report: from their `result_rows`, and the estimate of the difference of their
    losses."""
    a, b = rows
    # nats of a bit per byte
    unit = math.log(2) * a["bytes_per_token"]
    return {
        "dataset": a["dataset"],
        "data": a["data"],
        "orders": a["orders"],
        "group": a["group"],
        "bound": a["bound"],
        "nll": {
            "a": a["nll"],
            "b": b["nll"],
            "difference": gap.nll,
            "half_width_95": gap.half_width,
        },
        "bits_per_byte": {
            "a": a["bits_per_byte"],
            "b": b["bits_per_byte"],
            "difference": gap.nll / unit,
            "half_width_95": gap.half_width / unit,
        },
        "p": gap.p_value,
        "p_by": "document" if gap.documents > 1 else "sequence",
        "standard_error": gap.standard_error,
        "document_error": gap.document_error,
        "monte_carlo_error": gap.monte_carlo_error,
        "sequences": gap.sequences,
        "documents": gap.documents,
        "blocks": a["blocks"],
        "tokens": a["tokens"],
        "draws": a["draws"],
    }


def markdown(results: list[dict]) -> list[str]:
    """Return the lines of the table and of its notes."""
    has_gains = any(r["gain"] is not None for r in results)
    head = list(HEAD)
    if has_gains:
        head.append("gain")
    rows = []
    for r in results:
        low, high = r["perplexity_95"]
        interval = f"{low:.3f} to {high:.3f}"
        if math.isnan(low):
            interval = ""
        cells = [
            r["dataset"],
            label(r),
            str(r["ensemble"]),
            f"{r['nll']:.4f}",
            _number(r["standard_error"], 4),
            _number(r["document_error"], 4),
            _number(r["monte_carlo_error"], 5),
            f"{r['bits_per_token']:.4f}",
            _number(r["bits_per_byte"], 4),
            f"{r['perplexity']:.3f}",
            interval,
        ]
        if has_gains:
            gain = ""
            if r["gain"] is not None:
                gain = f"{r['gain']:.5f} ± {_number(r['gain_error'], 5)}"
            cells.append(gain)
        rows.append(cells)
    return [*markdown_table(head, rows, left=2), "", *_notes(results)]


def comparison(differences: list[dict]) -> list[str]:
    """Return the same of two models."""
    rows = []
    for r in differences:
        cells = [r["dataset"], label(r)]
        for unit in ("nll", "bits_per_byte"):
            compared = r[unit]
            difference = _number(compared["difference"], 4)
            half_width = _number(compared["half_width_95"], 4)
            cells.append(_number(compared["a"], 4))
            cells.append(_number(compared["b"], 4))
            cells.append(f"{difference} ± {half_width}")
        cells.append("unknown" if math.isnan(r["p"]) else f"{r['p']:.2g}")
        rows.append(cells)
    table = markdown_table(COMPARED, rows, left=2)
    return [*table, "", *_notes(differences), PAIRED]


def _notes(results: list[dict]) -> list[str]:
    """Return a line for each text, and what is said of its rows beside the table."""
    texts = {}
    kinds = set()
    for r in results:
        kinds.add(r["orders"].partition(":")[0])
        kinds.add(r["bound"])
        sequences = "sequence" if r["sequences"] == 1 else "sequences"
        documents = "document" if r["documents"] == 1 else "documents"
        text = f"{r['dataset']} ({r['data']['split']}): {r['sequences']:,}"
        if r["sequences"] < r["blocks"]:
            text += f" of {r['blocks']:,}"
        text += (
            f" {sequences} of {r['documents']:,} {documents}, {r['tokens']:,} tokens"
        )
        if "p_by" in r:
            text += f", blocks of {r['data']['block_size']:,}; p by {r['p_by']}"
        texts[r["dataset"]] = text
    notes = list(texts.values())
    for kind, note in NOTES.items():
        if kind in kinds:
            notes.append(note)
    return notes


def label(row: dict) -> str:
    """Return what the orders of a row are called in the table."""
    text = LABELS.get(row["orders"], row["orders"])
    if row["group"] > 1:
        text += f", groups of {row['group']}"
    if row["bound"] == "iw":
        text += f", weighted over {row['draws']}"
    return text


def _number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"
