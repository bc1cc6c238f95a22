"""Turn text into token files for training and evaluation: python data/prepare.py NAME [options].

Reads documents (catalogue.py, sources.py), detokenises published test sets (detokenisers.py), tokenises on all cores
(encoding.py), packs (packing.py) and writes a folder (folder.py):

    train.bin, val.bin, test.bin      token ids, flat, little-endian uint16 (uint32 for more than 65536 ids), of the
                                      splits there are; every document is followed by end-of-text
    meta.json                         tokenizer, dtype, protocol and packing, tokens and sha256 per file, source,
                                      settings, versions

Memory stays bounded however large the corpus. The folder is written beside its final place and moved there when it
is complete. The result depends on the source, the options and the seed, not on the number of workers.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # a script's sys.path begins with its own folder: let it begin with the project's, where `data` is a package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import collections
import contextlib
import difflib
import math
import os
import platform
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from data import packing
from data.catalogue import DATASETS, Dataset, Files
from data.encoding import RoutedPiece, batches, encode_all
from data.folder import clear_leftovers, is_finished, move_into_place, staging, write_meta
from data.loader import DTYPES, FORMAT, SPLIT_STREAM, dtype_name, random_bits
from data.packing import PROTOCOLS, SplitFile
from data.sources import Corpus, Piece, safe_cut
from data.tokenizers import get_tokenizer

DEFAULT_BLOCK_SIZE = 1024  # what the published perplexities are measured with

USAGE = """Turn text into token files for training and evaluation.

Writes a folder with train.bin, val.bin or test.bin and meta.json, for the loader to read. An interrupted run leaves
nothing behind; a finished dataset is not made twice.

examples:
  python data/prepare.py pydocs
  python data/prepare.py text --source book1.txt book2.md.gz --tokenizer bytes --out data/books
  python data/prepare.py text --source train.jsonl.xz --val val.jsonl.xz --field text
  python data/prepare.py ptb
  python data/prepare.py wikitext103 --source wiki.test.raw --block-size 512 --out data/wikitext103_512
"""


def _option(metavar: str, default: str):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass
class Prepare:
    """The command line of this script."""

    name: str
    """pydocs: the English that comes with Python, its help topics and docstrings; 2 MB, no download.
    text: your own files, given with --source.
    openwebtext: OpenWebText from the Hugging Face hub (24 GB), or local copies given with --source.
    wikitext2, wikitext103, ptb, lambada, lm1b: the evaluation sets of the published zero-shot perplexities, one split
    each, downloaded or given with --source, detokenised."""
    out: Annotated[Path | None, _option("DIR", "data/NAME in the project")] = None
    """Folder to write."""
    source: Annotated[tuple[Path, ...], _option("FILE ...", "none")] = ()
    """text: .txt and .md files (one document each), .jsonl files (one document a line), each also as .gz or .xz.
    Others: .parquet or .jsonl files to use instead of the download. Also, with a row a line: .txt for ptb, .txt .tokens
    .raw for wikitext, .txt or the published news.en files for lm1b."""
    val: Annotated[tuple[Path, ...], _option("FILE ...", "a share of the documents")] = ()
    """text: files of the validation split."""
    test: Annotated[tuple[Path, ...], _option("FILE ...", "no test split")] = ()
    """text: files of the test split."""
    tokenizer: Annotated[
        str | None, _option("gpt2|bytes", "bytes for pydocs, gpt2 for the others")
    ] = None
    """GPT-2's byte-pair encoding, or bytes as they are."""
    field: Annotated[str | None, _option("KEY", "sentence for ptb, text for the others")] = None
    """What holds the text in a row of a .jsonl or .parquet file."""
    split: Annotated[
        str | None, _option("train|val|test", "wikitext2: train, other evaluation sets: test")
    ] = None
    """Evaluation sets: the split to download, or which --source is. Others: write all documents to this split."""
    protocol: Annotated[
        str | None, _option("sedd|full", "sedd for the evaluation sets, full for the others")
    ] = None
    """sedd: rows in 8 shards and groups of 1,000, cut into blocks, the rest of every group dropped; as published.
    full: documents end to end, nothing dropped."""
    block_size: Annotated[int | None, _option("N", f"{DEFAULT_BLOCK_SIZE}")] = None
    """sedd: tokens of a block; a model of another block size needs the dataset prepared again."""
    val_fraction: Annotated[
        float | None, _option("SHARE", "0.0005 for openwebtext, 0.05 for text and pydocs")
    ] = None
    """Share of the documents that becomes the validation split.
    One out of every 1/SHARE in a row, drawn from the seed; of a single document, its end."""
    seed: Annotated[int, _option("N", "0")] = 0
    """Seed of that draw."""
    limit: Annotated[int | None, _option("N", "all")] = None
    """Use the first N documents only (validation share included), for a trial."""
    workers: Annotated[int | None, _option("N", "one per core, for bytes one")] = None
    """Processes that tokenise. The result does not depend on it."""
    overwrite: bool = False
    """Replace the dataset in the output folder; the old one stays until the new one is complete."""


def main() -> None:
    conf = tyro.conf
    args = tyro.cli(
        Prepare,
        description=USAGE,
        config=(
            conf.PositionalRequiredArgs,
            conf.DisallowNone,
            conf.PositionalMetavarFromFieldName,
            conf.FlagCreatePairsOff,
        ),
    )
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a scheduler's way to say stop is as good as Ctrl-C
        signal.signal(number, _interrupt)
    try:
        prepare(args)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _interrupt(signum, frame):
    _interrupt.came = True  # Python swallows what is raised inside a destructor: see prepare
    raise KeyboardInterrupt


_interrupt.came = False


def prepare(args: Prepare) -> Path:
    """Prepares the dataset that `args` describe and returns its folder.

    Does nothing where the folder holds that dataset already. Raises ValueError or OSError with a message for the
    user; then, and when interrupted, the output folder is what it was before.
    """
    dataset = _dataset(args.name)
    _check_options(args, dataset)
    target = (args.out or Path(__file__).resolve().parent / args.name).resolve()
    settings = _settings(args, dataset)
    get_tokenizer(settings["tokenizer"])  # before files are read, which can take long
    split, field = settings["split"], settings["field"]
    corpora = dataset.corpora(
        Files(list(args.source), list(args.val), list(args.test), field, split)
    )
    meta = _meta(target.name, settings, dataset, corpora)
    clear_leftovers(target)
    if is_finished(target, meta, args.overwrite):
        print(
            f"{_shown(target)} holds this dataset already, made with the same settings: nothing to do "
            "(--overwrite makes it again)"
        )
        return target
    with staging(target) as partial:
        meta["splits"] = _write_splits(partial, corpora, meta, args.workers)
        meta["notes"] = [note for corpus in corpora.values() for note in corpus.notes()]
        write_meta(partial, meta)
        if _interrupt.came:
            raise KeyboardInterrupt
        move_into_place(partial, target)
    _report(target, meta)
    return target


def _settings(args: Prepare, dataset: Dataset) -> dict:
    """What decides the result, beside the documents."""
    protocol = args.protocol or dataset.protocol
    fraction = dataset.val_fraction if args.val_fraction is None else args.val_fraction
    return {
        "dataset": args.name,
        "split": args.split or dataset.split,
        "protocol": protocol,
        "block_size": (args.block_size or DEFAULT_BLOCK_SIZE) if protocol == "sedd" else None,
        "tokenizer": args.tokenizer or dataset.tokenizer,
        "field": args.field or dataset.field,
        "val_fraction": None if args.val or args.split else fraction,
        "seed": args.seed,
        "limit": args.limit,
    }


def _meta(name: str, settings: dict, dataset: Dataset, corpora: dict[str, Corpus]) -> dict:
    """The contents of meta.json, without what is known at the end: splits and notes."""
    tokenizer = get_tokenizer(settings["tokenizer"])
    return {
        "format": FORMAT,
        "name": name,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype_name(tokenizer.vocab_size),
        "protocol": settings["protocol"],
        "packing": packing.describe(settings["block_size"]),
        "block_size": settings["block_size"],
        "detokeniser": dataset.detokeniser,
        "split": settings["split"],
        "splits": {},
        "notes": [],
        "source": [
            {"split": split, **part}
            for split, corpus in corpora.items()
            for part in corpus.describe()
        ],
        "settings": settings,
        "versions": _versions(tokenizer.name, corpora),
    }


# ---------------------------------------------------------------------------------------------------------------------
# options


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(
            f"unknown dataset {name!r}: {_near(name, DATASETS)}the datasets are {', '.join(DATASETS)}"
        )
    return DATASETS[name]


def _check_options(args: Prepare, dataset: Dataset) -> None:
    if args.source and dataset.source == "never":
        raise ValueError(
            f"{args.name} brings its own documents and takes no --source; for files of your own: "
            "python data/prepare.py text --source FILE ..."
        )
    if not args.source and dataset.source == "always":
        raise ValueError(f"{args.name} needs files to read: --source FILE ...")
    _check_splits(args, dataset)
    if args.protocol is not None and args.protocol not in PROTOCOLS:
        raise ValueError(
            f"unknown protocol {args.protocol!r}: {_near(args.protocol, PROTOCOLS)}it is sedd or full"
        )
    if args.block_size is not None and (args.protocol or dataset.protocol) != "sedd":
        raise ValueError(
            "--block-size is for --protocol sedd; a dataset of the protocol full can be read in blocks of any size"
        )
    for option, value in (
        ("--workers", args.workers),
        ("--limit", args.limit),
        ("--block-size", args.block_size),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    given = collections.Counter(path.resolve() for path in (*args.source, *args.val, *args.test))
    for path, times in given.items():
        if times > 1:
            raise ValueError(f"{path} is given {times} times; a file belongs to one split, once")


def _check_splits(args: Prepare, dataset: Dataset) -> None:
    if dataset.evaluation and (args.val or args.test or args.val_fraction is not None):
        raise ValueError(
            f"{args.name} is an evaluation set: it is written one split at a time, --split {'|'.join(dataset.splits)}, "
            "and takes no --val, --test or --val-fraction"
        )
    if (args.val or args.test) and dataset.source != "always":
        raise ValueError(
            f"--val and --test are for text; the validation split of {args.name} is a share of its "
            "documents (--val-fraction)"
        )
    if args.split is not None and args.split not in dataset.splits:
        near = _near(args.split, dataset.splits)
        raise ValueError(
            f"{args.name} has no split {args.split!r}: {near}its splits are {', '.join(dataset.splits)}"
        )
    if args.split and (args.val or args.test or args.val_fraction is not None):
        raise ValueError(
            "--split writes all documents to one split: give it without --val, --test and --val-fraction"
        )
    if args.val and args.val_fraction is not None:
        raise ValueError("give --val or --val-fraction, not both")
    if args.val_fraction is not None and not 0 < args.val_fraction <= 0.5:
        raise ValueError(f"--val-fraction must be above 0 and at most 0.5, not {args.val_fraction}")


def _near(word: str, known) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.4)
    return f"did you mean {near[0]}? " if near else ""


def _worker_count(workers: int | None, tokenizer: str) -> int:
    if workers is not None:
        return workers
    if tokenizer == "bytes":  # encoding bytes takes less time than sending them to another process
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(tokenizer: str, corpora: dict[str, Corpus]) -> dict[str, str]:
    from importlib.metadata import version

    packages = ["numpy"]
    if tokenizer == "gpt2":
        packages.append("tiktoken")
    packages += sorted({package for corpus in corpora.values() for package in corpus.packages})
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


# ---------------------------------------------------------------------------------------------------------------------
# which document goes where


def route(
    corpora: dict[str, Corpus], fraction: float | None, seed: int, limit: int | None
) -> Iterator[RoutedPiece]:
    """Every piece with its split, in reading order. With a `fraction`, validation comes out of "train".

    The `limit` is on the documents of the first split: those of --source.
    """
    for number, (split, corpus) in enumerate(corpora.items()):
        if split == "train" and fraction is not None:
            yield from _split_documents(corpus, fraction, seed, limit)
        else:
            for text, end in _limited(corpus, None if number else limit):
                yield split, text, end


def _limited(corpus: Corpus, limit: int | None) -> Iterator[Piece]:
    left = math.inf if limit is None else limit
    for text, end in corpus.pieces():
        yield text, end
        left -= end
        if left <= 0:
            break


def _split_documents(
    corpus: Corpus, fraction: float, seed: int, limit: int | None
) -> Iterator[RoutedPiece]:
    """One validation document in every group of 1 / fraction in a row; both splits get at least one document.

    The place in the group is drawn from (seed, number of the group), so a document's split depends on nothing that
    comes after it, except that a corpus of fewer documents than one group is a group itself.
    """
    enough = math.ceil(1 / fraction)
    documents = corpus.count(min(enough, limit or enough))
    if documents == 1:
        yield from _split_one_document(corpus, fraction, limit)
        return
    group_size = min(1 / fraction, documents)
    group, index = 0, 0
    chosen = _chosen(seed, group, group_size)
    for text, end in _limited(corpus, limit):
        yield "val" if index == chosen else "train", text, end
        index += end
        while chosen < index:
            group += 1
            chosen = _chosen(seed, group, group_size)


def _chosen(seed: int, group: int, group_size: float) -> int:
    """The document that group number `group` gives to validation."""
    first, last = math.ceil(group * group_size), math.ceil((group + 1) * group_size)
    return first + int(random_bits(seed, group, 1, SPLIT_STREAM)[0]) % (last - first)


def _split_one_document(
    corpus: Corpus, fraction: float, limit: int | None
) -> Iterator[RoutedPiece]:
    """The end of the only document is validation: the given share of its characters, cut at a space if possible."""
    characters = sum(len(text) for text, _ in _limited(corpus, limit))
    boundary = characters - max(1, round(characters * fraction))
    if boundary < 1:
        raise ValueError(
            f"the only document has {characters} characters, too few for a training and a validation "
            "split; add documents"
        )
    split, start = "train", 0
    for text, end in _limited(corpus, limit):
        if split == "train" and start + len(text) > boundary:
            cut = safe_cut(text, boundary - start) or boundary - start
            yield "train", text[:cut], True
            split, text, start = "val", text[cut:], start + cut
        yield split, text, end
        start += len(text)


# ---------------------------------------------------------------------------------------------------------------------
# files


def _write_splits(
    folder: Path, corpora: dict[str, Corpus], meta: dict, workers: int | None
) -> dict[str, dict]:
    """Writes the token files into `folder`; returns their entries for meta.json."""
    settings, files = meta["settings"], {}
    workers = _worker_count(workers, meta["tokenizer"])
    pieces = route(corpora, settings["val_fraction"], settings["seed"], settings["limit"])
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(next(iter(corpora.values())).unit))
        encoded = encode_all(batches(pieces), meta["tokenizer"], meta["detokeniser"], workers)
        for result in stack.enter_context(contextlib.closing(encoded)):
            for split, (ids, ends) in result.items():
                if split not in files:
                    files[split] = SplitFile(folder / f"{split}.bin", meta["block_size"])
                    stack.callback(files[split].close)
                files[split].write(ids, ends)
            _update(bar, corpora, sum(file.tokens for file in files.values()))
    return {split: files[split].entry() for split in ("train", "val", "test") if split in files}


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


def _report(target: Path, meta: dict) -> None:
    size, settings = DTYPES[meta["dtype"]].itemsize, meta["settings"]
    for split, entry in meta["splits"].items():
        dropped = f"  {entry['dropped_tokens']:,} dropped" if entry["dropped_tokens"] else ""
        print(
            f"{split:5}  {entry['tokens']:>15,} tokens  {entry['documents']:>11,} documents  "
            f"{entry['tokens'] * size / 1e6:>10,.1f} MB{dropped}"
        )
    print(
        f"in {_shown(target)}; tokenizer {meta['tokenizer']}, {meta['vocab_size']} ids as {meta['dtype']}"
    )
    print(f"protocol {meta['protocol']}: {meta['packing']}")
    for note in meta["notes"]:
        print(f"not comparable with the published tables: {note}")
    if meta["protocol"] == "sedd" or settings["split"] is not None:
        named = (
            settings["dataset"]
            if target == Path(__file__).resolve().parent / settings["dataset"]
            else _shown(target)
        )
        print(f"next: python eval_ppl.py RUN --datasets {named}")
        return
    config = "quickstart" if meta["tokenizer"] == "bytes" else "own_text"
    config = "aogpt_small" if settings["dataset"] == "openwebtext" else config
    print(
        f"next: python train.py configs/{config}.toml --name {target.name} --data.folder {_shown(target)}"
    )


def _shown(path: Path) -> str:
    """The path as the user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    main()
