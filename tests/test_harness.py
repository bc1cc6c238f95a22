"""aogpt/evaluation/harness.py and eval_tasks.py: against the model's own
log-likelihoods, enumeration, and whole tasks through lm-evaluation-harness without
network."""

import functools
import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    assert_user_error,
    read_lines,
    run_script,
    some_slow,
    torchrun,
    write_rows,
)
from reference import DECODERS, SYSTEMS, make_system, mask_sets

import eval_tasks
from aogpt.checkpoints import Loaded
from aogpt.data.tokenizers import get_tokenizer
from aogpt.evaluation import harness
from aogpt.sampling.engine import generate
from aogpt.sampling.plans import l2r_plan
from aogpt.sampling.token_choice import TokenChoice
from aogpt.scoring import masked_log_probs, token_log_probs

BYTES = get_tokenizer("bytes")
EOT = BYTES.eot
BLOCK = 24
TEXTS = ["", "a", "the  ", "order é model", "all that was said before it, and more"]
ENDS = ["x", " step by", "twelve bytes"]
# float64 sums of tens of terms near 10; another batch shape rounds them differently
EXACT = 1e-9


@pytest.fixture
def adapter(monkeypatch):
    """Make a `HarnessModel` of a system, bytes as tokens, or of a model."""
    pytest.importorskip(
        "lm_eval", reason="needs: pip install -r requirements/harness.txt"
    )

    def make(system="AO-GPT", **options):
        model = system
        if isinstance(system, str):
            model = make_system(system, tokens=BYTES.vocab_size, block_size=BLOCK)
        loaded = Loaded(model, "test.pt", 0, "raw", "bytes", BYTES.vocab_size)
        return harness.HarnessModel(loaded, device="cpu", **options)

    return make


def request(*arguments):
    return SimpleNamespace(args=arguments)


def requests_of(texts, ends):
    pairs = itertools.product(texts, ends)
    return [request(context, end) for context, end in pairs if end]


def tokens_of(context, end):
    """Return context and continuation as tokens, by the harness's conventions."""
    stripped = context.rstrip()
    context_ids = BYTES.encode(stripped)
    new = BYTES.encode(context[len(stripped) :] + end)
    return (context_ids or [EOT])[len(new) - BLOCK :], new


def left_to_right(model, context_ids, new):
    tokens = torch.tensor([context_ids + new])
    log_probs = token_log_probs(model, tokens, torch.arange(tokens.shape[1])[None])
    return float(log_probs[0, len(context_ids) :].double().sum())


def any_order(model, context_ids, new):
    """Return the mean over all orders of the continuation of its log-probability."""
    c = len(context_ids)
    n = len(new)
    tokens = torch.tensor([context_ids + new])
    rest = range(c, c + n)
    if model.config.attention == "causal":
        orders = [[*range(c), *order] for order in itertools.permutations(rest)]
        orders = torch.tensor(orders)
        log_probs = token_log_probs(model, tokens.expand(len(orders), -1), orders)
        return float(log_probs[:, c:].sum(dim=1).mean())
    given = {}  # log p(x_target | all but the masked positions)
    for subset in mask_sets(n):
        masked = torch.tensor([[p - c in subset for p in range(c + n)]])
        values = masked_log_probs(model, tokens, masked)[0]
        for target in subset:
            given[frozenset(subset), target] = float(values[c + target])
    sums = []
    for order in itertools.permutations(range(n)):
        sums.append(sum(given[frozenset(order[i:]), order[i]] for i in range(n)))
    return statistics.fmean(sums)


@pytest.mark.parametrize("system", DECODERS)
def test_left_to_right_it_is_the_sum_of_the_model_s_own_log_probabilities(
    adapter, system
):
    lm = adapter(system, batch_size=7)
    asked = requests_of(TEXTS, ENDS)
    got = lm.loglikelihood(asked)
    for one, (value, _) in zip(asked, got, strict=True):
        context, end = one.args
        context_ids, new = tokens_of(context, end)
        expected = left_to_right(lm.model, context_ids, new)
        assert value == pytest.approx(expected, abs=EXACT), one.args
    for empty in (request("the", ""), request("", "")):
        assert lm.loglikelihood([empty]) == [(0.0, True)]


@pytest.mark.parametrize(
    "context, end",
    [
        ("The sailor had seen the whole wor", "ld"),
        ("She spoke to Doro", "thy about"),
        ("the end ", "of it"),
        ("wor", "ld"),
    ],
)
def test_a_token_across_context_and_continuation_is_scored(adapter, context, end):
    """Both are encoded together; what is scored are all tokens that reach into the
    continuation."""
    english = get_tokenizer("english")
    model = make_system("AO-GPT", tokens=english.vocab_size, block_size=BLOCK)
    loaded = Loaded(
        model, "test.pt", 0, "raw", tokenizer="english", vocab_size=english.vocab_size
    )
    pytest.importorskip("lm_eval")
    lm = harness.HarnessModel(loaded, device="cpu")
    tokens = english.encode(context + end)
    context_length = max(
        k
        for k in range(len(tokens))
        if context.rstrip().startswith(english.decode(tokens[:k]))
    )
    [(got, _)] = lm.loglikelihood([request(context, end)])
    expected = left_to_right(
        model, tokens[:context_length] or [english.eot], tokens[context_length:]
    )
    assert got == pytest.approx(expected, abs=EXACT)
    assert got < 0
    spanning = english.decode(tokens[:context_length]) != context.rstrip()
    counts = lm.request_counts()
    assert counts == {
        "all": 1,
        "spanning": int(spanning),
        "truncated": 0,
        "windows": 0,
        "generated": 0,
    }
    lm.loglikelihood([request("wor" * BLOCK, end)])
    assert lm.request_counts()["truncated"] == 1


def test_greedy_in_random_orders_needs_every_order_drawn(adapter):
    """Two tokens that are the likeliest from left to right, but not the other way
    round."""
    model = make_system("AO-GPT", tokens=BYTES.vocab_size, block_size=BLOCK)
    plan = l2r_plan(1, 4, torch.arange(4)[None] < 2)
    given = torch.tensor([[5, 6, 0, 0]])
    greedy = TokenChoice(temperature=0)
    tokens = generate(model, plan, given, choice=greedy).tokens[0].tolist()
    l2r = [
        (None, tokens[:2], end)
        for end in (tokens[2:], [tokens[2], (tokens[3] + 1) % 256])
    ]
    first, second = adapter(model)._loglikelihood_tokens(l2r)
    assert first[1]
    assert not second[1]
    seen = set()
    for seed in range(12):
        lm = adapter(model, order="random", num_orders=2, seed=seed)
        passes = [lm.scoring_pass(tokens[:2], tokens[2:], draw) for draw in range(2)]
        drawn = [p.order.tolist() == [0, 1, 2, 3] for p in passes]
        ((_, best),) = lm._loglikelihood_tokens([(None, tokens[:2], tokens[2:])])
        assert best == all(drawn)
        seen.add(tuple(drawn))
    assert len(seen) == 4


def test_greedy_looks_at_the_tokenizer_s_ids_only(adapter):
    """The padding of the token table cannot be generated, but counts in the
    probabilities."""
    model = make_system("AO-GPT", tokens=300, block_size=BLOCK)
    with torch.no_grad():
        model.head.bias[280] = 50.0
    lm = adapter(model)
    ranked = [lm._loglikelihood_tokens([(None, [5], [t])])[0] for t in range(257)]
    assert [best for _, best in ranked].count(True) == 1
    assert max(ranked)[1]
    assert max(ranked)[0] < -10


@pytest.mark.parametrize(
    "system",
    some_slow(
        [(name,) for name in SYSTEMS if name != "GPT-2"],
        lambda system: system in ("AO-GPT", "RADD"),
        "600 estimates of each",
    ),
)
def test_any_order_estimates_are_unbiased_given_the_context(adapter, system):
    """300 independent estimates lie around the mean over all orders within 4 standard
    errors."""
    model = make_system(system, tokens=BYTES.vocab_size, block_size=BLOCK)
    asked = [request("the ", "abc"), request("", "wxyz")]
    estimates = [[], []]
    for seed in range(300):
        lm = adapter(model, seed=seed, order="random", num_orders=2, batch_size=64)
        for values, (value, _) in zip(estimates, lm.loglikelihood(asked), strict=True):
            values.append(value)
    for one, values in zip(asked, estimates, strict=True):
        context, end = one.args
        context_ids, new = tokens_of(context, end)
        exact = any_order(model, context_ids, new)
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert error > 1e-6
        assert abs(statistics.fmean(values) - exact) < 4 * error, one.args


@pytest.mark.parametrize("system", SYSTEMS)
def test_neither_batches_nor_other_requests_change_a_value(adapter, system):
    """Rows of different lengths share passes: padding is not seen."""
    order = "l2r" if system == "GPT-2" else "random"
    asked = requests_of(TEXTS, ENDS)
    together = adapter(system, order=order, num_orders=3, batch_size=17)
    whole = together.loglikelihood(asked)
    alone = adapter(system, order=order, num_orders=3, batch_size=1)
    backwards = alone.loglikelihood(asked[::-1])[::-1]
    for (value, best), (single, hit) in zip(whole, backwards, strict=True):
        assert value == pytest.approx(single, abs=EXACT)
        assert best == hit


def test_rolling_predicts_every_token_once_in_windows_that_fit(adapter):
    lm = adapter(batch_size=3)
    long = "It was the best of times, it was" * 3
    texts = ["", "a", "x" * (BLOCK - 1), "y" * BLOCK, long]
    got = lm.loglikelihood_rolling([request(text) for text in texts])
    for text, value in zip(texts, got, strict=True):
        tokens = BYTES.encode(text)
        expected = 0.0
        place = 0
        while place < len(tokens):
            end = min(place + BLOCK - 1, len(tokens))
            context_ids = ([EOT] + tokens)[max(0, end + 1 - BLOCK) : place + 1]
            expected += left_to_right(lm.model, context_ids, tokens[place:end])
            place = end
        assert value == pytest.approx(expected, abs=EXACT), text


def test_greedy_generation_left_to_right_whatever_the_batches(adapter):
    """One full pass of the model for each token."""
    lm = adapter("AO-GPT", batch_size=2)
    got = lm.generate_until([request(text, {"max_gen_toks": 6}) for text in TEXTS])
    for text, answer in zip(TEXTS, got, strict=True):
        context_ids = (BYTES.encode(text) or [EOT])[6 - BLOCK :]
        new = []
        for _ in range(6):
            rows = torch.tensor(
                [context_ids + new + [t] for t in range(BYTES.vocab_size)]
            )
            order = torch.arange(rows.shape[1]).expand_as(rows)
            new.append(int(token_log_probs(lm.model, rows, order)[:, -1].argmax()))
        assert answer == BYTES.decode(new[: new.index(EOT)] if EOT in new else new)


def ascii_model(system="AO-GPT"):
    """Return a model that says little else than lower-case letters and spaces."""
    model = make_system(system, tokens=BYTES.vocab_size, block_size=BLOCK)
    with torch.no_grad():
        model.head.bias[[*range(97, 123), 32]] += 30
    return model


def test_an_answer_ends_before_the_first_stop_string_or_end_of_text(adapter):
    lm = adapter(ascii_model())
    (whole,) = lm.generate_until([request("the", {"max_gen_toks": 12})])
    assert len(whole) == 12
    stops = [whole[7:9], "\n", whole[3:5], ""]
    (cut,) = lm.generate_until([request("the", {"max_gen_toks": 12, "until": stops})])
    assert cut == whole[: min(whole.find(stop) for stop in (stops[0], stops[2]))]
    with torch.no_grad():
        lm.model.head.bias[EOT] += 1000
    assert lm.generate_until([request("the", {"max_gen_toks": 12})]) == [""]


SAMPLED = {"max_gen_toks": 9, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
SAMPLERS = [
    *itertools.product(["AO-GPT", "RADD"], "l2r mdm even random adaptive".split()),
    ("AO-GPT", "speculative"),
]


@pytest.mark.parametrize(("system", "mode"), SAMPLERS)
def test_samples_are_a_function_of_seed_and_request_in_every_mode(
    adapter, system, mode
):
    model = ascii_model(system)
    asked = [request(text, SAMPLED) for text in TEXTS]
    lm = adapter(model, mode=mode, batch_size=5)
    got = lm.generate_until(asked)
    assert [len(text) for text in got] == [9] * len(TEXTS)
    backwards = adapter(model, mode=mode, batch_size=2).generate_until(asked[::-1])
    assert backwards[::-1] == got
    assert adapter(model, mode=mode, seed=1).generate_until(asked) != got
    # the same request several times over is several samples, the first as if alone
    repeated = lm.generate_until([asked[2]] * 3)
    assert repeated[0] == got[2]
    assert len(set(repeated)) == 3


def test_settings_of_generation_are_taken_as_the_harness_means_them(adapter):
    lm = adapter(ascii_model())
    for given, *expected in (
        ({"max_new_tokens": 5, "until": "a"}, TokenChoice(0.0), 5, ("a",)),
        (
            {"temperature": 0.5, "until": ["", "b"]},
            TokenChoice(0.5),
            BLOCK // 2,
            ("b",),
        ),
        ({"do_sample": True, "top_k": 3}, TokenChoice(1.0, top_k=3), BLOCK // 2, ()),
        (
            {"do_sample": False, "temperature": 0.7, "top_k": 0},
            TokenChoice(0.0),
            BLOCK // 2,
            (),
        ),
        (SAMPLED | {"top_k": -1}, TokenChoice(0.8, 0.95), 9, ()),
    ):
        assert lm.generation_settings(given) == tuple(expected)
    for refused in ({"num_beams": 4}, {"max_gen_toks": BLOCK}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match=f"{[*refused][0]} is "):
            lm.generation_settings(refused | {"do_sample": True})


def test_what_a_model_cannot_do_is_refused_by_name(adapter):
    for system, options, words in (
        (
            "RADD",
            {"order": "l2r"},
            "has no left-to-right likelihood; take order random",
        ),
        ("GPT-2", {"order": "random"}, "is a plain GPT; take order l2r and mode l2r"),
        ("AO-GPT", {"order": "backwards"}, "order is 'backwards'; it must be one of"),
        ("AO-GPT", {"temperature": 0.5}, "is for the tasks to say; give --gen-kwargs"),
        ("AO-GPT", {"num_orders": 0}, "num_orders is 0; give a number at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            adapter(system, **options)


def test_a_continuation_that_does_not_fit_is_an_error_before_any_score(
    adapter, monkeypatch
):
    lm = adapter()
    assert len(lm.loglikelihood([request("a", "b" * (BLOCK - 1))])) == 1
    monkeypatch.setattr(lm, "score", None)
    requests = [request("a", "b"), request("see this", "order" * BLOCK)]
    message = "of 120 tokens does not fit in the model's 24"
    with pytest.raises(ValueError, match=message):
        lm.loglikelihood(requests)


WITHOUT_LM_EVAL = """
import contextlib, sys
sys.modules["lm_eval"] = None
import eval_tasks
from aogpt.runtime.command_line import run_script
sys.argv[1:] = ["--help"]
with contextlib.suppress(SystemExit):
    run_script(eval_tasks.main)
sys.argv[1:] = ["nowhere", "--tasks", "a"]
run_script(eval_tasks.main)
"""


def test_without_lm_eval_help_works_and_the_rest_names_the_command_that_installs_it():
    done = run_script("-c", WITHOUT_LM_EVAL, check=False)
    message = "this needs the package lm_eval: pip install -r requirements/harness"
    assert_user_error(done, message)
    assert "--num-orders" in done.stdout


ROWS = [
    {"text": "the mo", "choices": ["del", "xyz", "de"], "gold": 0},
    {"text": "", "choices": ["any", "zz"], "gold": 0},
    {"text": "learn predict order the ", "choices": ["block", "q"], "gold": 1},
    {"text": "step of", "choices": [" the", " the token"], "gold": 1},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\ntarget_delimiter: ""\n'
CHOICE += "metric_list: [{metric: acc}]\n"
ANSWER = (
    'doc_to_target: "{{target}}"\ngeneration_kwargs: {until: [" "], max_gen_toks: 8}\n'
)
ANSWER += "metric_list: [{metric: exact_match}]\n"
ROLLING = (
    'doc_to_target: "{{text}}"\n'
    "metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]\n"
)


@pytest.fixture
def tasks(tmp_path, monkeypatch, adapter, run):
    """Return a folder of three tasks, one of each kind; two of four answers of
    generation are right."""
    import lm_eval.tasks

    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lm = harness.HarnessModel(run, device="cpu")
    settings = {"until": [" "], "max_gen_toks": 8}
    answers = lm.generate_until([request(row["text"], settings) for row in ROWS[:2]])
    targets = [*answers, "?", "?"]
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = []
    for row, target in zip(ROWS, targets, strict=True):
        rows.append(row | {"target": target})
    write_rows(folder / "rows.jsonl", rows)
    for name, kind, text, rest in (
        ("choose", "multiple_choice", "{{text}}", CHOICE),
        ("answer", "generate_until", "{{text}}", ANSWER),
        ("roll", "loglikelihood_rolling", "", ROLLING),
    ):
        task = TASK.format(
            name=f"tiny_{name}", kind=kind, text=text, path=folder / "rows.jsonl"
        )
        (folder / f"{name}.yaml").write_text(task + rest)
    only_ours = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_ours)
    return folder


def expected_results(lm):
    """Return accuracy and bits per byte of ROWS, from the adapter's log-likelihoods."""
    right = 0
    for row in ROWS:
        asked = [request(row["text"], choice) for choice in row["choices"]]
        values = [value for value, _ in lm.loglikelihood(asked)]
        right += values.index(max(values)) == row["gold"]
    texts = [row["text"] for row in ROWS]
    log_probs = lm.loglikelihood_rolling([request(text) for text in texts])
    bits = -sum(log_probs) / math.log(2)
    return right / len(ROWS), bits / sum(map(len, texts))


@pytest.mark.parametrize("order", [[], ["--order", "random", "--num-orders", 3]])
def test_tasks_of_every_kind_run_without_network(script, run, tasks, tmp_path, order):
    names = ["tiny_choose", "tiny_answer", "tiny_roll"]
    options = ["--tasks", *names, "--include-path", tasks, "--device", "cpu", *order]
    options += ["--json", tmp_path / "results.json"]
    options += ["--samples", tmp_path / "samples.jsonl"]
    status, out, err = script(eval_tasks, run, *options)
    assert status == 0, err
    report = json.loads((tmp_path / "results.json").read_text())
    results = report["results"]
    settings = report["settings"]
    kind = "random" if order else "l2r"
    lm = harness.HarnessModel(run, device="cpu", order=kind, num_orders=3)
    accuracy, bits = expected_results(lm)
    assert results["tiny_choose"]["acc,none"] == accuracy
    assert results["tiny_answer"]["exact_match,none"] == 0.5
    # float32, in other batches
    assert results["tiny_roll"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    assert all(name in out for name in names)
    assert f"log-likelihoods: {kind}, generation: l2r" in out
    assert settings["order"] == kind
    assert settings["mode"] == "l2r"
    assert report["checkpoint"]["step"] == 40
    assert report["versions"]["lm_eval"]
    assert report["command"].startswith("python eval_tasks.py")
    samples = read_lines(tmp_path / "samples.jsonl")
    assert [line["task"] for line in samples] == [name for name in names for _ in ROWS]


def test_limits_patterns_and_settings_reach_the_harness(script, run, tasks, tmp_path):
    options = ["--include-path", tasks, "--json", tmp_path / "r.json"]
    options += "--tasks tiny_[ca]* --device cpu --limit 2 --num-fewshot 0".split()
    options += "--mode mdm --steps 1 --gen-kwargs max_gen_toks=1".split()
    status, _, err = script(eval_tasks, run, *options)
    assert status == 0, err
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report["results"]) == {"tiny_choose", "tiny_answer"}
    assert all(count["effective"] == 2 for count in report["n-samples"].values())
    assert report["configs"]["tiny_answer"]["generation_kwargs"]["max_gen_toks"] == 1


def test_the_model_is_registered_under_its_name(run, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="aogpt",
        model_args=f"run={run},order=random,num_orders=2",
        tasks=["tiny_choose"],
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=4,
    )
    lm = harness.HarnessModel(run, device="cpu", order="random", num_orders=2)
    assert results["results"]["tiny_choose"]["acc,none"] == expected_results(lm)[0]


def test_mistakes_at_the_command_line_are_one_line(script, run, tasks):
    for arguments, message in (
        ("RUN --tasks tiny_roll", "no task or prepared data 'tiny_roll'; "),
        (
            "RUN --tasks data/qa --threshold 0.9",
            "--threshold has no meaning with --mode l2r",
        ),
        (
            "RUN --tasks a --html h.html",
            "--html is for prepared data, not for a: leave it out",
        ),
        ("TASKS/no --tasks a", "give a run folder"),
        (
            "RUN --tasks tiny_answer --include-path TASKS --gen-kwargs max_gen_toks=99",
            "1 to 15",
        ),
        (
            "RUN --tasks tiny_answer --include-path TASKS/no",
            "name the one that holds the YAML files of your tasks",
        ),
        (
            "RUN --tasks tiny_roll2 --include-path TASKS",
            "has a task 'tiny_roll2': give what follows `task:`",
        ),
    ):
        arguments = arguments.replace("RUN", str(run)).replace("TASKS", str(tasks))
        status, _, err = script(eval_tasks, *arguments.split(), "--device", "cpu")
        assert status == 2
        assert "Traceback" not in err
        assert message in " ".join(err.split()), err


@pytest.mark.slow(reason="starts two processes")
def test_two_processes_give_the_results_of_one(script, run, tasks, tmp_path):
    common = [run, "--tasks", tasks / "choose.yaml", tasks / "answer.yaml"]
    common += "--device cpu --order random".split()
    common += "--gen-kwargs temperature=1.0,do_sample=True --samples".split()
    assert script(eval_tasks, *common, tmp_path / "one.jsonl")[0] == 0
    json_file = ["--json", tmp_path / "two.json"]
    torchrun(2, "eval_tasks.py", *common, tmp_path / "two.jsonl", *json_file)
    assert json.loads((tmp_path / "two.json").read_text())["processes"] == 2

    def sorted_lines(name):
        lines = read_lines(tmp_path / f"{name}.jsonl")
        return sorted(lines, key=lambda row: (row["task"], row["doc_id"]))

    one = sorted_lines("one")
    two = sorted_lines("two")
    assert len(one) == len(two) == 8
    for row, other in zip(one, two, strict=True):
        assert (row["task"], row["doc_id"]) == (other["task"], other["doc_id"])
        for x, y in zip(row["resps"], other["resps"], strict=True):
            # an answer, or a log-likelihood and whether it is greedy
            if isinstance(x[0], str):
                assert x == y
            else:
                assert x[0] == pytest.approx(y[0], abs=1e-4)
