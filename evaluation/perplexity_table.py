"""What eval_ppl.py reports: a row for every data set, order and ensemble size, as JSON and as a
Markdown table with the notes that are needed to read it; and how far orders disagree."""

from __future__ import annotations

import itertools
import math

from evaluation.estimates import estimate
from evaluation.likelihood import Scores, Task
from evaluation.published import published_perplexity
from runtime.outputs import markdown_table

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
DISAGREEMENTS = ["text", "orders", "other orders", "difference", "std. error", "mean distance"]
NOTES = {
    "score_entropy": "score entropy: SEDD's own bound, with which it is published; any order: its "
    "outputs normalised to probabilities",
    "iw": "weighted over K: -log of the mean probability of a sequence over K orders; its "
    "expectation is between the mean over orders and -log of the mean over all orders",
    "published": "published: for the model with this layout and size; all else is measured here",
    "disagreement": "Difference, nats/token: first draws of the orders minus other orders, mean "
    "over sequences; mean distance: its absolute value. One joint distribution would have neither.",
}


def result_rows(task: Task, scores: Scores, weights: str) -> list[dict]:
    """The results of a task for the JSON report, one per ensemble size. weights: --weights."""
    rows, eval_set, draws = [], task.eval_set, scores.losses.shape[1]
    passes = task.scorer.passes(task.loaded.model.config, eval_set.lengths)
    for size, (loss, change) in scores.estimates.items():
        contexts, forwards = scores.contexts if size > 1 else 0, None
        if passes is not None:  # and one pass for each member of each context
            forwards = int((eval_set.lengths * (draws * passes + contexts * size)).sum())
        row = {
            "dataset": eval_set.name,
            "data": eval_set.description(),
            "orders": task.name,
            "group": task.scorer.group,
            "bound": "iw" if task.scorer.weighted else "mean",
            "ensemble": size,
            "nll": loss.nll,
            "standard_error": loss.standard_error,
            "monte_carlo_error": loss.monte_carlo_error,
            "perplexity": loss.perplexity,
            "perplexity_95": loss.interval(),
            "perplexity_95_given_data": loss.interval(given_data=True),
            "bits_per_token": loss.nll / math.log(2),
            "bits_per_byte": loss.nll / math.log(2) / eval_set.bytes_per_token,
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "sequences": loss.sequences,
            "tokens": int(task.scored_tokens().sum()),
            "published": published_perplexity(task, size, weights),
            "draws": draws,
            "contexts": contexts,
            "stopped": scores.stopped,
            "token_forwards": forwards,
            "seconds_of_all_sizes": scores.seconds,
            "batch_size": scores.batch_size,
        }
        rows.append(row)
    return rows


def markdown(results: list[dict], frequencies: dict[str, dict[str, float]]) -> list[str]:
    """The lines of the table: the results, then the losses of tables of frequencies."""
    gains = any(r["gain"] is not None for r in results)
    published = any(r["published"] for r in results)
    head = HEAD + ["gain"] * gains + ["token-forwards"] + ["published"] * published
    rows = []
    for r in results:
        low, high = r["perplexity_95"]
        cells = [r["dataset"], label(r), str(r["ensemble"]), f"{r['nll']:.4f}"]
        cells += [_number(r["standard_error"], 4), _number(r["monte_carlo_error"], 5)]
        cells += [f"{r['bits_per_token']:.4f}", _number(r["bits_per_byte"], 4)]
        cells += [f"{r['perplexity']:.3f}", "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"]
        if gains:
            gain, error = r["gain"], r["gain_error"]
            cells.append("" if gain is None else f"{gain:.5f} ± {_number(error, 5)}")
        cells.append("-" if r["token_forwards"] is None else f"{r['token_forwards']:,}")
        rows.append(cells + [f"{r['published'] or ''}"] * published)
    for text, values in frequencies.items():
        for name, nats in values.items():
            cells = [text, name, "", f"{nats:.4f}", "", "", f"{nats / math.log(2):.4f}", ""]
            cells.append(f"{math.exp(nats):.3f}")
            rows.append(cells + [""] * (len(head) - len(cells)))
    return markdown_table(head, rows, left=2)


def label(row: dict) -> str:
    text = LABELS.get(row["orders"], row["orders"])
    text += f", groups of {row['group']}" * (row["group"] > 1)
    return text + f", weighted over {row['draws']}" * (row["bound"] == "iw")


def _number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"


def notes(results: list[dict], target_se: float | None) -> list[str]:
    """What the table does not say, such as how much text it is and whether targets were reached."""
    texts, targets = {}, []
    for r in results:
        size = f"{r['sequences']:,} sequences, {r['tokens']:,} tokens"
        texts[r["dataset"]] = f"{r['dataset']} ({r['data']['split']}): {size}"
        if target_se and r["stopped"] != "exact":
            reached = "reached" if r["stopped"] == "target" else "NOT reached"
            targets.append(
                f"{r['dataset']} {r['orders']}, M = {r['ensemble']}: --target-se {target_se} "
                f"{reached} after {r['draws']} draws"
            )
    found = {r["orders"] for r in results} | {r["bound"] for r in results}
    found |= {"published" for r in results if r["published"]}
    return [*texts.values(), *targets, *(text for key, text in NOTES.items() if key in found)]


# ---- orders compared -----------------------------------------------------------------------------


def disagreements(done: list[tuple[Task, Scores]]) -> list[dict]:
    """How far the likelihoods of the same texts differ between every two orders, and between two
    draws of the same ones, in nats per token. One joint distribution would give a text the same
    probability along every order (chain-rule deviation, arXiv 2606.00997)."""
    rows = []
    for text in dict.fromkeys(task.eval_set.name for task, _ in done):
        of_text = [(task, scores) for task, scores in done if task.eval_set.name == text]
        pairs = [(a, b, 0) for a, b in itertools.combinations(of_text, 2)]
        pairs += [(a, a, 1) for a in of_text if a[1].losses.shape[1] > 1]
        for (task, one), (other, two), draw in pairs:
            gap = one.losses[:, 0].double() - two.losses[:, draw].double()
            scored = task.scored_tokens().double()
            weights = scored / scored.mean()
            found, distance = estimate(gap, weights=weights), float((weights * gap.abs()).mean())
            row = {"dataset": text, "orders": task.name, "other": other.name}
            row["other"] += ", drawn again" * draw
            row |= {"difference": found.nll, "standard_error": found.standard_error}
            rows.append(row | {"distance": distance})
    return rows


def disagreement_table(rows: list[dict]) -> list[str]:
    keys = "difference", "standard_error", "distance"
    cells = [
        [r["dataset"], r["orders"], r["other"], *(f"{r[key]:.4f}" for key in keys)] for r in rows
    ]
    return [*markdown_table(DISAGREEMENTS, cells, left=3), "", NOTES["disagreement"]]
