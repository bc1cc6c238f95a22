"""Infilling: score a sentence in the middle of a passage, and fill it in.

    python -m studies.eval_infill results/books_model --data data/books_english
    python -m studies.eval_infill out/aogpt out/encoder --data data/own --json FILE
    python -m studies.eval_infill out/aogpt out/gpt --data lambada --last-word

Reports the negative log-likelihood (nats/token) of the sentence given both sides, and
given only its left side, and the ROUGE of samples. A plain GPT has the left side only,
unless --draws fills in by resampling, as it does with other decoders but those with a
[MASK] as the query. 95% intervals are by document where there are several."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
import tyro

from aogpt.checkpoints import Loaded, load
from aogpt.data.loader import spread
from aogpt.evaluation.estimates import estimate
from aogpt.evaluation.eval_sets import (
    SplitOption,
    note_on_end,
    open_eval_set,
    open_split,
)
from aogpt.runtime.command_line import ModelOptions, run_script, show, with_help
from aogpt.runtime.devices import autocast, pick_device, pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import Outputs, ReportOptions, markdown_table, provenance
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling import modes
from aogpt.sampling.modes import DecodingOptions, PlannedSamples
from aogpt.sampling.plans import stack_plans
from aogpt.scoring import token_log_probs
from extras import plain_gpt
from studies.infilling import (
    Passages,
    find_last_words,
    find_passages,
    middle_nll,
    rouge,
)

HEAD = [
    "run",
    "given",
    "filled in",
    "nats/token",
    "95%",
    "ROUGE-1",
    "ROUGE-2",
    "ROUGE-L",
]
RESAMPLING = "resampling"  # "filled in" by --draws
WORD = "passage"  # "given" of a last word, which has no other side


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, ReportOptions, SplitOption):
    runs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")
    ]
    """Run folders (out/NAME), checkpoints, exported or released weights."""
    data: str
    """Prepared data set: a name under data/, or a folder that data/prepare.py wrote."""
    num_passages: Count = 200
    """Blocks of the split, evenly spread, to search for a sentence each; some may have
    none. Blocks are as long as the smallest block size of the runs, so that all fill in
    the same sentences."""
    last_word: bool = False
    """Instead of sentences: the last word of each of --num-passages documents, as in
    LAMBADA."""
    shortest: Count = 6
    """Least number of tokens in the sentence."""
    longest: Count = 40
    """Greatest number of tokens in the sentence."""
    draws: Count | None = None
    """Decoders, not those with a [MASK] as the query: also fill in given both sides by
    this many continuations of the left side, weighted by the right side
    (sampling-importance-resampling)."""
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")] = DecodingOptions(
        temperature=0
    )
    """Without --mode: l2r; given both sides also random and confidence. Given the left
    side, an encoder reads [MASK] up to the end of the block; where it chooses the order
    it fills all of them in, and the sentence is what is in its place."""


def main() -> None:
    a = tyro.cli(
        with_help(Arguments), prog="python -m studies.eval_infill", description=__doc__
    )
    check_values(a)
    if not a.runs:
        raise UserError("nothing to evaluate: name a run, such as results/books_model")
    if a.last_word:
        for option, is_given in (
            ("--draws", a.draws is not None),
            ("--shortest", a.shortest != Arguments.shortest),
            ("--longest", a.longest != Arguments.longest),
        ):
            if is_given:
                raise UserError(
                    f"{option} has no meaning with --last-word: leave it out"
                )
    rouge([])  # reports a missing package before the work
    outputs = Outputs.of_report(a.json, [*a.runs, a.data], a.overwrite)
    device = pick_device(a.device)
    dtype = pick_dtype(a.dtype, device)
    models = {}
    checkpoints = {}  # by run
    for run in a.runs:
        models[run] = load(run, a.weights, "cpu", a.block_size, a.checkpoint)
        checkpoints[run] = models[run].origin()
    # Before the first is evaluated, so that a wrong one costs no results.
    for loaded in models.values():
        for both in sides_of(a, loaded).values():
            for options in options_of(a, both):
                modes.check_mode(options.plan, loaded.model.config)
    passages = passages_of(a, list(models.values()))
    rows = []
    for run, loaded in models.items():
        loaded.model.to(device)
        with autocast(device, dtype):
            rows += evaluate(run, loaded, passages, a)
        loaded.model.to("cpu")  # one at a time needs memory there
        lines = table_of(rows)
        changed = modes.changed_settings(vars(a.decoding))
        if changed:
            lines.append(f"samples: {', '.join(changed)}")
        origin = provenance(a, dtype, device, rows=rows, checkpoints=checkpoints)
        # After every run, so that a job that is killed loses none.
        outputs.write_report(a.json, origin, lines, part=True)
    with outputs:  # raises an error if a file could not be written
        outputs.write_report(a.json, origin, lines)
        show(*lines, sep="\n")


def passages_of(a: Arguments, models: list[Loaded]) -> Passages:
    """Return the passages of the data set, the same for all models, in blocks of the
    smallest block size. Raises UserError if there is none."""
    dataset = open_split(a.data, a.split, verify=False)
    if dataset.of_records:
        raise UserError(f"{a.data} holds records: give documents, of prepare.py text")
    block_size = min(loaded.model.config.block_size for loaded in models)
    for loaded in models:  # each checks that the tokens are its own
        eval_set = open_eval_set(
            dataset, loaded, max_sequences=a.num_passages, block_size=block_size
        )
        if note := note_on_end(dataset, loaded):
            show(f"note: {note}", file=sys.stderr)
    end = dataset.meta["eot"]
    tokenizer = models[0].get_tokenizer()
    if a.last_word:
        passages = find_last_words(
            dataset.tokens, tokenizer, a.num_passages, block_size, end
        )
        if len(passages) == 0:
            raise UserError(
                "no document of two words or more ends among "
                f"{a.num_passages} documents in {a.data}"
            )
    else:
        blocks = dataset.blocks(spread(a.num_passages, dataset.num_blocks))
        documents = eval_set.documents[: len(blocks)]
        passages = find_passages(
            blocks, tokenizer, a.shortest, a.longest, end, documents
        )
        if len(passages) == 0:
            raise UserError(
                f"no sentence of {a.shortest} to {a.longest} tokens in {len(blocks)} "
                f"blocks in {a.data}"
            )
    return passages


def evaluate(run: str, loaded: Loaded, passages: Passages, a: Arguments) -> list[dict]:
    """Return a row for each context (left or both sides) and each decoding mode."""
    model = loaded.model
    size = a.decoding.batch_size
    rows = []
    for side, both in sides_of(a, loaded).items():
        parts = []
        for start in range(0, len(passages), size):
            parts.append(middle_nll(model, passages[start : start + size], both))
        nll = torch.cat(parts).tolist()
        for options in options_of(a, both):
            row = {
                "run": run,
                "given": side,
                "mode": options.mode,
                "nll": nll,
                "documents": passages.document.tolist(),
            }
            samples = fill_in(loaded, passages, both, options, a.seed)
            row.update(rouge(texts_of(loaded, passages, samples)))
            rows.append(row)
    if a.draws and model.config.target != "mask_query" and not model.config.is_encoder:
        rows.append(resampled_row(run, loaded, passages, a.draws, a.seed))
    return rows


def sides_of(a: Arguments, loaded: Loaded) -> dict[str, bool]:
    """Return the contexts that a model is given, by name: whether the right side is
    part of them."""
    if a.last_word:
        return {WORD: False}
    if loaded.model.config.l2r_only:
        return {"left": False}
    return {"left": False, "both": True}


def options_of(a: Arguments, both: bool) -> list[DecodingOptions]:
    """Return how the middles are filled in, by each mode. both: whether the right side
    is given."""
    side_modes = ["l2r", "random", "confidence"] if both else ["l2r"]
    if a.decoding.mode is not None:
        side_modes = [a.decoding.mode]
    return [replace(a.decoding, mode=mode) for mode in side_modes]


def resampled_row(
    run: str, loaded: Loaded, passages: Passages, draws: int, seed: int
) -> dict:
    """Return the row of a decoder that fills in given both sides by resampling."""
    nll = []
    best = []
    sizes = []
    device = loaded.model.wte.weight.device
    spans = zip(passages.start.tolist(), passages.end.tolist(), strict=True)
    for number, (start, end) in enumerate(spans):
        text = passages.tokens[number]
        order = torch.arange(len(text), device=device)[None]
        log_probs = token_log_probs(loaded.model, text[None].to(device), order)[0]
        joint = float(log_probs[start:].cpu().double().sum())
        sides = [text[:start].tolist(), text[end:].tolist()]
        gap = range(end - start, end - start + 1)
        result = plain_gpt.fill(
            loaded.model,
            plain_gpt.Gapped(sides, [gap]),
            draws=draws,
            seed=seed + number,
            vocab_size=loaded.vocab_size,
        )
        # Too small on average: the divisor is estimated from few middles.
        nll.append((result.log_evidence - joint) / (end - start))
        best.append(result.fillings[0].tokens)
        sizes.append(result.effective_sample_size)
    row = {
        "run": run,
        "given": "both",
        "mode": RESAMPLING,
        "draws": draws,
        "nll": nll,
        "documents": passages.document.tolist(),
        "effective_sample_size": sizes,
    }
    row.update(rouge(texts_of(loaded, passages, best)))
    return row


def fill_in(
    loaded: Loaded, passages: Passages, both: bool, options: DecodingOptions, seed: int
) -> list[list[int]]:
    """Return a sample of every passage, up to the end of its middle or longer. both:
    whether the right side is given.

    Given the left side alone, an encoder reads [MASK] up to the end of the block, as
    where `middle_nll` scores it: it must not see where the middle ends. Nothing of what
    comes after the middle is filled in before it, unless the model chooses the order:
    then all of it is."""
    N, T = passages.tokens.shape
    reads_on = loaded.model.config.is_encoder and not both
    is_chosen = options.plan(modes.example_samples()).unmask_by != "order"
    fills_all = reads_on and is_chosen
    length = passages.end
    if both or fills_all:
        length = torch.full((N,), T)
    contexts = modes.contexts_of(passages.tokens, passages.known(both), length)
    planned = modes.plan_samples(options.plan, contexts, seed)
    if reads_on:
        planned = masked_up_to(planned, T)
    engine = options.engine(loaded.model, loaded.vocab_size)
    return modes.generate_rows(engine, planned)


def masked_up_to(planned: PlannedSamples, width: int) -> PlannedSamples:
    """Return samples of `width` positions, whose plan is that of shorter ones: the
    positions after those unmask last, all in one step. So an encoder reads [MASK]
    there, and not where a sample ends. For orders that the model does not choose."""
    plan = stack_plans([planned.plan], width)
    last_step = plan.step.where(plan.valid, -1).amax(dim=1, keepdim=True)
    missing = width - planned.tokens.shape[1]
    return PlannedSamples(
        plan=replace(
            plan,
            step=plan.step.where(plan.valid, last_step + 1),
            length=torch.full_like(plan.length, width),
        ),
        tokens=F.pad(planned.tokens, (0, missing)),
        uniforms=F.pad(planned.uniforms, (0, missing)),
    )


def texts_of(
    loaded: Loaded, passages: Passages, samples: list[list[int]]
) -> list[tuple[str, str]]:
    """Return the middle of each sample and the true one of its passage, as text."""
    decode = loaded.get_tokenizer().decode
    true_middles = passages.middle(passages.tokens.tolist())
    texts = []
    for filled, true in zip(passages.middle(samples), true_middles, strict=True):
        texts.append((decode(filled), decode(true)))
    return texts


def table_of(rows: list[dict]) -> list[str]:
    """Return the lines of the table and of its notes."""
    cells = []
    for row in rows:
        mean, half = mean_and_half_width(row["nll"], row["documents"])
        bound = "≥ " if row["mode"] == RESAMPLING else ""  # see the notes
        line = [row["run"], row["given"], row["mode"]]
        interval = "unknown" if half is None else f"± {half:.4f}"
        line += [f"{bound}{mean:.4f}", interval]
        for key in ("rouge_1", "rouge_2", "rouge_l"):
            line.append(f"{statistics.mean(row[key]):.3f}")
        cells.append(line)
    return [*markdown_table(HEAD, cells, left=3), "", *notes(rows)]


def mean_and_half_width(
    values: list[float], documents: list[int]
) -> tuple[float, float | None]:
    """Return the mean of N values and half the width of its 95% interval: by passage
    or, where that is wider, by document; None for one value."""
    mean = estimate(torch.tensor(values), documents=torch.tensor(documents))
    return mean.nll, mean.half_width


def notes(rows: list[dict]) -> list[str]:
    """Return the legend, and the gain (nats/token) from the right side, paired by
    passage."""
    middle = "last word" if rows[0]["given"] == WORD else "sentence"
    lines = [
        f"{len(rows[0]['nll'])} {middle}s. nats/token: of the true {middle} from left "
        f"to right, mean over {middle}s; ROUGE: F1 of samples against it."
    ]
    for row in rows:
        if row["mode"] == RESAMPLING:
            size = statistics.mean(row["effective_sample_size"])
            lines.append(
                f"{row['run']}: {row['draws']} continuations at temperature "
                f"{plain_gpt.TEMPERATURE}, of which {size:.1f} count "
                "(mean effective sample size); nats/token are a lower bound on average"
            )
    for run in dict.fromkeys(row["run"] for row in rows):
        # The model's own loss; that of resampling, the last row, where it has no other.
        nll: dict[str, list[float]] = {}
        for row in rows:
            if row["run"] == run:
                nll.setdefault(row["given"], row["nll"])
        if len(nll) < 2 or len(nll["left"]) < 2:
            continue
        gains = []
        for left, both in zip(nll["left"], nll["both"], strict=True):
            gains.append(left - both)
        mean, half = mean_and_half_width(gains, rows[0]["documents"])
        lines.append(
            f"{run}: the right side is worth {mean:.4f} nats/token, 95% interval "
            f"{mean - half:.4f} to {mean + half:.4f}"
        )
    return lines


if __name__ == "__main__":
    run_script(main)
