"""Generate text with a trained model.

Examples:
    python sample.py out/quickstart --mode mdm --steps 64
    python sample.py out/quickstart --mode l2r --prompt "The old horse" --num-samples 8 --jsonl FILE
    python sample.py out/quickstart --mode adaptive --infill "She said[MASK:9] to him." --html FILE
    python sample.py out/quickstart --order slots:block=8 --group-size 4
    python sample.py out/own --prompts data/questions --rows 1 --html FILE"""

import itertools
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from aogpt.checkpoints.load import Loaded, load
from aogpt.data.tokenizers import Tokenizer
from aogpt.runtime.command_line import ModelOptions, counted, run_script, show, visible
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import json_object, read_lines
from aogpt.runtime.outputs import OutputOptions, Outputs, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.randomness import INFILL_SEEDS, philox_bits
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling import gaps, live, modes, resampling
from aogpt.sampling.engine import Generation
from aogpt.sampling.gaps import Gapped
from aogpt.sampling.modes import Context, DecodingOptions, sample_records
from aogpt.sampling.page import PageSample, render

TEXT = tyro.conf.arg(
    constructor=str, help_behavior_hint="(default: None)"
)  # tyro: None


@dataclass(frozen=True)
class Arguments(ModelOptions, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights, or Hugging Face repo id."""
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")]
    prompt: Annotated[str | None, TEXT] = None
    """Text that every sample begins with."""
    length: Count | None = None
    """Tokens in a sample, prompt included; by default the model's block size."""
    new_tokens: Count | None = (
        None  # Instead of --length: tokens to generate after the prompt.
    )
    num_samples: Count | None = (
        None  # Samples of each prompt: 4, or 1 with --interactive.
    )
    infill: Annotated[str | None, TEXT] = None
    """Text with masks, "It was a[MASK:12] and the[MASK:3].": [MASK:n] becomes n tokens. [MASK:2-12]
    tries every length from 2 to 12, --num-samples times each, and shows the best filling.
    Put no space before a mask: in the gpt2 tokenizer the space belongs to the word after it.
    A plain GPT draws at least 64 continuations, at 0.75 where --temperature is 1, and takes
    --num-samples of them in proportion to how probable they and the rest of the text are."""
    candidates: Count | None = None
    """Infilling: show only this many distinct fillings, ranked by the log-probability per token of
    the known text on their right (a plain GPT: of the whole text). By default 1 if a mask has
    several lengths, else all."""
    prompts: Path | None = None
    """Many prompts: FILE.txt (or /dev/stdin), one per line; or FILE.jsonl with the rows
    {"prompt": TEXT}, {"prompt": TEXT, "length": N} or {"infill": TEXT}; or the folder of a prepared
    data set with prompts (its test split, if it has one)."""
    rows: tuple[Count, ...] = ()
    """Use only these of the --prompts, by number from 1."""
    truncate: Literal["no", "left"] = "no"
    """What to do with prompts that are too long. no: skip them. left: drop their first tokens, so
    that there is room for --new-tokens, or else for half of the length (not with masks)."""
    stop: tuple[str, ...] = ()
    """Cut each sample before the first of these texts."""
    until_end: bool = False
    """Cut each sample before its end-of-text; for models that were trained on prompts. The
    default --mode is then l2r, as other modes fill in what follows the end as well."""
    jsonl: Path | None = None
    """Write a JSON object per sample instead of printing it: text, prompt, tokens, the step and
    log-probability of each, the order in which they were generated, settings. Log-probabilities
    (nats) are those before temperature, top-k and top-p, also on the --html page; after --refine
    those of the final text, each token given all before it in that order. Model calls,
    token-forwards and seconds are totals over all samples up to then."""
    html: Path | None = None
    """Write a page that shows the samples filling in, step by step."""
    live: bool = False
    """On a terminal: replay each finished sample in 2 to 6 seconds. A dim bar is a token not yet
    known; colors show how probable a token was. Any key ends a replay, Ctrl-C ends all."""
    interactive: bool = False
    """Read lines from the terminal or standard input: masks are filled in, other text is continued
    by 40 tokens. An empty line repeats the last one with the next seed; "exit" or Ctrl-D ends."""


@dataclass(frozen=True)
class Request:
    """A prompt, or a text with masks."""

    place: str  # where the user wrote it, for messages
    kind: Literal["prompt", "infill"]
    text: str
    length: int | None = None  # in tokens, of a prompt
    context: Context | None = None  # the tokens, where they are known


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        sample(arguments, procs)


def sample(a: Arguments, procs: Processes) -> None:
    """Generate; the main process writes and prints the samples."""
    check_values(a)
    if a.decoding.mode:
        modes.with_mode_defaults(a.decoding)
    if a.length and a.new_tokens:
        raise UserError(
            "--length counts the prompt, --new-tokens does not: give one of them"
        )
    if sum(value is not None for value in (a.prompt, a.infill, a.prompts)) > 1:
        raise UserError(
            "give one of --prompt, --infill and --prompts (whose .jsonl holds both)"
        )
    if a.decoding.require and (a.stop or a.until_end):
        raise UserError(
            "--require: a sample that is cut may lose the word; leave out --stop and "
            "--until-end"
        )
    if "" in a.stop:
        raise UserError("--stop is empty; give the text before which samples are cut")
    names = ("prompt", "infill", "prompts", "jsonl", "html")
    given = [f"--{name}" for name in names if getattr(a, name) is not None]
    if a.interactive and (given := given + ["torchrun"] * (procs.world_size > 1)):
        raise UserError(
            f"--interactive reads lines and shows the samples: leave out {given[0]}"
        )
    usual = (a.candidates or 1) if a.interactive else 4
    a = replace(a, num_samples=a.num_samples or usual)
    files = {"--jsonl": a.jsonl, "--html": a.html}
    outputs = Outputs(files, [a.run, a.prompts], a.overwrite)
    of_data = a.prompts is not None and a.prompts.is_dir()
    requests = [] if of_data else read_requests(a)
    no_gaps = not (a.interactive or of_data) and all(
        r.kind == "prompt" for r in requests
    )
    if a.candidates and no_gaps:
        raise UserError(
            "--candidates chooses among fillings: give --infill, or leave it out"
        )
    loaded = load(a.run, a.weights, procs.device, a.block_size, a.checkpoint)
    loaded.model.to(pick_dtype(a.dtype, procs.device))
    tokenizer = loaded.get_tokenizer()
    if of_data:
        requests = read_dataset(a.prompts, loaded, tokenizer)
    if wrong := [row for row in a.rows if row > len(requests)]:
        raise UserError(
            f"--rows {wrong[0]}: there are {counted(len(requests), 'prompts')}"
        )
    options = modes.with_mode_defaults(
        a.decoding, loaded.model.config.l2r_only, a.until_end
    )
    if a.until_end and (note := modes.end_note(options)):
        procs.print0(note, file=sys.stderr)
    modes.check_mode(options, loaded.model.config)
    options = modes.with_words(options, tokenizer)
    if not a.interactive:
        return fill(a, requests, options, loaded, tokenizer, outputs, procs)

    def fill_line(line: str, seed: int) -> None:
        length = a.length
        new = a.new_tokens
        kind = "prompt"
        if gaps.MASK.search(line):
            length = None
            new = None
            kind = "infill"
        elif not (length or new):
            new = max(
                1, min(40, loaded.model.config.block_size - len(tokenizer.encode(line)))
            )
        changed = replace(
            a,
            seed=seed,
            length=length,
            new_tokens=new,
        )
        request = Request("this line", kind, line)
        fill(changed, [request], options, loaded, tokenizer, outputs, procs)

    live.interact(fill_line, a.seed)


MOST_RANKED = 2**14  # samples that are ranked, all of them in memory


def fill(
    a: Arguments,
    requests,
    options,
    loaded: Loaded,
    tokenizer,
    outputs,
    procs,
) -> None:
    """Generate the samples of some requests; write and print them as they come."""
    encoded = encode_all(requests, tokenizer, a, loaded, procs)
    gapped = {n: text for n, text in encoded if isinstance(text, Gapped)}
    numbers = [n for n, text in encoded if not isinstance(text, Gapped)]
    contexts = [text for _, text in encoded if not isinstance(text, Gapped)]
    lengths = Counter(numbers)  # how many each request has
    fixed_infill = any(
        requests[n].kind == "infill" and count == 1 for n, count in lengths.items()
    )
    count = a.num_samples
    if fixed_infill and a.candidates:
        count = max(count, a.candidates)
    # Ranked are whole texts, also after their end, all fillings of a request together.
    ranks = bool(a.candidates) or len(lengths) < len(numbers)
    parts = modes.parts_of(len(contexts), count)
    if ranks and contexts:
        parts = [modes.Part(range(len(contexts)), range(count))]
        if len(contexts) * count > MOST_RANKED:
            raise UserError(
                f"{len(contexts) * count:,} fillings to rank, more than {MOST_RANKED:,}: "
                "lower --num-samples or --candidates, or give fewer lengths"
            )
    options = modes.with_default_steps(options, contexts)
    end_token = tokenizer.eot if a.until_end and not ranks else None
    report = Report(a, options, loaded, tokenizer, outputs, procs)
    report.several = encoded[-1][0] > 0
    with outputs:
        for part in parts:
            chosen = contexts[part.contexts.start : part.contexts.stop]
            of_part = numbers[part.contexts.start : part.contexts.stop]
            planned = modes.plan_samples(
                options, chosen, a.seed, len(part.samples), of_part, part.samples.start
            )
            samples = modes.generate_distributed(
                loaded.model,
                planned,
                options,
                loaded.vocab_size,
                procs,
                end_token=end_token,
            )
            if not procs.main:
                continue
            prompts = [(requests[n].kind, requests[n].text) for n in of_part]
            records = sample_records(samples, tokenizer, prompts, a.until_end, a.stop)
            if ranks:
                rows = [tokens for tokens, *_ in samples.rows()]
                records = best_fillings(loaded.model, chosen, rows, records, of_part, a)
            for record in records:
                record["prompt_index"] = of_part[record["prompt_index"]]
            report.add(records, samples)
        if procs.main:
            for number, text in gapped.items():
                report.add(
                    *resample(a, number, requests[number], text, options, loaded)
                )
            report.finish()


def resample(
    a: Arguments,
    number: int,
    request: Request,
    gapped: Gapped,
    options: DecodingOptions,
    loaded: Loaded,
) -> tuple[list[dict], Generation]:
    """Fill the gaps of request `number` with a plain GPT; return the records and samples."""
    choice = options.choice
    if choice.temperature == 1:
        choice = replace(choice, temperature=resampling.TEMPERATURE)
    seed = a.seed
    if number:  # other random numbers for each request
        seed = int(philox_bits(seed, number, range(1), 1, INFILL_SEEDS)[0, 0]) >> 1
    try:
        weighted = resampling.fill_by_resampling(
            loaded.model,
            gapped,
            seed=seed,
            draws=min(max(resampling.DRAWS, a.num_samples), modes.MOST_AT_ONCE),
            choice=choice,
            vocab_size=loaded.vocab_size,
        )
    except UserError as error:
        raise UserError(f"{request.place}: {error}") from None
    ranks = bool(a.candidates) or gapped.combinations > 1
    if ranks:
        chosen = list(range(len(weighted.tokens)))[: a.candidates or 1]
    else:
        chosen = weighted.resampled(a.num_samples, seed)
    samples = resampling.as_generation(loaded.model, weighted, chosen)
    prompts = [("infill", request.text)]
    records = sample_records(
        samples, loaded.get_tokenizer(), prompts, a.until_end, a.stop
    )
    for record, i in zip(records, chosen, strict=True):
        record["prompt_index"] = number
        record["weight"] = weighted.weights[i]
        record["effective_sample_size"] = weighted.effective_sample_size
        if ranks:
            record["scores"] = asdict(weighted.scores[i])
    return records, samples


class Report:
    """Writes and prints samples as they come, and what all of them cost."""

    def __init__(
        self,
        a: Arguments,
        options,
        loaded: Loaded,
        tokenizer,
        outputs,
        procs,
    ):
        self.a = a
        self.options = options
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.outputs = outputs
        self.several = False  # whether there are several prompts
        self.count = 0
        self.with_banned = 0
        self.lengths = set()
        self.kept = []  # records for --html and --midi, which are written at the end
        self.cost = {"model_calls": 0, "token_forwards": 0, "seconds": 0.0}
        self.started = time.perf_counter()
        origin = provenance(
            a,
            loaded.model.wte.weight.dtype,
            procs.device,
            procs.world_size,
            checkpoint=loaded.describe(),
        )
        # vars(options): with their defaults
        self.settings = origin.pop("settings") | vars(options) | origin

    def add(self, records: list[dict], samples: Generation) -> None:
        """Write and print the records of a part, which `samples` are."""
        self.cost["model_calls"] += samples.model_calls
        self.cost["token_forwards"] += samples.token_forwards
        self.cost["seconds"] = round(time.perf_counter() - self.started, 3)
        if self.a.jsonl:
            rows = [{**r, **self.cost, "settings": self.settings} for r in records]
            if self.count == 0:
                self.outputs.write_jsonl(self.a.jsonl, rows)
            else:
                self.outputs.append_jsonl(self.a.jsonl, rows)
        if self.a.html:
            self.kept += records
        if not self.a.jsonl or (self.a.live and live.can_style()):
            print_samples(
                records, self.tokenizer, self.a.live, self.several, 1 + self.count
            )
        self.count += len(records)
        self.with_banned += modes.banned_count(records, self.options.ban)
        self.lengths |= {record["length"] for record in records}

    def finish(self) -> None:
        """Write the page, and print what there is and what it cost."""
        if self.a.html:
            pages = []
            for record in self.kept:
                pieces = self.tokenizer.pieces(record["tokens"])
                page = PageSample(
                    pieces, record["step"], record["log_probs"], caption=caption(record)
                )
                pages.append(page)
            values = (self.settings | self.cost).items()
            known = {key: value for key, value in values if value is not None}
            self.outputs.write(self.a.html, render(pages, known))
        if self.with_banned:
            show(
                f"note: {counted(self.with_banned, 'samples have')} a word of --ban, given, "
                "as part of another word, in other tokens, or drawn in one step; one "
                "token a step helps",
                file=sys.stderr,
            )
        tokens = " to ".join(map(str, sorted({min(self.lengths), max(self.lengths)})))
        source = f"from {self.loaded.describe()}"
        if self.a.interactive:
            source = f"with seed {self.a.seed}"
        show(
            f"{counted(self.count, 'samples')} of {tokens} tokens {source}: "
            f"{self.cost['model_calls']} model calls, "
            f"{self.cost['token_forwards']} token-forwards, "
            f"{self.cost['seconds']:.2f} s",
            file=sys.stderr,
        )


def best_fillings(
    model,
    contexts,
    rows,
    records,
    numbers: list[int],
    a: Arguments,
) -> list[dict]:
    """The records, of which only the best fillings of each text with masks, best first, with
    scores. rows: all token ids of each sample; numbers: the index of each context's request."""
    kept = []
    lengths = Counter(numbers)
    count = len(rows) // len(contexts)
    for number, places in itertools.groupby(
        range(len(rows)), lambda i: numbers[i // count]
    ):
        several = lengths[number] > 1
        group = list(places)
        is_infill = "infill" in records[group[0]]
        if (
            several or not is_infill
        ):  # `count` is larger where --candidates asks for more
            group = [i for i in group if i % count < a.num_samples]
        if not (is_infill and (several or a.candidates)):
            kept += [records[i] for i in group]
            continue
        given = [contexts[i // count] for i in group]
        texts = [rows[i] for i in group]
        found = gaps.best_fillings(model, given, texts, a.candidates or 1)
        kept += [records[group[i]] | {"scores": asdict(scores)} for i, scores in found]
    return kept


def caption(record: dict) -> str:
    """Length and log-probabilities (nats per token) of a ranked filling; "" for other samples."""
    if "scores" not in record:
        return ""
    names = {"text to the right": "right", "filling": "filling"}
    values = {name: record["scores"][key] for name, key in names.items()}
    told = [
        f"{name} {value:.3f}" for name, value in values.items() if value == value
    ]  # no NaN
    blanks = sum(step >= 0 for step in record["step"])
    return f"{blanks} tokens; log p a token: {', '.join(told)}"


def read_requests(a: Arguments) -> list[Request]:
    if a.infill is not None:
        return [Request("--infill", "infill", a.infill)]
    if a.prompts is None:
        return [Request("--prompt", "prompt", a.prompt or "")]
    stdin = str(a.prompts) == "/dev/stdin"
    if a.prompts.suffix not in (".txt", ".jsonl") and not stdin:
        known = "a .txt or .jsonl file, or a folder of prepared data"
        raise UserError(f"--prompts {a.prompts}: give {known}")
    lines = read_lines(a.prompts, "--prompts")
    is_text = a.prompts.suffix != ".jsonl"
    requests = [
        Request(place, "prompt", line) if is_text else read_request(place, line)
        for place, line in lines
    ]
    if not requests:
        raise UserError(f"--prompts {a.prompts}: it has no prompt; write one per line")
    return requests


def read_request(place: str, line: str) -> Request:
    """The request on one line of a .jsonl file of prompts."""
    row = json_object(line, place)
    kinds = row.keys() & {"prompt", "infill"}
    if len(kinds) != 1 or row.keys() - {"prompt", "infill", "length"}:
        found = ", ".join(map(repr, row)) or "(none)"
        wanted = '{"prompt": TEXT}, also with "length": N, or {"infill": TEXT}'
        raise UserError(f"{place}: give {wanted}; found keys {found}")
    (kind,) = kinds
    for key, type_, name in ((kind, str, "text"), ("length", int, "a whole number")):
        if (
            key in row and type(row[key]) is not type_
        ):  # `isinstance` would take true for 1
            raise UserError(
                f'{place}: "{key}" must be {name}, not {json.dumps(row[key])[:40]}'
            )
    return Request(place, kind, row[kind], row.get("length"))


def read_dataset(
    folder: Path,
    loaded: Loaded,
    tokenizer: Tokenizer,
) -> list[Request]:
    """The rows of a data set with prompts, with masks in place of the tokens to predict."""
    from aogpt.evaluation.answers import open_questions  # not needed for text

    questions = open_questions(str(folder), None, loaded)
    roles = questions.roles
    requests = []
    contexts = modes.contexts_of(questions.tokens, roles.given, roles.lengths)
    for number, (tokens, context) in enumerate(
        zip(questions.tokens, contexts, strict=True), 1
    ):
        pairs = zip(tokenizer.pieces(tokens), context, strict=False)  # not the padding
        text = "".join("\0" if token is None else piece for piece, token in pairs)
        text = re.sub("\0+", lambda masks: f"[MASK:{len(masks[0])}]", text)
        requests.append(Request(f"row {number}", "infill", text, context=context))
    return requests


def encode_all(
    requests,
    tokenizer,
    a: Arguments,
    loaded: Loaded,
    procs,
) -> list[tuple[int, Context | Gapped]]:
    """Pairs of the index of a request that fits and one of its texts to fill in; prints how
    many requests are too long. Raises UserError if none fits."""
    found = {}
    too_long = []
    for number, request in enumerate(requests):
        if a.rows and number + 1 not in a.rows:
            continue
        try:
            found[number] = encode(request, tokenizer, a, loaded)  # one per length
        except gaps.TooLong as error:
            too_long.append(f"{request.place}: {error}")
        except UserError as error:
            raise UserError(f"{request.place}: {error}") from None
    if not found:
        raise gaps.TooLong(too_long[0])
    if too_long and procs.main:
        told = f"skipped {len(too_long)} of {len(requests)} prompts, which are too long"
        show(
            f"{told} (--truncate left cuts prompts); the first is {too_long[0]}",
            file=sys.stderr,
        )
    return [
        (number, context) for number, several in found.items() for context in several
    ]


def encode(
    request: Request,
    tokenizer: Tokenizer,
    a: Arguments,
    loaded: Loaded,
) -> list[Context | Gapped]:
    """The token ids of a sample, None where they are to be generated, for each length that
    the request allows; for gaps of a plain GPT one `Gapped`. Raises UserError if the model
    cannot fill it in, TooLong if it is too long."""
    c = loaded.model.config
    if request.kind == "infill":
        lengths = {
            "--length": a.length,
            "--new-tokens": a.new_tokens,
            '"length"': request.length,
        }
        if option := next(
            (name for name, value in lengths.items() if value is not None), None
        ):
            raise UserError(
                f"the text and its masks set the length: leave out {option}"
            )
        if request.context:
            gapped = gaps.gapped_of(request.context)
        else:
            gapped = gaps.encode_gaps(request.text, tokenizer, c.block_size)
        if c.l2r_only and not gapped.only_continues:
            modes.check_start(bool(gapped.known[0]), loaded.scored_from)
            return [gapped]
        found = gapped.contexts(c.block_size)
    else:
        gaps.refuse_masks(request.text, "give it to --infill, or leave it out")
        prompt = tokenizer.encode(request.text)
        total = request.length
        option = "length"
        if total is None:
            total = a.length or c.block_size
            option = "--length"
            if a.new_tokens:
                total = len(prompt) + a.new_tokens
                option = "--new-tokens and prompt together"
        if a.truncate == "left" and (len(prompt) >= total or total > c.block_size):
            total = min(total, c.block_size)
            room = min(a.new_tokens or (total + 1) // 2, total)
            prompt = prompt[max(0, len(prompt) + room - total) :]
        if not len(prompt) < total <= c.block_size:
            sizes = f"the prompt has {len(prompt)} tokens and {option} is {total}"
            limits = f"it must exceed the prompt and be at most the block size, {c.block_size}"
            raise gaps.TooLong(f"{sizes}: {limits}")
        found = [prompt + [None] * (total - len(prompt))]
    modes.check_context(found[0], c, loaded.scored_from)
    return found


def print_samples(
    records: list[dict],
    tokenizer: Tokenizer,
    replay: bool,
    several: bool,
    first: int,
) -> None:
    """Print the samples; on a terminal generated tokens are bold beside given ones, or
    replayed. several: name the prompt of each; first: the number of the first one."""
    replay = replay and live.can_style()
    for number, record in enumerate(records, first):
        pieces = tokenizer.pieces(record["tokens"])
        step = record["step"]
        log_probs = record["log_probs"]
        title = f"sample {number}"
        if several:
            title += f" of prompt {record['prompt_index'] + 1}"
        if "scores" in record:
            title += f" ({caption(record)})"
        sys.stdout.write(f"=== {title} ===\n")
        if replay:
            replay = live.play(pieces, step, log_probs)
            sys.stdout.write("\n")
            continue
        text = visible(record["text"])
        if live.can_style() and -1 in step:
            text = live.paint(live.cells(pieces, step, log_probs))
        sys.stdout.write(f"{text}\n\n")  # not show(), which would escape the bold type


if __name__ == "__main__":
    run_script(main)
