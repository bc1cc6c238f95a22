"""Generate text with a trained model.

python sample.py out/quickstart --mode mdm --steps 64
python sample.py out/quickstart --mode l2r --prompt "The module" --num-samples 8 --jsonl samples.jsonl
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from tqdm import tqdm

import checkpoint
from data.tokenizer import get_tokenizer
from decode import Generation, Plan, TokenChoice, generate, l2r_plan, mdm_plan
from runtime import check_output, pick_dtype, processes, run_script, to_json, versions


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME) or checkpoint file."""
    mode: Literal["mdm", "even", "l2r"] = "mdm"
    """mdm: masked diffusion, exact: every position unmasks at its own random time.
    even: a random order in equal groups. l2r: left to right, one token a step."""
    steps: int | None = None
    """Steps of mdm and even; by default one per token to generate."""
    prompt: str = ""
    """Text that every sample begins with."""
    length: int | None = None
    """Tokens in a sample, prompt included; by default the model's block size."""
    num_samples: int = 4
    batch_size: int = 16
    """Samples in flight at once; it does not change the samples."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    jsonl: Path | None = None
    """Write a JSON object per sample: text, tokens, steps, log-probabilities, settings, model calls."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model; auto: bfloat16 on a GPU that has it, float32 elsewhere."""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        sample(arguments, procs)


def sample(arguments: Arguments, procs) -> None:
    a = arguments
    choice = TokenChoice(a.temperature, a.top_p, a.top_k)
    for name in ("num_samples", "batch_size"):
        if getattr(a, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(a, name)}; give at least 1")
    if not 0 <= a.seed < 2**63:
        raise ValueError(f"--seed is {a.seed}; give an integer from 0 to 2**63 - 1")
    check_output(a.jsonl, "--jsonl")
    loaded = checkpoint.load(a.run, a.weights, procs.device)
    dtype = pick_dtype(a.dtype, procs.device)
    tokenizer = get_tokenizer(loaded.tokenizer)
    prompt = tokenizer.encode(a.prompt)
    if loaded.scored_from and not prompt:
        raise ValueError("this model has no start token (GPT-2): give it a --prompt to continue")
    plan, tokens, uniforms = draw(a, loaded.model.config, prompt)

    rows = slice(procs.share(a.num_samples).start, procs.share(a.num_samples).stop)
    started = time.perf_counter()
    bar = tqdm(total=int((plan[rows].step >= 0).sum()), unit="token", disable=None if procs.main else True, leave=False)
    own = []
    if rows.start < rows.stop:  # with more processes than samples, some have none
        own.append(
            generate(
                loaded.model.to(dtype),
                plan[rows],
                tokens[rows],
                uniforms=uniforms[rows],
                choice=choice,
                vocab_size=tokenizer.vocab_size,
                batch_size=a.batch_size,
                progress=bar.update,
            )
        )
    bar.close()
    parts = sum(procs.gather(own), [])
    if procs.main:
        seconds = time.perf_counter() - started
        settings = dataclasses.asdict(a) | {"dtype": str(dtype).removeprefix("torch."), "noise": "float64"}
        settings |= {"checkpoint": loaded.describe(), "versions": versions()}
        report(parts, tokenizer, settings, a.jsonl, len(prompt))
        calls, forwards = sum(p.model_calls for p in parts), sum(p.token_forwards for p in parts)
        print(
            f"{a.num_samples} samples of {plan.order.shape[1]} tokens from {loaded.describe()}: {calls} model calls, "
            f"{forwards} token-forwards, {seconds:.2f} s",
            file=sys.stderr,
        )


def draw(a: Arguments, config, prompt: list[int]) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """Plan, given tokens and uniform numbers of all samples: all the randomness, whatever the batches and processes."""
    length = config.block_size if a.length is None else a.length
    if not len(prompt) < length <= config.block_size:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and --length is {length}: the length must exceed the prompt and be "
            f"at most the model's block size, {config.block_size}"
        )
    if config.attention == "causal" and config.target == "none" and a.mode != "l2r":
        raise ValueError(f"--mode {a.mode} needs a model that is told its target position; this one takes --mode l2r")
    generator = torch.Generator().manual_seed(a.seed)
    tokens = torch.zeros(a.num_samples, length, dtype=torch.long)
    tokens[:, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
    given = (torch.arange(length) < len(prompt)).expand(a.num_samples, length)
    if a.mode == "l2r":
        if a.steps is not None:
            raise ValueError("--steps has no meaning with --mode l2r, which takes one step a token; leave it out")
        plan = l2r_plan(a.num_samples, length, given)
    else:
        steps = length - len(prompt) if a.steps is None else a.steps
        plan = mdm_plan(a.num_samples, length, steps, generator, given, even=a.mode == "even")
    return plan, tokens, torch.rand(a.num_samples, length, generator=generator, dtype=torch.float64)


def report(parts: list[Generation], tokenizer, settings: dict, jsonl: Path | None, prompt_length: int) -> None:
    """Print every sample; write the JSONL file if one is asked for."""
    lines, number = [], 0
    for part in parts:
        for tokens, step, log_probs in zip(part.tokens, part.step, part.log_probs, strict=True):
            number += 1
            text = tokenizer.decode(tokens.tolist())
            print(f"=== sample {number} ===\n{text}\n")
            record = {
                "text": text,
                "tokens": tokens.tolist(),
                "step": step.tolist(),
                "log_probs": [round(float(p), 6) for p in log_probs],
                "prompt_tokens": prompt_length,
                "model_calls": part.model_calls,
                "settings": settings,
            }
            lines.append(to_json(record))
    if jsonl:
        checkpoint.write_atomically(jsonl, lambda file: file.write(("\n".join(lines) + "\n").encode()))


if __name__ == "__main__":
    run_script(main)
