"""Generate text with a trained model.

Examples:
    python sample.py out/quickstart --mode mdm:steps=64
    python sample.py out/quickstart --mode l2r --prompt "The old horse" --jsonl FILE
    python sample.py out/quickstart --prompt "She said[MASK:9] to him." --html FILE
    python sample.py out/quickstart --mode slots:block=8,group=4
    python sample.py out/own --prompts data/questions --rows 1 --html FILE"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from annotated_types import Interval

from aogpt.checkpoints.load import Loaded, load
from aogpt.data.tokenizers import Tokenizer, notes_on_special
from aogpt.runtime.command_line import (
    TEXT,
    RunOptions,
    counted,
    run_script,
    show,
    with_help,
)
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import read_lines
from aogpt.runtime.outputs import OutputOptions, Outputs, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_value, check_values, from_json
from aogpt.sampling import modes
from aogpt.sampling.engine import Generation
from aogpt.sampling.modes import DecodingOptions, sample_records
from aogpt.sampling.page import PageSample, render
from aogpt.sampling.plans import Context


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions, OutputOptions):
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")]
    prompt: Annotated[str | None, TEXT] = None
    """Text that every sample begins with, or a text with masks to fill in, "It was
    a[MASK:12] and the[MASK:3].": [MASK:n] becomes n tokens. Put no space before a mask:
    in the gpt2 tokenizer the space belongs to the word after it."""
    length: Count | None = None
    """Tokens in a sample, prompt included; by default the model's block size. Of a run
    with data.end = given each sample's is drawn from the lengths of its records. Masks
    set their own length."""
    num_samples: Count = 4
    """Samples of each prompt."""
    prompts: Path | None = None
    """Many prompts: FILE.txt (or /dev/stdin), one per line, blank ones aside; or
    FILE.jsonl with the rows {"prompt": TEXT} or {"prompt": TEXT, "length": N}; or the
    folder of a prepared data set with prompts (its test split, if it has one)."""
    rows: tuple[Count, ...] = ()
    """Use only these of the --prompts, by number from 1."""
    until_end: bool = False
    """End each sample before the end-of-text that follows all given text: for decoders
    that were trained on prompts, and --mode l2r, which is then the default. Other modes
    fill in what follows the end before the text."""
    jsonl: Path | None = None
    """Write a JSON object per sample instead of printing it: text, prompt, tokens, the
    step and log-probability of each, the order in which they were generated, settings.
    Log-probabilities (nats) are those before temperature, top-k and top-p, also on the
    --html page. Model calls, token-forwards and seconds are totals over all samples up
    to then."""
    html: Path | None = None
    """Write a page that shows the samples filling in, step by step."""


@dataclass(frozen=True)
class Prompt:
    """A row of --prompts FILE.jsonl: a prompt, or a text with masks."""

    prompt: str
    length: int | None = None  # in tokens


@dataclass(frozen=True)
class Request:
    """A prompt of any source, with its place for messages."""

    place: str
    text: str
    length: int | None = None
    context: Context | None = None  # of a data set: the tokens, None to be generated


def main() -> None:
    arguments = tyro.cli(
        with_help(Arguments), prog="python sample.py", description=__doc__
    )
    with processes(arguments.device) as procs:
        sample(arguments, procs)


def sample(a: Arguments, procs: Processes) -> None:
    """Generate; the main process writes and prints the samples."""
    # 1. What can be wrong before a model is loaded.
    check_values(a)
    if a.prompt is not None and a.prompts is not None:
        raise UserError("give one of --prompt and --prompts")
    files = {"--jsonl": a.jsonl, "--html": a.html}
    outputs = Outputs(files, [a.run, a.prompts], a.overwrite)
    # The rows of a prepared data set are read once the model is there.
    of_data = a.prompts is not None and a.prompts.is_dir()
    requests = [] if of_data else read_prompts(a)
    dtype = pick_dtype(a.dtype, procs.device)

    # 2. The model, and what depends on it.
    loaded = load(a.run, a.weights, procs.device, a.block_size, a.checkpoint)
    if dtype == torch.bfloat16:
        loaded.model.bfloat16()
    config = loaded.model.config
    tokenizer = loaded.get_tokenizer()
    default = "l2r" if a.until_end else modes.default_mode(config)
    mode = a.decoding.mode or default
    if a.until_end and loaded.record_end is not None:
        raise UserError(
            "--until-end: this run knows the end of a record before its text "
            "(data.end), so samples end by themselves: leave it out"
        )
    if of_data:
        requests = read_dataset(a.prompts, loaded, tokenizer)
    for row in a.rows:
        check_value(row, Annotated[int, Interval(le=len(requests))], "--rows")
    contexts = {}
    for number, request in enumerate(requests):
        if a.rows and number + 1 not in a.rows:
            continue
        try:
            contexts[number] = context_of(request, a.length, loaded, tokenizer)
        except UserError as error:
            raise UserError(f"{request.place}: {error}") from None
    if not of_data:  # what looks like a special token in a prompt is text
        texts = [modes.MASK.sub("", requests[number].text) for number in contexts]
        for note in notes_on_special(tokenizer.count_special(texts)):
            procs.print0(f"note: {note}", file=sys.stderr)

    # 3. Samples.
    engine = a.decoding.engine(loaded.model, loaded.vocab_size)
    report = Report(a, mode, loaded, tokenizer, outputs, procs)
    for numbers, samples in modes.generate_samples(
        engine,
        modes.parse_mode(mode),
        contexts,
        a.seed,
        a.num_samples,
        procs,
        end=loaded.record_end,
        end_token=tokenizer.eot if a.until_end else None,
    ):
        if procs.main:
            report.add(samples, numbers, requests)
    if procs.main:
        report.finish()


@dataclass
class Report:
    """A report of the samples, written and printed as they come, and their cost."""

    a: Arguments
    mode: str  # as --mode has it
    loaded: Loaded
    tokenizer: Tokenizer
    outputs: Outputs
    procs: Processes
    lengths: list[int] = field(default_factory=list)  # of the samples
    pages: list[PageSample] = field(default_factory=list)  # for --html, at the end
    model_calls: int = 0
    token_forwards: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(
        self, samples: Generation, numbers: list[int], requests: list[Request]
    ) -> None:
        """Write and print some samples. numbers: of their requests."""
        self.model_calls += samples.model_calls
        self.token_forwards += samples.token_forwards
        records = sample_records(samples, self.tokenizer)
        for number, record in zip(numbers, records, strict=True):
            record["prompt_index"] = number
            record["prompt"] = requests[number].text
        if self.a.jsonl is None:
            self.print(records, several=len(requests) > 1)
        else:
            self.write(self.a.jsonl, records)
        for record in records:
            self.lengths.append(record["length"])
            if self.a.html is not None:
                pieces = self.tokenizer.pieces(record["tokens"])
                page = PageSample(pieces, record["step"], record["log_probs"])
                self.pages.append(page)

    def write(self, path: Path, records: list[dict]) -> None:
        """Write the samples with all that they depend on, and what they cost."""
        settings = self.settings()
        cost = self.cost()
        rows = [{**record, **cost, "settings": settings} for record in records]
        self.outputs.write_jsonl(path, rows, append=bool(self.lengths))

    def print(self, records: list[dict], several: bool) -> None:
        """Print the samples, and where there are several prompts the number of each."""
        for number, record in enumerate(records, len(self.lengths) + 1):
            title = f"sample {number}"
            if several:
                title += f" of prompt {record['prompt_index'] + 1}"
            show(f"=== {title} ===\n{record['text']}\n")

    def settings(self) -> dict:
        """Return everything that the samples depend on."""
        origin = provenance(
            self.a,
            self.loaded.model.wte.weight.dtype,
            self.procs.device,
            self.procs.world_size,
            checkpoint=self.loaded.description,
        )
        settings = dict(origin.pop("settings"))
        settings.update(origin)
        settings["mode"] = self.mode
        return settings

    def cost(self) -> dict:
        """Return what all samples cost so far."""
        return {
            "model_calls": self.model_calls,
            "token_forwards": self.token_forwards,
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    def finish(self) -> None:
        """Write the page, and print what there is and what it cost."""
        if self.a.jsonl is not None or self.a.html is not None:
            with self.outputs as outputs:
                if self.a.html is not None:
                    settings = {**self.settings(), **self.cost()}
                    shown = {k: v for k, v in settings.items() if v is not None}
                    outputs.write(self.a.html, render(self.pages, shown))
        shortest = min(self.lengths)
        longest = max(self.lengths)
        tokens = f"{shortest} to {longest}" if shortest < longest else str(longest)
        show(
            f"{counted(len(self.lengths), 'samples')} of {tokens} tokens "
            f"from {self.loaded.description}: {self.model_calls} model calls, "
            f"{self.token_forwards} token-forwards, "
            f"{time.perf_counter() - self.started:.2f} s",
            file=sys.stderr,
        )
        for path in (self.a.jsonl, self.a.html):
            if path is not None:
                show(f"wrote {path}", file=sys.stderr)


def read_prompts(a: Arguments) -> list[Request]:
    """Return the prompt of the command line, or those of a file."""
    if a.prompts is None:
        return [Request("--prompt", a.prompt or "")]
    is_stdin = str(a.prompts) == "/dev/stdin"
    if a.prompts.suffix not in (".txt", ".jsonl") and not is_stdin:
        raise UserError(
            f"--prompts {a.prompts}: give a .txt or .jsonl file, or a folder of "
            "prepared data"
        )
    requests = []
    for place, line in read_lines(a.prompts):
        prompt = Prompt(line)
        if a.prompts.suffix == ".jsonl":
            prompt = from_json(line, Prompt, place)
        requests.append(Request(place, prompt.prompt, prompt.length))
    return requests


def context_of(
    request: Request, length: int | None, loaded: Loaded, tokenizer: Tokenizer
) -> Context:
    """Return the tokens of a text, and None for each that is to be generated: at its
    masks, or where it has none behind it. length: of requests that have none."""
    text = request.text
    if request.length is not None:
        length = request.length
    has_masks = request.context is not None or modes.MASK.search(text) is not None
    if has_masks and length is not None:
        raise UserError("the text and its masks set the length: leave out the length")
    end = loaded.record_end
    longest = loaded.model.config.block_size
    if end is not None:
        longest = end.longest_in(longest)
    if request.context is not None:
        context = request.context
    elif has_masks:
        context = modes.encode_gaps(text, tokenizer, longest)
        if end is not None:
            context.append(end.token)
    else:
        context = modes.continued(tokenizer.encode(text), length, longest, end)
    if end is None:
        modes.check_start(context[0] is not None, loaded.scored_from)
    return context


def read_dataset(folder: Path, loaded: Loaded, tokenizer: Tokenizer) -> list[Request]:
    """Return the rows of a data set with prompts, with masks in place of the tokens to
    predict."""
    from aogpt.evaluation.eval_sets import open_questions  # not needed for text

    questions = open_questions(str(folder), None, loaded)
    roles = questions.roles
    contexts = modes.contexts_of(questions.tokens, roles.given, roles.lengths)
    requests = []
    rows = zip(questions.tokens, contexts, strict=True)
    for number, (tokens, context) in enumerate(rows, 1):
        text = ""
        # The context ends before the padding. A given end is no text.
        if loaded.record_end is not None:
            tokens = tokens[: len(context) - 1]
        for piece, token in zip(tokenizer.pieces(tokens), context, strict=False):
            text += "\0" if token is None else piece
        text = re.sub("\0+", lambda masks: f"[MASK:{len(masks[0])}]", text)
        requests.append(Request(f"row {number}", text, context=context))
    return requests


if __name__ == "__main__":
    run_script(main)
