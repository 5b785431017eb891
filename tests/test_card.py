"""The model card.

- huggingface_hub parses it, and its scores are the entries that MTEB itself would write.
- What it says is true of the run: every loss setting, the recipe, the seeds, the time; and nothing of
  the machine, and no sentence of the corpus.
- It shows how to load the encoder by its real name; both papers are cited, each once.
- The text that somebody wrote stays, whatever is pushed after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_gsinfonce import (
    STS_TASKS,
    GSInfoNCELoss,
    STSResults,
    build_encoder,
    build_trainer,
    strip_head,
)
from st_gsinfonce.card import BEGIN, END, Facts, write_card

REPO = "galaxy/heart-of-gold"
SNAPSHOT = Path(__file__).parent / "card_snapshot.md"


def sts_results(name: str, start: float) -> STSResults:
    return STSResults(
        scores={task: start + index / 100 for index, task in enumerate(STS_TASKS)},
        model_name=name,
        revision="0123456789abcdef" * 2 + "01234567",
        pooling="cls",
        pairs=dict.fromkeys(STS_TASKS, 1000),
        versions={"mteb": "2.26.24", "torch": "2.13.0"},
        seconds=12.0,
    )


AFTER, BEFORE = sts_results("local/x", 0.7), sts_results("google-bert/bert-base-uncased", 0.51)


@pytest.fixture
def run() -> dict[str, Any]:
    """What examples/train_unsup.py writes, on a machine with a user and a token."""
    return {
        "command": "python train.py --corpus /home/zaphod/secret/sentences.txt --hub_token hf_abc",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
        "settings": {
            "corpus": "/home/zaphod/secret/sentences.txt",
            "output": "/home/zaphod/runs/1",
            "model": "google-bert/bert-base-uncased",
            "pooling": "cls",
            "max_seq_length": 32,
            "head": True,
            "eval_data": "/home/zaphod/sts",
        },
        "loss": {"scale": 20.0, "noise": "sampled", "noise_ratio": 3.0, "seed": 42},
        "trainer": {
            "per_device_train_batch_size": 64,
            "learning_rate": 3e-5,
            "seed": 42,
            "output_dir": "/home/zaphod/runs/1/checkpoints",
            "run_name": "zaphod@heart",
            "hub_token": "<HUB_TOKEN>",
        },
    }


@pytest.fixture
def facts(run: dict[str, Any]) -> Facts:
    return Facts(REPO, AFTER, BEFORE, run, license="apache-2.0", language="en")


@pytest.fixture
def encoder(make_encoder: Callable[..., SentenceTransformer]) -> SentenceTransformer:
    return make_encoder()


@pytest.fixture(scope="module")
def trained(
    tiny_bert: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SentenceTransformer, str]:
    """An encoder that the Trainer trained, and the card that it wrote."""
    folder = tmp_path_factory.mktemp("zaphod")
    model = build_encoder(tiny_bert, seed=0, device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=16,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        deepspeed=None,
    )
    build_trainer(
        model, sentences, arguments, loss=GSInfoNCELoss(model, noise_size=7, seed=1)
    ).train()
    strip_head(model).save_pretrained(str(folder / "encoder"))
    return model, (folder / "encoder" / "README.md").read_text(encoding="utf-8")


def block(card: str) -> str:
    return card[card.index(BEGIN) : card.index(END)]


def headings(card: str) -> list[str]:
    return re.findall(r"^##+ .*", re.sub(r"<!--.*?-->|```.*?```", "", card, flags=re.DOTALL), re.M)


def test_the_card_keeps_its_shape(encoder: SentenceTransformer, facts: Facts) -> None:
    """If this fails on purpose, write the text that it shows to the snapshot."""
    card = write_card(encoder, facts)
    metadata = ModelCard(card).data.to_dict()
    shape = f"{json.dumps(metadata, indent=2)}\n\n{block(card)}{END}\n"
    assert shape == SNAPSHOT.read_text(encoding="utf-8"), shape


def test_the_hub_s_parser_reads_the_scores_as_mteb_writes_them(
    encoder: SentenceTransformer, facts: Facts
) -> None:
    mteb = pytest.importorskip("mteb")
    card = ModelCard(write_card(encoder, facts))
    name, entries = model_index_to_eval_results(card.data.to_dict()["model-index"])
    assert name == "heart-of-gold"
    assert [entry.metric_value for entry in entries] == list(AFTER.scores.values())
    for task_name, entry in zip(STS_TASKS, entries, strict=True):
        task = mteb.get_task(task_name)
        score = AFTER.scores[task_name]
        made = {"test": {"default": {"cosine_spearman": score, "main_score": score}}}
        result = mteb.TaskResult.from_task_results(task, made, evaluation_time=1.0)
        with pytest.warns(DeprecationWarning):
            (expected,) = result.get_hf_eval_results()
        assert entry == expected


def test_the_metadata(encoder: SentenceTransformer, facts: Facts) -> None:
    data = ModelCard(write_card(encoder, facts)).data
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert {"sentence-transformers", "simcse", "gs-infonce", "unsupervised"} <= set(data.tags)
    assert data.base_model == "google-bert/bert-base-uncased"  # of the run
    assert (data.license, data.language) == ("apache-2.0", ["en"])


def test_the_example_is_of_this_encoder(encoder: SentenceTransformer, facts: Facts) -> None:
    card = write_card(encoder, facts)
    assert f'SentenceTransformer("{REPO}")' in card
    assert "sentence_transformers_model_id" not in card and "{{" not in card


def test_the_example_of_a_saved_card_is_put_right(
    make_encoder: Callable[..., SentenceTransformer], facts: Facts, tmp_path: Path
) -> None:
    make_encoder().save_pretrained(str(tmp_path / "saved"))
    written = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "sentence_transformers_model_id" in written
    for where in ("written", "published"):
        card = write_card(make_encoder(), facts, **{where: f"{written}\n## My own\n\nwords\n"})
        assert f'SentenceTransformer("{REPO}")' in card and "## My own\n\nwords" in card
        assert "sentence_transformers_model_id" not in card


def test_before_and_after(encoder: SentenceTransformer, facts: Facts) -> None:
    lines = block(write_card(encoder, facts)).splitlines()
    before, after, gain = (
        line for line in lines if re.search(r"\(before\)|\(after\)|Difference", line)
    )
    assert before.startswith("| google-bert/bert-base-uncased (before) | 51.00 | 52.00")
    assert after.startswith(f"| {REPO} (after) | 70.00 | 71.00") and after.endswith("| 73.00 |")
    assert set(re.findall(r"[+-][\d.]+", gain)) == {"+19.00"}


@pytest.mark.parametrize("written", [None, "trained"])
def test_the_machine_stays_out(
    written: str | None,
    encoder: SentenceTransformer,
    facts: Facts,
    trained: tuple[SentenceTransformer, str],
    sentences: list[str],
) -> None:
    old = None
    if written:
        old = trained[1].replace("`deepspeed`: None", "`deepspeed`: /home/zaphod/x/ds.json")
        assert "/home/zaphod" in old
        assert any(sentence in old for sentence in sentences)  # it would give the corpus away
    card = write_card(encoder, facts, old)
    for secret in ("zaphod", "/home", "hf_abc", "HUB_TOKEN", "checkpoints"):
        assert secret not in card
    assert "sentences.txt" in card
    assert not [sentence for sentence in sentences if sentence in card]
    assert ("`deepspeed`: ds.json" in card) == bool(written)


def test_every_setting_is_there(encoder: SentenceTransformer, facts: Facts) -> None:
    text = block(write_card(encoder, facts))
    assert facts.run is not None
    (code,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert json.loads(code) == facts.run["loss"]
    for row in (
        "| corpus | sentences.txt |",
        "| pooling | cls |",
        "| per_device_train_batch_size | 64 |",
        "| learning_rate | 3e-05 |",
        "| seed | 42 |",
        "| cpu | Some CPU |",
        "| torch | 2.13.0 |",
        "| date | 2026-01-02T03:04:05+00:00 |",
    ):
        assert row in text


def test_what_the_trainer_knew_is_taken_over(
    encoder: SentenceTransformer, trained: tuple[SentenceTransformer, str]
) -> None:
    old = trained[1].replace("- Python: 3", "- Python: 2")
    card = write_card(encoder, Facts(REPO), old)
    for heading in ("### Training Hyperparameters", "### Training Logs", "### Training Time"):
        assert heading in headings(old) and heading in headings(card)
    assert '"noise_size": 7' in card and "### Loss" in headings(card)
    assert "`max_steps`: 2" in card and "| Sentences | 64 |" in card
    assert "- Python: 2" in card  # the training's versions, not those of the push
    assert "loss:GSInfoNCELoss" in ModelCard(card).data.tags
    assert "widget" not in ModelCard(card).data.to_dict()


def test_both_papers_are_cited_once(
    encoder: SentenceTransformer, trained: tuple[SentenceTransformer, str]
) -> None:
    own_text = "---\nlicense: mit\n---\n# Mine\n"
    for old in (None, trained[1], own_text):
        card = write_card(encoder, Facts(REPO), old)
        for key in ("{wu-etal-2022-smoothed,", "{gao-etal-2021-simcse,"):
            assert card.count(key) == 1


def test_limits_are_told(encoder: SentenceTransformer, facts: Facts) -> None:
    text = block(write_card(encoder, facts))
    assert "cut after 32 tokens" in text and "Another seed" in text
    assert "No scores" in block(write_card(encoder, Facts(REPO)))
    assert "Licence | not stated" in block(write_card(encoder, Facts(REPO)))


OWN = """---
license: mit
tags:
- robots
my_key: 1
model-index:
- name: old
  results:
  - task: {type: retrieval}
    dataset: {name: Docs, type: docs}
    metrics: [{type: mrr, value: 0.5}]
---

# Marvin

My own words, in `/my/own` style. Life? Don't talk to me about life.
"""


@pytest.mark.parametrize("where", ["written", "published"])
def test_own_words_stay(where: str, encoder: SentenceTransformer, facts: Facts) -> None:
    card = write_card(encoder, Facts(REPO, AFTER), **{where: OWN})
    parsed = ModelCard(card)
    assert parsed.text.startswith(ModelCard(OWN).text.rstrip())
    assert parsed.data["my_key"] == 1 and parsed.data.license == "mit"
    assert {"robots", "simcse"} <= set(parsed.data.tags)
    assert [e.dataset_name for e in parsed.data.eval_results][0] == "Docs"
    assert len(parsed.data.eval_results) == 8

    edited = card.replace("Life?", "Brain the size of a planet.") + "\nAn afterword.\n"
    again = write_card(encoder, Facts(REPO, BEFORE, license="apache-2.0"), published=edited)
    assert again.count(BEGIN) == again.count(END) == 1
    assert "Brain the size of a planet." in again and again.endswith("An afterword.\n")
    assert "| 51.00 |" in again and "| 70.00 |" not in again
    assert ModelCard(again).data.license == "apache-2.0"  # asked for
    assert len(ModelCard(again).data.eval_results) == 8
    assert write_card(encoder, Facts(REPO, BEFORE), published=again) == again


def test_the_hub_s_text_comes_before_the_folder_s(
    encoder: SentenceTransformer, trained: tuple[SentenceTransformer, str]
) -> None:
    card = write_card(encoder, Facts(REPO), written=trained[1], published=OWN)
    assert "# Marvin" in card and "Hyperparameters" not in card


def test_a_card_that_cannot_be_read_is_named(encoder: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="metadata at the top of README.md cannot be read"):
        write_card(encoder, Facts(REPO), written="---\n- a\n- b\n---\n")
    with pytest.raises(ValueError, match="metadata at the top of README.md cannot be read"):
        write_card(encoder, Facts(REPO), published="---\na: [\n---\n")


def test_scores_that_do_not_compare_are_refused() -> None:
    fewer = STSResults({"STS12": 0.5}, "a/b", "0" * 40, "cls", {"STS12": 3}, {}, 1.0)
    with pytest.raises(ValueError, match=r"baseline has the tasks \['STS12'\]"):
        Facts(REPO, AFTER, fewer)
    with pytest.raises(ValueError, match="nothing to compare"):
        Facts(REPO, baseline=BEFORE)
