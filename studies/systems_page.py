"""The page of what each compared system is given: results/findings/systems.md, made of
the experiments' files and rows. It names every inequality that these show."""

from aogpt.model import ModelConfig
from aogpt.runtime.outputs import markdown_table
from studies import pages
from studies.experiment import CONFIGS, Experiment
from studies.runner import Recipes

COMPARISONS = ("E21", "E22", "E26", "E28", "E29", "E32", "E34", "E39")
PAPERS_SHARE = 0.10  # of adaLN in a block, at most: the paper has 6 to 8%
LOSSES = {
    "ao_ar": "log p along a random order",
    "ar": "log p, left to right",
    "lambda_dce": "weighted by 1 / rate",
    "masked_ce": "unweighted",
    "k_dce": "weighted by n / k",
}
HEAD = [
    "",
    "parameters",
    "adaLN, share of a block",
    "MFLOPs a token",
    "loss trained",
    "values tried",
    "seeds",
    "not alike",
]


def systems_page() -> str:
    """Return the page: a table for each recipe of each experiment that has results."""
    lines = []
    for name in COMPARISONS:
        if not pages.has_results(name):
            lines += [f"## {name}", "", "Not run yet.", ""]
            continue
        for page in pages.pages_of(*pages.load_results(name)):
            experiment = page.experiment
            lines += [f"## [{name}]({page.name}.md). {experiment.title}", ""]
            for recipe in page.recipes:
                lines += [f"*{pages.title_of(recipe)}*, {tuning_of(experiment)}.", ""]
                lines += [*table(experiment, page.recipes, recipe), ""]
            if missing := pages.not_run(experiment, page.recipes):
                lines += [f"Not run yet: {'; '.join(missing)}.", ""]
    text = (CONFIGS / "systems.md").read_text()
    return text.replace("TABLES", "\n".join(lines).strip())


def tuning_of(experiment: Experiment) -> str:
    *first, last = map(str, experiment.tuning_seeds)
    seeds = f"{', '.join(first)} and {last}" if first else last
    measure = "loss"
    if experiment.tune_by_success is not None:
        measure = "number of runs that succeed"
    return f"tuned by the {measure} of seeds {seeds}"


def table(experiment: Experiment, recipes: Recipes, recipe: str) -> list[str]:
    rows = []
    for name, entry in recipes[recipe].items():
        run_config = experiment.recipes[recipe][name]
        config = experiment.config(recipe, run_config, 0, run_config.untuned)
        share = adaln_share(config.model)
        rows.append(
            [
                entry["description"] or name,
                pages.cost_cell(entry, "parameters"),
                f"{share:.1%}" if share else "",
                pages.cost_cell(entry, "mflops"),
                LOSSES[config.objective.kind],
                f"{len(entry['tuning'])}: {pages.tuned_cell(entry)}",
                str(len(entry["runs"])),
                "; ".join(inequalities(experiment, recipes, recipe, name)),
            ]
        )
    return markdown_table(HEAD, rows, left=1)


def adaln_share(model: ModelConfig) -> float:
    """Return the matrix of adaLN, (C, 6 D), beside the 12 D * D of a block's others in
    the paper's proportions; 0 without adaLN."""
    if model.target != "adaln":
        return 0.0
    return model.cond_dim / (2 * model.n_embd)


def has_rotary(experiment: Experiment, recipes: Recipes, recipe: str) -> bool:
    """Return whether some system of a recipe has rotary attention."""
    for name in recipes[recipe]:
        run_config = experiment.recipes[recipe][name]
        config = experiment.config(recipe, run_config, 0, run_config.untuned)
        if config.model.position != "learned":
            return True
    return False


def inequalities(
    experiment: Experiment, recipes: Recipes, recipe: str, name: str
) -> list[str]:
    """Return in words what a system has been given less or more of than others."""
    entry = recipes[recipe][name]
    model = experiment.config(
        recipe, experiment.recipes[recipe][name], 0, entry["tuned"]
    ).model
    words = []
    if adaln_share(model) > PAPERS_SHARE:
        words.append("more adaLN than the paper's 6 to 8%")
    if model.position == "learned" and has_rotary(experiment, recipes, recipe):
        words.append("no rotary attention")
    if entry["at_boundary"]:
        words.append("best value at the grid boundary")
    if entry.get("tuned_as"):
        words.append("rates of the run with all tokens")
    if model.attention == "full":
        trained = set()
        for other, run_config in experiment.recipes[recipe].items():
            config = experiment.config(recipe, run_config, 0, run_config.untuned)
            if config.model.attention == "full" and other in recipes[recipe]:
                trained.add(config.objective.kind)
        missing = [
            LOSSES[kind]
            for kind in ("lambda_dce", "masked_ce", "k_dce")
            if kind not in trained
        ]
        if missing:
            words.append(f"loss not tuned (not tried: {', '.join(missing)})")
    if experiment.success is not None and experiment.tune_by_success is None:
        words.append("compared by success, tuned by loss")
    return words
