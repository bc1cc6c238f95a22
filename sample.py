"""Generate text with a trained model.

Examples:
    python sample.py out/quickstart --mode mdm:steps=64
    python sample.py out/quickstart --mode l2r --prompt "The old horse" --jsonl FILE
    python sample.py out/quickstart --infill "She said[MASK:9] to him." --html FILE
    python sample.py out/quickstart --mode slots:block=8,group=4
    python sample.py out/own --prompts data/questions --rows 1 --html FILE"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from aogpt.checkpoints.load import Loaded, load
from aogpt.data.tokenizers import Tokenizer, notes_on_special
from aogpt.runtime.command_line import (
    TEXT,
    RunOptions,
    counted,
    run_script,
    show,
    visible,
    with_help,
)
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import json_object, read_lines
from aogpt.runtime.outputs import OutputOptions, Outputs, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling import gaps, modes
from aogpt.sampling.engine import Generation
from aogpt.sampling.modes import Context, DecodingOptions, sample_records
from aogpt.sampling.page import PageSample, render
from aogpt.sampling.records import (
    MOST_CONTEXTS,
    contexts_with_end,
    end_first,
    without_end,
)


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions, OutputOptions):
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")]
    prompt: Annotated[str | None, TEXT] = None
    """Text that every sample begins with."""
    length: Count | None = None
    """Tokens in a sample, prompt included; by default the model's block size. Of a run
    with data.end = given each sample's is drawn from the lengths of its records."""
    new_tokens: Count | None = None
    """Instead of --length: tokens to generate after the prompt."""
    num_samples: Count = 4
    """Samples of each prompt."""
    infill: Annotated[str | None, TEXT] = None
    """Text with masks, "It was a[MASK:12] and the[MASK:3].": [MASK:n] becomes n tokens.
    Put no space before a mask: in the gpt2 tokenizer the space belongs to the word
    after it."""
    prompts: Path | None = None
    """Many prompts: FILE.txt (or /dev/stdin), one per line; or FILE.jsonl with the rows
    {"prompt": TEXT}, {"prompt": TEXT, "length": N} or {"infill": TEXT}; or the folder
    of a prepared data set with prompts (its test split, if it has one)."""
    rows: tuple[Count, ...] = ()
    """Use only these of the --prompts, by number from 1."""
    until_end: bool = False
    """Cut each sample before the end-of-text that follows all given text; for models
    that were trained on prompts. The default --mode is then l2r, as other modes fill in
    what follows the end as well.
    Log-probabilities that depended on what is cut are computed once more without it."""
    jsonl: Path | None = None
    """Write a JSON object per sample instead of printing it: text, prompt, tokens, the
    step and log-probability of each, the order in which they were generated, settings.
    Log-probabilities (nats) are those before temperature, top-k and top-p, also on the
    --html page. Model calls, token-forwards and seconds are totals over all samples up
    to then."""
    html: Path | None = None
    """Write a page that shows the samples filling in, step by step."""


@dataclass(frozen=True)
class Request:
    """A prompt, or a text with masks."""

    place: str  # where the user wrote it, for messages
    kind: Literal["prompt", "infill"]
    text: str
    length: int | None = None  # in tokens, of a prompt
    context: Context | None = None  # the tokens, where they are known


@dataclass(frozen=True)
class Session:
    """The model and the options, which stay the same from request to request."""

    options: DecodingOptions  # with a mode
    loaded: Loaded
    tokenizer: Tokenizer
    outputs: Outputs
    procs: Processes
    longest: int  # tokens of a sample, without the end of a record


def main() -> None:
    arguments = tyro.cli(
        with_help(Arguments), prog="python sample.py", description=__doc__
    )
    with processes(arguments.device) as procs:
        sample(arguments, procs)


def sample(a: Arguments, procs: Processes) -> None:
    """Generate; the main process writes and prints the samples."""
    # 1. What can be wrong before a model is loaded.
    check_arguments(a, procs)
    files = {"--jsonl": a.jsonl, "--html": a.html}
    outputs = Outputs(files, [a.run, a.prompts], a.overwrite)
    of_data = a.prompts is not None and a.prompts.is_dir()
    requests = []
    if not of_data:
        requests = read_requests(a)
    dtype = pick_dtype(a.dtype, procs.device)

    # 2. The model, and the options that depend on it.
    loaded = load(a.run, a.weights, procs.device, a.block_size, a.checkpoint)
    if dtype == torch.bfloat16:
        loaded.model.bfloat16()
    config = loaded.model.config
    tokenizer = loaded.get_tokenizer()
    if of_data:
        requests = read_dataset(a.prompts, loaded, tokenizer)
    for row in a.rows:
        if row > len(requests):
            raise UserError(
                f"--rows {row}: there are {counted(len(requests), 'prompts')}"
            )
    options = a.decoding
    if options.mode is None:
        mode = "l2r" if a.until_end else modes.default_mode(config)
        options = replace(options, mode=mode)
    modes.check_mode(options.plan, config)
    if a.until_end and loaded.record_end is not None:
        raise UserError(
            "--until-end: this run knows the end of a record before its text "
            "(data.end), so samples end by themselves: leave it out"
        )
    has_prompts = of_data or any(request.text for request in requests)
    if loaded.of_records and loaded.record_end is None and not has_prompts:
        procs.print0(modes.RECORDS_NOTE, file=sys.stderr)

    # 3. Samples.
    longest = config.block_size
    if loaded.record_end is not None:
        longest = loaded.record_end.longest_in(longest)
    session = Session(options, loaded, tokenizer, outputs, procs, longest)
    fill(a, session, requests)


def check_arguments(a: Arguments, procs: Processes) -> None:
    """Raise UserError for options that exclude each other."""
    check_values(a)
    if a.length and a.new_tokens:
        raise UserError(
            "--length counts the prompt, --new-tokens does not: give one of them"
        )
    sources = [a.prompt, a.infill, a.prompts]
    if sum(source is not None for source in sources) > 1:
        raise UserError(
            "give one of --prompt, --infill and --prompts (whose .jsonl holds both)"
        )


BOLD = "\033[1m"
RESET = "\033[0m"


def fill(a: Arguments, session: Session, requests: list[Request]) -> None:
    """Generate the samples of some requests; write and print them as they come."""
    loaded = session.loaded
    # 1. What to generate: contexts, each with the number of its request.
    encoded = encode_all(a, session, requests)
    num_samples = a.num_samples
    end = loaded.record_end
    if end is not None:  # samples of one context differ in length
        encoded = contexts_with_end(
            end, encoded, a.seed, num_samples, longest=session.longest
        )
        num_samples = 1
    contexts = list(encoded.values())
    keys = list(encoded)
    numbers = [key % MOST_CONTEXTS for key in keys]
    engine = session.options.engine(loaded.model, loaded.vocab_size)
    plan = session.options.plan
    note = modes.block_note(plan, longest=max(map(len, contexts)))
    if note:
        session.procs.print0(note, file=sys.stderr)
    end_token = session.tokenizer.eot if a.until_end else None

    # 2. Part after part.
    report = Report(a, session, several=max(numbers) > 0)
    for part in modes.parts_of(len(contexts), num_samples):
        part_contexts = contexts[part.contexts.start : part.contexts.stop]
        part_keys = keys[part.contexts.start : part.contexts.stop]
        part_numbers = numbers[part.contexts.start : part.contexts.stop]
        planned = modes.plan_samples(
            plan,
            part_contexts,
            a.seed,
            num_samples=len(part.samples),
            keys=part_keys,
            first=part.samples.start,
        )
        if end is not None:
            planned = planned._replace(plan=end_first(planned.plan))
        if a.until_end and report.count == 0:
            note = modes.end_note(planned.plan)
            if note:
                session.procs.print0(note, file=sys.stderr)
        samples = modes.generate_distributed(
            engine, planned, session.procs, end_token=end_token
        )
        if not session.procs.main:
            continue
        if end is not None:
            samples = without_end(samples)
        prompts = [(requests[n].kind, requests[n].text) for n in part_numbers]
        records = sample_records(samples, session.tokenizer, prompts)
        for record in records:
            record["prompt_index"] = part_numbers[record["prompt_index"]]
        report.add(records, samples)
    if session.procs.main:
        report.finish()


@dataclass
class Report:
    """A report of the samples, written and printed as they come, and their cost."""

    a: Arguments
    session: Session
    several: bool  # whether there are several prompts
    count: int = 0  # of samples
    lengths: set[int] = field(default_factory=set)
    page_records: list[dict] = field(default_factory=list)  # for --html, at the end
    model_calls: int = 0
    token_forwards: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, records: list[dict], samples: Generation) -> None:
        """Write and print the records of a part. samples: those of the records, and
        what they cost."""
        self.model_calls += samples.model_calls
        self.token_forwards += samples.token_forwards
        self.seconds = round(time.perf_counter() - self.started, 3)
        if self.a.jsonl:
            self.write(records)
        if self.a.html:
            self.page_records += records
        if not self.a.jsonl:
            first = 1 + self.count
            print_samples(records, self.session.tokenizer, self.several, first)
        self.count += len(records)
        for record in records:
            self.lengths.add(record["length"])

    def write(self, records: list[dict]) -> None:
        """Write the records to the file of --jsonl."""
        settings = self.settings()
        rows = []
        for record in records:
            row = dict(record)
            row.update(self.cost())
            row["settings"] = settings
            rows.append(row)
        self.session.outputs.write_jsonl(self.a.jsonl, rows, append=self.count > 0)

    def settings(self) -> dict:
        """Return everything that the samples depend on."""
        loaded = self.session.loaded
        procs = self.session.procs
        origin = provenance(
            self.a,
            loaded.model.wte.weight.dtype,
            procs.device,
            procs.world_size,
            checkpoint=loaded.description,
        )
        settings = dict(origin.pop("settings"))
        settings.update(vars(self.session.options))  # with a mode
        settings.update(origin)
        return settings

    def cost(self) -> dict:
        """Return what all samples cost so far."""
        return {
            "model_calls": self.model_calls,
            "token_forwards": self.token_forwards,
            "seconds": self.seconds,
        }

    def finish(self) -> None:
        """Write the page, and print what there is and what it cost."""
        if self.a.jsonl or self.a.html:
            with self.session.outputs as outputs:
                if self.a.html:
                    outputs.write(self.a.html, self.page())
        shortest = min(self.lengths)
        longest = max(self.lengths)
        tokens = str(longest)
        if shortest < longest:
            tokens = f"{shortest} to {longest}"
        line = (
            f"{counted(self.count, 'samples')} of {tokens} tokens "
            f"from {self.session.loaded.description}: "
            f"{self.model_calls} model calls, {self.token_forwards} token-forwards, "
            f"{self.seconds:.2f} s"
        )
        changed = modes.changed_settings(vars(self.session.options))
        if changed:
            line += f"; {', '.join(changed)}"
        show(line, file=sys.stderr)
        for path in (self.a.jsonl, self.a.html):
            if path:
                show(f"wrote {path}", file=sys.stderr)

    def page(self) -> str:
        """Return the page of --html."""
        pages = []
        for record in self.page_records:
            page = PageSample(
                pieces=self.session.tokenizer.pieces(record["tokens"]),
                step=record["step"],
                log_probs=record["log_probs"],
            )
            pages.append(page)
        settings = self.settings()
        settings.update(self.cost())
        shown = {key: value for key, value in settings.items() if value is not None}
        return render(pages, shown)


def read_requests(a: Arguments) -> list[Request]:
    """Return the prompts and texts of the command line, or those of a file."""
    if a.infill is not None:
        return [Request("--infill", "infill", a.infill)]
    if a.prompts is None:
        return [Request("--prompt", "prompt", a.prompt or "")]
    is_stdin = str(a.prompts) == "/dev/stdin"
    if a.prompts.suffix not in (".txt", ".jsonl") and not is_stdin:
        raise UserError(
            f"--prompts {a.prompts}: give a .txt or .jsonl file, or a folder of "
            "prepared data"
        )
    requests = []
    for place, line in read_lines(a.prompts, "--prompts"):
        if a.prompts.suffix == ".jsonl":
            requests.append(read_request(place, line))
        else:
            requests.append(Request(place, "prompt", line))
    if not requests:
        raise UserError(f"--prompts {a.prompts}: it has no prompt; write one per line")
    return requests


def read_request(place: str, line: str) -> Request:
    """Return the request on one line of a .jsonl file of prompts."""
    row = json_object(line, place)
    kinds = [key for key in ("prompt", "infill") if key in row]
    unknown = [key for key in row if key not in ("prompt", "infill", "length")]
    if len(kinds) != 1 or unknown:
        keys = ", ".join(map(repr, row)) or "(none)"
        raise UserError(
            f'{place}: give {{"prompt": TEXT}}, also with "length": N, or '
            f'{{"infill": TEXT}}; found keys {keys}'
        )
    kind = kinds[0]
    for key, type_, name in ((kind, str, "text"), ("length", int, "a whole number")):
        # `isinstance` would take true for 1.
        if key in row and type(row[key]) is not type_:
            raise UserError(
                f'{place}: "{key}" must be {name}, not {json.dumps(row[key])[:40]}'
            )
    return Request(place, kind, row[kind], row.get("length"))


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
        requests.append(Request(f"row {number}", "infill", text, context=context))
    return requests


def encode_all(
    a: Arguments, session: Session, requests: list[Request]
) -> dict[int, Context]:
    """Return the texts to fill in of each request that fits, by its index. Print how
    many are too long. Raises UserError if none fits."""
    encoded = {}
    too_long = []
    special: Counter[str] = Counter()
    space_note = None
    for number, request in enumerate(requests):
        if a.rows and number + 1 not in a.rows:
            continue
        if request.kind == "infill" and not request.context:
            space_note = space_note or gaps.space_note(request.text, session.tokenizer)
        if not request.context:
            text = gaps.MASK.sub("", request.text)
            special += session.tokenizer.count_special([text])
        try:
            encoded[number] = encode(a, session, request)
        except gaps.TooLong as error:
            too_long.append(f"{request.place}: {error}")
        except UserError as error:
            raise UserError(f"{request.place}: {error}") from None
    if not encoded:
        raise gaps.TooLong(too_long[0])
    if session.procs.main:
        for note in [*notes_on_special(special), space_note]:
            if note is not None:
                show(f"note: {note}", file=sys.stderr)
    if too_long and session.procs.main:
        show(
            f"skipped {len(too_long)} of {len(requests)} prompts, which are too long; "
            f"the first is {too_long[0]}",
            file=sys.stderr,
        )
    return encoded


def encode(a: Arguments, session: Session, request: Request) -> Context:
    """Return the token ids of a sample, None where they are to be generated.

    Raises UserError if the model cannot fill it in, TooLong if it is too long."""
    config = session.loaded.model.config
    scored_from = session.loaded.scored_from
    if request.kind == "prompt":
        context = prompt_context(a, session, request)
        if session.loaded.record_end is None:  # whose end is known before all text
            modes.check_context(context, config, scored_from)
        return context
    for option, value in (
        ("--length", a.length),
        ("--new-tokens", a.new_tokens),
        ('"length"', request.length),
    ):
        if value is not None:
            raise UserError(
                f"the text and its masks set the length: leave out {option}"
            )
    context = request.context
    if context is None:
        longest = session.longest
        context = gaps.encode_gaps(request.text, session.tokenizer, longest)
        if session.loaded.record_end is not None:
            context.append(session.loaded.record_end.token)
    modes.check_context(context, config, scored_from)
    return context


def prompt_context(a: Arguments, session: Session, request: Request) -> Context:
    """Return the tokens of a prompt, and None for each that is to be generated."""
    longest = session.longest
    end = session.loaded.record_end
    if gaps.MASK.search(request.text):
        gaps.refuse_masks(request.text, "give it to --infill, or leave it out")
    prompt = session.tokenizer.encode(request.text)
    if request.length is not None:
        total = request.length
        option = "length"
    elif a.new_tokens:
        total = len(prompt) + a.new_tokens
        option = "--new-tokens and prompt together"
    elif a.length is None and end is not None and len(prompt) <= longest:
        return prompt  # the length is drawn: `contexts_with_end`
    else:
        total = a.length or longest
        option = "--length"
    if total > longest and not prompt:
        raise gaps.TooLong(
            f"{option} is {total}, but the model takes at most {longest} tokens"
        )
    if not len(prompt) < total <= longest:
        raise gaps.TooLong(
            f"the prompt has {len(prompt)} tokens and {option} is {total}: it must "
            f"exceed the prompt and be at most {longest}, what the model takes"
        )
    context = prompt + [None] * (total - len(prompt))
    return context if end is None else [*context, end.token]


def print_samples(
    records: list[dict], tokenizer: Tokenizer, several: bool, first: int
) -> None:
    """Print the samples; on a terminal generated tokens are bold beside given ones.
    several: name the prompt of each; first: the number of the first one."""
    for number, record in enumerate(records, first):
        title = f"sample {number}"
        if several:
            title += f" of prompt {record['prompt_index'] + 1}"
        sys.stdout.write(f"=== {title} ===\n")
        text = visible(record["text"])
        # Escape sequences are for a terminal that knows them.
        is_styled = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if -1 in record["step"] and is_styled:
            pieces = tokenizer.pieces(record["tokens"])
            text = emphasised(pieces, record["step"])
        sys.stdout.write(f"{text}\n\n")  # not show(), which would escape the bold type


def emphasised(pieces: list[str], step: list[int]) -> str:
    """Return a text from its tokens, in which those are bold that were generated, not
    given (step -1)."""
    text = ""
    tokens = zip(pieces, step, strict=True)
    for is_given, run in itertools.groupby(tokens, key=lambda token: token[1] < 0):
        shown = visible("".join(piece for piece, _ in run))
        text += shown if is_given else f"{BOLD}{shown}{RESET}"
    return text


if __name__ == "__main__":
    run_script(main)
