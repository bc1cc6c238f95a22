"""Turn text into token files for training and evaluation: python data/prepare.py NAME [options].

Reads documents (catalogue.py, sources.py), gives each its split (splits.py), undoes the tokenising
of published test sets (detokenisers.py), encodes on all cores (encoding.py), packs (packing.py) and
writes a folder (folder.py):

    train.bin, val.bin, test.bin      token ids, flat, little-endian uint16 (uint32 for more than
                                      65536 ids), of the splits there are; every document is
                                      followed by end-of-text
    train.roles.bin, ...              of records: what is given of them (records.py)
    meta.json                         tokenizer, dtype, protocol and packing, tokens and sha256 per
                                      file, source, settings, versions

Memory stays bounded however large the corpus. The folder is written beside its final place and
moved there when it is complete. The result depends on the source, the options and the seed, not on
the number of workers.
"""

import sys
from pathlib import Path

from runtime.errors import UserError

if __name__ == "__main__":
    # A script's sys.path begins with its own folder: let it begin with the project's, where `data`
    # is a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import collections
import contextlib
import os
import platform
import signal
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Interval

from data import packing
from data.catalogue import DATASETS, Dataset, EvaluationSet, Files, GeneratedText, TaskData
from data.detokenisers import DETOKENISERS
from data.encoding import Encode, encode_all, encode_batch, encode_records
from data.folder import SPLITS, clear_leftovers, is_finished, move_into_place, staging
from data.loader import DTYPES, dtype_name
from data.packing import SplitFile
from data.sources import Corpus
from data.splits import route
from data.tokenizers import Tokenizer, get_tokenizer
from runtime.command_line import run_script
from runtime.files import write_json
from runtime.validation import Count, Seed, check_value, check_values

DEFAULT_BLOCK_SIZE = 1024  # what the published perplexities are measured with

USAGE = """Turn text into token files for training and evaluation.

Writes a folder with train.bin, val.bin or test.bin and meta.json, for the loader to read. An
interrupted run leaves nothing behind; a finished dataset is not made twice.

examples:
  python data/prepare.py stories
  python data/prepare.py text --source book1.txt book2.md.gz --tokenizer bytes --out data/books
  python data/prepare.py text --source train.jsonl.xz --val val.jsonl.xz --field text
  python data/prepare.py sudoku6
  python data/prepare.py records --source questions.jsonl --block-size 128 --out data/questions
  python data/prepare.py ptb
  python data/prepare.py wikitext103 --source wiki.test.raw --block-size 512 --out data/wiki512
"""


def _option(metavar: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


ValFraction = Annotated[float, Interval(ge=1e-9, le=0.5)]
BlockSize = Annotated[int, Interval(ge=1, le=2**22)]


@dataclass(frozen=True)
class Prepare:
    """The command line of this script. Its help keeps the line breaks of these texts."""

    name: str
    """stories: nine books for children, 2.7 MB, no download.
    pydocs: the English that comes with Python, 2 MB, no download.
    text: your own files, given with --source.
    shuffled: the same, in pieces of 63 characters in random order.
    records: .jsonl files of {"prompt": given, "text": predicted}, or of
    {"text": "some [GIVEN]parts[/GIVEN] of it given"}, or of {"text": ...,
    "given": "0110..."}, a mask of its characters; each in its own block.
    infill: your own files, or the stories, in pieces of 128 characters, each a record whose
    middle is predicted, given both sides.
    polya, latin5: made of random numbers, with a known entropy.
    sudoku6, star, addition, reversal, mirror, parity, colouring, copy,
    replace, shuffle: tasks, as records, for eval_tasks.py.
    openwebtext: from the Hugging Face hub (24 GB), or local copies of it.
    wikitext2, wikitext103, ptb, lambada, lm1b: the evaluation sets of the
    published zero-shot perplexities, and ag_news, pubmed, arxiv, which
    later ones have, one split each, detokenised;
    downloaded, or local copies given with --source."""
    out: Annotated[Path | None, _option("DIR", "data/NAME in the project")] = None
    """Folder to write."""
    source: Annotated[tuple[Path, ...], _option("FILE ...", "none")] = ()
    """.jsonl and .parquet files, a document a row;
    text: also .txt and .md files, one document each;
    wikitext: also .txt .tokens .raw files, a row a line; ptb, lm1b: .txt;
    lm1b: also the published news.en files.
    All but .parquet can end in .gz or .xz, too."""
    val: Annotated[tuple[Path, ...], _option("FILE ...", "a share of the documents")] = ()
    """text, shuffled, records, infill: files of the validation split."""
    test: Annotated[tuple[Path, ...], _option("FILE ...", "no test split")] = ()
    """The same: files of the test split."""
    tokenizer: Annotated[
        str | None,
        _option(
            "gpt2|english|bytes",
            "english for stories; bytes for pydocs, tasks, infill, shuffled and what is made of "
            "random numbers; gpt2 for the others",
        ),
    ] = None
    """GPT-2's byte-pair encoding, a small one of 2048 ids, or bytes as they are."""
    field: Annotated[
        str | None, _option("KEY", "sentence for ptb, article for pubmed, arxiv, else text")
    ] = None
    """What holds the text in a row of a .jsonl or .parquet file."""
    split: Annotated[
        str | None,
        _option(
            "train|val|test", "wikitext2: train, pubmed and arxiv: val, other evaluation sets: test"
        ),
    ] = None
    """Evaluation sets: the split to download, or which --source is.
    Others: write all documents to this split."""
    protocol: Annotated[
        Literal["sedd", "full"] | None,
        _option("sedd|full", "sedd for the evaluation sets, full for the others"),
    ] = None
    """sedd: rows in 8 shards and groups of 1,000, cut into blocks,
    the rest of every group dropped; as published.
    full: documents end to end, nothing dropped."""
    block_size: Annotated[BlockSize | None, _option("N", f"{DEFAULT_BLOCK_SIZE}")] = None
    """sedd, records: tokens of a block; of records at least those of the
    longest and one. A model of another needs the dataset prepared again."""
    val_fraction: Annotated[
        ValFraction | None, _option("SHARE", "0.0005 for openwebtext, 0.05 for the others")
    ] = None
    """Share of the documents that becomes the validation split:
    one out of every 1/SHARE in a row, drawn from the seed;
    of a single document, its end."""
    seed: Annotated[Seed, _option("N", "0")] = 0
    """Seed of that draw."""
    limit: Annotated[Count | None, _option("N", "all")] = None
    """Use the first N documents only (validation share included), for a trial."""
    workers: Annotated[Count | None, _option("N", "one per core, for bytes one")] = None
    """Threads that tokenise. The result does not depend on it."""
    overwrite: bool = False
    """Replace the dataset in the output folder; it stays until the new one is complete."""


def main() -> None:
    conf = tyro.conf
    style = (
        conf.PositionalRequiredArgs,
        conf.DisallowNone,
        conf.PositionalMetavarFromFieldName,
        conf.FlagCreatePairsOff,
    )
    args = tyro.cli(Prepare, description=USAGE, config=style)

    def stop(number: int, frame: Any) -> None:
        """Clean up and end here. Python would rather raise an exception wherever the main thread
        is; in a destructor it shows that one with a traceback, and goes on."""
        try:
            clear_leftovers(output_folder(args))
        finally:
            # not print, which may be what was interrupted
            os.write(2, b"\ninterrupted: no unfinished dataset is left behind\n")
            os._exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)  # a scheduler's way to say stop is as good as Ctrl-C
    prepare(args)


def prepare(args: Prepare) -> Path:
    """Prepare the dataset that `args` describe and return its folder.

    Does nothing where the folder holds that dataset already. Raises ValueError or OSError with a
    message for the user; then, and when interrupted, the output folder is what it was before.
    """
    check_values(args)
    check_value(args.name, Literal[tuple(DATASETS)], "the dataset")
    dataset, target = DATASETS[args.name], output_folder(args)
    check_options(args, dataset)
    settings = effective_settings(args, dataset)
    tokenizer = get_tokenizer(settings["tokenizer"])  # before files are read, which can take long
    corpora = dataset.corpora(
        Files(args.source, args.val, args.test, settings["field"], settings["split"])
    )
    meta = metadata(target.name, settings, tokenizer, dataset, corpora)

    clear_leftovers(target)
    if is_finished(target, meta, args.overwrite):
        print(
            f"{_shown(target)} holds this dataset already, made with the same settings: "
            "nothing to do (--overwrite makes it again)"
        )
        return target
    with staging(target) as partial:
        workers = args.workers or default_workers(tokenizer)
        encode = encoder_of(dataset, tokenizer, meta)
        meta["splits"] = write_splits(partial, corpora, encode, meta, workers)
        meta["notes"] = [note for corpus in corpora.values() for note in corpus.notes()]
        write_json(partial / "meta.json", meta)
        is_finished(target, meta, args.overwrite)  # what came there meanwhile stays, too
        move_into_place(partial, target)
    report(target, meta)
    return target


# ---- options -------------------------------------------------------------------------------------


def output_folder(args: Prepare) -> Path:
    return (args.out or Path(__file__).resolve().parent / args.name).resolve()


def check_options(args: Prepare, dataset: Dataset) -> None:
    """Raise ValueError for options that do not fit the dataset or each other."""
    if args.source and dataset.source == "never":
        raise UserError(
            f"{args.name} brings its own documents and takes no --source; for files of your own: "
            "python data/prepare.py text --source FILE ..."
        )
    if not args.source and dataset.source == "always":
        raise UserError(f"{args.name} needs files to read: --source FILE ...")
    own_splits = args.val or args.test or args.val_fraction is not None
    if isinstance(dataset, EvaluationSet) and own_splits:
        raise UserError(
            f"{args.name} is an evaluation set: it is written one split at a time, "
            f"--split {'|'.join(dataset.splits)}, and takes no --val, --test or --val-fraction"
        )
    if isinstance(dataset, GeneratedText | TaskData) and (own_splits or args.split):
        raise UserError(
            f"{args.name} is made in splits of its own: leave out --split and --val-fraction"
        )
    if args.seed and dataset.val_fraction is None:
        raise UserError(
            f"--seed draws a validation split, and {args.name} has splits of its own: leave it out"
        )
    if (args.val or args.test) and dataset.source != "always":
        raise UserError(
            f"--val and --test are for text; the validation split of {args.name} is a share of its "
            "documents (--val-fraction)"
        )
    if args.split is not None:
        check_value(args.split, Literal[dataset.splits], f"--split of {args.name}")
        if own_splits:
            raise UserError(
                "--split writes all documents to one split: give it without --val, --test and "
                "--val-fraction"
            )
    if args.val and args.val_fraction is not None:
        raise UserError("give --val or --val-fraction, not both")
    if dataset.protocol == "records":
        check_records(args, dataset)
    elif args.block_size is not None and (args.protocol or dataset.protocol) != "sedd":
        raise UserError(
            "--block-size is for --protocol sedd; a dataset of the protocol full can be read in "
            "blocks of any size"
        )
    given = collections.Counter(path.resolve() for path in (*args.source, *args.val, *args.test))
    for path, times in given.items():
        if times > 1:
            raise UserError(f"{path} is given {times} times; a file belongs to one split, once")


def check_records(args: Prepare, dataset: Dataset) -> None:
    """Raise ValueError for options that do not fit records."""
    if args.protocol is not None:
        raise UserError(
            f"{args.name}: a record is in a block of its own, so there is no --protocol to choose; "
            "leave it out"
        )
    if dataset.block_size is None and args.block_size is None:
        raise UserError(
            f"{args.name} needs --block-size N: as many tokens as the longest record has, prompt, "
            "text and end-of-text together"
        )
    if dataset.block_size is not None and args.block_size not in (None, dataset.block_size):
        raise UserError(
            f"the records of {args.name} have {dataset.block_size} tokens; leave out --block-size"
        )
    if dataset.block_size is not None and args.tokenizer not in (None, "bytes"):
        raise UserError(f"the records of {args.name} are of single bytes; leave out --tokenizer")


def effective_settings(args: Prepare, dataset: Dataset) -> dict:
    """What decides the result, beside the documents."""
    protocol = args.protocol or dataset.protocol
    block_size = args.block_size or dataset.block_size or DEFAULT_BLOCK_SIZE
    fraction = dataset.val_fraction if args.val_fraction is None else args.val_fraction
    return {
        "dataset": args.name,
        "split": args.split or dataset.split,
        "protocol": protocol,
        "block_size": None if protocol == "full" else block_size,
        "tokenizer": args.tokenizer or dataset.tokenizer,
        "field": args.field or dataset.field,
        "val_fraction": None if args.val or args.split else fraction,
        "seed": args.seed,
        "limit": args.limit,
    }


def default_workers(tokenizer: Tokenizer) -> int:
    if tokenizer.name == "bytes":  # takes less time than handing it to another thread
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- what is written -----------------------------------------------------------------------------


def metadata(
    name: str, settings: dict, tokenizer: Tokenizer, dataset: Dataset, corpora: dict[str, Corpus]
) -> dict:
    """The contents of meta.json; splits and notes are known at the end."""
    source = [
        {"split": split, **part} for split, corpus in corpora.items() for part in corpus.describe()
    ]
    packages = {package for corpus in corpora.values() for package in corpus.packages}
    packages |= {"numpy", *(["tiktoken"] if tokenizer.name != "bytes" else [])}
    versions = {package: version(package) for package in sorted(packages)}
    return {
        "format": 2 if settings["protocol"] == "records" else 1,
        "name": name,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype_name(tokenizer.vocab_size),
        "protocol": settings["protocol"],
        "packing": packing.in_words(settings["protocol"], settings["block_size"]),
        "block_size": settings["block_size"],
        "detokeniser": dataset.detokeniser,
        "split": settings["split"],
        "splits": {},
        "notes": [],
        "source": source,
        "settings": settings,
        "versions": {"python": platform.python_version()} | versions,
    }


def encoder_of(dataset: Dataset, tokenizer: Tokenizer, meta: dict) -> Encode:
    """How pieces of text become tokens."""
    if meta["protocol"] == "records":
        end = dataset.block_size is None  # records of one length need no end
        return partial(encode_records, tokenizer, meta["block_size"], end)
    return partial(encode_batch, tokenizer, DETOKENISERS.get(meta["detokeniser"]))


def write_splits(
    folder: Path, corpora: dict[str, Corpus], encode: Encode, meta: dict, workers: int
) -> dict[str, dict]:
    """Write the token files into `folder`; returns their entries for meta.json."""
    settings, block_size = meta["settings"], None
    if meta["protocol"] == "sedd":
        block_size = meta["block_size"]
    records = meta["protocol"] == "records"
    how = settings["val_fraction"], settings["seed"], settings["limit"], records
    pieces = route(corpora, *how)
    encoded = encode_all(pieces, encode, workers)
    files: dict[str, SplitFile] = {}
    with contextlib.closing(encoded), _progress_bar(next(iter(corpora.values())).unit) as bar:
        for result in encoded:
            for split, tokens in result.items():
                if split not in files:
                    path = folder / f"{split}.bin"
                    files[split] = SplitFile(path, DTYPES[meta["dtype"]], block_size)
                files[split].write(*tokens)
            _update(bar, corpora, sum(file.tokens for file in files.values()))
    return {split: files[split].close() for split in SPLITS if split in files}


def _progress_bar(unit: str):
    from tqdm import tqdm

    # a log file needs a line now and then, a terminal a bar that moves
    interval = 0.2 if sys.stderr.isatty() else 30
    unit = unit if unit == "B" else f" {unit}"
    return tqdm(
        desc="tokenising", unit=unit, unit_scale=True, mininterval=interval, file=sys.stderr
    )


def _update(bar, corpora: dict[str, Corpus], tokens: int) -> None:
    totals = [corpus.total for corpus in corpora.values()]
    bar.total = None if None in totals else sum(totals)
    bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
    bar.update(max(0, sum(corpus.position for corpus in corpora.values()) - bar.n))


def report(target: Path, meta: dict) -> None:
    """Say what was made, and which command comes next."""
    size, settings = DTYPES[meta["dtype"]].itemsize, meta["settings"]
    for split, entry in meta["splits"].items():
        dropped = f"  {entry['dropped_tokens']:,} dropped" if entry["dropped_tokens"] else ""
        print(
            f"{split:5}  {entry['tokens']:>15,} tokens  {entry['documents']:>11,} documents  "
            f"{entry['tokens'] * size / 1e6:>10,.1f} MB{dropped}"
        )
    print(
        f"in {_shown(target)}; tokenizer {meta['tokenizer']}, {meta['vocab_size']} ids "
        f"as {meta['dtype']}"
    )
    print(f"protocol {meta['protocol']}: {meta['packing']}")
    for note in meta["notes"]:
        print(f"not comparable with the published tables: {note}")
    if meta["protocol"] == "sedd" or settings["split"] is not None:
        home = Path(__file__).resolve().parent / settings["dataset"]
        name = settings["dataset"] if target == home else _shown(target)
        print(f"next: python eval_ppl.py RUN --datasets {name}")
        return
    config = "own_text" if meta["tokenizer"] == "gpt2" else "quickstart"
    if isinstance(DATASETS.get(settings["dataset"]), TaskData):
        config = "sudoku6"
    if settings["dataset"] == "openwebtext":
        config = "aogpt_small"
    options = f"--name {target.name} --data.folder {_shown(target)}"
    if target == Path(__file__).resolve().parent / "stories":  # the quickstart's own
        options = ""
    if meta["protocol"] == "records":
        options += f" --model.block-size {meta['block_size']}"
    print(f"next: python train.py configs/{config}.toml {options}".rstrip())


def _shown(path: Path) -> str:
    """The path as the user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    run_script(main)
