"""Turn text into token files for training: python data/prepare.py NAME [options].

Reads documents (sources.py), tokenises them on all cores and writes a folder:

    train.bin, val.bin [, test.bin]   token ids, flat, little-endian uint16 (uint32 for more than 65536 ids);
                                      every document is followed by end-of-text
    meta.json                         tokenizer, dtype, tokens and sha256 per file, source, settings, versions

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
import hashlib
import itertools
import json
import math
import os
import platform
import shutil
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from data.loader import DTYPES, FORMAT, SPLIT_STREAM, check_file, dtype_name, load_meta, random_bits
from data.sources import DATASETS, Corpus, Dataset, HubRows, Piece, safe_cut
from data.tokenizer import get_tokenizer

BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 8192
WINDOW = 3  # batches per worker that may wait: enough to keep all workers busy, few enough to bound memory

USAGE = """Turn text into token files for training.

Writes a folder with train.bin, val.bin (and test.bin) and meta.json, for the loader to read. An interrupted run leaves
nothing behind; a finished dataset is not made twice.

examples:
  python data/prepare.py pydocs
  python data/prepare.py text --source book1.txt book2.md.gz --tokenizer bytes --out data/books
  python data/prepare.py text --source train.jsonl.xz --val val.jsonl.xz --field text
"""

RoutedPiece = tuple[str, str, bool]  # split, text, whether the document ends here


def _option(metavar: str, default: str):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass
class Prepare:
    """The command line of this script."""

    name: str
    """pydocs: the English that comes with Python, its help topics and docstrings; 2 MB, no download.
    text: your own files, given with --source.
    openwebtext: OpenWebText from the Hugging Face hub (24 GB), or local copies given with --source."""
    out: Annotated[Path | None, _option("DIR", "data/NAME in the project")] = None
    """Folder to write."""
    source: Annotated[tuple[Path, ...], _option("FILE ...", "none")] = ()
    """text: .txt and .md files (one document each), .jsonl files (one document a line), each also as .gz or .xz.
    openwebtext: .parquet or .jsonl files to use instead of the download."""
    val: Annotated[tuple[Path, ...], _option("FILE ...", "a share of the documents")] = ()
    """text: files of the validation split."""
    test: Annotated[tuple[Path, ...], _option("FILE ...", "no test split")] = ()
    """text: files of the test split."""
    tokenizer: Annotated[str | None, _option("gpt2|bytes", "bytes for pydocs, gpt2 for the others")] = None
    """GPT-2's byte-pair encoding, or bytes as they are."""
    field: Annotated[str, _option("KEY", "text")] = "text"
    """What holds the text in a row of a .jsonl or .parquet file."""
    val_fraction: Annotated[float | None, _option("SHARE", "0.0005 for openwebtext, 0.05 for the others")] = None
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
    for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler's way to say stop is as good as Ctrl-C
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
    _interrupt.came = True  # Python swallows what is raised inside a destructor: see _move_into_place
    raise KeyboardInterrupt


_interrupt.came = False


def prepare(args: Prepare) -> Path:
    """Prepares the dataset that `args` describe and returns its folder.

    Does nothing where the folder holds that dataset already. Raises ValueError or OSError with a message for the
    user; then, and when interrupted, the output folder is what it was before.
    """
    dataset = _dataset(args.name)
    _check_options(args, dataset)
    name = args.tokenizer or dataset.tokenizer
    tokenizer = get_tokenizer(name)
    target = (args.out or Path(__file__).resolve().parent / args.name).resolve()
    corpora = dataset.corpora(list(args.source), list(args.val), list(args.test), args.field)
    fraction = dataset.val_fraction if args.val_fraction is None else args.val_fraction
    fraction = None if "val" in corpora or "train" not in corpora else fraction
    settings = {
        "dataset": args.name,
        "tokenizer": name,
        "field": args.field,
        "val_fraction": fraction,
        "seed": args.seed,
        "limit": args.limit,
    }
    meta = {
        "format": FORMAT,
        "name": target.name,
        "tokenizer": name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype_name(tokenizer.vocab_size),
        "splits": {},
        "source": [{"split": split, **part} for split, corpus in corpora.items() for part in corpus.describe()],
        "settings": settings,
        "versions": _versions(name, corpora),
    }
    _clear_leftovers(target)
    if _is_finished(target, meta, args.overwrite):
        print(
            f"{_shown(target)} holds this dataset already, made with the same settings: nothing to do "
            "(--overwrite makes it again)"
        )
        return target
    with _staging(target) as partial:
        pieces = route(corpora, fraction, args.seed, args.limit)
        meta["splits"] = _write_splits(partial, corpora, pieces, name, _worker_count(args.workers, name))
        _write_meta(partial, meta)
        _move_into_place(partial, target)
    _report(target, meta)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# options


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        near = difflib.get_close_matches(name.lower(), DATASETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown dataset {name!r}: {hint}the datasets are {', '.join(DATASETS)}")
    return DATASETS[name]


def _check_options(args: Prepare, dataset: Dataset) -> None:
    if args.source and dataset.source == "never":
        raise ValueError(
            f"{args.name} brings its own documents and takes no --source; for files of your own: "
            "python data/prepare.py text --source FILE ..."
        )
    if not args.source and dataset.source == "always":
        raise ValueError(f"{args.name} needs files to read: --source FILE ...")
    if (args.val or args.test) and dataset.source != "always":
        raise ValueError(
            f"--val and --test are for text; the validation split of {args.name} is a share of its "
            "documents (--val-fraction)"
        )
    if args.val and args.val_fraction is not None:
        raise ValueError("give --val or --val-fraction, not both")
    if args.val_fraction is not None and not 0 < args.val_fraction <= 0.5:
        raise ValueError(f"--val-fraction must be above 0 and at most 0.5, not {args.val_fraction}")
    for option, value in (("--workers", args.workers), ("--limit", args.limit)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    given = collections.Counter(path.resolve() for path in (*args.source, *args.val, *args.test))
    for path, times in given.items():
        if times > 1:
            raise ValueError(f"{path} is given {times} times; a file belongs to one split, once")


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
    if any(isinstance(corpus, HubRows) for corpus in corpora.values()):
        packages.append("datasets")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


# ---------------------------------------------------------------------------------------------------------------------
# which document goes where


def route(corpora: dict[str, Corpus], fraction: float | None, seed: int, limit: int | None) -> Iterator[RoutedPiece]:
    """Every piece with its split, in reading order. With a `fraction`, validation comes out of "train"."""
    for split, corpus in corpora.items():
        if split == "train" and fraction is not None:
            yield from _split_documents(corpus, fraction, seed, limit)
        else:
            for text, end in _limited(corpus, limit if split == "train" else None):
                yield split, text, end


def _limited(corpus: Corpus, limit: int | None) -> Iterator[Piece]:
    left = math.inf if limit is None else limit
    for text, end in corpus.pieces():
        yield text, end
        left -= end
        if left <= 0:
            break


def _split_documents(corpus: Corpus, fraction: float, seed: int, limit: int | None) -> Iterator[RoutedPiece]:
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


def _split_one_document(corpus: Corpus, fraction: float, limit: int | None) -> Iterator[RoutedPiece]:
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
# tokenising, in order, with a bounded number of batches under way


def batches(pieces: Iterable[RoutedPiece]) -> Iterator[list[RoutedPiece]]:
    """The pieces in lists of about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_batch(tokenizer_name: str, batch: list[RoutedPiece]) -> dict[str, tuple[np.ndarray, int]]:
    """Per split of the batch: the ids, in the dtype of the file, with end-of-text after every document, and the
    number of documents that end."""
    tokenizer = get_tokenizer(tokenizer_name)
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    eot = np.array([tokenizer.eot], dtype=dtype)
    arrays: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    documents: collections.Counter[str] = collections.Counter()
    for split, text, end in batch:
        arrays[split].append(tokenizer.encode_array(text).astype(dtype, copy=False))
        if end:
            arrays[split].append(eot)
            documents[split] += 1
    return {split: (np.concatenate(parts), documents[split]) for split, parts in arrays.items()}


def encode_all(todo: Iterator[list[RoutedPiece]], tokenizer_name: str, workers: int):
    """`encode_batch` of every batch, in order, on `workers` processes."""
    head = list(itertools.islice(todo, 2 * workers))
    if workers == 1 or len(head) < 2 * workers:  # little text is done before the workers would have started
        for batch in itertools.chain(head, todo):
            yield encode_batch(tokenizer_name, batch)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # spawn: a forked child would inherit the locks of whatever threads pyarrow has running
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        pending, started = collections.deque(), False
        for batch in itertools.chain(head, todo):
            if not started:  # workers inherit the mask: no Ctrl-C strikes one that is still importing
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            pending.append(pool.submit(encode_batch, tokenizer_name, batch))
            if not started:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            started = True
            if len(pending) >= WINDOW * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a tokenising process was killed, for lack of memory perhaps; try again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent dies: a parent that is killed outright cannot, and the worker would wait on."""
    from multiprocessing import connection, parent_process

    connection.wait([parent_process().sentinel])
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# files


class SplitFile:
    """A token file as it is written: counts and checksum come with it."""

    def __init__(self, path: Path):
        self.path, self.tokens, self.documents = path, 0, 0
        self._hash = hashlib.sha256()
        self._file = open(path, "wb")

    def write(self, ids: np.ndarray, documents: int) -> None:
        self._file.write(ids.data)
        self._hash.update(ids.data)
        self.tokens += ids.size
        self.documents += documents

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def entry(self) -> dict:
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "sha256": self._hash.hexdigest(),
        }


def _write_splits(
    folder: Path, corpora: dict[str, Corpus], pieces: Iterator[RoutedPiece], tokenizer_name: str, workers: int
) -> dict[str, dict]:
    """Writes the token files into `folder`; returns their entries for meta.json."""
    files: dict[str, SplitFile] = {}
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(next(iter(corpora.values())).unit))
        results = stack.enter_context(contextlib.closing(encode_all(batches(pieces), tokenizer_name, workers)))
        for result in results:
            for split, (ids, documents) in result.items():
                if split not in files:
                    files[split] = SplitFile(folder / f"{split}.bin")
                    stack.callback(files[split].close)
                files[split].write(ids, documents)
            _update(bar, corpora, sum(file.tokens for file in files.values()))
    return {split: files[split].entry() for split in ("train", "val", "test") if split in files}


def _progress_bar(unit: str):
    from tqdm import tqdm

    # a log file needs a line now and then, a terminal a bar that moves
    interval = 0.2 if sys.stderr.isatty() else 30
    unit = unit if unit == "B" else f" {unit}"
    return tqdm(desc="tokenising", unit=unit, unit_scale=True, mininterval=interval, file=sys.stderr)


def _update(bar, corpora: dict[str, Corpus], tokens: int) -> None:
    totals = [corpus.total for corpus in corpora.values()]
    bar.total = None if None in totals else sum(totals)
    bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
    bar.update(max(0, sum(corpus.position for corpus in corpora.values()) - bar.n))


def _write_meta(folder: Path, meta: dict) -> None:
    with open(folder / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Whether `target` holds the dataset that `meta` describes. ValueError where it holds something that stays."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise ValueError(f"{target} is a file; choose another --out")
    names = {path.name for path in target.iterdir()}
    if not names:
        return False
    strangers = sorted(name for name in names if name != "meta.json" and not name.endswith(".bin"))
    if strangers or "meta.json" not in names:  # never replace a folder that holds anything of the user's
        raise ValueError(
            f"{target} is not empty and holds more or other things than a prepared dataset "
            f"({', '.join(strangers[:3]) or 'no meta.json'}); choose another --out"
        )
    if overwrite:
        return False
    try:
        found = load_meta(target)
        for split in found["splits"]:
            check_file(target, found, split)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{error}\n{target} holds a damaged dataset: pass --overwrite to replace it, or choose another --out"
        ) from error
    differences = _differences(found, meta)
    if differences:
        raise ValueError(
            f"{target} holds a dataset made with other settings ({'; '.join(differences)}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return True


def _differences(found: dict, wanted: dict) -> list[str]:
    before, now = found.get("settings", {}), wanted["settings"]
    different = [f"{key} was {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]
    if found.get("source") != wanted["source"]:
        different.append("the source has changed")
    return different


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, removed at the end unless it was moved."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{_run_id()}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"  # the host as well: several may share a disk


def _clear_leftovers(target: Path) -> None:
    """Removes what killed runs left beside `target`."""
    for path in list(target.parent.iterdir()) if target.parent.is_dir() else []:
        for kind in ("partial", "old"):
            prefix = f".{target.name}.{kind}-"
            if not path.name.startswith(prefix) or not _is_dead(path.name.removeprefix(prefix)):
                continue
            if kind == "old" and not target.exists():  # killed between the two moves of _move_into_place
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_dead(run_id: str) -> bool:
    """Whether the run is known to have ended: of runs on other hosts nothing is known."""
    host, _, pid = run_id.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(pid) == os.getpid()


def _move_into_place(partial: Path, target: Path) -> None:
    """Moves the finished folder to `target`; what was there before is kept until then."""
    if _interrupt.came:
        raise KeyboardInterrupt
    _sync_folder(partial)
    old = target.parent / f".{target.name}.old-{_run_id()}"
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _report(target: Path, meta: dict) -> None:
    size = DTYPES[meta["dtype"]].itemsize
    for split, entry in meta["splits"].items():
        print(
            f"{split:5}  {entry['tokens']:>15,} tokens  {entry['documents']:>11,} documents  "
            f"{entry['tokens'] * size / 1e6:>10,.1f} MB"
        )
    print(f"in {_shown(target)}; tokenizer {meta['tokenizer']}, {meta['vocab_size']} ids as {meta['dtype']}")
    config = "quickstart" if meta["tokenizer"] == "bytes" else "own_text"
    config = "aogpt_small" if meta["settings"]["dataset"] == "openwebtext" else config
    print(f"next: python train.py configs/{config}.toml --name {target.name} --data.folder {_shown(target)}")


def _shown(path: Path) -> str:
    """The path as the user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    main()
