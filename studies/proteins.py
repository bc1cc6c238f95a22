"""Does a model's probability of mutations follow a measured fitness?

    python -m studies.proteins score MODEL --assay FILE.csv --sequence MKTAYIAK...

FILE.csv has the columns of ProteinGym's assays of substitutions: `mutant`, such as A12G
or A12G:C30T (old letter, place from 1, new letter), `DMS_score`, and `mutated_sequence`
where --sequence is left out. Printed is Spearman's correlation of the measured scores
with log-probabilities, new letters minus old ones:

exact     of all mutated places together, given the rest of the sequence
orders K  the same, with the probability averaged over K orders of the places
sum       the sum over places of single scores, each given the rest of the wild type

A row of one mutation has one score in all three. ProteinGym itself was not run: it was
not at hand."""

import csv
import io
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro

import aogpt
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import markdown_table

MUTATION = re.compile(r"([A-Za-z])(\d+)([A-Za-z])")
Mutations = dict[int, tuple[str, str]]  # by place from 0: the old and the new letter


@dataclass(frozen=True)
class Variant:
    """A row of an assay."""

    mutations: Mutations
    fitness: float

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(sorted(self.mutations))

    def applied(self, sequence: str, undo: bool = False) -> str:
        """Return the wild type with its mutations, or the other way round. Raises
        UserError if another letter stands there."""
        letters = list(sequence)
        for place, (old, new) in self.mutations.items():
            before, after = (new, old) if undo else (old, new)
            if place >= len(letters) or letters[place] != before:
                letter = letters[place] if place < len(letters) else "nothing"
                raise UserError(
                    f"{old}{place + 1}{new} does not fit the sequence, which has "
                    f"{letter} at place {place + 1}"
                )
            letters[place] = after
        return "".join(letters)


def read_assay(file: Path, sequence: str | None) -> tuple[str, list[Variant]]:
    """Return the wild type and the variants of an assay. Raises UserError for a row
    that cannot be read, or that does not fit the wild type."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: {error}") from None
    reader = csv.DictReader(io.StringIO(text))
    columns = reader.fieldnames or ()
    for name in ("mutant", "DMS_score"):
        if name not in columns:
            raise UserError(f"{file} has no column {name!r}, but {', '.join(columns)}")
    rows = list(reader)
    if not rows:
        raise UserError(f"{file} has no rows")
    variants = []
    for number, row in enumerate(rows, 2):  # below the line of names
        try:
            variant = variant_of(row)
            mutated = row.get("mutated_sequence")
            if sequence is None:
                if not mutated:
                    raise UserError("give --sequence, the wild type")
                sequence = variant.applied(mutated, undo=True)
            if mutated not in (None, "", variant.applied(sequence)):
                raise UserError("mutated_sequence is not the wild type with the mutant")
            variants.append(variant)
        except UserError as error:
            raise UserError(f"{file}, line {number}: {error}") from None
    assert sequence is not None
    return sequence, variants


def variant_of(row: dict[str, str]) -> Variant:
    """Return the variant of a row of an assay."""
    mutations: Mutations = {}
    for word in (row["mutant"] or "").split(":"):
        match = MUTATION.fullmatch(word)
        if match is None or int(match[2]) < 1:
            raise UserError(f"mutant is {row['mutant']!r}; write A12G or A12G:C30T")
        place = int(match[2]) - 1
        if place in mutations:
            raise UserError(f"{row['mutant']} names place {match[2]} twice")
        mutations[place] = (match[1], match[3])
    try:
        fitness = float(row["DMS_score"])
    except (TypeError, ValueError):  # TypeError: the row has no such cell
        fitness = math.nan
    if not math.isfinite(fitness):
        raise UserError(f"DMS_score is {row['DMS_score']!r}, which is no number")
    return Variant(mutations, fitness)


def joint_scores(
    model: aogpt.TextModel, wild: str, variants: list[Variant], orders: int
) -> list[float]:
    """Return log p(new letters | rest) - log p(old letters | rest) of each variant,
    exact along one order, or with probabilities averaged over `orders` of them."""
    numbers = defaultdict(list)
    for number, variant in enumerate(variants):
        numbers[variant.places].append(number)
    result = [0.0] * len(variants)
    for places, members in numbers.items():
        texts = [wild] + [variants[number].applied(wild) for number in members]
        spans = [(place, place + 1) for place in places]
        before, *after = model.score(texts, predict=spans, orders=orders)
        for number, joint in zip(members, after, strict=True):
            result[number] = joint.log_prob - before.log_prob
    return result


def sums_of_singles(
    model: aogpt.TextModel, wild: str, variants: list[Variant]
) -> list[float]:
    """Return the sum over the places of each variant of the score of its mutation
    alone."""
    singles: dict[tuple[int, str], Variant] = {}
    for variant in variants:
        for place, (old, new) in variant.mutations.items():
            singles[place, new] = Variant({place: (old, new)}, 0.0)
    scores = joint_scores(model, wild, list(singles.values()), orders=1)
    by_mutation = dict(zip(singles, scores, strict=True))
    sums = []
    for variant in variants:
        parts = [
            by_mutation[place, new] for place, (_, new) in variant.mutations.items()
        ]
        sums.append(math.fsum(parts))
    return sums


def spearman(scores: list[float], fitness: list[float]) -> str:
    """Return Spearman's correlation as a cell; a dash where it is not defined."""
    from scipy import stats

    if len(set(scores)) < 2 or len(set(fitness)) < 2:
        return "-"
    return f"{stats.spearmanr(scores, fitness).statistic:.3f}"


def score(
    model: tyro.conf.Positional[str],
    assay: Path,
    sequence: str | None = None,
    orders: int = 8,
) -> None:
    """Print how well a model's scores of mutations follow an assay.

    Args:
        model: a model of any order with a token per residue.
        assay: the file of variants and measured scores.
        sequence: the wild type; by default of `mutated_sequence`.
        orders: over how many orders of the mutated places probabilities are averaged,
            too."""
    wild, variants = read_assay(assay, sequence)
    text_model = aogpt.load(model)
    scores = {
        "exact": joint_scores(text_model, wild, variants, orders=1),
        f"orders {orders}": joint_scores(text_model, wild, variants, orders),
        "sum": sums_of_singles(text_model, wild, variants),
    }
    groups = {
        "all variants": range(len(variants)),
        "one mutation": [n for n, v in enumerate(variants) if len(v.places) == 1],
        "several": [n for n, v in enumerate(variants) if len(v.places) > 1],
    }
    rows = []
    for name, numbers in groups.items():
        fitness = [variants[number].fitness for number in numbers]
        cells = [name, f"{len(fitness):,}"]
        for values in scores.values():
            cells.append(spearman([values[number] for number in numbers], fitness))
        rows.append(cells)
    show("\n".join(markdown_table(["Spearman", "variants", *scores], rows)))


def main() -> None:
    """Command line."""
    tyro.extras.subcommand_cli_from_dict(
        {"score": score}, prog="python -m studies.proteins", description=__doc__
    )


if __name__ == "__main__":
    run_script(main)
