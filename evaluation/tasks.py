"""Records filled in by a model, and how many are right: exact match.

N records of T tokens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.load import Loaded
from data.loader import TokenDataset, evaluation_split, find_dataset, load_meta
from data.puzzles import TASKS, Task
from data.tokenizers import get_tokenizer
from evaluation.text_measures import mean_and_error
from orders import Roles
from runtime.errors import UserError
from runtime.processes import Processes
from sampling.engine import Generation
from sampling.modes import DecodingOptions, PlannedSamples, generate_distributed, mode_plan
from sampling.page import PageSample, render
from sampling.plans import Plan, group_sizes

ON_PAGE = 16  # records


@dataclass(frozen=True)
class Questions:
    """Records of which a part is to be filled in, as a model reads them."""

    name: str
    tokens: Tensor
    """LongTensor (N, T)."""
    roles: Roles
    task: Task | None
    """What says which answers are right; None: only the record's own is."""

    @property
    def is_right(self) -> Callable[[str, str], bool]:
        return self.task.is_right if self.task else str.__eq__

    def first(self, count: int) -> Questions:
        """The first of them."""
        roles = Roles(self.roles.predicted[:count], self.roles.given[:count])
        return Questions(self.name, self.tokens[:count], roles, self.task)

    def given_first(self) -> Questions:
        """With what is given at the beginning of every record, as a model is asked that can only
        continue a text."""
        order = self.roles.first_given(torch.arange(self.tokens.shape[1]).expand_as(self.tokens))
        predicted, given = (r.gather(1, order) for r in (self.roles.predicted, self.roles.given))
        return Questions(
            self.name, self.tokens.gather(1, order), Roles(predicted, given), self.task
        )


def open_questions(
    name: str, split: str | None, loaded: Loaded, limit: int | None = None
) -> Questions:
    """The records of a prepared data set, or the first of them.

    split: by default test, where there is one. Raises ValueError for a set that holds other text
    than records, or is not for this model."""
    folder = find_dataset(name)
    meta = load_meta(folder)
    if meta["tokenizer"] != loaded.tokenizer:
        raise UserError(
            f"{folder} holds {meta['tokenizer']} tokens, but the model was trained on "
            f"{loaded.tokenizer} tokens"
        )
    split = split or ("test" if "test" in meta["splits"] else evaluation_split(meta))
    data = TokenDataset(folder, split, loaded.model.config.block_size)
    if not data.of_records:
        raise UserError(
            f"{folder} holds text of which nothing is given; make records with: python "
            "data/prepare.py records --source FILE.jsonl --block-size N"
        )
    rows = range(min(limit or data.num_blocks, data.num_blocks))
    task = TASKS.get(meta.get("settings", {}).get("dataset"))
    return Questions(Path(name).name, data.blocks(rows), Roles.of(data.roles(rows)), task)


@dataclass(frozen=True)
class Answers:
    """What a model has filled in."""

    records: list[dict]
    """Of each record: text, answer (the text as filled in), right."""
    samples: Generation
    seconds: float
    limit: float | None
    """Share of right answers that is possible with these groups; see `Task.limit`."""

    def summary(self) -> dict:
        """What a table tells of all of them."""
        share, error = mean_and_error([float(record["right"]) for record in self.records])
        return {
            "records": len(self.records),
            "exact_match": share,
            "standard_error": error,
            "nfe": float(self.samples.nfe.double().mean()),
            "token_forwards": self.samples.token_forwards / len(self.records),
            "seconds": self.seconds,
            "limit": self.limit,
        }


def answer(
    loaded: Loaded, questions: Questions, options: DecodingOptions, seed: int, procs: Processes
) -> Answers:
    """Fill in all records. options: with the mode's defaults; seed: of all that is random."""
    if loaded.model.config.l2r_only:
        questions = questions.given_first()
    generator = torch.Generator().manual_seed(seed)
    roles, lengths = questions.roles, questions.roles.lengths
    longest = int(lengths.max())
    plan = mode_plan(options, lengths, roles.given[:, :longest], generator)
    uniforms = torch.rand(plan.order.shape, generator=generator, dtype=torch.float64)
    planned = PlannedSamples(plan, questions.tokens[:, :longest], uniforms)
    started = time.perf_counter()
    samples = generate_distributed(
        loaded.model,
        planned,
        options.choice,
        loaded.vocab_size,
        procs,
        batch_size=options.batch_size,
        compile=options.compile,
        label=questions.name,
    )
    seconds = time.perf_counter() - started
    limit = limit_of(questions.task, plan, options)
    return Answers(compared(loaded, questions, samples), samples, seconds, limit)


def compared(loaded: Loaded, questions: Questions, samples: Generation) -> list[dict]:
    """Every record as it was made and as it was filled in, up to its end-of-text."""
    tokenizer, records = get_tokenizer(loaded.tokenizer), []

    def text(tokens: list[int]) -> str:
        end = tokens.index(tokenizer.eot) if tokenizer.eot in tokens else len(tokens)
        return tokenizer.decode(tokens[:end])

    lengths = questions.roles.lengths.tolist()
    rows = zip(questions.tokens.tolist(), samples.tokens.tolist(), lengths, strict=True)
    for made, filled, length in rows:
        made, filled = text(made[:length]), text(filled[:length])
        right = questions.is_right(filled, made)
        records.append({"text": made, "answer": filled, "right": right})
    return records


def limit_of(task: Task | None, plan: Plan, options: DecodingOptions) -> float | None:
    """The mean of the task's limit over the rows of a plan; None where there is none, or where the
    model chooses the sizes of groups or not every token is drawn from its distribution."""
    exact = options.temperature == options.top_p == 1 and options.top_k is None
    if task is None or task.limit is None or plan.pace or not exact:
        return None
    if plan.draft:  # as one position a step
        sizes = [[1] * int(n) for n in plan.generated().sum(dim=1)]
    else:
        sizes = [[n for n in row if n] for row in group_sizes(plan).tolist()]
    return math.fsum(map(task.limit, sizes)) / len(sizes)


def page_of(loaded: Loaded, questions: Questions, answers: Answers, told: dict) -> str:
    """HTML on which the first records fill in, step by step. told: settings, shown as they are."""
    pieces = get_tokenizer(loaded.tokenizer).pieces
    board = questions.task.board if questions.task else None
    shown = [
        PageSample(pieces(tokens), step, log_probs, board, "right" if record["right"] else "wrong")
        for (tokens, step, log_probs), record in zip(
            itertools.islice(answers.samples.rows(), ON_PAGE), answers.records, strict=False
        )
    ]
    return render(shown, told)
