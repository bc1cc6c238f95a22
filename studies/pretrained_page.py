"""The page results/pretrained.md. `rows`: what the command `gather` of
studies.pretrained put together, by the name of each report."""

import math
import re
import statistics

import torch

from aogpt.evaluation.estimates import estimate
from aogpt.evaluation.text_measures import mean_and_error
from aogpt.runtime.outputs import markdown_table

STARTS = {
    "s_exact": "at the target minus one: the start is exact left to right",
    "s_target": "at the target",
    "s_two": "two streams",
    "s_adaln": "adaLN that starts as the identity",
}
STAGED = {"out/a3": "three stages", "out/a3_direct": "direct"}  # by run
RULES = ("random", "confidence", "entropy", "margin")
SPECULATED = (0, 50, 100, 200)  # steps
SAMPLES = (
    "16 samples of 128 tokens a row, 8 tokens a pass, temperature 0.9, top-p 0.95. The "
    "judge is the untouched model; entropy: of a sample's tokens; repeated: the share "
    "of 4-grams that occurred before."
)
ORDER_TITLES = {"l2r": "left to right", "random": "any order", "infill": "infilling"}
SETS = {  # by report
    "starts_lora": "books",
    "ppl_books": "books",
    "ppl_ptb": "Penn Treebank",
    "ppl_wikitext": "WikiText-103",
    "long_books": "books",
    "long_ptb": "Penn Treebank",
    "long_wikitext": "WikiText-103",
}
INFILLED = {  # (text, model) by report
    "infill_plain": ("books", "untouched"),
    "infill_uniform": ("books", "uniform orders"),
    "infill_adapter_early": ("books", "infilling orders"),
    "infill_adapter": ("books", "infilling orders"),
    "infill_plain_wikitext103": ("WikiText-103", "untouched"),
    "infill_adapter_wikitext103": ("WikiText-103", "infilling orders"),
    "infill_plain_ptb": ("Penn Treebank", "untouched"),
    "infill_adapter_ptb": ("Penn Treebank", "infilling orders"),
}
# Where the same adapter also filled in by resampling, by report.
RESAMPLED = {
    "infill_adapter": "resampled_adapter",
    "infill_adapter_wikitext103": "resampled_adapter_wikitext103",
    "infill_adapter_ptb": "resampled_adapter_ptb",
}
READERS = {  # by report
    "lambada_part": "left to right, float32",
    "lambada_hf": "the harness's own model, float32",
    "lambada_ours": "left to right, bfloat16",
    "lambada_adapter": "left to right, adapter, bfloat16",
    "lambada_both": "by resampling, given a full stop after the word",
    "lambada_adapter_both": "adapter, given a full stop after the word",
    "lambada_adapter_resampling": "adapter, by resampling, given a full stop",
}
PASSAGES = 5153  # of LAMBADA's test set
EXPORTS = {
    "hub": "`--hub`, the code is in the folder",
    "plain": "`--layout transformers`, a Llama without code",
}
Z = 1.96  # half of a normal 95% interval, in standard errors


def page(rows: dict) -> str:
    sections = [
        head(rows),
        before_and_after(rows),
        equal_budget(rows),
        infilling(rows),
        sentences(rows),
        starts(rows),
        stages(rows),
        speculation(rows),
        agreement(rows),
        lambada(rows),
        fresh(rows),
        not_run(rows),
    ]
    return "\n\n".join(sections) + "\n"


def section(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"## {title}", *paragraphs])


def table(head: list[str], cells: list[list[str]], left: int = 1) -> str:
    return "\n".join(markdown_table(head, cells, left))


def tokens_of(rows: dict, report: str = "long_books") -> int:
    step = rows[report]["checkpoint"]["B"]["step"]
    return step * rows["long"]["tokens_a_step"]


def head(rows: dict) -> str:
    run = rows["long"]
    nll = {row["orders"]: row["nll"] for row in rows["long_books"]["differences"]}
    tokens = f"{tokens_of(rows):,}"
    seconds = sum(run["tokens_a_step"] / rate for rate in run["tokens_per_second"])
    cost = nll["random"]["b"] - nll["l2r"]["b"]
    return (
        "# Can a pretrained decoder learn to read in any order? SmolLM2-135M\n\n"
        f"{answer(rows)}\n\n**Scale.** SmolLM2-135M-Instruct, 134.5M parameters, "
        f"weights of 4 bits. An adapter of rank {run['lora_rank']}, trained on "
        f"{tokens} tokens of books on one CPU core in {seconds / 3600:.1f} hours. One "
        "run, one seed, small subsets for evaluation ([how to repeat]"
        "(../studies/README.md#a-pretrained-decoder)).\n\n"
        f"**What {tokens} tokens buy.** On held-out books any order goes from "
        f"{nll['random']['a']:.2f}, worse than the frequencies of tokens "
        f"({rows['speculation_unigram']['nats']:.2f}), to {nll['random']['b']:.2f} "
        f"nats a token and still costs {cost:.2f} more than left to right. Elsewhere "
        f"some became worse: {'; '.join(losses_elsewhere(rows))}.\n\n"
        f"{verdict(rows)}{so_shipped(rows)}\n\n{by_resampling(rows)}\n\n"
        f"{worth_of_right_side(rows)}"
    )


def answer(rows: dict) -> str:
    """Return the answer in two sentences, without a number."""
    nll = {row["orders"]: row["nll"] for row in rows["long_books"]["differences"]}
    text = "**Partly: an hour of a core makes any order much better, "
    if nll["random"]["b"] > nll["l2r"]["b"]:
        text += "and it still costs far more than left to right"
    text += "."
    if not fills_better(rows):
        text += (
            " The adapter is not shown to fill gaps better than the untouched model "
            "does by resampling."
        )
    return f"{text}**"


def losses_elsewhere(rows: dict) -> list[str]:
    """Return what training on books made worse on other texts, beyond its interval."""
    sentences = []
    for report, name in SETS.items():
        if name == "books" or tokens_of(rows, report) != tokens_of(rows):
            continue
        for row in rows[report]["differences"]:
            if -row["nll"]["difference"] > row["nll"]["half_width_95"]:
                order = ORDER_TITLES[row["orders"]]
                sentences.append(f"{name} {order} by {change_of(row, sign=-1)}")
    return sentences


def before_and_after(rows: dict) -> str:
    cells = []
    for report, name in SETS.items():
        for row in rows[report]["differences"]:
            nll = row["nll"]
            cells.append(
                [
                    f"{name}, {row['sequences']} blocks",
                    ORDER_TITLES[row["orders"]],
                    f"{tokens_of(rows, report):,}",
                    f"{nll['a']:.3f}",
                    f"{nll['b']:.3f}",
                    change_of(row, sign=-1),
                ]
            )
    head = ["text", "order", "trained on", "before", "after", "change"]
    return section(
        "Before and after",
        table(head, cells, left=2),
        "Nats per token in blocks of 128; *trained on*: tokens of infilling (80%) and "
        "uniform orders, in earlier, shorter runs where they are fewer. ± is half of "
        "the 95% interval of the paired change, by document where that is wider. "
        "*Infilling* is of all tokens of a block, most of them context that is read "
        "from left to right.",
    )


def change_of(difference: dict, sign: int = 1) -> str:
    """Return a difference of eval_ppl.py, nats/token, with half of its interval."""
    nll = difference["nll"]
    return f"{sign * nll['difference']:+.3f} ± {nll['half_width_95']:.3f}"


def equal_budget(rows: dict) -> str:
    report = rows["budget_books"]
    tokens = report["checkpoint"]["A"]["step"] * rows["long"]["tokens_a_step"]
    cells = []
    for row in report["differences"]:
        nll = row["nll"]
        name = ORDER_TITLES[row["orders"]]
        losses = [f"{nll['a']:.3f}", f"{nll['b']:.3f}"]
        cells.append([name, *losses, change_of(row, sign=-1)])
    head = [
        "order",
        "trained on infilling",
        "trained on uniform",
        "uniform minus infilling",
    ]
    return section(
        "Infilling orders beside uniform orders, at an equal budget",
        table(head, cells),
        f"Two adapters after {tokens:,} tokens each, the same texts and learning rate "
        "(0.001, not tuned), one seed. Infilling: 80% of the orders read the text "
        "around a gap first, then the gap from left to right; 20% are uniform. "
        "Uniform: 80% uniform, 20% left to right. Nats per token on "
        f"{report['differences'][0]['sequences']} blocks of held-out books.",
    )


def estimated(values: list[float], documents: list[int], form: str = ".3f") -> str:
    """Return a mean over sentences with half of its 95% interval, by document."""
    result = estimate(torch.tensor(values), documents=torch.tensor(documents))
    return f"{result.nll:{form}} ± {result.half_width:.3f}"


def infilling(rows: dict) -> str:
    cells = []
    counts = {}
    for report, (text, model) in INFILLED.items():
        if report not in rows:
            continue
        for row in rows[report]["rows"] + resampled(rows, report):
            line = [text, model, f"{trained_on(rows, report):,}"]
            line += [row["given"], row["mode"]]
            for key in ("nll", "rouge_1"):
                line.append(estimated(row[key], row["documents"]))
            cells.append(line)
            counts[text] = len(row["nll"])
    head = [
        "text",
        "orders of training",
        "trained on",
        "given",
        "filled in",
        "nats/token",
        "ROUGE-1",
    ]
    sentences = [f"{count} of {text}" for text, count in counts.items()]
    return section(
        "Infilling sentences",
        table(head, cells, left=5),
        f"Held-out sentences of 6 to 20 tokens: {', '.join(sentences)}. `resampling` "
        "draws continuations and weights them by the text after the gap; its "
        "nats/token are a lower bound on average, so they flatter it. ± by document.",
    )


def resampled(rows: dict, report: str) -> list[dict]:
    """Return the row of an adapter that fills in by resampling, if there is one."""
    other = rows.get(RESAMPLED.get(report, ""), {"rows": []})
    return [row for row in other["rows"] if row["mode"] == "resampling"]


def trained_on(rows: dict, report: str) -> int:
    """Return the tokens that the model of a report of eval_infill.py has trained on."""
    (origin,) = rows[report]["checkpoints"].values()
    return (origin["step"] or 0) * rows["long"]["tokens_a_step"]


def infilled(rows: dict, report: str, given: str) -> dict:
    """Return the row of a report of eval_infill.py with that context."""
    (row,) = [row for row in rows[report]["rows"] if row["given"] == given]
    return row


def paired(after: dict, before: dict, key: str) -> list[float]:
    """Return the differences of two rows, sentence by sentence."""
    pairs = zip(after[key], before[key], strict=True)
    return [one - other for one, other in pairs]


def gains_of_adapter(rows: dict) -> dict[str, list[float]]:
    """Return the adapter's losses and ROUGE given both sides, less those of the
    untouched model by resampling."""
    plain = infilled(rows, "infill_plain", "both")
    adapter = infilled(rows, "infill_adapter", "both")
    return {key: paired(adapter, plain, key) for key in ("nll", "rouge_1")}


def fills_better(rows: dict) -> bool:
    """Return whether the whole interval of the adapter's loss is below resampling's."""
    gains = torch.tensor(gains_of_adapter(rows)["nll"])
    documents = torch.tensor(infilled(rows, "infill_plain", "both")["documents"])
    nll = estimate(gains, documents=documents)
    return nll.nll + nll.half_width < 0


def so_shipped(rows: dict) -> str:
    """Return why no adapter comes with the clone, if that is so."""
    if fills_better(rows):
        return ""
    plain = rows["lambada_both"]["right"]
    adapter = rows["lambada_adapter_both"]["right"]
    return (
        " So no adapter comes with the clone. That the untouched model fills gaps "
        f"better rests on LAMBADA's last word ({sum(plain)} of {len(plain)} right "
        f"against {sum(adapter)} of {len(adapter)}) and on ten sentences, where the "
        "decoders differ, too: up to 64 weighted draws against 4 of each length."
    )


def by_resampling(rows: dict) -> str:
    """Return how the adapter fills in by resampling, beside the untouched model by
    resampling, paired by sentence."""
    cells = []
    for report, other in (
        ("infill_plain", "infill_adapter"),
        ("infill_plain_wikitext103", "infill_adapter_wikitext103"),
        ("infill_plain_ptb", "infill_adapter_ptb"),
    ):
        for adapter in resampled(rows, other):
            plain = infilled(rows, report, "both")
            documents = plain["documents"]
            nll = estimated(paired(adapter, plain, "nll"), documents, "+.3f")
            rouge = estimated(paired(adapter, plain, "rouge_1"), documents, "+.3f")
            size = statistics.median(adapter["effective_sample_size"])
            cells.append([INFILLED[report][0], nll, rouge, f"{size:.1f}"])
    filled = rows["lambada_adapter_resampling"]["right"]
    plain_words = rows["lambada_both"]["right"]
    head = ["adapter minus untouched, both by resampling", "nats/token", "ROUGE-1"]
    head.append("median effective sample size")
    return (
        "**Adapter and resampling together.** Both nats are lower bounds on average. "
        f"Of LAMBADA's last words the adapter gets {sum(filled)} of {len(filled)}, the "
        f"untouched model {sum(plain_words)}. What it owes to other orders was not "
        f"separated from what it owes to books.\n\n{table(head, cells)}"
    )


def worth_of_right_side(rows: dict) -> str:
    cells = []
    for report, (text, orders) in INFILLED.items():
        if report in rows and orders != "untouched":
            left = infilled(rows, report, "left")
            both = infilled(rows, report, "both")
            worth = estimated(paired(left, both, "nll"), left["documents"], "+.3f")
            cells.append([text, orders, f"{trained_on(rows, report):,}", worth])
    head = ["text", "orders of training", "trained on", "worth of the right side"]
    return (
        "**The text after a gap**, in nats a token of the sentence in the gap; below 0 "
        f"it confuses more than it tells.\n\n{table(head, cells, left=3)}"
    )


def verdict(rows: dict) -> str:
    """Return whether the adapter fills in better than the untouched model by
    resampling, paired by sentence."""
    plain = infilled(rows, "infill_plain", "both")
    gains = gains_of_adapter(rows)
    said = "is not shown to fill in better"
    if fills_better(rows):
        said = "fills in better"
    left = infilled(rows, "infill_plain", "left")
    adapter = infilled(rows, "infill_adapter", "both")
    over_left = estimated(paired(adapter, left, "nll"), left["documents"], "+.3f")
    size = statistics.median(plain["effective_sample_size"])
    return (
        f"**The adapter {said} than resampling without training.** Given both sides of "
        "a sentence of books, its samples have "
        f"{estimated(gains['rouge_1'], plain['documents'], '+.3f')} of ROUGE-1 and its "
        f"loss is {estimated(gains['nll'], plain['documents'], '+.3f')} nats a token, "
        "paired by sentence. The second is no difference of models: resampling's nats "
        "are a lower bound on average, and the median effective sample size of its "
        f"{plain['draws']} draws is {size:.1f}. Beside the untouched model given the "
        f"left side alone it is {over_left} nats a token."
    )


def sentences(rows: dict) -> str:
    plain = rows["fill_plain"]
    adapter = rows.get("fill_adapter")
    adapter_resampled = rows.get("fill_adapter_resampling")
    cells = []
    for number, row in enumerate(plain["rows"]):
        cells.append([row["sentence"], gap_of(row)])
        for other in (adapter_resampled, adapter):
            if other:
                cells[-1].append(gap_of(other["rows"][number]))
    head = ["sentence", "untouched, by resampling"]
    sizes = [row["effective_sample_size"] for row in plain["rows"]]
    whole = rows["whole"]["rows"]
    text = (
        f"Seed {plain['seed']}, the best filling of each. Resampling: "
        f"{seconds_of(plain['rows'])} a sentence on one core; effective sample size "
        f"{min(sizes):.1f} to {max(sizes):.1f} of 64, median "
        f"{median_size(plain['rows']):.1f}. As a whole process `aogpt fill FOLDER` "
        f"takes {seconds_of(whole)} for the first sentence."
    )
    if adapter_resampled:
        head.append("adapter, by resampling")
        filled = adapter_resampled["rows"]
        text += (
            f" The adapter by resampling: {seconds_of(filled)}, median effective "
            f"sample size {median_size(filled):.1f}."
        )
    if adapter:
        head.append("adapter, left to right in the gap")
        tokens = rows["long"]["exported_step"] * rows["long"]["tokens_a_step"]
        text += (
            f" Left to right in the gap: averaged weights after {tokens:,} tokens, "
            "temperature 0.7, 4 fillings of each length; "
            f"{seconds_of(adapter['rows'])}."
        )
    title = "Ten fixed sentences, as they come"
    return section(title, table(head, cells, left=len(head)), text)


def gap_of(row: dict) -> str:
    """Return what the best filling of a sentence has in the place of its mask."""
    before, after = re.split(r"\[MASK:\d+-\d+\]", row["sentence"])
    return row["fillings"][0].removeprefix(before).removesuffix(after).strip()


def median_size(rows: list[dict]) -> float:
    return statistics.median(row["effective_sample_size"] for row in rows)


def seconds_of(rows: list[dict]) -> str:
    seconds = [row["cpu_seconds"] for row in rows]
    return f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds"


def starts(rows: dict) -> str:
    runs = {name: run for name, run in rows["starts"].items() if name in STARTS}
    head = ["where queries stand", "first gradient norm"]
    parts = []  # the steps of each column: from 0, up to the last one of some run
    first = 0
    for last in sorted({len(run["losses"]) for run in runs.values()}):
        steps = f"steps {first + 1} to {last}"
        head.append(f"step {last}" if last == first + 1 else steps)
        parts.append(slice(first, last))
        first = last
    cells = []
    for name, label in STARTS.items():
        if name in runs:
            run = runs[name]
            cells.append([label, f"{run['grad_norms'][0]:.1f}"])
            for part in parts:
                cell = "not run"
                if part.stop <= len(run["losses"]):
                    cell = f"{statistics.mean(run['losses'][part]):.3f}"
                cells[-1].append(cell)
    run = runs["s_exact"]
    paragraphs = [
        f"Mean training loss (nats a token) of steps of {run['tokens_a_step']:,} "
        "tokens, the same texts in the same orders (80% uniform, 20% left to right). "
        f"All weights, learning rate {run['lr']:g}. Two streams take about twice the "
        "operations a token."
    ]
    adapter = rows["starts"].get("uniform")
    if adapter:
        shared = min(len(adapter["losses"]), len(run["losses"]))
        means = [statistics.mean(one["losses"][:shared]) for one in (adapter, run)]
        paragraphs.append(
            f"An adapter (learning rate {adapter['lr']:g}) beside all weights, on the "
            f"first {shared} batches: {means[0]:.3f} for {means[1]:.3f}."
        )
    return section("Where to start", table(head, cells), *paragraphs)


def stages(rows: dict) -> str:
    """Return what A3's three stages reach beside direct training at equal tokens."""
    staged = rows["starts"]["a3"]
    tokens = len(staged["steps"]) * staged["tokens_a_step"]
    cells = []
    for report, group in (("a3_one", 1), ("a3_eight", 8)):
        for row in rows[report]["differences"]:
            nll = row["nll"]
            title = f"{ORDER_TITLES[row['orders']]}, {group} at a time"
            losses = [f"{nll['a']:.3f}", f"{nll['b']:.3f}"]
            cells.append([title, *losses, change_of(row, sign=-1)])
    head = ["order", "direct", "three stages", "stages minus direct"]
    blocks = rows["a3_one"]["differences"][0]["sequences"]
    samples = []
    for rule in RULES:
        for row in rows[f"a3_{rule}"]["rows"]:
            low, high = row["perplexity_low"], row["perplexity_high"]
            samples.append(
                [
                    STAGED[row["run"]],
                    rule,
                    f"{row['perplexity']:.0f} ({low:.0f} to {high:.0f})",
                    f"{row['entropy']:.2f}",
                    f"{row['repetition_4']:.2f}",
                ]
            )
    return section(
        "A3's three stages",
        f"Two streams from the same weights, {len(staged['steps'])} steps of "
        f"{staged['tokens_a_step']:,} tokens ({tokens:,} in all): left to right, then "
        "groups of 2, 4 and 8 from left to right (steps 41 to 100), then groups of 8 "
        "in any order. *Direct*: groups of 8 in any order from the first step. The "
        f"same texts and learning rate ({staged['lr']:g}, not tuned), one seed.",
        table(head, cells),
        f"Nats per token on {blocks} blocks of held-out books.",
        table(
            ["model", "which position first", "perplexity", "entropy", "repeated"],
            samples,
            left=2,
        ),
        SAMPLES,
    )


def speculation(rows: dict) -> str:
    """Return how many tokens a pass of exact speculation keeps, and the loss, at
    checkpoints of one run."""
    run = rows["starts"]["any_order"]
    cells = []
    for step in SPECULATED:
        (loss,) = rows[f"speculation_loss_{step}"]["results"]
        line = [f"{step * run['tokens_a_step']:,}"]
        low, high = map(math.log, loss["perplexity_95"])
        line.append(f"{loss['nll']:.3f} ± {(high - low) / 2:.3f}")
        passes = rows[f"speculation_passes_{step}"]["results"]
        for row in passes:
            half = Z * row["standard_error"]
            line.append(f"{row['tokens_a_pass']:.2f} ± {half:.2f}")
        cells.append(line)
    head = [
        "trained on",
        "any order, nats/token",
        "tokens a pass, random orders",
        "tokens a pass, left to right",
    ]
    return section(
        "Speculation as it learns other orders",
        table(head, cells),
        f"All weights, learning rate {run['lr']:g} without decay, not tuned, 80% "
        "uniform orders and 20% left to right, one seed; averaged weights. "
        f"{passes[0]['samples']} samples of {passes[0]['length']} tokens, drafts of "
        "16, temperature 1, a draft and its check are two passes "
        "([small models from scratch](findings/E38.md)). The frequencies of tokens "
        f"have {rows['speculation_unigram']['nats']:.3f} nats. ± of "
        f"tokens a pass: by sample; of the loss: by document, of {loss['sequences']} "
        f"blocks of {loss['documents']} held-out books, {loss['draws']} orders each.",
    )


def agreement(rows: dict) -> str:
    report = rows["agree"]
    same = sum(row["same_tokens"] for row in report["greedy"])
    new = report["greedy"][0]["new_tokens"]
    largest = f"{report['largest_difference']:.1e}"
    losses = {"mean of -log p of these tokens": report["nll"]}
    furthest = []
    for one in report["sets"]:
        name = one["set"].partition("_")[0]
        title = f"{name}, {one['tokens']:,} tokens in blocks of 1,024"
        losses[title] = one["nll"]
        furthest.append(one["largest_difference"])
    cells = [[f"log p of {report['tokens']:,} tokens, largest difference", largest, ""]]
    for title, nll in losses.items():
        cells.append([title, f"{nll['ours']:.6f}", f"{nll['theirs']:.6f}"])
    title = f"greedy continuations of {new} tokens with the same tokens"
    cells.append([title, f"{same} of {len(report['greedy'])}", ""])
    return section(
        "Numbers that a stranger can check",
        table(["what", "here", "transformers / harness"], cells),
        "float32 on a CPU. The first block of the test books; Penn Treebank's test "
        "file without its last, shorter block; the first blocks of WikiText-103's. Log "
        f"p of any token of these two differs by at most {max(furthest):.1e}.",
    )


def share_cell(right: list[bool]) -> str:
    """Return a share and half of its 95% interval (normal approximation)."""
    share = statistics.mean(right)
    half = Z * math.sqrt(share * (1 - share) / len(right))
    return f"{share:.3f} ± {half:.3f}"


def perplexity_cell(log_probs: list[float]) -> str:
    """Return exp of the mean of -log p of a word, and the 95% interval of the mean."""
    mean, error = mean_and_error(log_probs)
    low = math.exp(-mean - Z * error)
    high = math.exp(-mean + Z * error)
    return f"{math.exp(-mean):.2f} ({low:.1f} to {high:.1f})"


def lambada(rows: dict) -> str:
    cells = []
    for report, label in READERS.items():
        if report not in rows:
            continue
        right = rows[report]["right"]
        log_probs = rows[report].get("log_prob")
        perplexity = perplexity_cell(log_probs) if log_probs else ""
        cells.append([label, f"{len(right):,}", share_cell(right), perplexity])
    ours = rows["lambada_part"]
    theirs = rows["lambada_hf"]
    words = list(zip(ours["right"], theirs["right"], strict=False))
    same = sum(one == other for one, other in words)
    log_probs = zip(ours["log_prob"], theirs["log_prob"], strict=False)
    largest = max(abs(one - other) for one, other in log_probs)
    filled = zip(rows["lambada_both"]["right"], ours["right"], strict=False)
    gains = [float(both) - float(left) for both, left in filled]
    gain, error = mean_and_error(gains)
    after = rows.get("lambada_adapter", {"right": []})
    pairs = zip(after["right"], rows["lambada_ours"]["right"], strict=False)
    trained = [float(one) - float(other) for one, other in pairs]
    paragraphs = []
    if trained:
        change, half = mean_and_error(trained)
        paragraphs.append(
            f"On the same {len(trained):,} passages the adapter changes the accuracy "
            f"left to right by {change:+.3f} ± {Z * half:.3f}."
        )
    head = ["last word", "first passages", "accuracy", "perplexity of the word"]
    return section(
        "LAMBADA",
        table(head, cells),
        "A word counts as right if each of its tokens is the most probable one; given "
        "the full stop, if the best filling of 1 to 4 tokens is the word (the "
        "adapter's: of 4 of each length, drawn at temperature 0.7). ± and brackets: "
        "95%, by passage. This project and "
        f"lm-evaluation-harness agree on {same} of {len(words)} words; log p differs "
        f"by at most {largest:.1e}. On the same {len(gains)} passages the full stop "
        f"changes the accuracy by {gain:+.3f} ± {Z * error:.3f}.",
        *paragraphs,
    )


def fresh(rows: dict) -> str:
    cells = []
    for row in rows["fresh"]["rows"]:
        versions = f"{row['versions']['torch']}, {row['versions']['transformers']}"
        largest = f"{row['largest_difference']:.1e}"
        name = EXPORTS[row["export"]]
        cells.append([name, row["class"], str(row["tokens"]), largest, versions])
    head = ["export", "class", "tokens", "largest difference", "torch, transformers"]
    return section(
        "Exports where this project is not installed",
        table(head, cells, left=2),
        "Log p of each token beside this project's, float32, with torch and "
        "transformers alone. `convert.py` had these two options up to commit 4349f6ec.",
    )


def not_run(rows: dict) -> str:
    lines = [
        "an adapter trained for long enough to use the text after a gap: this one had "
        "a core of a CPU for some hours",
        "several seeds, and a search for the learning rates",
    ]
    if "fill_adapter" not in rows:
        lines.append("the ten sentences with the adapter")
    words = len(rows["lambada_ours"]["right"])
    if words < PASSAGES:
        lines.append(f"LAMBADA as a whole: {words:,} of {PASSAGES:,} passages")
    for name, label in STARTS.items():
        if name not in rows["starts"]:
            lines.append(f"the start: {label}")
    return "## Not run\n\n" + "\n".join(f"- {line}" for line in lines)
