"""Tasks: their records are right, their splits have nothing in common, their limits are exact."""

import collections
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import ALONE, prepared, read_lines, tiny_config

import eval_tasks
import train
from checkpoints.load import load
from data import tasks
from data.loader import TokenDataset
from data.records import GIVEN, spans
from data.tasks import TASKS
from evaluation.answers import open_questions
from orders import OrderConfig
from studies import tasks as command
from studies.experiments.kept import Kept
from studies.experiments.tasks import (
    RESULTS,
    Decodings,
    against_l2r,
    conclusions,
    cost_table,
    cost_told,
    costs_of,
    figure,
    limit_cell,
    load_tasks,
    page,
    summary_table,
    task_table,
)


def made(task, count, seed=0):
    """(key, record, text without marks) of so many records."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        key = task.draw(generator)
        record = task.record(key, generator)
        yield key, record, "".join(text for text, _ in spans(record))


@pytest.mark.parametrize("name", TASKS)
def test_records_fill_their_block_and_their_answer_is_right_and_hardly_any_other(name):
    task = TASKS[name]
    for _, record, text in made(task, 20):
        assert len(text) == task.length and text.isascii()
        assert task.is_right(text, text)
        at = 0
        for part, role in spans(record):
            changed = text[:at] + chr(ord(part[0]) ^ 1) + text[at + 1 :]
            if role == GIVEN and name != "sudoku6" and name != "parity":
                assert not task.is_right(changed, text)
            at += len(part)
        wrong = text[:-1] + "!"
        assert not task.is_right(wrong, text)
        # Too short, as up to an early end-of-text, or too long.
        for other in (text[:-1], text[: len(text) // 2], "", text + text[-1]):
            assert not task.is_right(other, text)


@pytest.mark.parametrize("name", [n for n in TASKS if n != "reversal"])
def test_all_splits_have_their_keys_and_most_are_trained_on(name):
    splits = collections.Counter(TASKS[name].split_of(key) for key, *_ in made(TASKS[name], 400))
    assert splits.keys() == {"train", "val", "test"}
    assert splits["train"] > 5 * splits["test"]


# What tells the key of a record: its first or its last characters.
KEY_OF = {
    "sudoku6": slice(36, None),
    "star": slice(0, 22),
    "addition": slice(0, 12),
    "mirror": slice(0, 12),
    "parity": slice(0, 20),
    "colouring": slice(0, 25),
    "copy": slice(0, 8),
    "replace": slice(0, 8),
    "shuffle": slice(0, 8),
}


@pytest.mark.parametrize("name", KEY_OF)
def test_prepared_splits_hold_the_records_of_their_keys(name, tmp_path):
    task, keys = TASKS[name], {}
    folder = prepared(name, tmp_path / name, limit=300)
    for split in ("train", "val", "test"):
        data = TokenDataset(folder, split, task.length, verify=True)
        assert data.num_blocks == (300 if split == "train" else 1000)
        rows = [bytes(row.tolist()).decode() for row in data.blocks(range(300))]
        keys[split] = {row[KEY_OF[name]] for row in rows}
        assert {task.split_of(key) for key in keys[split]} == {split}
    assert not keys["train"] & keys["test"] and not keys["train"] & keys["val"]
    if name == "mirror":
        assert all(row[:12] == row[:12:-1] and row[12] == "=" for row in rows)


def test_each_fact_is_asked_once(tmp_path):
    folder, length = prepared("reversal", tmp_path / "facts", limit=50), TASKS["reversal"].length
    for split in ("val", "test"):
        data = TokenDataset(folder, split, length)
        rows = {tuple(row) for row in data.blocks(range(data.num_blocks)).tolist()}
        assert len(rows) == data.num_blocks == 100


def test_a_sum_whose_numbers_change_places_is_in_the_same_split():
    task = TASKS["addition"]
    keys = [key for key, *_ in made(task, 40)]
    others = ["+".join(reversed(key[:-1].split("+"))) + "=" for key in keys]
    assert others != keys and [*map(task.split_of, others)] == [*map(task.split_of, keys)]


def test_a_map_whose_borders_are_listed_otherwise_is_in_the_same_split():
    task = TASKS["colouring"]
    for key, *_ in made(task, 40):
        pairs = [key[i : i + 2] for i in range(0, 24, 2)]
        other = "".join(pair[::-1] for pair in reversed(pairs)) + "="
        assert task.split_of(other) == task.split_of(key)


# ---- single tasks --------------------------------------------------------------------------------


def number_of_solutions(cells):
    """By trying every digit in the first empty cell: slow, and made without `tasks.solutions`."""
    if 0 not in cells:
        return 1
    at = cells.index(0)
    row, column = divmod(at, 6)
    seen = {
        d
        for i, d in enumerate(cells)
        if i // 6 == row or i % 6 == column or (i // 12, i % 6 // 3) == (row // 2, column // 3)
    }
    return sum(
        number_of_solutions([*cells[:at], digit, *cells[at + 1 :]])
        for digit in range(1, 7)
        if digit not in seen
    )


def test_a_board_has_the_split_of_those_that_are_it_with_other_digits():
    task, generator = TASKS["sudoku6"], np.random.default_rng(5)
    splits = {name: set() for name in ("train", "val", "test")}
    for _ in range(300):
        board = task.draw(generator)
        renamed = board.translate(str.maketrans("123456", "351642"))
        assert task.split_of(board) == task.split_of(renamed)
        splits[task.split_of(board)].add(board)
    assert all(splits.values()) and len(splits["train"]) > 200


def test_a_sudoku_has_one_solution_and_keeps_the_rules():
    for _, record, _ in made(TASKS["sudoku6"], 30):
        (shown, _), (board, _) = spans(record)
        cells = np.array(list(map(int, board))).reshape(6, 6)
        boxes = cells.reshape(3, 2, 2, 3).transpose(0, 2, 1, 3).reshape(6, 6)
        for line in (*cells, *cells.T, *boxes):
            assert sorted(line) == [1, 2, 3, 4, 5, 6]
        assert all(a in ("0", b) for a, b in zip(shown, board, strict=True))
        assert number_of_solutions(list(map(int, shown))) == 1
        assert ["".join(map(str, s)) for s in tasks.solutions(list(map(int, shown)))] == [board]
    assert len(set(tasks.first_row_in_order())) == 39_168  # of 28,200,960 boards, over 6!


def test_solutions_are_all_that_there_are():
    """Of a board with the first five rows filled in, and of one with two rows that can be swapped
    in two places: by trying everything."""
    board = list(tasks.first_row_in_order()[1234])
    assert list(tasks.solutions(board[:30] + [0] * 6)) == [board]
    empty = [i for i in range(36) if board[i] in (1, 2)]
    puzzle = [0 if i in empty else d for i, d in enumerate(board)]
    by_hand = set()
    for digits in itertools.product((1, 2), repeat=len(empty)):
        trial = np.array(puzzle)
        trial[empty] = digits
        cells = trial.reshape(6, 6)
        boxes = cells.reshape(3, 2, 2, 3).transpose(0, 2, 1, 3).reshape(6, 6)
        if all(len(set(line)) == 6 for line in (*cells, *cells.T, *boxes)):
            by_hand.add(tuple(trial.tolist()))
    assert {tuple(s) for s in tasks.solutions(puzzle)} == by_hand and len(by_hand) >= 2


def test_a_star_has_one_path_and_arms_of_one_length():
    for _, record, _ in made(TASKS["star"], 30):
        (graph, _), (path, _) = spans(record)
        edges = [graph[i : i + 2] for i in range(0, 18, 2)]
        centre, end = graph[19:21]
        assert path[0] == centre and path[-1] == end and len(path) == 4
        assert all(a + b in edges for a, b in itertools.pairwise(path))
        out = collections.Counter(edge[0] for edge in edges)
        assert out.pop(centre) == 3 and set(out.values()) == {1}
        assert len({letter for edge in edges for letter in edge}) == 10
        again = "".join(edges[::-1]) + graph[18:20] + edges[0][1] + "="
        assert TASKS["star"].split_of(again) == TASKS["star"].split_of(graph)


def test_facts_that_are_asked_are_told_forwards_only():
    generator, told, asked = np.random.default_rng(0), set(), set()
    task = TASKS["reversal"]
    for _ in range(12_000):
        key = task.draw(generator)
        record = task.record(key, generator)
        (told if task.split_of(key) == "train" else asked).add(record)
    assert all(record.endswith("[/GIVEN]") for record in asked)
    for record in asked:
        name, other = record[:4], record[-12:-8]
        assert f"{name}:{other}" in told and f":{other}{name}" not in told
    assert any(record[0] == ":" for record in told)


def test_other_colourings_are_right_if_they_fit():
    for _, record, text in made(TASKS["colouring"], 20):
        (borders, _), (colours, _) = spans(record)
        renamed = borders + colours.translate(str.maketrans("RGB", "GBR"))
        assert TASKS["colouring"].is_right(renamed, text)
        assert not TASKS["colouring"].is_right(borders + "R" * 8, text)


def test_pieces_of_text_are_given_but_for_the_words_in_their_middle(tmp_path):
    text = "The [quick] brown fox, naïve as it is, jumps over the lazy dog and so on. " * 40
    (tmp_path / "text.txt").write_text(text)
    folder = prepared("infill", tmp_path / "infill", tmp_path / "text.txt", split="test")
    data = TokenDataset(folder, "test", 128, verify=True)
    blocks, roles = data.blocks(range(data.num_blocks)), data.roles(range(data.num_blocks))
    kept = "".join(c for c in text if c.isascii() and c not in "[]")
    assert data.num_blocks == len(kept) // 128
    assert bytes(blocks.flatten().tolist()).decode() == kept[: data.num_blocks * 128]
    for row, role in zip(blocks.tolist(), roles, strict=True):
        middle = (role == 0).nonzero().flatten().tolist()
        assert middle == list(range(middle[0], middle[-1] + 1))
        assert 128 // 3 <= middle[0] < middle[-1] < 2 * 128 // 3
        assert row[middle[0]] == row[middle[-1] + 1] == ord(" ")


# ---- limits --------------------------------------------------------------------------------------


def answers_of(name, n):
    """All answers to one question of n letters, with their probabilities, uniform."""
    word = range(n)
    return {
        "copy": [tuple(word)],
        "replace": [tuple(-1 if i == j else i for i in word) for j in word],
        "shuffle": list(itertools.permutations(word)),
    }[name]


def exact_limit(name, groups):
    """By the definition: the positions of a group are drawn independently from their conditionals
    given all before them; summed over everything that is drawn."""
    answers = answers_of(name, sum(groups))

    def right(known, rest):
        fitting = [a for a in answers if a[: len(known)] == known]
        if not fitting or not rest:
            return float(bool(fitting))
        at, size = len(known), rest[0]
        marginals = [
            {
                v: c / len(fitting)
                for v, c in collections.Counter(a[at + i] for a in fitting).items()
            }
            for i in range(size)
        ]
        return sum(
            math.prod(p for _, p in drawn) * right(known + tuple(v for v, _ in drawn), rest[1:])
            for drawn in itertools.product(*(m.items() for m in marginals))
        )

    return right((), list(groups))


@pytest.mark.parametrize("name", ["copy", "replace", "shuffle"])
@pytest.mark.parametrize("groups", [[4], [1, 3], [3, 1], [2, 2], [1, 1, 1, 1], [2, 1, 1], [5]])
def test_limits_are_those_of_independent_draws_from_exact_conditionals(name, groups):
    assert TASKS[name].limit(groups) == pytest.approx(exact_limit(name, groups), abs=1e-12)
    if set(groups) == {1}:
        assert TASKS[name].limit(groups) == pytest.approx(1)


# ---- eval_tasks.py -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of a few steps on shuffle and reversal, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = {name: prepared(name, folder / name, limit=400) for name in ("shuffle", "reversal")}
    config = tiny_config(data["shuffle"], folder, steps=5, model__block_size=17)
    assert train.train(config, ALONE) == 0
    gpt = tiny_config(data["reversal"], folder, name="gpt", steps=5, model__block_size=9)
    model = dataclasses.replace(gpt.model, target="none")
    gpt = dataclasses.replace(gpt, model=model, order=OrderConfig("l2r"))
    assert train.train(gpt, ALONE) == 0
    return config.run_folder, gpt.run_folder, data


def test_every_record_is_answered_and_compared(trained, script, tmp_path):
    run, _, data = trained
    files = {name: tmp_path / f"out.{name}" for name in ("json", "samples", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    status, out, err = script(
        eval_tasks, run, "--tasks", data["shuffle"], "--mode", "random", "--group-size", 4,
        "--limit", 50, *options,
    )  # fmt: skip
    assert status == 0, err
    result = json.loads(files["json"].read_text())["results"][0]
    used = {key: result[key] for key in ("mode", "group_size", "temperature", "unmask_by")}
    assert used == {"mode": "random", "group_size": 4, "temperature": 1.0, "unmask_by": None}
    rows = read_lines(files["samples"])
    assert len(rows) == 50 and result["records"] == 50 and result["nfe"] == 2
    right = [tasks.is_shuffle(row["answer"], row["text"]) for row in rows]
    assert [row["right"] for row in rows] == right
    share = sum(right) / 50
    error = math.sqrt(share * (1 - share) / 49)
    assert result["exact_match"] == pytest.approx(share)
    assert result["standard_error"] == pytest.approx(error)
    assert result["limit"] == pytest.approx(TASKS["shuffle"].limit([4, 4]))
    for row in rows:
        assert row["answer"][:9] == row["text"][:9]
        assert row["step"][:9] == [-1] * 9 and sorted(row["step"][9:]) == [0] * 4 + [1] * 4
    assert "shuffle" in out and f"{share:.4f}" in out
    assert "<script" in files["html"].read_text()


def test_a_model_that_can_only_continue_is_asked_with_what_is_given_first(trained, script):
    _, gpt, data = trained
    questions = open_questions(str(data["reversal"]), None, load(gpt), limit=5)
    first = questions.given_first()
    for row, other in zip(questions.tokens.tolist(), first.tokens.tolist(), strict=True):
        assert other == row[4:] + row[:4]
    assert torch.equal(first.roles.given[0], torch.arange(9) < 5)
    arguments = "--tasks", data["reversal"], "--limit", 10, "--mode"
    status, out, err = script(eval_tasks, gpt, *arguments, "l2r")
    assert status == 0 and "reversal" in out, err
    status, out, err = script(eval_tasks, gpt, f"--tasks={data['reversal']}", "--limit", 10)
    assert status == 0 and "| l2r" in out, err
    status, _, err = script(eval_tasks, gpt, *arguments, "confidence")
    assert status == 2 and "takes --mode l2r" in err


def test_names_of_the_harness_are_not_taken_for_data(tmp_path, monkeypatch):
    """data/lambada is text to score, and lambada a task of the harness."""
    protocols = {"lambada": "sedd", "questions": "records"}
    monkeypatch.setattr(eval_tasks, "load_meta", lambda name: {"protocol": protocols[name]})

    def find(name):
        if name not in protocols:
            raise FileNotFoundError(name)
        return name

    monkeypatch.setattr(eval_tasks, "find_dataset", find)
    found = map(eval_tasks.is_prepared, ("lambada", "questions", "sudoku6", "hellaswag"))
    assert list(found) == [False, True, True, False]


def test_what_cannot_be_answered_is_said(trained, script, data):
    run, *_ = trained
    for words, says in (
        (["--tasks", data], "holds text without prompts"),
        (["--tasks", "colouring"], "make it with: python data/prepare.py colouring"),
        (["--tasks", trained[2]["shuffle"], "--mode", "mdm", "--threshold", 0.5], "no meaning"),
        (["--tasks", trained[2]["shuffle"], "--threshold", 90], "confidence is a probability"),
        (["--tasks", trained[2]["shuffle"], "--num-fewshot", 2], "is for tasks of the harness"),
        (["--tasks", trained[2]["shuffle"], "--mode", "margin", "--unmask-by", "entropy"], "leave"),
    ):
        status, _, err = script(eval_tasks, run, *words)
        assert status == 2 and says in err, err


# ---- tasks.py ------------------------------------------------------------------------------------


def test_systems_are_tuned_alike_and_differ_in_what_they_are_only():
    found = load_tasks()
    assert found.keys() == TASKS.keys()
    for name, of in found.items():
        arms = of.experiment.recipes["fast"].values()
        configs = [of.experiment.config("fast", arm, 0, {}) for arm in arms]
        assert len({json.dumps(arm.tune) for arm in arms}) == 1
        for config in configs:
            assert config.model.block_size == TASKS[name].length
            for table in ("data", "optim", "train", "eval"):
                assert getattr(config, table) == getattr(configs[0], table)
            for key in ("n_layer", "n_head", "n_embd", "position"):
                assert getattr(config.model, key) == getattr(configs[0].model, key)


def test_a_run_decodes_in_every_way_that_it_can(trained):
    run, gpt, data = trained
    found = load_tasks()
    questions = {n: open_questions(str(data[n]), None, load(run), limit=8) for n in data}
    config = tiny_config("data", "out")

    def decode_all(loaded, of, questions):
        model, kind = loaded.model.config, "l2r" if loaded.model.config.l2r_only else "random"
        of_model = dataclasses.replace(config, model=model, order=OrderConfig(kind))
        decodings = Decodings(of, of_model, 8, Kept(None))
        decodings.asked = loaded, questions
        return {name: decodings.summary(name) for name in decodings.possible}

    of_run = decode_all(load(run), found["shuffle"], questions["shuffle"])
    assert of_run.keys() == found["shuffle"].decoders.keys()
    assert of_run["random, 4 a step"]["nfe"] == of_run["l2r, 4 a step"]["nfe"] == 2
    assert of_run["even, 4 steps"]["limit"] == TASKS["shuffle"].limit([2, 2, 2, 2])
    assert of_run["random, 4 a step"]["limit"] == TASKS["shuffle"].limit([4, 4])
    assert of_run["speculative"]["limit"] == pytest.approx(1)
    assert of_run["threshold 0.9"]["limit"] is None
    of_gpt = decode_all(load(gpt), found["reversal"], questions["reversal"])
    assert of_gpt.keys() == {"l2r"} and of_gpt["l2r"]["nfe"] == 4


def made_up(shares, nfe=8.0, seconds=1.0, **others):
    """The arm of a result: a share of right answers for each decoder and seed."""
    base = {"records": 100, "standard_error": 0.01, "limit": None, "token_forwards": 10 * seconds}
    runs = [
        {
            "seed": seed,
            "commit": "abc",
            "tokens": [5_000_000],
            "decoders": {
                name: base
                | {"exact_match": share, "nfe": nfe / (1 + ("fast" in name)), "seconds": seconds}
                for name, share in of_seed.items()
            },
        }
        for seed, of_seed in enumerate(shares)
    ]
    tuned = {"tuned": {"optim.muon_lr": 0.02}, "edge": False}
    return tuned | {"parameters": 1234, "runs": runs} | others


def cells_of(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_tables_and_the_page_say_what_the_results_are():
    """Interval: Student's t of one degree of freedom, 12.706 times 0.02 / sqrt(2)."""
    arms = {
        "aogpt": made_up([{"l2r": 0.2, "confidence": 0.96}, {"l2r": 0.3, "confidence": 0.98}]),
        "encoder": made_up([{"confidence": 0.5, "fast": 0.5}] * 2, seconds=4.0),
        "gpt": made_up([{"l2r": 0.25}, {"l2r": 0.27}]),
    }
    row = next(li for li in task_table(arms) if li.startswith("| aogpt") and "confidence" in li)
    assert cells_of(row) == ["aogpt", "confidence", "97.0% +- 12.7%", "", "8.0", "10", "10.0"]
    head, _, row = summary_table({"star": arms})
    told = dict(zip(cells_of(head), cells_of(row), strict=True))
    assert told["aogpt, l2r"].startswith("25.0%") and told["aogpt, confidence"].startswith("97.0%")
    assert told["encoder, confidence"].startswith("50.0%") and told["any order"] == "wins"
    assert costs_of({"star": arms}) == []  # the encoder is right less often
    assert cost_table([]) == ["Nowhere."] and "Nowhere" in cost_told([])
    ends = {
        n: made_up([{"confidence": 0.97}] * 9, seconds=s) for n, s in (("aogpt", 1), ("encoder", 4))
    }
    assert cells_of(cost_table(costs_of({"star": ends}))[-1]) == [
        "star", "confidence", "8.0", "97.0%", "97.0%", "4.0 +- 0.0", "4.0 +- 0.0",
    ]  # fmt: skip
    dearer = ends | {"encoder": made_up([{"confidence": 0.97}] * 9, seconds=6)}
    told = cost_told(costs_of({"star": ends, "copy": dearer}))
    assert "4.0 (star, confidence) to 6.0 times (copy, confidence) the seconds" in told
    assert "more than 5.0 times" in told
    text = page(load_tasks(), {"star": arms})
    assert "aogpt 1,234" in text and "## star:" in text and "Not run yet: sudoku6" in text
    assert "5.0M tokens. Tuned: aogpt muon_lr 0.02" in text
    assert "Any order wins: star. It ties: nowhere." in text
    # Two standard errors: of 200 answers, of which half are right or nearly all; of seeds.
    assert "and the plain GPT in less than half: star (97.0% +- 2.4% against 26.0% +- 6.2%" in text
    untuned = page(load_tasks(), {"star": {n: arm | {"tuned": {}} for n, arm in arms.items()}})
    assert "5.0M tokens. Commit" in untuned and "Tuned" not in untuned
    assert figure({"star": arms})[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "ours, gpt, word",
    [
        ([0.9, 0.9, 0.9], [0.5, 0.5, 0.5], "wins"),
        ([0.5, 0.5, 0.5], [0.9, 0.9, 0.9], "loses"),
        ([0.99, 0.99, 0.99], [0.985, 0.985, 0.985], "tie"),
        ([0.99, 0.99, 0.2], [0.3, 0.3, 0.3], "unresolved"),  # seeds that scatter are no tie
        ([0.6, 0.6, 0.6], [0.58, 0.58, 0.58], "unresolved"),  # nor is what 300 answers cannot tell
    ],
)
def test_what_any_order_is_worth_is_told_by_decoders_chosen_beforehand(ours, gpt, word):
    """Whatever AO-GPT may do from left to right."""
    arms = {
        "aogpt": made_up([{"l2r": 1.0, "confidence": share} for share in ours]),
        "gpt": made_up([{"l2r": share} for share in gpt]),
    }
    assert against_l2r(arms) == word


@pytest.mark.parametrize(
    "shares, limit, met",
    [
        ([0.47, 0.47], 0.5, True),  # 200 answers: three errors are 10.6%
        ([0.6, 0.62], 0.5, False),
        ([0.3, 0.6, 0.9], 0.9, False),  # that seeds scatter excuses nothing
        ([0.995, 0.995], 1.0, True),  # no model is exact
        ([0.97, 0.97], 1.0, False),
        ([0.0, 0.0], 0.02, True),  # none of 200: a chance of 1.8%
        ([0.0, 0.0], 0.04, False),  # of 0.03%
    ],
)
def test_a_limit_is_met_within_the_error_of_answers(shares, limit, met):
    arm = made_up([{"random": share} for share in shares])
    for run in arm["runs"]:
        run["decoders"]["random"]["limit"] = limit
    assert limit_cell(arm, "random") == f"{limit:.1%} ({'met' if met else 'not met'})"
    told = "\n".join(conclusions({"copy": {"aogpt": arm}}))
    assert f"met in {int(met)} of 1 ways" in told
    assert ("Not met: none" if met else "Not met: copy, aogpt, random") in told


def test_the_page_is_made_of_the_results_that_are_shipped():
    known = load_tasks()
    files = {name: RESULTS / f"{name}.json" for name in known}
    results = {n: json.loads(f.read_text())["arms"] for n, f in files.items() if f.exists()}
    if results:
        assert RESULTS.with_suffix(".md").read_text() == page(known, results)


def test_a_task_that_there_is_not_is_said(script):
    for words, says in (
        (["stars"], "there is no task 'stars'"),
        (["copy", "page"], "page is of all tasks that have results: give it alone"),
    ):
        status, _, err = script(command, *words)
        assert status == 2 and says in err
