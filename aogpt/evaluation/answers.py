"""Prompts of a prepared data set answered by a model, and how many answers are right:
exact match.

N rows of T tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoints import Loaded
from ..orders import Roles
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..sampling import modes
from ..sampling.engine import Generation
from ..sampling.modes import DecodingOptions
from ..sampling.page import PageSample, render
from ..sampling.plans import Plan, group_sizes
from .eval_sets import note_on_end, open_eval_set, open_split
from .text_measures import mean_and_error

ON_PAGE = 16  # rows
# Puzzles of which another answer than the one in the data can be right.
SEVERAL_ANSWERS = ("colouring", "replace", "shuffle")


class Judge(Protocol):
    """A judge of answers to the prompts of a data set where the answer in the data is
    not the only right one, such as a coloring of a map."""

    temperature: float  # at which models answer, unless the user gives another one
    # (sizes of the groups of positions that are drawn in parallel) -> share of right
    # answers that a model with exact conditionals reaches at temperature 1; None:
    # unknown
    limit: Callable[[Sequence[int]], float] | None
    # Rows and columns of the board that an answer is, and of its boxes; None: a line
    board: tuple[int, int, int, int] | None

    def is_right(self, filled: str, original: str) -> bool:
        """Return whether a filled row is right; original: the row in the data."""


@dataclass(frozen=True)
class Questions:
    """The rows of a data set with prompts, as a model reads them."""

    name: str
    tokens: Tensor  # LongTensor (N, T)
    roles: Roles
    judge: Judge | None  # None: only the answer in the data is right
    notes: tuple[str, ...] = ()  # on what its numbers mean

    def first(self, count: int) -> "Questions":
        """Return the first `count` rows."""
        roles = Roles(
            predicted=self.roles.predicted[:count], given=self.roles.given[:count]
        )
        return replace(self, tokens=self.tokens[:count], roles=roles)

    def given_first(self) -> "Questions":
        """Return the rows with the prompt at the beginning, for a model that can only
        continue a text."""
        positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        order = self.roles.first_given(positions)
        roles = Roles(
            predicted=self.roles.predicted.gather(1, order),
            given=self.roles.given.gather(1, order),
        )
        return replace(self, tokens=self.tokens.gather(1, order), roles=roles)


def open_questions(
    name: str,
    split: str | None,
    loaded: Loaded,
    limit: int | None = None,
    judges: Mapping[str, Judge] | None = None,
) -> Questions:
    """Return the rows of a prepared data set, or `limit` of them, spread over the
    split. split: by default test, where there is one. judges: by the name of the data
    set for prepare.py. Raises UserError for a set without prompts."""
    dataset = open_split(
        name,
        split,
        preferred_split="test",
        verify=False,
    )
    eval_set = open_eval_set(dataset, loaded, limit)
    rows = range(eval_set.count)
    roles = eval_set.roles(rows)
    if roles is None:
        raise UserError(
            f"{dataset.folder} holds text without prompts; make some with: "
            "python data/prepare.py records --source FILE.jsonl"
        )
    dataset_name = dataset.meta.get("settings", {}).get("dataset")
    judge = (judges or {}).get(dataset_name)
    notes = []
    if note := note_on_end(dataset, loaded):
        notes.append(note)
    if judge is None and dataset_name in SEVERAL_ANSWERS:
        notes.append(
            f"{eval_set.name}: other answers than the one in the data are right, too, "
            "and count as wrong here: take python -m studies.puzzle_answers"
        )
    return Questions(eval_set.name, eval_set.tokens(rows), roles, judge, tuple(notes))


@dataclass(frozen=True)
class Answers:
    """The answers of a model, and how many are right."""

    records: list[dict]  # of each row: text, answer (as filled in), right, step, nfe
    samples: Generation
    seconds: float
    # Share of right answers that is possible with these groups: `Judge.limit`.
    limit: float | None

    def summary(self) -> dict:
        """Return the results over all rows: exact match, cost and time."""
        right = [float(record["right"]) for record in self.records]
        share, error = mean_and_error(right)
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
    loaded: Loaded,
    questions: Questions,
    options: DecodingOptions,
    seed: int,
    procs: Processes,
) -> Answers:
    """Return the answers to all questions. options: with the mode's defaults; seed: of
    all random numbers."""
    if loaded.model.config.l2r_only:
        questions = questions.given_first()
    roles = questions.roles
    contexts = modes.contexts_of(questions.tokens, roles.given, roles.lengths)
    planned = modes.plan_samples(options, contexts, seed)
    started = time.perf_counter()
    samples = modes.generate_distributed(
        loaded.model, planned, options, loaded.vocab_size, procs, label=questions.name
    )
    seconds = time.perf_counter() - started
    return Answers(
        records=_compared(loaded, questions, samples),
        samples=samples,
        seconds=seconds,
        limit=limit_of(questions.judge, planned.plan, options),
    )


def _compared(loaded: Loaded, questions: Questions, samples: Generation) -> list[dict]:
    """Return a record for each row: its text in the data and as it was filled in, both
    up to end-of-text."""
    tokenizer = loaded.get_tokenizer()
    nfe = samples.nfe.tolist()
    records = []
    rows = zip(questions.tokens.tolist(), samples.rows(), strict=True)
    for number, (true, (filled, step, _)) in enumerate(rows):
        text = modes.text_until(tokenizer, true[: len(filled)])
        answer_text = modes.text_until(tokenizer, filled)
        if questions.judge is None:
            is_right = answer_text == text
        else:
            is_right = questions.judge.is_right(answer_text, text)
        record = {
            "text": text,
            "answer": answer_text,
            "right": is_right,
            "step": step,
            "nfe": nfe[number],
        }
        records.append(record)
    return records


def limit_of(judge: Judge | None, plan: Plan, options: DecodingOptions) -> float | None:
    """Return the mean of the judge's limit over the rows of a plan; None where there is
    none, where the model chooses the sizes of groups, or tokens are not drawn once from
    its distribution."""
    if judge is None or judge.limit is None or plan.pace is not None:
        return None
    if not options.is_exact:
        return None
    limits = []
    if plan.draft:  # as one position a step
        for count in plan.generated.sum(dim=1).tolist():
            limits.append(judge.limit([1] * count))
    else:
        for sizes in group_sizes(plan).tolist():
            limits.append(judge.limit([size for size in sizes if size]))
    return math.fsum(limits) / len(limits)


def page_of(
    loaded: Loaded, questions: Questions, answers: Answers, settings: dict
) -> str:
    """Return an HTML page on which the first rows fill in, step by step. settings: the
    settings to show."""
    tokenizer = loaded.get_tokenizer()
    board = questions.judge.board if questions.judge else None
    shown = []
    rows = zip(answers.samples.rows(), answers.records[:ON_PAGE], strict=False)
    for (tokens, step, log_probs), record in rows:
        sample = PageSample(
            pieces=tokenizer.pieces(tokens),
            step=step,
            log_probs=log_probs,
            board=board,
            caption="right" if record["right"] else "wrong",
        )
        shown.append(sample)
    return render(shown, settings)
