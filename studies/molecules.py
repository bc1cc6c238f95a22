"""Molecules of the benchmark MOSES (moses.py): make its data, and measure.

    pip install rdkit fcd==1.2.2
    pip download --no-deps molsets==0.3.1   # 52 MB: the data
    python -m studies.molecules prepare --wheel molsets-0.3.1-py3-none-any.whl
    python -m studies.molecules ruler --wheel molsets-0.3.1-py3-none-any.whl
    python -m studies.molecules train                    # resumes, too
    python -m studies.molecules measure RUN --wheel molsets-0.3.1-py3-none-any.whl
    python -m studies.molecules page                     # results/molecules.md

`prepare` writes data/molecules: a molecule a block of 58 letters, with the benchmark's
test set as test.bin and 5,000 of its training molecules as val.bin; the scaffold test
set lies in data/molecules_scaffolds. `ruler` measures training molecules like generated
ones: its row must be the published one, except where that depends on how many are
measured, which `sizes` shows. `train` tunes and trains the systems of
configs/molecules.toml; `measure` adds rows of a run to results/molecules/rows.jsonl."""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from aogpt.data.prepare import Prepare
from aogpt.data.prepare import prepare as prepare_dataset
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from studies import molecule_measures, molecule_runs
from studies.molecule_measures import Measuring, Sizes, spread_molecules
from studies.molecule_page import page
from studies.moses import (
    Moses,
    canonical,
    chemnet,
    cosine,
    frechet,
    measures,
    normal,
    scaffolds,
)

# Of all three sets, the most frequent ones first.
LETTERS = "cC()1O2nN=3F-Ssol[H]#4Br56"
BLOCK_SIZE = 58  # the longest molecule has 57 letters, and its end
VALIDATION = 5000  # molecules of the training set that no run trains on
RULER = 30_000  # generated molecules of a published row
RESULTS = Path("results/molecules")
# The published row of training molecules (arXiv 1811.12823).
COLUMNS = (
    "valid",
    "unique",
    "FCD test",
    "FCD scaffolds",
    "SNN test",
    "SNN scaffolds",
    "Frag test",
    "Scaf test",
    "Scaf scaffolds",
    "IntDiv",
    "filters",
)
TRAINING_ROW = (1.0, 1.0, 0.008, 0.4755, 0.6419, 0.5859, 1.0, 0.9907, 0.0, 0.8567, 1.0)

Wheel = Annotated[Path, tyro.conf.arg(metavar="FILE")]


def benchmark(wheel: Path) -> Moses:
    if not wheel.is_file():
        raise UserError(
            f"there is no {wheel}; get it: pip download --no-deps molsets==0.3.1"
        )
    return Moses(wheel)


def prepare(
    wheel: Wheel, out: Path = Path("data/molecules"), validation: int = VALIDATION
) -> None:
    """Write the molecules as records, in OUT and OUT_scaffolds.

    validation: molecules of the training set for val.bin, drawn at random."""
    moses = benchmark(wheel)
    train = moses.molecules("train")
    random.Random(0).shuffle(train)
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "val": train[:validation],
            "train": train[validation:],
            "test": moses.molecules("test"),
            "scaffolds": moses.molecules("test_scaffolds"),
        }
        files = {}
        for name, molecules in parts.items():
            files[name] = Path(folder) / f"{name}.jsonl"
            lines = (json.dumps({"text": molecule}) for molecule in molecules)
            files[name].write_text("\n".join(lines) + "\n")
        prepare_dataset(
            Prepare(
                "records",
                source=(files["train"],),
                val=(files["val"],),
                test=(files["test"],),
                out=out,
                tokenizer=f"alphabet:{LETTERS}",
                block_size=BLOCK_SIZE,
            )
        )
        prepare_dataset(
            Prepare(
                "records",
                source=(files["scaffolds"],),
                split="test",
                out=out.with_name(f"{out.name}_scaffolds"),
                tokenizer=f"alphabet:{LETTERS}",
                block_size=BLOCK_SIZE,
            )
        )


def ruler(
    wheel: Wheel, count: int = RULER, seed: int = 0, out: Path = RESULTS / "ruler.json"
) -> None:
    """Measure training molecules as if they were generated.

    count: how many, drawn with `seed` without replacement."""
    moses = benchmark(wheel)
    train = moses.molecules("train")
    drawn = random.Random(seed).sample(train, count)
    _, training = canonical(drawn)  # so none of them is novel
    start = time.perf_counter()
    row = measures(drawn, moses, frozenset(training))
    show(table(row))
    facts = {"molecules": count, "seed": seed, "seconds": time.perf_counter() - start}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, facts | row)


def sizes(
    wheel: Wheel, most: int = 60_000, seed: int = 0, out: Path = RESULTS / "sizes.json"
) -> None:
    """Measure how two distances of training molecules to the test set fall with the
    number of molecules, from an eighth of MOST to all of it."""
    moses = benchmark(wheel)
    drawn = random.Random(seed).sample(moses.molecules("train"), most)
    molecules, texts = canonical(drawn)
    reference = moses.statistics("test")
    of_test = (reference["FCD"]["mu"], reference["FCD"]["sigma"])
    values = chemnet(texts)
    rows = []
    for count in (most // 8, most // 4, most // 2, most):
        row = {
            "molecules": count,
            "FCD test": frechet(normal(values[:count]), of_test),
            "Scaf test": cosine(
                scaffolds(molecules[:count]), reference["Scaf"]["scaf"]
            ),
        }
        show(json.dumps(row))
        rows.append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"seed": seed, "rows": rows})


def train(systems: tyro.conf.Positional[tuple[str, ...]] = ()) -> None:
    """Tune and train the systems of configs/molecules.toml; finished runs stay.

    systems: names of run configs there, in this order; by default all."""
    molecule_runs.train(list(systems))


def measure(
    run: tyro.conf.Positional[Path],
    wheel: Wheel,
    data: Path = Path("data/molecules"),
    modes: tuple[str, ...] = (),
    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = Sizes(),  # noqa: B008
    out: Path = RESULTS / "rows.jsonl",
) -> None:
    """Measure a run, and add a row of each measure that is not there.

    data: the folder of `prepare`. modes: of samples; by default those of its
    system."""
    moses = benchmark(wheel)
    measuring = Measuring(run, out, sizes)
    folders = {"test": str(data), "scaffolds": f"{data}_scaffolds"}
    test = moses.molecules("test")
    molecule_measures.measure_nats(measuring, folders)
    molecule_measures.measure_holes(measuring, spread_molecules(test, sizes.holes))
    molecule_measures.measure_parts(measuring, spread_molecules(test, sizes.parts))
    molecule_measures.measure_joints(measuring, spread_molecules(test, sizes.joints))
    # The training set is written as an rdkit of its time did.
    training = frozenset(moses.molecules("train"))
    molecule_measures.measure_samples(measuring, moses, training, modes)


def table(row: dict[str, float]) -> str:
    """Return the measured row below the published one of training molecules."""
    lines = [
        "| | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
        "| published | " + cells(TRAINING_ROW) + " |",
        "| measured | " + cells([row[name] for name in COLUMNS]) + " |",
    ]
    return "\n".join(lines)


def cells(values: Sequence[float]) -> str:
    return " | ".join(f"{value:.4f}" for value in values)


def main() -> None:
    commands = {
        "prepare": prepare,
        "ruler": ruler,
        "sizes": sizes,
        "train": train,
        "measure": measure,
        "page": page,
    }
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m studies.molecules", description=__doc__
    )


if __name__ == "__main__":
    run_script(main)
