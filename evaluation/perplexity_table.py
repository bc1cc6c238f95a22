"""What eval_ppl.py reports: a row for every data set, order and ensemble size, as JSON and as a
Markdown table with the notes that are needed to read it."""

from __future__ import annotations

import math

from evaluation.likelihood import Scores, Task
from runtime.outputs import markdown_table

LABELS = {
    "l2r": "left to right",
    "random": "any order",
    "score_entropy": "any order, score entropy",
    "confidence": "the model's, by confidence",
    "entropy": "the model's, by entropy",
    "margin": "the model's, by margin",
}
HEAD = ["text", "orders", "M", "nats/token", "std. error", "by document", "Monte Carlo"]
HEAD += ["bits/token", "bits/byte", "perplexity", "95% interval"]
NOTES = {
    "score_entropy": "score entropy: SEDD's own bound, with which it is published; any order: its "
    "outputs normalised to probabilities",
    "iw": "weighted over K: -log of the mean probability of a sequence over K orders; its "
    "expectation is between the mean over orders and -log of the mean over all orders",
}


def result_rows(task: Task, scores: Scores, draws: int) -> list[dict]:
    """The results of a task for the JSON report, one per ensemble size."""
    rows, eval_set = [], task.eval_set
    for size, (loss, change) in scores.items():
        row = {
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
            "bits_per_byte": loss.nll / math.log(2) / eval_set.bytes_per_token,
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "blocks": eval_set.dataset.num_blocks,
            "tokens": int(task.scored_tokens().sum()),
            "draws": 1 if task.scorer.exact else draws,
        }
        rows.append(row)
    return rows


def markdown(results: list[dict]) -> list[str]:
    """The lines of the table and of its notes."""
    gains = any(r["gain"] is not None for r in results)
    rows, texts = [], {}
    for r in results:
        low, high = r["perplexity_95"]
        cells = [r["dataset"], label(r), str(r["ensemble"]), f"{r['nll']:.4f}"]
        cells += [_number(r["standard_error"], 4), _number(r["document_error"], 4)]
        cells.append(_number(r["monte_carlo_error"], 5))
        cells += [f"{r['bits_per_token']:.4f}", _number(r["bits_per_byte"], 4)]
        cells += [f"{r['perplexity']:.3f}", "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"]
        if gains:
            gain, error = r["gain"], r["gain_error"]
            cells.append("" if gain is None else f"{gain:.5f} ± {_number(error, 5)}")
        rows.append(cells)
        part = f" of {r['blocks']:,}" if r["sequences"] < r["blocks"] else ""
        size = f"{r['sequences']:,}{part} sequences of {r['documents']:,} documents"
        split, tokens = r["data"]["split"], f"{r['tokens']:,} tokens"
        texts[r["dataset"]] = f"{r['dataset']} ({split}): {size}, {tokens}"
    found = {r["orders"] for r in results} | {r["bound"] for r in results}
    notes = [*texts.values(), *(text for key, text in NOTES.items() if key in found)]
    return [*markdown_table(HEAD + ["gain"] * gains, rows, left=2), "", *notes]


def label(row: dict) -> str:
    text = LABELS.get(row["orders"], row["orders"])
    text += f", groups of {row['group']}" * (row["group"] > 1)
    return text + f", weighted over {row['draws']}" * (row["bound"] == "iw")


def _number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"
