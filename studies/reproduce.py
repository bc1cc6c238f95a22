"""The paper's zero-shot tables (2, 4 and 5) from released weights, beside the published
ones.

    python -m studies.reproduce          # both sizes, whole sets: on a GPU
    python -m studies.reproduce --quick  # small, 256 of each set; hours on a CPU

Downloads weights and sets, prepares the sets in the packing of the SEDD protocol,
scores every model, and writes out/reproduce/README.md. The same command goes on where
it was interrupted: a downloaded file, a prepared set and a finished evaluation are not
made again."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
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
QUICK_SEQUENCES = 256


@dataclass(frozen=True)
class Model:
    """Released weights, and how they are scored.

    files: per size a repository on the Hugging Face hub, and a file in it if it is not
    a folder that the loaders read as a whole. orders: values of --orders, each in a run
    of its own. random_orders: whether it takes --num-orders. ensembles: whether random
    orders are also averaged over. l2r_sequences: the most sequences that are scored
    left to right."""

    name: str
    files: dict[str, list[str]]
    weights: Literal["ema", "raw"]
    note: str
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
    """256 sequences of each set, spread over it, instead of all."""
    max_sequences: Count | None = None
    """Sequences of each set; by default all, with --quick 256."""
    num_orders: Count = 8
    """Random orders, or masks of an encoder, for each sequence."""
    ensemble: tuple[Count, ...] = (1, 8, 64)
    """Context orders that AO-GPT averages over."""
    out: Path = ROOT / "out" / "reproduce"
    """Folder of weights, evaluations and the table."""

    @property
    def limit(self) -> int | None:
        """Sequences of each set; None for all."""
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
    models, lines, datasets = read_config()
    datasets = chosen(a.datasets, datasets, "--datasets")
    names = chosen(a.models, [model.name for model in models], "--models")
    folders = [prepared(name) for name in datasets]
    results: dict[tuple[str, str], list[dict]] = {}
    for size in a.all_sizes:
        for model in models:
            if model.name in names:
                path = fetched(model, size)
                results[size, model.name] = evaluated(a, model, size, path, folders)
                write_text(
                    a.out / "README.md", table(a, lines, models, datasets, results)
                )
    show(f"wrote {a.out / 'README.md'}")


def read_config() -> tuple[list[Model], list[Line], list[str]]:
    """Return the models, the lines and the names of the sets in CONFIG."""
    values = tomllib.loads(CONFIG.read_text())
    models = from_values(values["models"], list[Model], str(CONFIG))
    lines = from_values(values["lines"], list[Line], str(CONFIG))
    return models, lines, values["datasets"]


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
    for order in model.orders:
        limit = sequences_of(a, model, order)
        file = a.out / f"{model.name}_{size}_{order}_{limit or 'all'}.json"
        command = scoring_command(a, model, order, path, folders)
        report = json.loads(file.read_text()) if file.exists() else {}
        if report.get("reproduced_by") != command:
            show(" ".join(["python", *command]), flush=True)
            report = {"reproduced_by": command, **report_of(*command)}
            write_json(file, report)
        results += report["results"]
    return results


def sequences_of(a: Arguments, model: Model, order: str) -> int | None:
    """Return how many sequences of each set a model scores in an order; None for
    all."""
    if order == "l2r" and model.l2r_sequences:
        return min(a.limit or model.l2r_sequences, model.l2r_sequences)
    return a.limit


def scoring_command(
    a: Arguments, model: Model, order: str, path: str, folders: list[Path]
) -> list[str]:
    """Return the words of eval_ppl.py that score one order on all sets."""
    command = ["eval_ppl.py", path, "--weights", model.weights]
    command += ["--datasets", *map(str, folders), "--orders", order]
    if model.random_orders:
        command += ["--num-orders", str(a.num_orders)]
    if model.ensembles and order == "random":
        command += ["--ensemble", *map(str, a.ensemble)]
    if limit := sequences_of(a, model, order):
        command += ["--max-sequences", str(limit)]
    return command


def table(
    a: Arguments,
    lines: list[Line],
    models: list[Model],
    datasets: list[str],
    results: dict[tuple[str, str], list[dict]],
) -> str:
    """Return as Markdown, for each line and set, our perplexity, its 95% interval and
    the published one, and whether the published one is inside of the interval."""
    all_datasets = read_config()[2]
    rows = []
    for size in a.all_sizes:
        for line in lines:
            measured = results.get((size, line.model))
            if measured is None:
                continue
            rows.append([f"{line.title} ({size})"])
            for name in datasets:
                published = line.published[size][all_datasets.index(name)]
                rows[-1].append(cell(measured, name, line, published))
    head = ["model", *datasets]
    reasons = [f"- {model.name}: {model.note}." for model in models]
    reasons.append(
        "- The released script stops after 16 batches on most sets; here blocks are "
        "spread over a set, or all are scored."
    )
    for model in models:
        if model.l2r_sequences:
            reasons.append(
                f"- {model.name} takes a pass for each token left to right: "
                f"{model.l2r_sequences} sequences at most."
            )
    reasons.append("- More causes, each with its option: docs/numbers.md.")
    scope = f"{a.limit} sequences of each set" if a.limit else "whole sets"
    return "\n".join(
        [
            "# Zero-shot perplexities: ours, and published",
            "",
            "Ours (95% interval over sequences, or documents where that is wider; "
            f"{scope}) / published by Xue et al. (arXiv 2506.19935). **Bold**: the "
            "published number is outside of our interval.",
            "",
            *markdown_table(head, rows, left=len(head)),
            "",
            "Why cells differ:",
            "",
            *reasons,
            "",
        ]
    )


def cell(measured: list[dict], dataset: str, line: Line, published: float) -> str:
    """Return one cell of the table; a dash where nothing was measured."""
    for row in measured:
        identity = (row["dataset"], row["orders"], row["ensemble"])
        if identity == (dataset, line.orders, line.ensemble):
            low, high = row["perplexity_95"]
            if low is None:  # one sequence has no interval
                return f"{row['perplexity']:.2f} / {published:.2f}"
            ours = f"{row['perplexity']:.2f} ({low:.2f} to {high:.2f})"
            text = f"{ours} / {published:.2f}"
            return text if low <= published <= high else f"**{text}**"
    return f"- / {published:.2f}"


if __name__ == "__main__":
    run_script(main)
