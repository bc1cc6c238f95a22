"""Turn text into token files for training and evaluation.

Writes a folder with train.bin, val.bin or test.bin (token ids, little-endian uint16, or
uint32 for vocabularies above 65,536 ids; end-of-text after every document), train.roles.bin, ...
for prompts, and meta.json. An interrupted run leaves nothing behind; a finished dataset is not made
twice.

examples:
  python data/prepare.py stories
  python data/prepare.py text --source book1.txt book2.md.gz --tokenizer bytes --out data/books
  python data/prepare.py text --source train.jsonl.xz --val val.jsonl.xz --field text
  python data/prepare.py records --source questions.jsonl --block-size 128 --out data/questions
  python data/prepare.py chorales --predict alto --out data/chorales_alto
  python data/prepare.py ptb
  python data/prepare.py wikitext103 --source wiki.test.raw --block-size 512 --out data/wiki512"""

import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Interval
from tqdm import tqdm

from ..runtime.command_line import counted, show
from ..runtime.errors import UserError
from ..runtime.files import staging, write_json
from ..runtime.paths import DATA, PROJECT
from ..runtime.validation import Count, check_value, check_values, read_toml
from . import tokenizers
from .catalogue import DATASETS, SPLITS, TASKS, Dataset
from .loader import load_meta, read_tokens
from .packing import SplitFile, batches, encode_documents, route
from .prompts import encode_example
from .sources import Corpus, found_files
from .tokenizers import Tokenizer, get_tokenizer, other_tokenizer

FILES = {f"{s}{kind}" for s in SPLITS for kind in (".bin", ".roles.bin")}
FILES |= {"meta.json", *tokenizers.FILES}
DEFAULT_BLOCK_SIZE = 1024  # what the published perplexities are measured with
ValFraction = Annotated[float, Interval(ge=1e-9, le=0.5)]
BlockSize = Annotated[int, Interval(ge=1, le=2**22)]
EVALUATION = ", ".join(
    name for name, dataset in DATASETS.items() if dataset.protocol == "sedd"
)
NAMES = f"""stories: nine books for children, 2.7 MB, no download.
text: your own files, given with --source.
books: 297 books of English literature, 132 MB; downloaded, or the .zip in --source.
shuffled: your own files, in chunks of 63 characters in random order.
chorales: 382 of Bach's, in four voices (docs/data.md), downloaded, or a local copy in --source.
records: your own prompts and answers, each in a block (docs/data.md).
polya, latin5: made of random numbers, with a known entropy.
{", ".join(TASKS)}: puzzles.
hub REPOSITORY: any text on the Hugging Face hub.
openwebtext (24 GB), fineweb_edu (10B tokens), tinystories: from that hub, or local copies.
text8: 100 million characters of Wikipedia, in the published splits.
{EVALUATION}: evaluation sets of the published zero-shot perplexities, detokenised; downloaded, or
local copies in --source."""


def _option(kind: Any, metavar: str, default: str) -> Any:
    """An option whose default depends on the dataset."""
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
    .jsonl and .parquet: a document a row;
    text: also .txt and .md files, one document each;
    wikitext: also .txt .tokens .raw files, ptb: .txt, lm1b: .txt, news.en.*; a row a line.
    All but .parquet can end in .gz or .xz, too."""
    val: _option(tuple[Path, ...], "FILE ...", "a share of the documents") = ()
    """text, shuffled, records: files of the validation split."""
    test: _option(tuple[Path, ...], "FILE ...", "no test split") = ()
    """text, shuffled, records: files of the test split."""
    tokenizer: _option(str | None, "gpt2|english|bytes|FILE", "depends on NAME") = None
    """gpt2: GPT-2's byte-pair encoding. english: a small one of 2048 ids. bytes: UTF-8 bytes. FILE:
    your vocabulary, NAME.tiktoken or tokenizer.json, which is copied into the folder."""
    alphabet: _option(str | None, "LETTERS", "none") = None
    """Instead of --tokenizer: each of these characters is a token, as ACDEFGHIKLMNPQRSTVWY."""
    field: _option(str | None, "KEY", "text; ptb: sentence; pubmed, arxiv: article") = (
        None
    )
    """Field that holds the text in a row of a .jsonl or .parquet file."""
    prompt_field: _option(str | None, "KEY", "prompt, where a row has one") = None
    """records: field that holds the prompt in a row."""
    split_at: _option(str | None, "TEXT", "none") = None
    """text, shuffled: separator of the documents in a file, such as "<|endoftext|>"."""
    skip_long: bool = False
    """records: skip those that are longer than a block."""
    split: _option(str | None, "train|val|test", "the published one") = None
    """Evaluation sets: the split to download, or which --source is.
    Others: write all documents to this split."""
    protocol: _option(
        Literal["sedd", "full"] | None, "sedd|full", "full; evaluation: sedd"
    ) = None
    """sedd: 8 shards, groups of 1,000 rows divided into blocks, rests dropped; as published.
    full: documents end to end, nothing dropped."""
    block_size: _option(BlockSize | None, "N", f"{DEFAULT_BLOCK_SIZE}") = None
    """sedd: tokens of a block, which must be the model's.
    records: tokens of a block, more than the longest record has."""
    val_fraction: _option(ValFraction | None, "SHARE", "0.05; openwebtext: 0.0005") = (
        None
    )
    """Share of the documents for validation: a random one of every 1/SHARE in a row; of a single
    document, its end."""
    predict: _option(tuple[Literal[tokenizers.VOICES], ...], "VOICE ...", "all") = ()
    """chorales: the voices to predict; the others are the prompt."""
    limit: _option(Count | None, "N", "all") = None
    """Use the first N documents only (validation share included), for a trial."""
    overwrite: bool = False
    """Replace the dataset in the output folder; it stays until the new one is complete."""


def main() -> None:
    names = tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName
    config = (*names, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    # A scheduler's way to stop a run cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    prepare(tyro.cli(Prepare, description=__doc__, config=config))


def prepare(args: Prepare) -> Path:
    """Prepare a dataset, unless its folder holds it already. Errors leave the folder as it was."""
    check_values(args)
    check_value(args.name, Literal[tuple(DATASETS)], "the dataset")
    folder = Path(args.repository).name or args.name
    dataset = DATASETS[args.name]
    target = (args.out or DATA / folder).resolve()
    given = {"source": args.source, "val": args.val, "test": args.test}
    args = replace(
        args, **{s: found_files(p, dataset.readers) for s, p in given.items()}
    )
    check_options(args, dataset)
    if args.alphabet:
        args = replace(args, tokenizer=tokenizers.ALPHABET + args.alphabet)
    keys = ("split", "protocol", "tokenizer", "field", "val_fraction")
    chosen = {key: getattr(args, key) or getattr(dataset, key) for key in keys}
    if chosen["protocol"] != "full":
        chosen["block_size"] = (
            args.block_size or dataset.block_size or DEFAULT_BLOCK_SIZE
        )
    if args.val or args.split:
        chosen["val_fraction"] = None
    args = replace(args, **chosen)
    tokenizer = get_tokenizer(
        args.tokenizer
    )  # before files are read, which can take long
    corpora = dataset.corpora(args)
    meta = metadata(target.name, args, tokenizer, dataset, corpora)
    if is_finished(target, meta, args.overwrite):
        show(
            f"{target} holds this dataset already: nothing to do (--overwrite makes it again)"
        )
        return target
    with staging(target) as folder:
        (
            folder / "meta.json"
        ).touch()  # token files without one would pass for nanoGPT's
        tokenizer.keep(folder)
        meta |= write_splits(folder, corpora, args, tokenizer, dataset)
        write_json(folder / "meta.json", meta)
        is_finished(
            target, meta, args.overwrite
        )  # raises for what came there meanwhile
    report(
        args.out or os.path.relpath(target), meta, next(iter(corpora.values())).counts
    )
    return target


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
    twice = {*args.source} & {*args.val, *args.test} or {*args.val} & {*args.test}
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
        (args.repository and not of_hub, f"{name} takes no repository; leave it out"),
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
            args.prompt_field and name != "records",
            "--prompt-field is for records; leave it out",
        ),
        (
            args.predict and not dataset.divide,
            "--predict is for chorales; leave it out",
        ),
        (
            args.split_at and (source != "always" or examples),
            "--split-at is for text, shuffled",
        ),
        (examples and not (args.block_size or size), f"{name} needs --block-size N"),
        (
            size and args.block_size not in (None, size),
            f"records of {name} have {size} tokens",
        ),
        (other, f"{name} is {dataset.tokenizer}: leave out --tokenizer"),
        (full and args.block_size, "--block-size is for --protocol sedd; leave it out"),
        (twice, f"{[*map(str, twice)]}: a file belongs to one split"),
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
    """The contents of meta.json, without splits and notes."""
    keys = "split protocol block_size field val_fraction limit prompt_field split_at skip_long"
    settings = {
        key: getattr(args, key) for key in keys.split()
    }  # on which the result depends
    settings["predict"] = list(args.predict)
    return {
        "format": 2 if args.protocol == "records" else 1,
        "name": name,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": tokenizer.dtype,
        **{key: settings[key] for key in ("protocol", "block_size", "split")},
        "detokeniser": dataset.detokeniser,
        "source": [
            {"split": s, **part} for s, c in corpora.items() for part in c.description
        ],
        "settings": {"dataset": args.name, "tokenizer": tokenizer.name, **settings},
    }


def write_splits(
    folder: Path,
    corpora: dict[str, Corpus],
    args: Prepare,
    tokenizer: Tokenizer,
    dataset: Dataset,
) -> dict:
    """Write the token files into `folder`; returns the splits and notes for meta.json."""
    encode = partial(encode_documents, tokenizer, dataset.detokeniser)
    if examples := args.protocol == "records":
        end = dataset.block_size is None  # examples of one length need no end
        encode = partial(map, partial(encode_example, tokenizer, args.block_size, end))
    files: dict[str, SplitFile] = {}
    long: list[tuple[int, str]] = []  # records that are: tokens and place
    with tqdm(
        unit=" tokens", unit_scale=True, disable=None
    ) as bar:  # None: unless in a terminal
        for batch in batches(
            route(corpora, args.val_fraction, args.limit, whole=examples)
        ):
            splits, texts = zip(*batch, strict=True)
            for split, text, (ids, roles) in zip(
                splits, texts, encode(texts), strict=True
            ):
                if examples and ids.size > args.block_size:
                    long.append((ids.size, text.place))
                    continue
                if split not in files:
                    path = folder / f"{split}.bin"
                    how = args.protocol, args.block_size, tokenizer.dtype
                    files[split] = SplitFile(path, *how)
                files[split].write(ids, roles)
                bar.update(ids.size)
    if long and not args.skip_long:
        places = ", ".join(place for _, place in long[:3]) + ", ..." * (len(long) > 3)
        what = counted(
            len(long), f"records are longer than a block of {args.block_size} tokens"
        )
        advice = "give a larger --block-size, or --skip-long"
        raise UserError(
            f"{what} ({places}; the longest has {max(long)[0]} tokens): {advice}"
        )
    next(iter(corpora.values())).counts["records longer than a block are skipped"] += (
        len(long)
    )
    if not files:
        raise UserError(f"no document of {args.name} is left: give more text")
    entries = {split: files[split].close() for split in SPLITS if split in files}
    notes = []
    for split, corpus in corpora.items():
        rows = entries.get(split, {}).get("documents", 0)
        published = corpus.published
        if published not in (None, rows):
            notes.append(
                f"{rows:,} rows, where the published {split} split has {published:,}"
            )
    return {"splits": entries, "notes": notes}


def is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Whether `target` holds the dataset that `meta` describes. Raises UserError for other files
    and, without `overwrite`, for another or a damaged dataset."""
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    if names and (names - FILES or "meta.json" not in names):
        found = ", ".join(sorted(names - FILES)[:3]) or "no meta.json"
        raise UserError(
            f"{target} is not a prepared dataset ({found}); choose another --out"
        )
    if overwrite or not names:
        return False
    found = load_meta(target)
    for split in found["splits"]:
        read_tokens(target, split, verify=True)
    before, now = (
        {**m.get("settings", {}), "source": m.get("source")} for m in (found, meta)
    )
    changed = [
        key
        for key in now
        if before.get(key) != now[key] and (key in before or now[key])
    ]
    if not (
        other := other_tokenizer(found, meta)
    ):  # the name of a vocabulary does not matter
        changed = [key for key in changed if key != "tokenizer"]
    changed += ["vocabulary"] * (not changed and bool(other))
    if changed:
        advice = "pass --overwrite to replace it, or choose another --out"
        raise UserError(
            f"{target} was made with another {', '.join(changed)}: {advice}"
        )
    return True


def report(folder: Path | str, meta: dict, counts: dict[str, int]) -> None:
    """Print what was made and noticed, and which command comes next. folder: as it is typed."""
    for split, entry in meta["splits"].items():
        whole = [counted(entry[key], key) for key in ("tokens", "documents")]
        show(
            f"{split}: {' of '.join(whole)}, {entry['dropped_tokens']:,} tokens dropped"
        )
    blocks = f", blocks of {meta['block_size']} tokens" if meta["block_size"] else ""
    show(
        f"in {folder}; tokenizer {meta['tokenizer']}, protocol {meta['protocol']}{blocks}"
    )
    notes = [f"note: {counted(count, what)}" for what, count in counts.items() if count]
    notes += [
        f"not comparable with the published tables: {note}" for note in meta["notes"]
    ]
    for note in notes:
        show(note)
    if meta["protocol"] == "sedd" or meta["split"] or meta["settings"]["predict"]:
        show(f"next: python eval_ppl.py RUN --datasets {folder}")
        return
    named = {"openwebtext": "aogpt_small", "sudoku6": "sudoku6"}
    name = meta["name"]
    by_tokenizer = {"gpt2": "own_text", "chorales": "chorales"}.get(
        meta["tokenizer"], "quickstart"
    )
    config = named.get(name, by_tokenizer)
    options = f" --name {name} --data.folder {folder}"
    options = "" if Path(folder).resolve() == DATA / "stories" else options
    if meta["tokenizer"] == tokenizers.HUB:
        show(
            f"next: python train.py configs/aogpt_llama.toml{options} --train.init-from FOLDER"
        )
        return
    if meta["tokenizer"] in tokenizers.FILES:
        options += f" --model.vocab-size {-(-meta['vocab_size'] // 64) * 64}"
    least = min(entry["tokens"] for entry in meta["splits"].values())
    usual = read_toml(PROJECT / "configs" / f"{config}.toml")["model"].get(
        "block_size", least
    )
    if meta["protocol"] == "records":
        options += f" --model.block-size {meta['block_size']}"
    elif least < usual:
        options += f" --model.block-size {least}"
    show(f"next: python train.py configs/{config}.toml{options}")
