"""Generate text with a trained model.

python sample.py out/quickstart --mode mdm --steps 64
python sample.py out/quickstart --mode l2r --prompt "The module" --num-samples 8 --jsonl samples.jsonl
python sample.py out/quickstart --mode adaptive --infill "Return the [MASK:20] of the list." --html order.html
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from checkpoints import load as checkpoint
from data.tokenizers import Tokenizer, get_tokenizer
from runtime.command_line import run_script
from runtime.devices import pick_dtype
from runtime.files import check_output, to_json, write_atomically
from runtime.processes import Processes, processes
from runtime.reports import versions
from sampling import modes, page
from sampling.engine import Generation, TokenChoice
from sampling.modes import Mode, draw, generate_shared, rows_of, with_defaults, with_steps
from sampling.plans import Schedule


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME) or checkpoint file."""
    mode: Mode = "mdm"
    """mdm: masked diffusion, exact: every position unmasks at its own random time.
    even: a random order in groups of equal size.
    l2r: left to right.
    random: a random order, one group of --group-size after the other.
    adaptive: the positions that the model is surest of first.
    speculative: guessed in parallel, verified in one causal pass; distributed as one token a step."""
    steps: int | None = None
    """Steps of mdm and even; by default one per token to generate."""
    schedule: Schedule | None = None
    """Of mdm and even. linear (default): about as many tokens in every step. cosine: few at first, many at the end."""
    group_size: int | None = None
    """Tokens a step of l2r, random and adaptive; by default 1."""
    reveal_by: Literal["confidence", "entropy", "random"] | None = None
    """adaptive: first where the likeliest token is most probable (default), or the entropy least, or at random."""
    draft: int | None = None
    """speculative: tokens guessed in parallel; by default 8."""
    order: Literal["random", "l2r"] | None = None
    """speculative: in a random order (default) or left to right."""
    prompt: str | None = None
    """Text that every sample begins with."""
    infill: str | None = None
    """Text with masks, "It was a[MASK:12] and the[MASK:3].": every [MASK:n] becomes n tokens.
    A word of the gpt2 tokenizer begins with the space before it, so leave none before a mask."""
    prompts: Path | None = None
    """Many prompts: FILE.txt, one a line, or FILE.jsonl.
    Its rows are {"prompt": TEXT}, {"prompt": TEXT, "length": N} or {"infill": TEXT}."""
    length: int | None = None
    """Tokens in a sample, prompt included; by default the model's block size. An infill's length is its own."""
    num_samples: int = 4
    """Samples of each prompt."""
    batch_size: int = 16
    """Samples in flight at once; in float32 it does not change the samples, in bfloat16 rounding depends on it."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""
    top_k: int | None = None
    """Draw from so many most probable tokens."""
    noise: Literal["float64", "float32", "bfloat16"] = "float64"
    """float64: the exact draw. float32, bfloat16: Gumbel noise of that precision, which lowers the temperature."""
    seed: int = 0
    jsonl: Path | None = None
    """Write a JSON object per sample: text, prompt, tokens, the step and log-probability of each, settings.
    Log-probabilities, here and on the page, are the model's own, before temperature, top-k and top-p.
    Model calls, token-forwards and seconds are those of all samples together."""
    html: Path | None = None
    """Write a page that shows the samples filling in, step by step."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    compile: bool = False
    """torch.compile the model: minutes at the start, worth it for many samples."""


@dataclass(frozen=True)
class Request:
    """What samples are asked for. place: where the user wrote it, for messages. length: in tokens, of a prompt."""

    place: str
    kind: Literal["prompt", "infill"]
    text: str
    length: int | None = None


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        sample(arguments, procs)


def sample(arguments: Arguments, procs: Processes) -> None:
    a = check(arguments)
    choice = TokenChoice(a.temperature, a.top_p, a.top_k, a.noise)
    requests = read_requests(a)
    loaded = checkpoint.load(a.run, a.weights, procs.device)
    dtype = pick_dtype(a.dtype, procs.device)
    tokenizer = get_tokenizer(loaded.tokenizer)
    contexts = [
        encode(request, tokenizer, a.length, loaded.model.config.block_size) for request in requests
    ]
    check_model(a, loaded, requests, contexts)
    a = with_steps(a, contexts)
    drawn = draw(a, contexts)

    started = time.perf_counter()
    model, sizes = loaded.model.to(dtype), {"batch_size": a.batch_size, "compile": a.compile}
    parts = generate_shared(model, drawn, choice, loaded.vocab_size, procs, **sizes)
    if procs.main:
        cost = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("model_calls", "token_forwards")
        }
        cost["seconds"] = round(time.perf_counter() - started, 3)
        settings = dataclasses.asdict(a) | {"dtype": str(dtype).removeprefix("torch.")}
        settings |= {"checkpoint": loaded.describe(), "versions": versions()}
        report(a, records(parts, requests, tokenizer), tokenizer, cost, settings)


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check(a: Arguments) -> Arguments:
    """The arguments with the defaults of their mode. ValueError for what has no meaning or cannot be written."""
    a = with_defaults(a)
    if sum(value is not None for value in (a.prompt, a.infill, a.prompts)) > 1:
        raise ValueError(
            "give one of --prompt, --infill and --prompts; a .jsonl file of --prompts can hold both kinds"
        )
    check_output(a.jsonl, "--jsonl")
    check_output(a.html, "--html")
    files = [path.resolve() for path in (a.prompts, a.jsonl, a.html) if path]
    if len(set(files)) < len(files):
        raise ValueError(
            "--prompts, --jsonl and --html name the same file twice; name different ones"
        )
    return a


def read_requests(a: Arguments) -> list[Request]:
    if a.infill is not None:
        return [Request("--infill", "infill", a.infill)]
    if a.prompts is None:
        return [Request("--prompt", "prompt", a.prompt or "")]
    if a.prompts.suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"--prompts {a.prompts}: give a .txt file with one prompt a line, or a .jsonl file"
        )
    if not a.prompts.is_file():
        raise ValueError(f"--prompts {a.prompts}: there is no such file")
    data = a.prompts.read_bytes()
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{a.prompts} line {line}: this is not UTF-8; save the file as UTF-8"
        ) from error
    requests = []
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # str.splitlines would also cut at what JSON strings may hold
        if line.strip():
            place = f"{a.prompts} line {number}"
            row = (
                {"prompt": line.removesuffix("\r")}
                if a.prompts.suffix == ".txt"
                else read_row(place, line)
            )
            kind = "infill" if "infill" in row else "prompt"
            requests.append(Request(place, kind, row[kind], row.get("length")))
    if not requests:
        raise ValueError(f"--prompts {a.prompts}: there is no prompt in it")
    return requests


def read_row(place: str, line: str) -> dict:
    """The object on one line of a .jsonl file of prompts."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from error
    keys = set(row) if isinstance(row, dict) else set()
    if len(keys & {"prompt", "infill"}) != 1 or keys - {"prompt", "infill", "length"}:
        found = (
            f"keys {', '.join(map(repr, row)) or '(none)'}"
            if isinstance(row, dict)
            else f"a {type(row).__name__}"
        )
        raise ValueError(
            f'{place}: give {{"prompt": TEXT}}, also with "length": N, or {{"infill": TEXT}}; found {found}'
        )
    for key, kind, name in (
        ("prompt", str, "text"),
        ("infill", str, "text"),
        ("length", int, "a whole number"),
    ):
        if key in row and type(row[key]) is not kind:
            raise ValueError(f'{place}: "{key}" must be {name}, not {json.dumps(row[key])[:40]}')
    return row


def encode(
    request: Request, tokenizer: Tokenizer, length: int | None, block_size: int
) -> list[int | None]:
    """The tokens of a sample, None where they are to be generated. length: of prompts that have none of their own."""
    if request.kind == "infill":
        return encode_infill(request, tokenizer, length, block_size)
    prompt = tokenizer.encode(request.text)
    name, total = (
        ("--length", length or block_size) if request.length is None else ("length", request.length)
    )
    if not len(prompt) < total <= block_size:
        raise ValueError(
            f"{request.place}: the prompt has {len(prompt)} tokens and {name} is {total}: the length must exceed the "
            f"prompt and be at most the model's block size, {block_size}"
        )
    return prompt + [None] * (total - len(prompt))


def encode_infill(
    request: Request, tokenizer: Tokenizer, length: int | None, block_size: int
) -> list[int | None]:
    if length is not None or request.length is not None:
        name = "--length" if request.length is None else '"length"'
        raise ValueError(
            f"{request.place}: an infill is as long as its text and its masks; leave out {name}"
        )
    tokens = []
    for number, part in enumerate(re.split(r"(\[MASK\b[^\]]*\]?)", request.text)):
        if number % 2 == 0:  # text and masks take turns
            tokens += tokenizer.encode(part)
        elif mask := re.fullmatch(r"\[MASK:0*([1-9][0-9]{0,8})\]", part):
            # one more than fits is enough to be refused, whatever the number is
            tokens += [None] * min(int(mask[1]), block_size + 1)
        else:
            raise ValueError(
                f"{request.place}: {part[:40]!r} is no mask; write [MASK:n] for n tokens, n at least 1"
            )
    if None not in tokens:
        raise ValueError(
            f"{request.place}: there is no mask; write [MASK:n] where n tokens are to be generated"
        )
    if len(tokens) > block_size:
        raise ValueError(
            f"{request.place}: text and masks together exceed the model's block size, {block_size} tokens; shorten them"
        )
    return tokens


def check_model(
    a: Arguments, loaded: checkpoint.Loaded, requests: list[Request], contexts: list[list]
) -> None:
    """ValueError if the model cannot do what is asked for."""
    config = loaded.model.config
    modes.check_model(a, config)
    l2r_only = config.attention == "causal" and config.target == "none"
    for request, context in zip(requests, contexts, strict=True):
        if loaded.scored_from and context[0] is None:
            raise ValueError(
                f"{request.place}: this model has no start token (GPT-2): give it a prompt to continue, or an infill "
                "that begins with text"
            )
        if l2r_only and any(token is not None for token in context[context.index(None) :]):
            raise ValueError(
                f"{request.place}: this model is not told its target position and can only continue a text: write one "
                "mask, at the end"
            )


# ---- results ---------------------------------------------------------------------------------------------------------


def records(parts: list[Generation], requests: list[Request], tokenizer: Tokenizer) -> list[dict]:
    """Of each sample: text, what was given, and lists as long as the sample."""
    rows, samples = rows_of(parts), []
    for number, (tokens, step, log_probs) in enumerate(rows):
        index = number * len(requests) // len(rows)
        record = {
            "text": tokenizer.decode(tokens),
            "prompt_index": index,
            requests[index].kind: requests[index].text,
        }
        record |= {
            "length": len(tokens),
            "tokens": tokens,
            "step": step,
            "log_probs": [round(p, 6) for p in log_probs],
        }
        samples.append(record)
    return samples


def report(
    a: Arguments, samples: list[dict], tokenizer: Tokenizer, cost: dict, settings: dict
) -> None:
    """Write the files that are asked for, then print every sample."""
    if a.jsonl:
        lines = "".join(
            to_json(record | cost | {"settings": settings}) + "\n" for record in samples
        )
        write_atomically(a.jsonl, lambda file: file.write(lines.encode()))
    if a.html:
        shown = [
            page.PageSample(tokenizer.pieces(s["tokens"]), s["step"], s["log_probs"])
            for s in samples
        ]
        known = {name: value for name, value in settings.items() if value is not None}
        document = page.render(shown, known | cost)
        write_atomically(a.html, lambda file: file.write(document.encode()))
    several = samples[-1]["prompt_index"] > 0
    for number, record in enumerate(samples, 1):
        source = f" of prompt {record['prompt_index'] + 1}" if several else ""
        print(f"=== sample {number}{source} ===\n{emphasised(record, tokenizer)}\n")
    least, most = min(s["length"] for s in samples), max(s["length"] for s in samples)
    print(
        f"{len(samples)} samples of {least if least == most else f'{least} to {most}'} tokens from "
        f"{settings['checkpoint']}: {cost['model_calls']} model calls, {cost['token_forwards']} token-forwards, "
        f"{cost['seconds']:.2f} s",
        file=sys.stderr,
    )


def emphasised(record: dict, tokenizer: Tokenizer) -> str:
    """The text; on a terminal, what was generated is bold where something was given as well."""
    if not sys.stdout.isatty() or -1 not in record["step"]:
        return record["text"]
    pieces = zip(tokenizer.pieces(record["tokens"]), record["step"], strict=True)
    runs = itertools.groupby(pieces, key=lambda piece: piece[1] >= 0)
    texts = ((generated, "".join(text for text, _ in run)) for generated, run in runs)
    return "".join(f"\033[1m{text}\033[0m" if generated else text for generated, text in texts)


if __name__ == "__main__":
    run_script(main)
