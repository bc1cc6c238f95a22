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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from annotated_types import Interval
from tqdm import tqdm

from ..runtime.command_line import counted, show, with_help
from ..runtime.errors import UserError
from ..runtime.files import clear_leftovers, staging, write_json
from ..runtime.paths import DATA
from ..runtime.validation import Count, check_value, check_values, flag
from . import packing, tokenizers
from .catalogue import DATASETS, SPLITS, Dataset
from .detokenisers import detokenise
from .loader import load_meta, read_tokens
from .packing import SplitFile
from .prompts import PROMPT, encode_example, example_of
from .sources import Corpus, RowReader, source_files, text_of
from .tokenizers import HUB, HubTokenizer, Tokenizer, get_tokenizer, other_tokenizer

# What a folder may hold that --overwrite replaces.
FILES = {"meta.json", tokenizers.OWN, tokenizers.HUB, tokenizers.HUB_SETTINGS}
FILES.update(f"{split}.bin" for split in SPLITS)
FILES.update(f"{split}.roles.bin" for split in SPLITS)
CONFIGS = {"gpt2": "configs/own_text.toml", HUB: "configs/smollm2.toml"}
DEFAULT_BLOCK_SIZE = 1024  # that of the published perplexities
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
openwebtext: from that hub (24 GB), or a copy.
{EVALUATION}: evaluation sets of published zero-shot perplexities, detokenised; these
are downloaded, or local copies in --source."""


@dataclass(frozen=True)
class Prepare:
    """The command line of this script."""

    name: Annotated[str, tyro.conf.arg(help=NAMES)]
    repository: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[REPOSITORY]")
    ] = ""
    """hub: OWNER/NAME, or a local copy; --field names the field that holds the text."""
    config: str | None = None
    """hub: the configuration of the repository; by default the only one."""
    out: Path | None = None
    """Folder to write; by default data/NAME in the project."""
    source: tuple[Path, ...] = ()
    """Files, or folders of files.
    .jsonl, .json (a list), .parquet: a document a row;
    text: also .txt and .md files, one document each;
    wikitext: also .txt .tokens .raw, ptb: .txt, lm1b: .txt, news.en.*; a row a line.
    All but .parquet can end in .gz or .xz, too."""
    val: tuple[Path, ...] = ()
    """text, records: files of the validation split; by default a share of the
    documents."""
    test: tuple[Path, ...] = ()
    """text, records: files of the test split."""
    tokenizer: str | None = None
    """gpt2: GPT-2's byte-pair encoding, the usual default. english: a small one of 2048
    ids. bytes: UTF-8 bytes. alphabet:ACDEFGHIKLMNPQRSTVWY: each of these characters is
    a token. Or a file, NAME.tiktoken or tokenizer.json, which is copied into the
    folder."""
    end_token: str | None = None
    """tokenizer.json: the token that ends a document, such as "</s>"; by default what
    the files beside it say."""
    field: str | None = None
    """Field that holds the text in a row: by default "text"; ptb: "sentence"; pubmed,
    arxiv: "article"."""
    prompt_field: str | None = None
    """records: field that holds the prompt in a row; by default "prompt", where a row
    has one."""
    skip_long: bool = False
    """records: skip those that are longer than a block."""
    split: str | None = None
    """Evaluation sets and hub: the split (train, val, test) to download, or which
    --source is. Others: write all documents to this split."""
    protocol: Literal["sedd", "full"] | None = None
    """sedd, for evaluation sets: 8 shards; groups of 1,000 rows make blocks, rests
    dropped; as published.
    full, for others: documents end to end, nothing dropped."""
    block_size: BlockSize | None = None
    """sedd: tokens of a block, which must be the model's; by default 1024.
    records: tokens of a block, more than the longest record has."""
    val_fraction: ValFraction | None = None
    """Share of the documents for validation, 0.05 (openwebtext: 0.0005): a random one
    of every 1/SHARE in a row; of a single document, its end."""
    limit: Count | None = None
    """Use the first N documents of --source only (validation share included), for a
    trial."""
    overwrite: bool = False
    """Replace the dataset in the output folder; it stays until the new one is
    complete."""


def main() -> None:
    """Prepare the dataset of the command line."""
    # A scheduler's way to stop a run cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    check_value(args.name, Literal[tuple(datasets)], "the dataset")
    dataset = datasets[args.name]
    name = Path(args.repository).name or args.name
    target = Path(os.path.realpath(args.out or DATA / name))
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
    read_row: RowReader = partial(text_of, field=args.field)
    if dataset.protocol == "records":
        read_row = partial(example_of, field=args.field, prompt_field=args.prompt_field)
    corpora = dataset.corpora(args, read_row)
    meta = metadata(target.name, args, tokenizer, dataset, corpora)
    if is_finished(target, meta, args.overwrite):
        show(f"{target} holds this dataset already: nothing to do")
        meta = load_meta(target)
    else:
        with staging(target) as folder:
            # Token files without a meta.json would pass for finished ones.
            (folder / "meta.json").touch()
            tokenizer.keep(folder)
            files = write_splits(folder, args, tokenizer, dataset, corpora)
            meta.update(complete(files, corpora))
            write_json(folder / "meta.json", meta)
            # Raises for files that another process has written there meanwhile.
            is_finished(target, meta, args.overwrite)
        report(target, meta, tokenizer)
    place = shlex.quote(str(args.out or os.path.relpath(target)))
    if meta["protocol"] == "sedd" or "train" not in meta["splits"]:
        show(f"next: python eval_ppl.py RUN --datasets {place}")
    else:
        config = dataset.config or CONFIGS.get(
            tokenizer.name, "configs/quickstart.toml"
        )
        options = f"--name {shlex.quote(target.name)} --data.folder {place}"
        train = meta["splits"]["train"]
        if "lengths" in train:  # records that end
            options += f" --model.block-size {meta['block_size']}"
            if not has_prompts(target, train):  # they say how long an answer is
                options += " --data.end given"
        show(f"next: python train.py {config} {options}")
    return target


def has_prompts(folder: Path, split: dict) -> bool:
    """Return whether a token of a split of records belongs to a prompt."""
    if "roles" not in split:
        return False
    return PROMPT in np.fromfile(folder / split["roles"]["file"], np.uint8)


def with_defaults(args: Prepare, dataset: Dataset) -> Prepare:
    """Return the options with the dataset's defaults."""
    protocol = args.protocol or dataset.protocol
    block_size = None
    if protocol != "full":
        block_size = args.block_size or dataset.block_size or DEFAULT_BLOCK_SIZE
    val_fraction = args.val_fraction or dataset.val_fraction
    if args.val or args.split:
        val_fraction = None
    return replace(
        args,
        split=args.split or dataset.split,
        protocol=protocol,
        tokenizer=args.tokenizer or dataset.tokenizer,
        field=args.field or dataset.field,
        val_fraction=val_fraction,
        block_size=block_size,
    )


def check_options(args: Prepare, dataset: Dataset) -> None:
    """Raise UserError for options that do not fit the dataset or each other."""
    name = args.name
    size = dataset.block_size
    of_files = dataset.source == "always"
    of_examples = dataset.protocol == "records"
    has_share = dataset.val_fraction is not None
    is_packed = (args.protocol or dataset.protocol) != "full"
    takes = {
        "source": dataset.source != "never",
        "val": of_files,
        "test": of_files,
        "split": dataset.source != "never" or has_share,
        "val_fraction": has_share,
        "repository": name == "hub",
        "config": name == "hub",
        "prompt_field": of_examples,
        "skip_long": of_examples,
        "protocol": not of_examples,
        "block_size": is_packed and size in (None, args.block_size),
        "tokenizer": size is None or args.tokenizer == dataset.tokenizer,
        "end_token": (args.tokenizer or "").endswith(".json"),
    }
    for option, fits in takes.items():
        if getattr(args, option) and not fits:
            raise UserError(
                f"{name} takes no {flag(option)} here; leave it out, or see --help"
            )
    needs = {
        "--source FILE ...": of_files and not args.source,
        "a repository, OWNER/NAME": name == "hub" and not args.repository,
        "--block-size N": of_examples and not (args.block_size or size),
    }
    for words, is_missing in needs.items():
        if is_missing:
            raise UserError(f"{name} needs {words}")
    ways = [args.split, args.val_fraction, args.val]
    if sum(map(bool, ways)) > 1 or (args.split and args.test):
        raise UserError("give one of --split, --val-fraction and --val, not several")
    if args.split:
        check_value(args.split, Literal[dataset.splits], f"--split of {name}")
    if args.prompt_field and args.prompt_field == (args.field or dataset.field):
        raise UserError(f"--field and --prompt-field are both {args.prompt_field!r}")


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
        sources += [{"split": split, **part} for part in corpus.description]
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


def write_splits(
    folder: Path,
    args: Prepare,
    tokenizer: Tokenizer,
    dataset: Dataset,
    corpora: dict[str, Corpus],
) -> dict[str, SplitFile]:
    """Read all documents and write their tokens. Returns the files by split. Raises
    UserError for a split without a document, and for records that are too long."""
    of_examples = args.protocol == "records"
    # Records of one length, which the dataset knows, need no end.
    records_end = of_examples and dataset.block_size is None
    encode: Any = partial(packing.encode_documents, tokenizer)
    if of_examples:
        encode = partial(
            map, partial(encode_example, tokenizer, args.block_size, records_end)
        )
    files: dict[str, SplitFile] = {}
    too_long = []  # tokens of records
    special: Counter[str] = Counter()  # tokens that are plain text in texts
    documents = packing.route(corpora, args.val_fraction, args.limit, whole=of_examples)
    # None: a bar in a terminal only
    with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
        for batch in packing.batches(documents):
            texts = [detokenise(dataset.detokeniser, text) for _, text in batch]
            special += tokenizer.count_special(texts)
            encoded = zip(batch, texts, encode(texts), strict=True)
            for (split, _), text, (ids, roles) in encoded:
                if of_examples and ids.size > args.block_size:
                    too_long.append(ids.size)
                    continue
                if split not in files:
                    files[split] = SplitFile(
                        folder / f"{split}.bin",
                        args.protocol,
                        args.block_size,
                        tokenizer,
                        records_end,
                    )
                files[split].write(text, ids, roles)
                bar.update(ids.size)
    if too_long:
        count = counted(len(too_long), "records")
        long_records = f"{count} longer than a block of {args.block_size} tokens"
        if not args.skip_long:
            raise UserError(
                f"{long_records}, the longest has {max(too_long)}: give a larger "
                "--block-size, or --skip-long"
            )
        show(f"note: {long_records} skipped")
    for split in corpora:
        if split not in files:
            raise UserError(f"{split} of {args.name} has no document: give more text")
    for note in tokenizers.notes_on_special(special):
        show(f"note: {note}")
    return files


def complete(files: dict[str, SplitFile], corpora: dict[str, Corpus]) -> dict:
    """Complete the files. Returns the splits and notes for meta.json."""
    files = {split: files[split] for split in SPLITS if split in files}
    entries = {split: file.close() for split, file in files.items()}
    notes = []
    for split, corpus in corpora.items():
        rows = entries[split]["documents"]
        if corpus.published not in (None, rows):
            notes.append(
                f"{rows:,} rows, where the published {split} split has "
                f"{corpus.published:,}"
            )
    for first, second in (("train", "val"), ("train", "test"), ("val", "test")):
        if {first, second} <= files.keys():
            shared = packing.shared_rows(files[first], files[second])
            if shared:
                total = counted(entries[second]["documents"], f"documents of {second}")
                show(f"note: {shared:,} of {total} are in {first}, too")
    if any(file.text_bytes != file.token_bytes for file in files.values()):
        show(
            "note: the tokenizer loses text; bits per byte are of the bytes of the text"
        )
    return {"splits": entries, "notes": notes}


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
    before = load_meta(target)
    for split in before["splits"]:
        read_tokens(target, split, verify=True)
    old = before.get("settings", {})
    new = meta["settings"]
    # An older folder lacks newer keys, and has those of removed options.
    changed = [
        key
        for key in {**new, **old}
        if key != "tokenizer" and (old.get(key) or None) != (new.get(key) or None)
    ]
    if before.get("source") != meta["source"]:
        changed.append("source")
    if other_tokenizer(before, meta):
        changed.append("vocabulary")
    if before["eot"] != meta["eot"]:
        changed.append("end token")
    if changed:
        raise UserError(
            f"{target} was made with another {', '.join(changed)}: "
            "pass --overwrite to replace it, or choose another --out"
        )
    return True


def report(folder: Path, meta: dict, tokenizer: Tokenizer) -> None:
    """Print the sizes of the splits, and notes."""
    for split, entry in meta["splits"].items():
        tokens = counted(entry["tokens"], "tokens")
        documents = counted(entry["documents"], "documents")
        show(
            f"{split}: {tokens} of {documents}, {entry['dropped_tokens']:,} tokens "
            "dropped"
        )
    show(
        f"in {folder}; tokenizer {meta['tokenizer']}, protocol {meta['protocol']}, "
        f"blocks of {meta['block_size'] or 'any number of'} tokens"
    )
    if isinstance(tokenizer, HubTokenizer):
        show(
            f"{tokenizer.end_token} (id {tokenizer.eot}) ends a document; the model "
            f"reads it after {' '.join(tokenizer.start_tokens) or 'no token'}"
        )
    for note in meta["notes"]:
        show(f"not comparable with the published tables: {note}")
