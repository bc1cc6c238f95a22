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
HEAD = ["text", "orders", "M", "nats/token", "std. error", "by document", "Monte Carlo"]
HEAD += ["bits/token", "bits/byte", "perplexity", "95% interval"]
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
    """The results of a task for the JSON report, one per ensemble size."""
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
    """Two models on one text, along one order, for the JSON report: from their
    `result_rows`, and the estimate of the difference of their losses."""
    a, b = rows
    row = {key: a[key] for key in ("dataset", "data", "orders", "group", "bound")}
    for key, unit in (
        ("nll", 1.0),
        ("bits_per_byte", math.log(2) * a["bytes_per_token"]),
    ):
        row[key] = {"a": a[key], "b": b[key], "difference": gap.nll / unit}
        row[key]["half_width_95"] = gap.half_width / unit
    row |= {"p": gap.p_value, "p_by": "document" if gap.documents > 1 else "sequence"}
    errors = (
        "standard_error",
        "document_error",
        "monte_carlo_error",
        "sequences",
        "documents",
    )
    row |= {key: getattr(gap, key) for key in errors}
    return row | {key: a[key] for key in ("blocks", "tokens", "draws")}


def markdown(results: list[dict]) -> list[str]:
    """The lines of the table and of its notes."""
    gains = any(r["gain"] is not None for r in results)
    rows = []
    for r in results:
        low, high = r["perplexity_95"]
        cells = [r["dataset"], label(r), str(r["ensemble"]), f"{r['nll']:.4f}"]
        cells += [_number(r["standard_error"], 4), _number(r["document_error"], 4)]
        cells.append(_number(r["monte_carlo_error"], 5))
        cells += [f"{r['bits_per_token']:.4f}", _number(r["bits_per_byte"], 4)]
        cells += [
            f"{r['perplexity']:.3f}",
            "" if math.isnan(low) else f"{low:.3f} to {high:.3f}",
        ]
        if gains:
            gain = r["gain"]
            error = r["gain_error"]
            cells.append("" if gain is None else f"{gain:.5f} ± {_number(error, 5)}")
        rows.append(cells)
    return [
        *markdown_table(HEAD + ["gain"] * gains, rows, left=2),
        "",
        *_notes(results),
    ]


def comparison(differences: list[dict]) -> list[str]:
    """The same of two models."""
    rows = []
    for r in differences:
        cells = [r["dataset"], label(r)]
        for unit in ("nll", "bits_per_byte"):
            *both, half = (_number(number, 4) for number in r[unit].values())
            cells += [*both[:2], f"{both[2]} ± {half}"]
        rows.append([*cells, "unknown" if math.isnan(r["p"]) else f"{r['p']:.2g}"])
    return [*markdown_table(COMPARED, rows, left=2), "", *_notes(differences), PAIRED]


def _notes(results: list[dict]) -> list[str]:
    texts = {}
    for r in results:
        part = f" of {r['blocks']:,}" if r["sequences"] < r["blocks"] else ""
        sequences = "sequence" if r["sequences"] == 1 else "sequences"
        documents = "document" if r["documents"] == 1 else "documents"
        size = f"{r['sequences']:,}{part} {sequences} of {r['documents']:,} {documents}"
        split = r["data"]["split"]
        tokens = f"{r['tokens']:,} tokens"
        tested = (
            f", blocks of {r['data']['block_size']:,}; p by {r['p_by']}"
            if "p_by" in r
            else ""
        )
        texts[r["dataset"]] = f"{r['dataset']} ({split}): {size}, {tokens}{tested}"
    found = {r["orders"].partition(":")[0] for r in results} | {
        r["bound"] for r in results
    }
    return [*texts.values(), *(text for key, text in NOTES.items() if key in found)]


def label(row: dict) -> str:
    text = LABELS.get(row["orders"], row["orders"])
    if row["group"] > 1:
        text += f", groups of {row['group']}"
    if row["bound"] == "iw":
        text += f", weighted over {row['draws']}"
    return text


def _number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"
