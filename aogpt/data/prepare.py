"""Turn text into token files for training and evaluation.

Writes a folder with train.bin, val.bin or test.bin (token ids, little-endian uint16, or
uint32 for vocabularies above 65,536 ids; end-of-text after every document),
train.roles.bin, ... for prompts, and meta.json. An interrupted run leaves nothing
behind; a finished dataset is not made twice.

examples:
  python data/prepare.py stories
  python data/prepare.py text --source a.txt b.md.gz --tokenizer bytes --out data/books
  python data/prepare.py text --source train.jsonl.xz --val val.parquet --field text
  python data/prepare.py records --source rows.jsonl --block-size 128 --out data/rows
  python data/prepare.py ptb
  python data/prepare.py wikitext103 --source wiki.test.raw --block-size 512"""

import os
import shlex
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from annotated_types import Interval
from tqdm import tqdm

from ..runtime.command_line import counted, interrupt, show, with_help
from ..runtime.errors import UserError
from ..runtime.files import clear_leftovers, staging, write_json
from ..runtime.paths import DATA, PROJECT
from ..runtime.validation import (
    Count,
    check_value,
    check_values,
    expand_home,
    read_toml,
)
from . import packing, tokenizers
from .catalogue import DATASETS, SPLITS, Dataset, Request
from .loader import load_meta, read_tokens, token_dtype
from .packing import RoundTrip, SplitFile
from .prompts import PADDING, Examples, encode_example, without_marks
from .sources import LEFT_OUT, Corpus, Reading, source_files
from .tokenizers import HUB, Tokenizer, get_tokenizer, other_tokenizer

# What a folder may hold that --overwrite replaces.
FILES = {"meta.json", tokenizers.OWN, tokenizers.HUB, tokenizers.HUB_SETTINGS}
FILES.update(f"{split}.bin" for split in SPLITS)
FILES.update(f"{split}.roles.bin" for split in SPLITS)
DEFAULT_BLOCK_SIZE = 1024  # that of the published perplexities
ENOUGH = 100_000  # tokens of text to train on: below that a note
FAR = 2  # times the share of tokens that --val-fraction means, or a part of it: a note
ValFraction = Annotated[float, Interval(ge=1e-9, le=0.5)]
BlockSize = Annotated[int, Interval(ge=1, le=2**22)]
EVALUATION = ", ".join(
    name for name, dataset in DATASETS.items() if dataset.protocol == "sedd"
)
NAMES = f"""stories: nine books for children, 2.7 MB, no download.
text: your own files, given with --source.
books: 297 books of English literature, 132 MB; downloaded, or the .zip in --source.
records: your own prompts and answers, each in a block (docs/data.md).
hub REPOSITORY: any text on the Hugging Face hub.
openwebtext (24 GB), fineweb_edu (10B tokens), tinystories: from that hub, or copies.
text8: 100 million characters of Wikipedia, in the published splits.
{EVALUATION}: evaluation sets of published zero-shot perplexities, detokenised; these
are downloaded, or local copies in --source."""


def _option(kind: Any, metavar: str, default: str) -> Any:
    hint = f"(default: {default})"
    return Annotated[kind, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


@dataclass(frozen=True)
class Prepare:
    """The command line of this script."""

    name: Annotated[str, tyro.conf.arg(help=NAMES)]
    repository: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[REPOSITORY]")
    ] = ""
    """hub: OWNER/NAME, or a local copy; --field names the field that holds the text."""
    config: _option(str | None, "NAME", "the only one") = None
    """hub: the configuration of the repository."""
    out: _option(Path | None, "DIR", "data/NAME in the project") = None
    """Folder to write."""
    source: _option(tuple[Path, ...], "FILE ...", "none") = ()
    """Files, folders, or patterns such as "texts/**/*.txt".
    .jsonl, .json (a list), .parquet: a document a row;
    text: also .txt and .md files, one document each;
    wikitext: also .txt .tokens .raw, ptb: .txt, lm1b: .txt, news.en.*; a row a line.
    All can end in .gz, .xz or .zst, too."""
    val: _option(tuple[Path, ...], "FILE ...", "a share of the documents") = ()
    """text, records: files of the validation split."""
    test: _option(tuple[Path, ...], "FILE ...", "no test split") = ()
    """text, records: files of the test split."""
    tokenizer: _option(str | None, "gpt2|english|bytes|FILE", "depends on NAME") = None
    """gpt2: GPT-2's byte-pair encoding. english: a small one of 2048 ids. bytes: UTF-8
    bytes. FILE: your vocabulary, NAME.tiktoken or tokenizer.json, which is copied into
    the folder."""
    end_token: _option(str | None, "TOKEN", "what the files beside it say") = None
    """tokenizer.json: the token that ends a document, such as "</s>"."""
    alphabet: _option(str | None, "LETTERS", "none") = None
    """Instead of --tokenizer: each of these characters is a token, as
    ACDEFGHIKLMNPQRSTVWY."""
    field: _option(str | None, "KEY", "text; ptb: sentence; pubmed, arxiv: article") = (
        None
    )
    """Field that holds the text in a row."""
    prompt_field: _option(str | None, "KEY", "prompt, where a row has one") = None
    """records: field that holds the prompt in a row."""
    skip_long: bool = False
    """records: skip those that are longer than a block."""
    split: _option(str | None, "train|val|test", "the published one") = None
    """Evaluation sets: the split to download, or which --source is.
    Others: write all documents to this split."""
    protocol: _option(
        Literal["sedd", "full"] | None, "sedd|full", "full; evaluation: sedd"
    ) = None
    """sedd: 8 shards; groups of 1,000 rows make blocks, rests dropped; as published.
    full: documents end to end, nothing dropped."""
    block_size: _option(BlockSize | None, "N", f"{DEFAULT_BLOCK_SIZE}") = None
    """sedd: tokens of a block, which must be the model's.
    records: tokens of a block, more than the longest record has."""
    val_fraction: _option(ValFraction | None, "SHARE", "0.05; openwebtext: 0.0005") = (
        None
    )
    """Share of the documents for validation: a random one of every 1/SHARE in a row; of
    a single document, its end."""
    limit: _option(Count | None, "N", "all") = None
    """Use the first N documents only (validation share included), for a trial."""
    overwrite: bool = False
    """Replace the dataset in the output folder; it stays until the new one is
    complete."""


def main() -> None:
    """Prepare the dataset of the command line."""
    # A scheduler's way to stop a run cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, interrupt)
    prepare(parse(Prepare, "python data/prepare.py", __doc__))


def parse(options: type[Prepare], program: str, description: str) -> Prepare:
    """Return the command line as a Prepare, or a subclass of it."""
    config = (
        tyro.conf.PositionalRequiredArgs,
        tyro.conf.PositionalMetavarFromFieldName,
        tyro.conf.DisallowNone,
        tyro.conf.FlagCreatePairsOff,
    )
    return tyro.cli(
        with_help(options), prog=program, description=description, config=config
    )


def prepare(args: Prepare, datasets: Mapping[str, Dataset] = DATASETS) -> Path:
    """Prepare a dataset, unless its folder holds it already. Returns the folder. Errors
    leave it as it was."""
    check_values(args)
    if Path(args.name).is_file():
        raise UserError(
            f"{args.name} is a file: python data/prepare.py text --source "
            f"{shlex.quote(args.name)} --out data/own"
        )
    check_value(args.name, Literal[tuple(datasets)], "the dataset")
    dataset = datasets[args.name]
    target = output_folder(args)
    clear_leftovers(target)
    args = replace(
        args,
        source=source_files(args.source, dataset.readers),
        val=source_files(args.val, dataset.readers),
        test=source_files(args.test, dataset.readers),
    )
    check_options(args, dataset)
    args = with_defaults(args, dataset)
    # Before files are read, which can take long.
    tokenizer = get_tokenizer(args.tokenizer, end_token=args.end_token)
    reading = Examples if dataset.protocol == "records" else Reading
    corpora = dataset.corpora(
        Request(
            args.name,
            reading(field=args.field, prompt_field=args.prompt_field),
            source=args.source,
            val=args.val,
            test=args.test,
            split=args.split,
            repository=args.repository,
            config=args.config,
        )
    )
    shown = args.out or Path(os.path.relpath(target))
    meta = metadata(
        name=target.name,
        args=args,
        tokenizer=tokenizer,
        dataset=dataset,
        corpora=corpora,
    )
    if is_finished(target, meta, args.overwrite):
        show(
            f"{target} holds this dataset already: nothing to do (--overwrite makes it "
            "again)"
        )
        show(next_command(shown, load_meta(target), dataset, args.tokenizer))
        return target
    with staging(target) as folder:
        # Token files without a meta.json would pass for nanoGPT's.
        (folder / "meta.json").touch()
        tokenizer.keep(folder)
        written = Writer(folder, args, tokenizer, dataset)
        written.write(corpora)
        meta.update(written.close(corpora))
        write_json(folder / "meta.json", meta)
        # Raises for files that another process has written there meanwhile.
        is_finished(target, meta, args.overwrite)
    report(shown, meta, tokenizer, written.notes)
    show(next_command(shown, meta, dataset, args.tokenizer))
    return target


def output_folder(args: Prepare) -> Path:
    """Return the folder to write. Raises UserError for a path that cannot be one."""
    name = Path(args.repository).name or args.name
    try:
        target = (args.out or DATA / name).resolve()
        str(target).encode()
    except UnicodeEncodeError:
        raise UserError(f"--out {args.out}: give a name in UTF-8") from None
    except (RuntimeError, OSError):  # of Python 3.11 to 3.12, and from 3.13 on
        raise UserError(f"--out {args.out}: a link in it leads to itself") from None
    if target.is_symlink():  # from 3.13 on a loop resolves to a link
        raise UserError(f"--out {args.out}: a link in it leads to itself")
    return target


def with_defaults(args: Prepare, dataset: Dataset) -> Prepare:
    """Return the options with the dataset's defaults."""
    protocol = args.protocol or dataset.protocol
    block_size = None
    if protocol != "full":
        block_size = args.block_size or dataset.block_size or DEFAULT_BLOCK_SIZE
    val_fraction = args.val_fraction or dataset.val_fraction
    if args.val or args.split:
        val_fraction = None
    tokenizer = args.tokenizer or dataset.tokenizer
    if args.alphabet:
        tokenizer = tokenizers.ALPHABET + args.alphabet
    return replace(
        args,
        split=args.split or dataset.split,
        protocol=protocol,
        tokenizer=tokenizer,
        field=args.field or dataset.field,
        val_fraction=val_fraction,
        block_size=block_size,
    )


def check_options(args: Prepare, dataset: Dataset) -> None:
    """Raise UserError for options that do not fit the dataset or each other."""
    name = args.name
    size = dataset.block_size
    source = dataset.source
    other = size and args.tokenizer not in (None, dataset.tokenizer)
    examples = dataset.protocol == "records"
    full = (args.protocol or dataset.protocol) == "full"
    files = args.val or args.test
    share = args.val_fraction is not None
    drawn = dataset.val_fraction is not None  # the validation split
    of_hub = name == "hub"
    of_file = (args.tokenizer or "").endswith(".json")
    mistakes = [
        (
            args.source and source == "never",
            f"{name} takes no --source; use text --source FILE",
        ),
        (
            not args.source and source == "always",
            f"{name} needs files: --source FILE ...",
        ),
        (
            args.split and source == "never" and not drawn,
            f"{name} has splits of its own",
        ),
        (
            share and not drawn,
            f"{name} has splits of its own: leave out --val-fraction",
        ),
        (
            of_hub and not args.repository,
            "hub needs a repository: prepare.py hub OWNER/NAME",
        ),
        (
            args.repository and not of_hub,
            f"{name} takes no repository; leave out {args.repository!r} "
            "(one data set a command)",
        ),
        (args.config and not of_hub, f"{name} takes no --config; leave it out"),
        (
            args.alphabet and (args.tokenizer or size),
            "--alphabet replaces --tokenizer: leave one of them out",
        ),
        (files and source != "always", f"{name} takes no --val or --test files"),
        (
            args.split and (files or share),
            "--split is of all documents: leave out other splits",
        ),
        (args.val and share, "give --val or --val-fraction, not both"),
        (
            examples and args.protocol,
            f"{name}: a record has its own block; leave out --protocol",
        ),
        (args.skip_long and not examples, "--skip-long is for records; leave it out"),
        (
            args.prompt_field and not examples,
            "--prompt-field is for records; leave it out",
        ),
        (examples and not (args.block_size or size), f"{name} needs --block-size N"),
        (
            size and args.block_size not in (None, size),
            f"records of {name} have {size} tokens",
        ),
        (other, f"{name} is {dataset.tokenizer}: leave out --tokenizer"),
        (full and args.block_size, "--block-size is for --protocol sedd; leave it out"),
        (
            args.end_token is not None and not of_file,
            "--end-token is for a tokenizer.json; leave it out",
        ),
    ]
    for is_mistake, message in mistakes:
        if is_mistake:
            raise UserError(message)
    if args.split:
        check_value(args.split, Literal[dataset.splits], f"--split of {name}")


def metadata(
    name: str,
    args: Prepare,
    tokenizer: Tokenizer,
    dataset: Dataset,
    corpora: dict[str, Corpus],
) -> dict:
    """Return the contents of meta.json, without splits and notes."""
    settings = {  # on which the result depends
        "dataset": args.name,
        "tokenizer": tokenizer.name,
        "split": args.split,
        "protocol": args.protocol,
        "block_size": args.block_size,
        "field": args.field,
        "val_fraction": args.val_fraction,
        "limit": args.limit,
        "prompt_field": args.prompt_field,
        "skip_long": args.skip_long,
    }
    sources = []
    for split, corpus in corpora.items():
        for part in corpus.description:
            source = {"split": split}
            source.update(part)
            sources.append(source)
    return {
        "format": 2 if args.protocol == "records" else 1,
        "name": name,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": tokenizer.dtype,
        "protocol": args.protocol,
        "block_size": args.block_size,
        "split": args.split,
        "detokeniser": dataset.detokeniser,
        "source": sources,
        "settings": settings,
    }


class Writer:
    """A writer of the token files of all splits into a folder. After `close`, `notes`
    holds notes for the user."""

    def __init__(
        self, folder: Path, args: Prepare, tokenizer: Tokenizer, dataset: Dataset
    ):
        self.folder = folder
        self.args = args
        self.tokenizer = tokenizer
        self.dataset = dataset
        self.files: dict[str, SplitFile] = {}
        self.long: list[tuple[int, str]] = []  # records that are: tokens and place
        # The other tokenizers lose nothing: the bytes of a text are among their ids.
        self.round_trip = RoundTrip(tokenizer) if tokenizer.name == HUB else None
        # Records of one length, which the dataset knows, need no end.
        self.records_end = args.protocol == "records" and dataset.block_size is None
        self.special: Counter[str] = Counter()  # tokens that are plain text in texts
        self.notes: list[str] = []

    def write(self, corpora: dict[str, Corpus]) -> None:
        """Read and write all documents. Raises UserError if none is left."""
        args = self.args
        of_examples = args.protocol == "records"
        documents = packing.detokenised(
            packing.route(corpora, args.val_fraction, args.limit, whole=of_examples),
            self.dataset.detokeniser,
        )
        # None: a bar in a terminal only
        with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
            for batch in packing.batches(documents):
                texts = [text for _, text in batch]
                encoded = self.encode(texts)
                for (split, text), (ids, roles) in zip(batch, encoded, strict=True):
                    if of_examples and ids.size > args.block_size:
                        self.long.append((ids.size, text.place))
                        continue
                    self.add(split, text, ids, roles)
                    bar.update(ids.size)
        if self.long and not args.skip_long:
            places = ", ".join(place for _, place in self.long[:3])
            if len(self.long) > 3:
                places += ", ..."
            long_records = counted(
                len(self.long),
                f"records are longer than a block of {args.block_size} tokens",
            )
            raise UserError(
                f"{long_records} ({places}; the longest has {max(self.long)[0]} "
                "tokens): give a larger --block-size, or --skip-long"
            )
        if not self.files:
            raise UserError(f"no document of {args.name} is left: give more text")

    def encode(
        self, texts: list[str]
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield the ids of each text, and the roles of those of an example."""
        self.special += self.tokenizer.count_special(texts)
        if self.args.protocol != "records":
            yield from packing.encode_documents(self.tokenizer, texts)
            return
        for text in texts:
            yield encode_example(
                self.tokenizer, self.args.block_size, end=self.records_end, example=text
            )

    def add(
        self, split: str, text: str, ids: np.ndarray, roles: np.ndarray | None
    ) -> None:
        """Write a document, and count the text that its tokens lose."""
        if split not in self.files:
            self.files[split] = SplitFile(
                self.folder / f"{split}.bin",
                self.args.protocol,
                self.args.block_size,
                token_dtype(self.tokenizer.dtype),
            )
        file = self.files[split]
        file.write(text, ids, roles)
        if self.records_end:
            # From the roles: end-of-text can also stand inside a record.
            file.lengths[int((roles != PADDING).sum()) - 1] += 1
        if self.round_trip:
            plain = text
            if roles is not None:
                plain = without_marks(text)
            size, of_tokens = self.round_trip.add(plain, ids)
            file.text_bytes += size
            file.token_bytes += of_tokens

    def close(self, corpora: dict[str, Corpus]) -> dict:
        """Complete the files. Returns the splits and notes for meta.json."""
        files = {split: self.files[split] for split in SPLITS if split in self.files}
        entries = {split: file.close() for split, file in files.items()}
        notes = []
        for split, corpus in corpora.items():
            rows = entries.get(split, {}).get("documents", 0)
            if corpus.published not in (None, rows):
                notes.append(
                    f"{rows:,} rows, where the published {split} split has "
                    f"{corpus.published:,}"
                )
        self.notes += self.notes_on_splits(files, entries)
        self.notes += self.notes_on_reading(next(iter(corpora.values())).reading)
        return {"splits": entries, "notes": notes}

    def notes_on_splits(
        self, files: dict[str, SplitFile], entries: dict[str, dict]
    ) -> list[str]:
        """Return notes on the splits: on odd sizes, and on rows that two of them
        have."""
        notes = []
        fraction = self.args.val_fraction
        if fraction and {"train", "val"} <= entries.keys():
            count = entries["val"]["tokens"]
            share = count / (count + entries["train"]["tokens"])
            if not fraction / FAR <= share <= fraction * FAR:
                notes.append(
                    f"val has {share:.1%} of the tokens, where --val-fraction is "
                    f"{fraction:.1%} of the documents, which differ in length"
                )
        tokens = entries.get("train", {}).get("tokens", ENOUGH)
        if tokens < ENOUGH and self.args.protocol == "full":
            notes.append(
                f"{counted(tokens, 'tokens')} to train on are few; a model that writes "
                f"words needs about {ENOUGH:,}"
            )
        for first, second in (("train", "val"), ("train", "test"), ("val", "test")):
            if {first, second} <= files.keys():
                shared = packing.shared_rows(files[first], files[second])
                if shared:
                    total = entries[second]["documents"]
                    effect = "a model can know them by heart"
                    if first == "val":
                        effect = "what is chosen by val is chosen by them"
                    notes.append(
                        f"{shared:,} of {counted(total, f'documents of {second}')} "
                        f"are in {first}, too: {effect}"
                    )
        return notes

    def notes_on_reading(self, reading: Reading) -> list[str]:
        """Return notes on what was noticed while documents were read and encoded."""
        notes = []
        if not self.dataset.shipped:  # the project's own files have more fields
            for name, count in reading.left_out.items():
                notes.append(counted(count, LEFT_OUT.format(name)))
        for message, count in reading.counts.items():
            if count > 0:
                notes.append(counted(count, message))
        notes += tokenizers.notes_on_special(self.special)
        if self.long:
            notes.append(
                counted(len(self.long), "records longer than a block are skipped")
            )
        trip = self.round_trip
        if trip and trip.changed:
            notes.append(
                f"{trip.changed:,} of {trip.documents:,} documents do "
                f"not come back from their tokens unchanged ({trip.example}): the "
                "tokenizer loses text; bits per byte are of the bytes of the text"
            )
        return notes


def is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Return whether `target` holds the dataset that `meta` describes. Raises UserError
    for other files and, without `overwrite`, for another or a damaged dataset."""
    names = set()
    if target.exists():
        names = {path.name for path in target.iterdir()}
    if names and (names - FILES or "meta.json" not in names):
        unknown = ", ".join(sorted(names - FILES)[:3]) or "no meta.json"
        raise UserError(
            f"{target} is not a prepared dataset ({unknown}); choose another --out"
        )
    if overwrite or not names:
        return False
    old_meta = load_meta(target)
    for split in old_meta["splits"]:
        read_tokens(target, split, verify=True)
    before = old_meta.get("settings", {})
    settings = meta["settings"]
    changed = []
    for key in settings | before:
        old = before.get(key)
        new = settings.get(key)
        # An older folder lacks newer keys, and has those of removed options.
        is_off = not old and not new
        is_known = key in before and key in settings
        if old != new and (is_known or not is_off):
            changed.append(key)
    if old_meta.get("source") != meta["source"]:
        changed.append("source")
    other = other_tokenizer(old_meta, meta)
    if not other:  # the name of a vocabulary does not matter
        changed = [key for key in changed if key != "tokenizer"]
    if other and not changed:
        changed.append("vocabulary")
    if old_meta["eot"] != meta["eot"] and not changed:
        changed.append("end token")
    if changed:
        raise UserError(
            f"{target} was made with another {', '.join(changed)}: "
            "pass --overwrite to replace it, or choose another --out"
        )
    return True


def report(folder: Path, meta: dict, tokenizer: Tokenizer, notes: list[str]) -> None:
    """Print the sizes of the splits, and notes. folder: as the user typed it."""
    for split, entry in meta["splits"].items():
        tokens = counted(entry["tokens"], "tokens")
        documents = counted(entry["documents"], "documents")
        show(
            f"{split}: {tokens} of {documents}, {entry['dropped_tokens']:,} tokens "
            "dropped"
        )
    blocks = ""
    if meta["block_size"]:
        blocks = f", blocks of {meta['block_size']} tokens"
    show(
        f"in {folder}; tokenizer {meta['tokenizer']}, protocol "
        f"{meta['protocol']}{blocks}"
    )
    if tokenizer.name == HUB:
        begin = "without a token that begins it"
        if tokenizer.starts:
            begin = f"that the model reads after {' '.join(tokenizer.start_tokens)}"
        show(
            f"{tokenizer.end_token} (id {tokenizer.eot}) ends a document, {begin}; "
            "--end-token chooses another end"
        )
    for note in notes:
        show(f"note: {note}")
    for note in meta["notes"]:
        show(f"not comparable with the published tables: {note}")


def next_command(
    folder: Path, meta: Mapping[str, Any], dataset: Dataset, tokenizer: str = HUB
) -> str:
    """Return the line that says which command comes next. folder, tokenizer: as the
    user typed them; a pretrained model lies beside its tokenizer.json."""
    place = shlex.quote(str(folder))
    if meta["protocol"] == "sedd" or "train" not in meta["splits"]:
        return f"next: python eval_ppl.py RUN --datasets {place}"
    by_tokenizer = {"gpt2": "own_text", HUB: "smollm2"}
    config = dataset.config or by_tokenizer.get(meta["tokenizer"], "quickstart")
    file = config if "/" in config else f"configs/{config}.toml"
    values = read_toml(PROJECT / file)
    words = [f"next: python train.py {file}"]
    usual = PROJECT / values.get("data", {}).get("folder", "data/own")
    if folder.resolve() != usual.resolve():
        words += ["--name", shlex.quote(meta["name"]), "--data.folder", place]
    model = values["model"]
    if config == "smollm2":
        source = Path(tokenizer).parent
        is_model = (expand_home(source) / "config.json").is_file()
        model_folder = shlex.quote(str(source)) if is_model else "FOLDER"
        words += ["--train.init-from", model_folder]
    elif meta["tokenizer"] in tokenizers.FILES and not dataset.config:
        size = -(-meta["vocab_size"] // 64) * 64
        words += ["--model.vocab-size", str(size)]
    least = min(entry["tokens"] for entry in meta["splits"].values())
    block_size = model.get("block_size", least)
    if meta["protocol"] == "records":
        if meta["block_size"] != block_size:
            words += ["--model.block-size", str(meta["block_size"])]
    elif least < block_size:
        words += ["--model.block-size", str(least)]
    if "val" not in meta["splits"]:
        words += ["--eval.interval", "0"]
    return " ".join(words)
