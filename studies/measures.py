"""What is measured of a run besides its validation losses: scripts of this project, each run as a
process of its own, and the figures in the JSON that they write.

Figures are {name: [value, error or None]}; a claim names them as it names losses.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evaluation.text_measures import mean_and_reach
from runtime.errors import UserError
from runtime.files import write_json
from runtime.reports import commit
from runtime.validation import damaged, read_results
from studies.experiments.arms import run_alone

Measured = dict[str, list[float | None]]


@dataclass(frozen=True)
class Measure:
    """A script, and what it is given."""

    script: str
    arguments: tuple[str, ...]
    """{run} is the run that is measured, {data} its dataset, {NAME} one of the experiment's other
    `runs`."""
    quick: tuple[str, ...] = ()
    """Added by --quick."""
    arms: tuple[str, ...] = ()
    """Those that it can measure; by default all."""

    def is_of(self, arm: str) -> bool:
        return not self.arms or arm in self.arms


def figures_of(measure: Measure, arguments: list[str], file: Path) -> Measured:
    """What a measure says, with these arguments. It is kept in `file`, and measured again only if
    the arguments have changed. Raises ValueError with the script's last words if it fails."""
    command = [measure.script, *arguments]
    advice = "remove it, to have it measured again"
    if file.exists():
        with damaged(file, advice):
            kept = read_results(file, advice)
            if kept["command"] == command:
                return kept["figures"]
    report = file.with_suffix(".report.json")
    # A measure that was cut off may have left a report behind: replace it.
    done = run_alone(*command, "--json", str(report), "--overwrite")
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    figures = READERS[measure.script](json.loads(report.read_text()))
    write_json(file, {"command": command, "commit": commit(), "figures": figures})
    return figures


def known(value: float | None) -> float | None:
    """None for what is not a number, which JSON does not have."""
    return None if value is None or math.isnan(value) else value


# ---- readers: the figures in a script's JSON -----------------------------------------------------


def of_perplexity(result: dict) -> Measured:
    """eval_ORDERS in nats a token, DATASET_ORDERS in bits a byte; with _mM of an ensemble of M, _gG
    in groups of G; gain_ORDERS_mM and DATASET_gain_ORDERS_mM, what an ensemble gains over one
    order, whose error is that of pairs. With several datasets eval_ and gain_ are of the first."""
    figures = {}
    for row in result["results"]:
        name, size, group = row["orders"], row["ensemble"], row["group"]
        name += f"_m{size}" * (size > 1) + f"_g{group}" * (group > 1)
        found = {name: [row["nll"], known(row["monte_carlo_error"])]}
        if row["gain"] is not None:
            found[f"gain_{name}"] = [row["gain"], known(row["gain_error"])]
        bits = known(row["bits_per_byte"])
        for of_what, (nats, error) in found.items():
            own = of_what if of_what.startswith("gain_") else f"eval_{of_what}"
            figures.setdefault(own, [nats, error])
            if bits is not None:
                per_nat = bits / row["nll"]
                figures[f"{row['dataset']}_{of_what}"] = [nats * per_nat, error and error * per_nat]
    return figures


def of_generation(result: dict) -> Measured:
    """For each sampler, SETTING as in t0.9_p0.95_mdm64: judge_SETTING and entropy_SETTING (nats a
    token), nfe_SETTING."""
    figures = {}
    for row in result["rows"]:
        s = row["sampler"]
        size = next(filter(None, (s[key] for key in ("steps", "group_size", "draft"))))
        name = f"t{s['temperature']:g}_p{s['top_p']:g}_{s['mode']}{size}"
        figures[f"judge_{name}"] = [row["nll"], known(row["standard_error"])]
        for key in ("entropy", "nfe"):
            figures[f"{key}_{name}"] = [row[key], known(row[f"{key}_standard_error"])]
    return figures


def at_entropy(figures: Measured, entropy: float) -> Measured:
    """Of generation: for every number of steps matched_mdmSTEPS, the judge's loss where samples
    have this entropy, on the straight line between the two settings around it; nothing where
    all settings are above or below it."""
    settings: dict[str, list[tuple[float, float]]] = {}
    for name, (loss, _) in figures.items():
        if name.startswith("judge_"):
            setting = name.removeprefix("judge_")
            of_samples = figures[f"entropy_{setting}"][0]
            settings.setdefault(setting.rpartition("_")[2], []).append((of_samples, loss))
    found = {}
    for steps, points in settings.items():
        for (low, below), (high, above) in itertools.pairwise(sorted(points)):
            if low <= entropy <= high:
                share = (entropy - low) / (high - low)
                found[f"matched_{steps}"] = [below + share * (above - below), None]
    return found


def of_infilling(result: dict) -> Measured:
    """nll_left, nll_both (nats a token of the middle), gain, their difference, gain_low,
    the lower end of its 95% interval over sentences; rouge1_GIVEN_MODE, rouge2_..., rougel_...; of
    last words GIVEN is passage. Without errors: all runs are asked about the same sentences, and
    chance has no part in it."""
    figures: Measured = {}
    of_sentences = {row["given"]: row["nll"] for row in result["rows"]}
    for given, nll in of_sentences.items():
        figures[f"nll_{given}"] = [statistics.mean(nll), None]
    for row in result["rows"]:
        for key in ("rouge_1", "rouge_2", "rouge_l"):
            name = f"{key.replace('_', '')}_{row['given']}_{row['mode']}"
            figures[name] = [statistics.mean(row[key]), None]
    if {"left", "both"} <= of_sentences.keys():
        pairs = zip(of_sentences["left"], of_sentences["both"], strict=True)
        mean, reach = mean_and_reach([left - both for left, both in pairs])
        figures |= {"gain": [mean, None], "gain_low": [known(mean - reach), None]}
    return figures


# Of benchmarks: the figures of every repeat of each system, {NAME: {"why", "repeats"}}.

SYSTEMS = {
    "ours": "masked diffusion, cache and Lemma 4.1: only what is unmasked is computed",
    "cache-only": "a cache, but every unknown position computed in every step",
    "no-cache": "Lemma 4.1 without a cache",
    "encoder": "an encoder of the same size",
    "l2r": "AO-GPT from left to right, a token a step",
    "speculative": "AO-GPT, eight tokens drafted at a time and verified",
    "gpt": "a plain GPT with a cache, a token a step",
    "decoder": "AO-GPT",
    "rotary": "AO-GPT with relative attention, without adaLN",
}


def of_bench(result: dict) -> Measured:
    """Of bench.py lengths seconds_LENGTH, forwards_LENGTH and their exponents, seconds and
    forwards; of bench.py memory peak_LENGTH and planned_LENGTH in MiB, and the exponent, peak. A
    system of the latter is SYSTEM_BATCH."""
    return of_memory(result) if "peak_bytes" in result["rows"][0] else of_lengths(result)


def of_lengths(result: dict) -> Measured:
    systems = {}
    for name, fit in result["exponents"].items():
        rows = [row for row in result["rows"] if row["system"] == name]
        repeats = []
        for r, seconds in enumerate(fit["seconds"]):
            figures = {"seconds": [seconds, None], "forwards": [fit["token_forwards"][r], None]}
            for row in rows:
                figures[f"seconds_{row['length']}"] = [row["all_seconds"][r], None]
                figures[f"forwards_{row['length']}"] = [row["token_forwards"], None]
            repeats.append(figures)
        systems[name] = {"why": SYSTEMS[name], "repeats": repeats}
    return systems


def of_memory(result: dict) -> Measured:
    systems = {}
    for name, fit in result["exponents"].items():
        system, _, batch_size = name.rpartition("_")
        rows = [
            row
            for row in result["rows"]
            if (row["system"], row["batch_size"]) == (system, int(batch_size))
        ]
        repeats = []
        for repeat in range(len(rows[0]["all_peak_bytes"])):
            figures = {"peak": [fit[repeat], None]}
            for row in rows:
                peak = row["all_peak_bytes"][repeat]
                figures[f"peak_{row['length']}"] = [peak / 2**20, None]
                figures[f"planned_{row['length']}"] = [row["planned_bytes"] / 2**20, None]
            repeats.append(figures)
        systems[name] = {"why": f"{SYSTEMS[system]}, {batch_size} at a time", "repeats": repeats}
    return systems


READERS: dict[str, Callable[[dict], Measured]] = {
    "bench.py": of_bench,
    "eval_ppl.py": of_perplexity,
    "eval_gen.py": of_generation,
    "eval_infill.py": of_infilling,
}
