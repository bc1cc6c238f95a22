"""Prompts of a prepared data set answered by a model, and how many answers are right:
exact match.

N rows of T tokens."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from aogpt.checkpoints import Loaded
from aogpt.evaluation.eval_sets import Questions
from aogpt.evaluation.text_measures import mean_and_error
from aogpt.orders import Roles
from aogpt.runtime.processes import Processes
from aogpt.sampling import modes
from aogpt.sampling.engine import Generation
from aogpt.sampling.modes import DecodingOptions
from aogpt.sampling.page import PageSample, render
from aogpt.sampling.plans import Plan, group_sizes
from aogpt.sampling.records import end_first
from aogpt.sampling.token_choice import TokenChoice

ON_PAGE = 16  # rows


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


def first_rows(questions: Questions, count: int) -> Questions:
    roles = Roles(
        predicted=questions.roles.predicted[:count], given=questions.roles.given[:count]
    )
    return replace(questions, tokens=questions.tokens[:count], roles=roles)


def given_first(questions: Questions) -> Questions:
    """Return the rows with the prompt at the beginning, for a model that can only
    continue a text."""
    tokens = questions.tokens
    roles = questions.roles
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    order = roles.first_given(positions)
    roles = Roles(
        predicted=roles.predicted.gather(1, order), given=roles.given.gather(1, order)
    )
    return replace(questions, tokens=tokens.gather(1, order), roles=roles)


@dataclass(frozen=True)
class Answers:
    """The answers of a model, and how many are right."""

    records: list[dict]  # of each row: text, answer (as filled in), right, step, nfe
    samples: Generation
    seconds: float
    # Share of right answers that is possible with these groups: `Judge.limit`.
    limit: float | None

    def summary(self) -> dict:
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
    judge: Judge | None = None,
) -> Answers:
    """Return the answers to all questions. options: with a mode; seed: of all random
    numbers; judge: None if only the answer in the data is right."""
    if loaded.model.config.l2r_only:
        questions = given_first(questions)
    roles = questions.roles
    contexts = modes.contexts_of(questions.tokens, roles.given, roles.lengths)
    planned = modes.plan_samples(options.plan, contexts, seed)
    if roles.end is not None and roles.end.any():
        planned = planned._replace(plan=end_first(planned.plan))
    started = time.perf_counter()
    engine = options.engine(loaded.model, loaded.vocab_size)
    samples = modes.generate_distributed(engine, planned, procs, label=questions.name)
    seconds = time.perf_counter() - started
    return Answers(
        records=_compared(loaded, questions, samples, judge),
        samples=samples,
        seconds=seconds,
        limit=limit_of(judge, planned.plan, options),
    )


def _compared(
    loaded: Loaded, questions: Questions, samples: Generation, judge: Judge | None
) -> list[dict]:
    """Return a record for each row: its text in the data and as it was filled in, both
    up to end-of-text."""
    tokenizer = loaded.get_tokenizer()
    nfe = samples.nfe.tolist()
    records = []
    rows = zip(questions.tokens.tolist(), samples.rows(), strict=True)
    for number, (true, filled) in enumerate(rows):
        text = modes.text_until_end(tokenizer, true[: len(filled.tokens)])
        answer_text = modes.text_until_end(tokenizer, filled.tokens)
        if judge is None:
            is_right = answer_text == text
        else:
            is_right = judge.is_right(answer_text, text)
        record = {
            "text": text,
            "answer": answer_text,
            "right": is_right,
            "step": filled.step,
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
    for field in fields(TokenChoice):
        if getattr(options, field.name) != field.default:
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
    loaded: Loaded, answers: Answers, judge: Judge | None, settings: dict
) -> str:
    """Return an HTML page on which the first rows fill in, step by step. settings: the
    settings to show."""
    tokenizer = loaded.get_tokenizer()
    board = judge.board if judge else None
    shown = []
    rows = zip(answers.samples.rows(), answers.records[:ON_PAGE], strict=False)
    for row, record in rows:
        sample = PageSample(
            pieces=tokenizer.pieces(row.tokens),
            step=row.step,
            log_probs=row.log_probs,
            board=board,
            caption="right" if record["right"] else "wrong",
        )
        shown.append(sample)
    return render(shown, settings)
