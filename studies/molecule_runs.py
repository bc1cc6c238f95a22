"""The runs on molecules (studies/configs/molecules.toml): five systems, tuned alike and
trained on equal letters. Rows of finished runs are in results/molecules/runs.jsonl."""

from dataclasses import dataclass, replace
from pathlib import Path

from aogpt.runtime.command_line import show
from aogpt.runtime.errors import UserError
from aogpt.runtime.validation import from_values, read_toml
from studies.experiment import Experiment, experiment_of
from studies.runner import Results, Runner, best_of
from studies.runs import ROOT

CONFIG = ROOT / "studies" / "configs" / "molecules.toml"
RESULTS = ROOT / "results" / "molecules"
OUT = Path("out/molecules")
RECIPE = "quarter"
ENCODERS = ("encoder", "encoder_ce", "encoder_k")


@dataclass(frozen=True)
class Claim:
    """One figure is lower than another one plus a margin. A figure is SYSTEM:NAME, as
    `molecule_measures` writes it."""

    says: str
    lower: str
    higher: str
    margin: float = 0.0
    # How far apart two seeds of a system may be: it is taken off a difference, as there
    # is one seed.
    allowance: float = 0.0


def load_runs() -> tuple[Experiment, list[Claim]]:
    """Return the run configs, each with a short one on which its rate is tuned, and the
    claims about them."""
    values = read_toml(CONFIG)
    claims = from_values(values.pop("claims"), list[Claim], str(CONFIG))
    short = values.pop("short")
    tables = values["run_configs"]
    for name in list(tables):
        tables[name]["tuned_as"] = f"{name}_short"
        tables[f"{name}_short"] = {"from": name, **short}
    experiment = experiment_of("molecules", values, str(CONFIG))
    return replace(experiment, out=OUT), claims


def systems_of(experiment: Experiment) -> list[str]:
    """Return the names of the run configs that are not short."""
    return [
        name
        for name, run_config in experiment.recipes[RECIPE].items()
        if run_config.tuned_as
    ]


def train(systems: list[str], file: Path = RESULTS / "runs.jsonl") -> None:
    """Tune and train systems, all if none is named; a finished run is not trained
    again. "encoder" is the one with the best of three losses."""
    experiment, _ = load_runs()
    names = [name for name in systems_of(experiment) if name not in ENCODERS[1:]]
    for system in systems:
        if system not in names:
            raise UserError(f"there is no system {system!r}; take of {names}")
    results = Results(file)
    for name in systems or names:
        if name == "encoder":
            name = best_encoder(Runner(experiment, results))
            show(f"the encoder's loss is that of {name}", flush=True)
        runner = Runner(experiment, results, chosen=(name,))
        runner.train(seeds=1)


def best_encoder(runner: Runner) -> str:
    """Tune the encoders; return the one whose tuning runs ended with the lowest
    bound."""
    run_configs = runner.experiment.recipes[RECIPE]
    losses = {}
    for name in ENCODERS:
        pairs = runner.tune(RECIPE, [run_configs[f"{name}_short"]])
        best_of(run_configs[name], pairs)  # raises an error if all diverged
        losses[name] = min(loss for _, loss in pairs)
    return min(losses, key=losses.get)
