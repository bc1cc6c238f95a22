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
    """A record of every sample.

    Args:
        samples: as many for each prompt, those of a prompt one after the other, as
            `modes.plan_samples` arranges them.
        prompts: of each, its key in the record, "prompt" or "infill", and its text.
        until_end: leave out what stands after the first end-of-text that was generated.

    Returns: dicts with "text", "prompt_index", the prompt, "length" (in tokens), and, as long as
    the sample is, the lists "tokens", "step" (-1: given) and "log_probs" (nats, six digits), and
    "nfe", the passes that it took part in.
    """
    records = []
    nfe = samples.nfe.tolist()
    for number, (tokens, step, log_probs) in enumerate(samples.rows()):
        if until_end:
            ends = (i for i, t in enumerate(tokens) if t == tokenizer.eot and step[i] >= 0)
            end = next(ends, len(tokens))
            tokens, step, log_probs = tokens[:end], step[:end], log_probs[:end]
        prompt_index = number * len(prompts) // len(samples)
        kind, text = prompts[prompt_index]
        records.append(
            {
                "text": tokenizer.decode(tokens),
                "prompt_index": prompt_index,
                kind: text,
                "length": len(tokens),
                "tokens": tokens,
                "step": step,
                "log_probs": [round(p, 6) for p in log_probs],
                "nfe": nfe[number],
            }
        )
    return records


def generation_cost(samples: Generation, seconds: float) -> dict:
    """What all samples together cost."""
    return {
        "model_calls": samples.model_calls,
        "token_forwards": samples.token_forwards,
        "seconds": round(seconds, 3),
    }


def with_settings(records: list[dict], cost: dict, settings: dict) -> list[dict]:
    """Each with the cost of all and with the settings that made it, as it is written."""
    return [record | cost | {"settings": settings} for record in records]
