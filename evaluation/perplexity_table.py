"""What eval_ppl.py reports: a row for every data set, order and ensemble size, as JSON and as a
Markdown table with the notes that are needed to read it."""

from __future__ import annotations

import math

from evaluation.likelihood import Scores, ScoringTask
from evaluation.published import published_perplexity
from runtime.reports import markdown_table

LABELS = {
    "l2r": "left to right",
    "random": "any order",
    "score_entropy": "any order, score entropy",
    "confidence": "the model's, by confidence",
    "entropy": "the model's, by entropy",
    "margin": "the model's, by margin",
}
HEAD = ["text", "orders", "M", "nats/token", "std. error", "Monte Carlo"]
HEAD += ["bits/token", "bits/byte", "perplexity", "95% interval"]


def result_rows(task: ScoringTask, scores: Scores, weights: str) -> list[dict]:
    """The results of a task for the JSON report, one for each ensemble size.

    weights: as --weights asked for."""
    rows = []
    for size, (loss, change) in scores.estimates.items():
        contexts = scores.contexts if size > 1 else 0
        # Inputs that the model is fed: for each draw so many passes of all tokens, and one for each
        # member of each context.
        lengths, fed = task.eval_set.lengths(), None
        if (passes := task.passes(lengths)) is not None:
            fed = int((lengths * (scores.draws * passes + contexts * size)).sum())
        row = {
            "dataset": task.eval_set.name,
            "data": task.eval_set.description(),
            "orders": task.name,
            "group": task.group,
            "bound": "iw" if task.importance_weighted else "mean",
            "ensemble": size,
            "nll": loss.nll,
            "standard_error": loss.standard_error,
            "monte_carlo_error": loss.monte_carlo_error,
            "perplexity": loss.perplexity,
            "perplexity_95": loss.interval(),
            "perplexity_95_given_data": loss.interval(given_data=True),
            "bits_per_token": loss.nll / math.log(2),
            "bits_per_byte": loss.nll / math.log(2) / task.eval_set.bytes_per_token,
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "sequences": loss.sequences,
            "tokens": int(task.scored_tokens().sum()),
            "published": published_perplexity(task, size, weights),
            "draws": scores.draws,
            "contexts": contexts,
            "stopped": scores.stopped,
            "token_forwards": fed,
            "seconds_of_all_sizes": scores.seconds,
            "batch_size": scores.batch_size,
        }
        if scores.precision_gap:
            row["bfloat16_minus_float32"] = scores.precision_gap
        rows.append(row)
    return rows


def markdown(results: list[dict], frequencies: dict[str, dict[str, float]]) -> list[str]:
    """The lines of the table: the results, then what tables of frequencies lose on each text."""
    gains = any(r["gain"] is not None for r in results)
    published = any(r["published"] for r in results)
    head = HEAD + ["gain"] * gains + ["token-forwards"] + ["published"] * published
    rows = []
    for r in results:
        low, high = r["perplexity_95"]
        cells = [
            r["dataset"],
            label(r),
            str(r["ensemble"]),
            f"{r['nll']:.4f}",
            _number(r["standard_error"], 4),
            _number(r["monte_carlo_error"], 5),
            f"{r['bits_per_token']:.4f}",
            _number(r["bits_per_byte"], 4),
            f"{r['perplexity']:.3f}",
            "" if math.isnan(low) else f"{low:.3f} to {high:.3f}",
        ]
        if gains and r["gain"] is None:
            cells.append("")
        elif gains:
            cells.append(f"{r['gain']:.5f} +- {_number(r['gain_error'], 5)}")
        cells.append("-" if r["token_forwards"] is None else f"{r['token_forwards']:,}")
        if published:
            cells.append(f"{r['published'] or ''}")
        rows.append(cells)
    for text, values in frequencies.items():
        for name, nats in values.items():
            cells = [text, name, "", f"{nats:.4f}", "", ""]
            cells += [f"{nats / math.log(2):.4f}", "", f"{math.exp(nats):.3f}"]
            rows.append(cells + [""] * (len(head) - len(cells)))
    return markdown_table(head, rows, left=2)


def label(row: dict) -> str:
    """How the orders of a row are called."""
    text = LABELS.get(row["orders"], row["orders"])
    if row["group"] > 1:
        text += f", groups of {row['group']}"
    return text + f", weighted over {row['draws']}" * (row["bound"] == "iw")


def _number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"


def notes(results: list[dict], target_se: float | None) -> list[str]:
    """What the table does not tell: how much text, whether the target was reached, how far bfloat16
    is from float32."""
    texts, targets, gaps = {}, [], {}
    for r in results:
        name, task = r["dataset"], f"{r['dataset']} {r['orders']}"
        size = f"{r['sequences']:,} sequences, {r['tokens']:,} tokens"
        texts[name] = f"{name} ({r['data']['split']}): {size}"
        if target_se and r["stopped"] != "exact":
            reached = "reached" if r["stopped"] == "target" else "NOT reached"
            targets.append(
                f"{task}, M = {r['ensemble']}: --target-se {target_se} {reached} "
                f"after {r['draws']} draws"
            )
        if gap := r.get("bfloat16_minus_float32"):  # the same for all ensemble sizes
            gaps[task] = (
                f"{task}: bfloat16 - float32 on {gap['sequences']} blocks: "
                f"{gap['mean']:+.5f} nats/token on average, {gap['largest']:.5f} at most"
            )
    lines = [*texts.values(), *targets, *gaps.values()]
    if any(r["orders"] == "score_entropy" for r in results):
        lines.append(
            "score entropy: SEDD's own bound, with which it is published; without it, its outputs "
            "are normalised to probabilities"
        )
    if any(r["bound"] == "iw" for r in results):
        lines.append(
            "weighted over K: -log of the mean probability of a sequence over K orders; in "
            "expectation over the orders drawn it is between the mean over orders and -log of the "
            "mean over all"
        )
    if any(r["published"] for r in results):
        lines.append(
            "published: of the model whose layout and size this is; the others are measured here"
        )
    return lines
