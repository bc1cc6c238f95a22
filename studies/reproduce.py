"""The paper's zero-shot tables (2, 4 and 5) from released weights, beside the published
ones.

    python -m studies.reproduce          # both sizes, whole sets: on a GPU
    python -m studies.reproduce --quick  # small, 64 sequences of each set

Downloads weights and sets, prepares the sets in the packing of the SEDD protocol,
scores every model, and writes out/reproduce/README.md. --quick takes about 57,000
passes of 1,024 tokens, 41,000 of them RADD's and SEDD's left to right: hours, on two
CPU cores most of a day. The same command goes on where it was interrupted: a
downloaded file, a prepared set and a finished evaluation are not made again."""

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Literal

import tyro

from aogpt.data.loader import find_dataset
from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json, write_text
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import Count, check_values, from_values
from studies.runs import ROOT, report_of, run_well

Size = Literal["small", "medium"]
CONFIG = ROOT / "studies" / "configs" / "reproduce.toml"
QUICK_SEQUENCES = 64
# Left to right an encoder takes a pass for each of the 1,024 tokens of a sequence.
QUICK_L2R_SEQUENCES = 4
QUICK_ENSEMBLE_SEQUENCES = 8  # 136 passes each


@dataclass(frozen=True)
class Model:
    """Released weights, and how they are scored.

    files: per size a repository on the Hugging Face hub, and a file in it if it is not
    a folder that the loaders read as a whole. orders: values of --orders, each in a run
    of its own. random_orders: whether it takes --num-orders. ensembles: whether random
    orders are also averaged over. l2r_sequences: the most sequences that are scored
    left to right, with --quick QUICK_L2R_SEQUENCES."""

    name: str
    files: dict[str, list[str]]
    weights: Literal["ema", "raw"]
    orders: list[str]
    random_orders: bool = True
    ensembles: bool = False
    l2r_sequences: int | None = None


@dataclass(frozen=True)
class Line:
    """A line of the published tables: perplexities by size, one a dataset."""

    model: str
    title: str
    orders: str
    published: dict[str, list[float]]
    ensemble: int = 1


@dataclass(frozen=True)
class Cause:
    """Why a cell can differ from the published one: which models and orders it is
    about, by default all, and whether of averages over context orders alone."""

    says: str
    models: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    ensembles: bool = False

    def applies_to(self, line: Line) -> bool:
        if self.models and line.model not in self.models:
            return False
        if self.ensembles and line.ensemble == 1:
            return False
        return not self.orders or line.orders in self.orders


@dataclass(frozen=True)
class Config:
    """What CONFIG holds: the models, the lines of the tables, the names of the sets,
    the number of sequences behind a published number, and the causes of differences."""

    models: list[Model]
    lines: list[Line]
    datasets: list[str]
    published_sequences: int
    causes: list[Cause]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    sizes: tuple[Size, ...] = ()
    """small: about 125M parameters; medium: about 350M. By default both of whole sets,
    small of a part of each set."""
    models: tuple[str, ...] = ()
    """Names such as AO-GPT and RADD; by default all."""
    datasets: tuple[str, ...] = ()
    """Names such as ptb; by default all five sets."""
    quick: bool = False
    """64 sequences of each set, spread over it, instead of all; encoders left to right
    4, averages over context orders 8."""
    max_sequences: Count | None = None
    """Sequences of each set; by default all, with --quick 64."""
    num_orders: Count = 8
    """Random orders, or masks of an encoder, for each sequence."""
    ensemble: tuple[Count, ...] = (1, 8, 64)
    """Context orders that AO-GPT averages over."""
    out: Path = ROOT / "out" / "reproduce"
    """Folder of weights, evaluations and the table."""

    @property
    def limit(self) -> int | None:
        """Return the number of sequences of each set to score; None for all."""
        return self.max_sequences or (QUICK_SEQUENCES if self.quick else None)

    @property
    def all_sizes(self) -> tuple[Size, ...]:
        """Return the sizes of models to score."""
        if self.sizes:
            return self.sizes
        return ("small",) if self.limit else ("small", "medium")


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    check_values(a)
    config = read_config()
    datasets = chosen(a.datasets, config.datasets, "--datasets")
    names = chosen(a.models, [model.name for model in config.models], "--models")
    folders = [prepared(name) for name in datasets]
    results: dict[tuple[str, str], list[dict]] = {}
    for size in a.all_sizes:
        for model in config.models:
            if model.name in names:
                path = fetched(model, size)
                results[size, model.name] = evaluated(a, model, size, path, folders)
                page = table(a, config, datasets, results)
                write_text(a.out / "README.md", page)
    show(f"wrote {a.out / 'README.md'}")


def read_config() -> Config:
    return from_values(tomllib.loads(CONFIG.read_text()), Config, str(CONFIG))


def chosen(wanted: tuple[str, ...], names: list[str], option: str) -> list[str]:
    """Return those of `names` that an option names, all if it names none. Raises
    UserError."""
    for name in wanted:
        if name not in names:
            raise UserError(f"{option} {name}: choose among {', '.join(names)}")
    return [name for name in names if not wanted or name in wanted]


def fetched(model: Model, size: Size) -> str:
    """Return the local path of released weights, which are downloaded if they are not
    there."""
    import huggingface_hub

    repository, *file = model.files[size]
    show(f"weights of {model.name}, {size}: {repository}", flush=True)
    try:
        if file:
            return huggingface_hub.hf_hub_download(repository, file[0])
        return huggingface_hub.snapshot_download(
            repository, allow_patterns=["*.json", "*.safetensors", "pytorch_model.bin"]
        )
    except Exception as error:  # no network, no such repository or file
        raise UserError(
            f"{repository} cannot be downloaded ({type(error).__name__}: {error}); "
            "the same command goes on when it can"
        ) from error


def prepared(name: str) -> Path:
    """Return the folder of a zero-shot set, which prepare.py makes if it is not
    there."""
    try:
        return find_dataset(name)
    except FileNotFoundError:
        show(f"preparing {name}", flush=True)
    run_well("data/prepare.py", name, "--protocol", "sedd")
    return find_dataset(name)


def evaluated(
    a: Arguments, model: Model, size: Size, path: str, folders: list[Path]
) -> list[dict]:
    """Return the results of eval_ppl.py on all sets: those of an earlier call with the
    same options, or new ones."""
    results = []
    for order, ensemble in scorings_of(a, model):
        limit = sequences_of(a, model, order, ensemble)
        name = f"{model.name}_{size}_{order}"
        if ensemble:
            name += "_ensemble"
        file = a.out / f"{name}_{limit or 'all'}.json"
        command = scoring_command(a, model, order, ensemble, path, folders)
        report = json.loads(file.read_text()) if file.exists() else {}
        if report.get("reproduced_by") != command:
            show(" ".join(["python", *command]), flush=True)
            report = {"reproduced_by": command, **report_of(*command)}
            write_json(file, report)
        results += report["results"]
    return results


def scorings_of(a: Arguments, model: Model) -> list[tuple[str, tuple[int, ...]]]:
    """Return the orders in which a model is scored, each with the numbers of context
    orders that it averages over, none for a single one."""
    scorings: list[tuple[str, tuple[int, ...]]] = []
    averaged = tuple(number for number in a.ensemble if number > 1)
    for order in model.orders:
        if not (model.ensembles and order == "random" and averaged):
            scorings.append((order, ()))
        elif a.quick:  # single orders are of more sequences
            scorings += [(order, ()), (order, averaged)]
        else:
            scorings.append((order, a.ensemble))
    return scorings


def sequences_of(
    a: Arguments, model: Model, order: str, ensemble: tuple[int, ...] = ()
) -> int | None:
    """Return how many sequences of each set a model scores in an order; None for
    all."""
    if order == "l2r" and model.l2r_sequences:
        most = QUICK_L2R_SEQUENCES if a.quick else model.l2r_sequences
    elif ensemble and a.quick:
        most = QUICK_ENSEMBLE_SEQUENCES
    else:
        return a.limit
    return min(a.max_sequences or most, most)


def scoring_command(
    a: Arguments,
    model: Model,
    order: str,
    ensemble: tuple[int, ...],
    path: str,
    folders: list[Path],
) -> list[str]:
    """Return the words of eval_ppl.py that score one order on all sets."""
    command = ["eval_ppl.py", path, "--weights", model.weights]
    command += ["--datasets", *map(str, folders), "--orders", order]
    if model.random_orders:
        command += ["--num-orders", str(a.num_orders)]
    if ensemble:
        command += ["--ensemble", *map(str, ensemble)]
    if limit := sequences_of(a, model, order, ensemble):
        command += ["--max-sequences", str(limit)]
    return command


def table(
    a: Arguments,
    config: Config,
    datasets: list[str],
    results: dict[tuple[str, str], list[dict]],
) -> str:
    """Return as Markdown, for each line and set, our perplexity, its 95% interval and
    the published one; where the two differ by more than the interval of either also the
    letters of the causes that can be behind it."""
    names = {model for _, model in results}
    measured_lines = [line for line in config.lines if line.model in names]
    causes: dict[str, Cause] = {}  # by letter
    for cause in causes_of(a, config.models) + config.causes:
        if any(cause.applies_to(line) for line in measured_lines):
            causes[ascii_lowercase[len(causes)]] = cause
    rows = []
    for size in a.all_sizes:
        for line in config.lines:
            measured = results.get((size, line.model))
            if measured is None:
                continue
            letters = []
            for letter, cause in causes.items():
                if cause.applies_to(line):
                    letters.append(letter)
            rows.append([f"{line.title} ({size})"])
            for name in datasets:
                published = line.published[size][config.datasets.index(name)]
                rows[-1].append(
                    cell(
                        measured,
                        name,
                        line,
                        published,
                        letters,
                        config.published_sequences,
                    )
                )
    head = ["model", *datasets]
    listed = [f"- *{letter}*: {cause.says}." for letter, cause in causes.items()]
    scope = f"{a.limit} sequences of each set" if a.limit else "whole sets"
    return "\n".join(
        [
            "# Zero-shot perplexities: ours, and published",
            "",
            "Ours (95% interval over sequences, or documents where that is wider; "
            f"{scope}, unless a letter says otherwise) / published by Xue et al. "
            "(arXiv 2506.19935). **Bold**: the published number is outside of our "
            "interval, and ours outside of the published number's, which would be "
            f"that of {config.published_sequences} sequences of the same set; the "
            "letters name what can be the cause.",
            "",
            *markdown_table(head, rows, left=len(head)),
            "",
            "Causes:",
            "",
            *listed,
            "",
            "More of them, each with its option: docs/paper.md.",
            "",
        ]
    )


def causes_of(a: Arguments, models: list[Model]) -> list[Cause]:
    """Return the causes that come with the options of this call."""
    causes = [
        Cause(
            "the released script stops after 16 batches on most sets, here sequences "
            "are spread over a set"
        ),
        Cause(
            f"a sequence is scored under {a.num_orders} random orders, or masks of an "
            "encoder, drawn anew",
            models=[model.name for model in models if model.random_orders],
            orders=["random", "score_entropy"],
        ),
    ]
    for model in models:
        if model.l2r_sequences:
            says = (
                f"{model.name} takes a pass for each token left to right: "
                f"{sequences_of(a, model, 'l2r')} sequences are scored"
            )
            causes.append(Cause(says, models=[model.name], orders=["l2r"]))
        for order, ensemble in scorings_of(a, model):
            count = sequences_of(a, model, order, ensemble)
            if ensemble and count != sequences_of(a, model, order):
                says = f"averages over context orders are of {count} sequences"
                causes.append(Cause(says, models=[model.name], ensembles=True))
    return causes


def cell(
    measured: list[dict],
    dataset: str,
    line: Line,
    published: float,
    letters: list[str],
    published_sequences: int,
) -> str:
    """Return one cell of the table, with the letters of its causes if it differs; a
    dash where nothing was measured."""
    for row in measured:
        identity = (row["dataset"], row["orders"], row["ensemble"])
        if identity == (dataset, line.orders, line.ensemble):
            low, high = row["perplexity_95"]
            if low is None:  # one sequence has no interval
                return f"{row['perplexity']:.2f} / {published:.2f}"
            ours = f"{row['perplexity']:.2f} ({low:.2f} to {high:.2f})"
            text = f"{ours} / {published:.2f}"
            if low <= published <= high:
                return text
            share = row["sequences"] / published_sequences
            error = math.log(high / low) / 2 * math.sqrt(share)
            if abs(math.log(row["perplexity"] / published)) <= error:
                return text
            return f"**{text}** *{', '.join(letters)}*"
    return f"- / {published:.2f}"


if __name__ == "__main__":
    run_script(main)
