"""Fill the gaps of a text with a plain GPT, which has only learned to continue texts.

    python -m extras.plain_gpt MODEL "My sister plays the[MASK:1-4] in the orchestra."

[MASK] is one token, [MASK:3] three, [MASK:1-4] one to four. p(filling | both sides) is
p(filling | left) p(right | left, filling), up to a factor, so for each gap in turn

1. K continuations of the left text are drawn from q, the model at a temperature below
   1; the first n tokens of each are a filling of n tokens;
2. fillings are weighted by p(filling | left) p(right | left, filling) / q(filling), and
   K of them go on to the next gap (sampling-importance-resampling, Rubin 1987).

The joint probability of each filling and the known text after it is exact. Fillings of
one length are ranked by it. Where lengths differ, the text after the first gap counts
twice: alone, the joint prefers a likely phrase that the text does not go on from."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import aogpt
from aogpt.data.tokenizers import Tokenizer
from aogpt.model import AOGPT
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.validation import Count, check_value
from aogpt.sampling.modes import (
    DecodingOptions,
    generate_rows,
    plan_samples,
    refuse_masks,
)
from aogpt.scoring import check_finite

MASKS = re.compile(r"((?:\[MASK(?::\d+(?:-\d+)?)?\])+)")
LENGTHS = re.compile(r"\[MASK(?::(\d+)(?:-(\d+))?)?\]")
DRAWS = 64  # continuations
TEMPERATURE = 0.75
SCORED_TOGETHER = 8  # texts, whose logits are in memory at once


@dataclass(frozen=True)
class Gapped:
    """Known tokens before, between and after the gaps, and the lengths to try."""

    texts: list[list[int]]  # one more than gaps; all but the first may be empty
    lengths: list[range]


@dataclass(frozen=True)
class Filling:
    """A text with its gaps filled in."""

    tokens: list[int]
    lengths: tuple[int, ...]  # of the gaps
    joint: float  # log p of the gaps and the known text after the first one, nats
    right: float  # the part of that which is the known text
    share: float  # of the joint probabilities of all fillings that were drawn
    score: float  # by which they are ranked: `joint`, plus `right` if lengths differ


@dataclass(frozen=True)
class Fillings:
    """Different fillings, the best first."""

    fillings: list[Filling]
    effective_sample_size: float  # of the continuations; near 1, draw more
    log_evidence: float  # estimate of log p(known text after the gap | before), nats


@dataclass
class Row:
    """A text that is filled in up to a gap."""

    tokens: list[int]
    lengths: tuple[int, ...] = ()
    log_gaps: float = 0.0
    log_right: float = 0.0
    origin: int = 0  # the first continuation that it comes from


def read(text: str, tokenizer: Tokenizer) -> Gapped:
    """Return the tokens and gaps of a text with masks."""
    parts = MASKS.split(text)
    if len(parts) == 1:
        raise aogpt.UserError("there is no mask; write [MASK:3], or [MASK:1-4]")
    for part in parts[::2]:
        refuse_masks(part, "write [MASK:3], or [MASK:1-4]")
    texts = [tokenizer.encode(parts[0])]
    texts += [tokenizer.encode_after(part) for part in parts[2::2]]
    lengths = []
    for masks in parts[1::2]:
        shortest = 0
        longest = 0
        for first, last in LENGTHS.findall(masks):  # masks side by side are one gap
            shortest += int(first or 1)
            longest += int(last or first or 1)
        if not 1 <= shortest <= longest:
            raise aogpt.UserError(f"{masks[:40]}: write the shorter length first")
        lengths.append(range(shortest, longest + 1))
    return Gapped(texts, lengths)


@torch.no_grad()
def fill(
    model: AOGPT,
    gapped: Gapped,
    draws: int = DRAWS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Fillings:
    """Draw fillings of all gaps, and rank them."""
    check_value(draws, Count, "draws")
    if model.config.is_encoder or not gapped.texts[0] or temperature <= 0:
        raise aogpt.UserError("give a decoder, text before the mask, a temperature > 0")
    if model.excluded is not None:
        raise aogpt.UserError(
            "this model was trained on records whose end is given (data.end), which a "
            "plain GPT has not: python -m aogpt fill MODEL TEXT"
        )
    longest = sum(lengths[-1] for lengths in gapped.lengths)
    total = longest + sum(map(len, gapped.texts))
    if total > model.config.block_size:
        raise aogpt.UserError(
            f"with its longest gaps the text has {total} tokens, more than the block "
            f"size, {model.config.block_size}"
        )
    choice = DecodingOptions(mode="l2r", temperature=temperature)
    engine = choice.engine(model, vocab_size)
    rows = [Row(gapped.texts[0], origin=row) for row in range(draws)]
    filled = rows
    weights = torch.full((draws,), 1 / draws, dtype=torch.float64)
    effective = math.inf
    log_evidence = 0.0
    for gap, (lengths, after) in enumerate(
        zip(gapped.lengths, gapped.texts[1:], strict=True)
    ):
        if gap > 0:  # those that go on, by weight, at equal distances
            ends = weights.cumsum(dim=0)
            generator = torch.Generator().manual_seed(seed + gap)
            shift = torch.rand(1, generator=generator, dtype=torch.float64)
            places = (torch.arange(draws) + shift) / draws * ends[-1]
            chosen = torch.searchsorted(ends, places, right=True)
            rows = [filled[i] for i in chosen.clamp(max=len(filled) - 1).tolist()]
        contexts = [[*row.tokens, *[None] * lengths[-1]] for row in rows]
        planned = plan_samples(choice.plan, contexts, seed + gap)
        drawn = generate_rows(engine, planned)
        filled, log_weights = extended(
            model, rows, drawn, lengths, after, temperature, vocab_size
        )
        check_finite(log_weights)
        if not log_weights.isfinite().any():
            raise aogpt.UserError("no continuation leads to the text after the gap")
        log_evidence += float(log_weights.logsumexp(dim=0)) - math.log(draws)
        weights = log_weights.softmax(dim=0)
        origins = torch.tensor([row.origin for row in filled])
        by_origin = torch.zeros(draws, dtype=torch.float64)
        by_origin.index_add_(0, origins, weights)
        effective = min(effective, float(1 / by_origin.square().sum()))
    distinct = {(tuple(row.tokens), row.lengths): row for row in filled}
    return Fillings(ranked(list(distinct.values())), effective, log_evidence)


def extended(
    model: AOGPT,
    rows: list[Row],
    drawn: list[list[int]],
    lengths: range,
    after: list[int],
    temperature: float,
    vocab_size: int | None,
) -> tuple[list[Row], Tensor]:
    """Return the rows with a gap of every length and the text after it, and the
    logarithms of their weights (rows,)."""
    texts = []
    for row, text in zip(rows, drawn, strict=True):
        for n in lengths:
            texts.append((*text[: len(row.tokens) + n], *after))
    scores = token_scores(model, set(texts), temperature, vocab_size)
    filled = []
    log_weights = []
    pairs = itertools.product(rows, lengths)
    for (row, n), text in zip(pairs, texts, strict=True):
        log_p, log_q = scores[text]
        gap = slice(len(row.tokens), len(row.tokens) + n)
        log_gap = math.fsum(log_p[gap])
        log_after = math.fsum(log_p[gap.stop :])
        filled.append(
            Row(
                tokens=list(text),
                lengths=(*row.lengths, n),
                log_gaps=row.log_gaps + log_gap,
                log_right=row.log_right + log_after,
                origin=row.origin,
            )
        )
        log_weights.append(log_gap + log_after - math.fsum(log_q[gap]))
    return filled, torch.tensor(log_weights, dtype=torch.float64)


def token_scores(
    model: AOGPT,
    texts: set[tuple[int, ...]],
    temperature: float,
    vocab_size: int | None,
) -> dict[tuple[int, ...], tuple[list[float], list[float]]]:
    """Return log p of each token of each text given those before it, and the same at a
    temperature, among the ids that may be drawn."""
    scores = {}
    device = model.wte.weight.device
    by_length = sorted(texts, key=lambda text: (len(text), text))
    for start in range(0, len(by_length), SCORED_TOGETHER):
        batch = by_length[start : start + SCORED_TOGETHER]
        tokens = pad_sequence([torch.tensor(text) for text in batch], batch_first=True)
        tokens = tokens.to(device)  # (N, T)
        order = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        logits = model.logits(tokens, order).cpu().double()  # (N, T, V)
        index = tokens.cpu()[..., None]
        log_p = logits.log_softmax(dim=-1).gather(2, index).squeeze(2)
        drawable = logits[..., :vocab_size] / temperature
        log_q = drawable.log_softmax(dim=-1).gather(2, index).squeeze(2)
        for text, p, q in zip(batch, log_p.tolist(), log_q.tolist(), strict=True):
            scores[text] = (p[: len(text)], q[: len(text)])  # without the padding
    return scores


def ranked(rows: list[Row]) -> list[Filling]:
    """Return fillings, the best first."""
    joints = torch.tensor([row.log_gaps + row.log_right for row in rows]).double()
    check_finite(joints)
    shares = joints.softmax(dim=0).tolist()
    lengths_differ = len({row.lengths for row in rows}) > 1
    fillings = []
    for row, joint, share in zip(rows, joints.tolist(), shares, strict=True):
        score = joint + row.log_right if lengths_differ else joint
        filling = Filling(
            row.tokens,
            row.lengths,
            joint,
            right=row.log_right,
            share=share,
            score=score,
        )
        fillings.append(filling)
    return sorted(fillings, key=lambda filling: -filling.score)


def print_fillings(
    model: Annotated[str, tyro.conf.Positional],
    text: Annotated[str, tyro.conf.Positional],
    candidates: Count = 3,
    draws: Count = DRAWS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> None:
    """Fill the gaps of a text with a plain GPT."""
    check_value(candidates, Count, "candidates")
    loaded = aogpt.load(model)
    gapped = read(text, loaded.tokenizer)
    result = fill(
        loaded.model, gapped, draws, temperature, seed, loaded.loaded.vocab_size
    )
    for filling in result.fillings[:candidates]:
        text = loaded.tokenizer.decode(filling.tokens)
        show(f"{filling.score:9.3f} {filling.share:6.1%}  {text!r}")
    show(
        "ranked by log p (nats) of gaps and text after them, which counts twice where "
        "lengths differ; share of the joint probability of the fillings that were "
        f"drawn; effective sample size {result.effective_sample_size:.1f} of {draws}"
    )


def main() -> None:
    """Run the command line."""
    tyro.cli(print_fillings)


if __name__ == "__main__":
    run_script(main)
