"""Measures of a model of molecules. Each is a row of results/molecules/rows.jsonl,
which is not measured again:

    nats       -log p of test molecules, their end or length included
    samples    molecules made in a mode: the row of MOSES' table, passes, seconds
    holes      letters that are missing from the middle of a test molecule
    parts      all of a molecule but its scaffold, or a ring system of it, missing
    joints     exact joint probabilities of letters, beside sums of single scores"""

import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import aogpt
from aogpt.checkpoints import Loaded
from aogpt.data.loader import spread
from aogpt.evaluation.eval_sets import open_eval_set, open_split
from aogpt.evaluation.likelihood import token_nll
from aogpt.model import ModelConfig
from aogpt.orders import parse_order
from aogpt.runtime.command_line import show
from aogpt.runtime.files import read_lines, write_jsonl
from aogpt.runtime.validation import from_json
from studies.molecule_parts import ring_system, scaffold, unknown_letters, with_masks
from studies.moses import Moses, canonical, measures, read_molecule
from studies.runs import commit, rows_by, run_well

BATCH = 64  # molecules in a pass, or in flight
SEED = 0
SHORTEST_HOLE = 3  # letters
LONGEST_HOLE = 8
PROPOSALS = 8  # fillings of a hole that a GPT draws, of which one is resampled
JOINT = 4  # most letters of a joint
EXAMPLES = 12  # of each kind, to look at


@dataclass(frozen=True)
class Sizes:
    """How many molecules each measure takes."""

    samples: int = 3000
    nats: int = 2000
    orders: int = 4  # random ones of a test molecule; an encoder takes four times that
    holes: int = 1000
    parts: int = 500
    joints: int = 200


def system_of(config: ModelConfig) -> str:
    """Return the name of a system, as molecules.toml has it."""
    if config.is_encoder:
        return "encoder"
    return "gpt" if config.l2r_only else config.target


def modes_of(config: ModelConfig) -> list[str]:
    """Return the modes in which a system is sampled."""
    if config.l2r_only:
        return ["l2r"]
    modes = ["l2r", "random", "confidence"]
    if not config.is_encoder:
        modes.append("speculative")
    return modes


@dataclass
class Measuring:
    """A run that is measured, and the file of rows."""

    run: Path
    file: Path
    sizes: Sizes
    rows: dict[str, dict] = field(init=False)
    model: aogpt.TextModel = field(init=False)

    def __post_init__(self):
        self.rows = rows_by("key", self.file)
        self.model = aogpt.load(str(self.run), device="cpu")

    @property
    def loaded(self) -> Loaded:
        return self.model.loaded

    @property
    def config(self) -> ModelConfig:
        return self.model.model.config

    def is_missing(self, name: str) -> bool:
        return self.key_of(name) not in self.rows

    def key_of(self, name: str) -> str:
        return f"{self.run} step {self.loaded.step} {name}"

    def add(self, name: str, values: dict) -> None:
        """Add a row to the file, and print what fits on a line."""
        row = {
            "key": self.key_of(name),
            "system": system_of(self.config),
            "run": str(self.run),
            "step": self.loaded.step,
            "measure": name,
            "parameters": sum(p.numel() for p in self.model.model.parameters()),
            "commit": commit(),
            **values,
        }
        self.rows.update(rows_by("key", self.file))  # of another process
        self.rows[row["key"]] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(self.file, self.rows.values())
        short = {}
        for key, value in values.items():
            if not isinstance(value, list):
                short[key] = value
        show(f"{system_of(self.config)} {name}: {json.dumps(short)}", flush=True)


# ---- likelihood ----------------------------------------------------------------------


@torch.no_grad()
def nats_of_molecules(
    loaded: Loaded, folder: str, order: str, count: int, draws: int
) -> list[float]:
    """Return -log p of `count` test molecules of a prepared folder: the mean over
    `draws` random orders of each, or, of an encoder, over masks. It holds the end of
    the molecule (a GPT) or its length."""
    eval_set = open_eval_set(open_split(folder, "test"), loaded, count)
    orders = parse_order(order, "order")
    nats = torch.zeros(eval_set.count, dtype=torch.float64)
    for start in range(0, eval_set.count, BATCH):
        rows = range(start, min(start + BATCH, eval_set.count))
        for draw in range(draws):
            nll = token_nll(
                loaded.model,
                eval_set.tokens(rows),
                orders,
                seed=SEED,
                draw=draw,
                rows=rows,
                total=eval_set.count,
                roles=eval_set.roles(rows),
            )
            nats[rows.start : rows.stop] += nll.values.sum(dim=1) / draws
    if loaded.record_end is not None:
        for row, length in enumerate(eval_set.lengths.tolist()):
            nats[row] -= loaded.record_end.log_prob(length - 1)
    return [round(value, 3) for value in nats.tolist()]


def measure_nats(measuring: Measuring, folders: dict[str, str]) -> None:
    """Measure the likelihood of test sets. folders: prepared ones, by name."""
    orders = ["random"]
    if not measuring.config.is_encoder:
        orders.insert(0, "l2r")
    if measuring.config.l2r_only:
        orders.remove("random")
    for name, folder in folders.items():
        for order in orders:
            measure = f"nats_{name}_{order}"
            if not measuring.is_missing(measure):
                continue
            draws = 1
            if order == "random":
                draws = measuring.sizes.orders
                if measuring.config.is_encoder:
                    draws *= 4
            values = nats_of_molecules(
                measuring.loaded, folder, order, measuring.sizes.nats, draws
            )
            mean = sum(values) / len(values)
            measuring.add(measure, {"nats": mean, "draws": draws, "each": values})


# ---- samples -------------------------------------------------------------------------


def sampled(run: Path, mode: str, count: int, is_gpt: bool) -> list[dict]:
    """Return `count` rows of sample.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        words = ["--mode", mode, "--num-samples", str(count), "--temperature", "1"]
        words += ["--batch-size", str(BATCH)]
        if is_gpt:
            words.append("--until-end")
        run_well("sample.py", str(run), *words, "--jsonl", str(file))
        return [from_json(text, dict, place) for place, text in read_lines(file)]


def measure_samples(
    measuring: Measuring, moses: Moses, training: frozenset[str], modes: Sequence[str]
) -> None:
    """Measure molecules that are made in each mode."""
    for mode in modes or modes_of(measuring.config):
        measure = f"samples_{mode}_{measuring.sizes.samples}"
        if not measuring.is_missing(measure):
            continue
        rows = sampled(
            measuring.run, mode, measuring.sizes.samples, measuring.config.l2r_only
        )
        texts = [row["text"] for row in rows]
        values = {
            "mode": mode,
            "samples": len(rows),
            "passes": sum(row["nfe"] for row in rows) / len(rows),
            "seconds": rows[-1]["seconds"] / len(rows),
            "letters": sum(map(len, texts)) / len(rows),
            "examples": texts[:EXAMPLES],
        }
        measuring.add(measure, values | measures(texts, moses, training))


# ---- holes ---------------------------------------------------------------------------


def holes_of(molecules: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (before, missing, after) of each molecule, a hole in its middle."""
    chosen = random.Random(SEED)
    holes = []
    for text in molecules:
        size = min(chosen.randint(SHORTEST_HOLE, LONGEST_HOLE), len(text))
        start = (len(text) - size) // 2
        holes.append((text[:start], text[start : start + size], text[start + size :]))
    return holes


def filled_by_gpt(
    model: aogpt.TextModel, holes: Sequence[tuple[str, str, str]], proposals: int
) -> list[str]:
    """Return a filling of each hole by a GPT: `proposals` continuations of what is
    before it, one of which is drawn by the probability of what comes after."""
    chosen = random.Random(SEED)
    result = [""] * len(holes)
    for size in sorted({len(missing) for _, missing, _ in holes}):
        numbers = [n for n, hole in enumerate(holes) if len(hole[1]) == size]
        samples = model.generate(
            [holes[number][0] for number in numbers],
            new_tokens=size,
            num_samples=proposals,
            seed=SEED,
            temperature=1.0,
            batch_size=BATCH,
        )
        for place, number in enumerate(numbers):
            before, _, after = holes[number]
            parts = []
            for sample in samples[place * proposals : (place + 1) * proposals]:
                letters = sample.tokens[len(before) :]
                if model.tokenizer.eot not in letters:
                    parts.append(model.tokenizer.decode(letters))
            if not parts:  # each ends the molecule before its time
                continue
            texts = [before + part + after for part in parts]
            weights = []
            for scored in model.score(texts, end=True):
                rest = scored.log_probs[len(before) + size :]
                weights.append(math.fsum(value or 0.0 for value in rest))
            most = max(weights)
            (part,) = chosen.choices(
                parts, [math.exp(weight - most) for weight in weights]
            )
            result[number] = part
    return result


def filled_by_any_order(
    model: aogpt.TextModel, texts: Sequence[str], mode: str
) -> list[str]:
    """Return texts with their masks filled in at temperature 1."""
    samples = model.fill(texts, seed=SEED, temperature=1.0, mode=mode, batch_size=BATCH)
    return [sample.text for sample in samples]


def shares(fillings: Sequence[str], molecules: Sequence[str]) -> dict[str, float]:
    """Return the shares of filled-in texts that are valid, and that are the molecule
    itself."""
    equal = 0
    for text, molecule in zip(fillings, molecules, strict=True):
        written = canonical([text, molecule])[1]
        equal += len(written) == 2 and written[0] == written[1]
    valid = sum(read_molecule(text) is not None for text in fillings)
    count = len(molecules)
    return {"molecules": count, "valid": valid / count, "equal": equal / count}


def measure_holes(measuring: Measuring, molecules: Sequence[str]) -> None:
    """Measure the fillings of holes."""
    model = measuring.model
    holes = holes_of(molecules)
    masked = [f"{before}[MASK:{len(hole)}]{after}" for before, hole, after in holes]
    if measuring.config.l2r_only:
        ways = {"hole_resampled": PROPOSALS, "hole_one": 1}
        for measure, proposals in ways.items():
            if measuring.is_missing(measure):
                parts = filled_by_gpt(model, holes, proposals)
                fillings = []
                for (before, _, after), part in zip(holes, parts, strict=True):
                    fillings.append(before + part + after if part else "")
                add_fillings(measuring, measure, masked, fillings, molecules)
        return
    for mode in ("l2r", "random", "confidence"):
        if measuring.is_missing(f"hole_{mode}"):
            fillings = filled_by_any_order(model, masked, mode)
            add_fillings(measuring, f"hole_{mode}", masked, fillings, molecules)
    if measuring.is_missing("hole_nats"):
        nats = []
        for before, hole, after in holes:
            span = (len(before), len(before + hole))
            (joint,) = model.score([before + hole + after], predict=[span])
            nats.append(round(joint.nats, 3))
        mean = sum(nats) / len(nats)
        measuring.add("hole_nats", {"nats": mean, "each": nats})


def add_fillings(
    measuring: Measuring,
    measure: str,
    masked: Sequence[str],
    fillings: Sequence[str],
    molecules: Sequence[str],
) -> None:
    """Add the row of some fillings, with examples."""
    examples = []
    for row in zip(masked[:EXAMPLES], fillings, molecules, strict=False):
        examples.append(row)
    values = shares(fillings, molecules)
    measuring.add(measure, {**values, "examples": examples})


def measure_parts(measuring: Measuring, molecules: Sequence[str]) -> None:
    """Measure fillings of all but the scaffold of a molecule, and of a ring system."""
    if measuring.config.l2r_only:
        return
    unknown = {"scaffold": unknown_around_scaffold, "ring": unknown_ring_system}
    for name, unknown_atoms in unknown.items():
        chosen = []
        masked = []
        for text in molecules:
            letters = unknown_letters(text, unknown_atoms(text))
            if any(letters):
                chosen.append(text)
                masked.append(with_masks(text, letters))
        for mode in ("l2r", "random", "confidence"):
            measure = f"{name}_{mode}"
            if measuring.is_missing(measure) and chosen:
                fillings = filled_by_any_order(measuring.model, masked, mode)
                add_fillings(measuring, measure, masked, fillings, chosen)


def unknown_around_scaffold(text: str) -> set[int]:
    """Return the atoms of a molecule that are not in its scaffold."""
    molecule = read_molecule(text)
    return set(range(molecule.GetNumAtoms())) - scaffold(molecule)


def unknown_ring_system(text: str) -> set[int]:
    """Return the atoms of the largest ring system of a molecule."""
    return ring_system(read_molecule(text))


# ---- joints --------------------------------------------------------------------------


def joint_rows(model: aogpt.TextModel, molecules: Sequence[str]) -> Iterator[dict]:
    """Yield scores of 1 to JOINT letters of each molecule given all others: exact,
    averaged over all orders, the sum of single scores with all of them masked, and the
    pseudo-likelihood."""
    chosen = random.Random(SEED)
    for text in molecules:
        for size in range(1, min(JOINT, len(text)) + 1):
            places = sorted(chosen.sample(range(len(text)), size))
            spans = [(place, place + 1) for place in places]
            (exact,) = model.score([text], predict=spans)
            (averaged,) = model.score(
                [text], predict=spans, orders=math.factorial(JOINT)
            )
            masked = with_masks(text, [place in places for place in range(len(text))])
            (blanks,) = model.blanks([masked], top=model.loaded.vocab_size)
            total = 0.0
            pseudo = 0.0
            for place, likely in zip(places, blanks, strict=True):
                (letter,) = [one for one in likely if one.id == exact.ids[place]]
                total += math.log(letter.probability)
                (single,) = model.score([text], predict=[(place, place + 1)])
                pseudo += single.log_prob
            yield {
                "size": size,
                "exact": round(exact.log_prob, 4),
                "averaged": round(averaged.log_prob, 4),
                "sum": round(total, 4),
                "pseudo": round(pseudo, 4),
            }


def measure_joints(measuring: Measuring, molecules: Sequence[str]) -> None:
    """Measure exact joints beside sums of single scores."""
    if not measuring.config.l2r_only and measuring.is_missing("joints"):
        rows = list(joint_rows(measuring.model, molecules))
        measuring.add("joints", {"rows": rows})


def spread_molecules(molecules: Sequence[str], count: int) -> list[str]:
    """Return `count` molecules, spread over all."""
    return [molecules[row] for row in spread(count, len(molecules))]
