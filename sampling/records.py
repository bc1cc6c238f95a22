"""Samples as records, one JSON object a sample: what sample.py --jsonl and eval_gen.py write."""

from __future__ import annotations

from collections.abc import Sequence

from data.tokenizers import Tokenizer
from sampling.engine import Generation


def sample_records(
    samples: Generation,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str, str]] = (("prompt", ""),),
    until_end: bool = False,
) -> list[dict]:
    """A dict of every sample, lists as long as it is; step -1: given; log_probs: nats.

    prompts: of each, "prompt" or "infill" and its text; samples are in equal number for each, those
    of a prompt one after the other. until_end: leave out what follows the first end-of-text that
    was generated."""
    records, nfe = [], samples.nfe.tolist()
    for number, (tokens, step, log_probs) in enumerate(samples.rows()):
        if until_end:
            ends = (i for i, t in enumerate(tokens) if t == tokenizer.eot and step[i] >= 0)
            end = next(ends, len(tokens))
            tokens, step, log_probs = tokens[:end], step[:end], log_probs[:end]
        prompt_index = number * len(prompts) // len(samples)
        kind, text = prompts[prompt_index]
        record = {"text": tokenizer.decode(tokens), "prompt_index": prompt_index, kind: text}
        record |= {"length": len(tokens), "tokens": tokens, "step": step}
        record |= {"log_probs": [round(p, 6) for p in log_probs], "nfe": nfe[number]}
        records.append(record)
    return records


def generation_cost(samples: Generation, seconds: float) -> dict:
    """What all samples together cost."""
    cost = {"model_calls": samples.model_calls, "token_forwards": samples.token_forwards}
    return cost | {"seconds": round(seconds, 3)}
