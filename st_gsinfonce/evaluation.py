"""Semantic textual similarity as the field reports it: MTEB's seven tasks, and an evaluator for training.

The metric everywhere is cosine_spearman: Spearman's rank correlation between the cosine of the two
sentence embeddings and the human score, over all pairs of a split at once (the "all" setting of the
SimCSE and GS-InfoNCE papers, and MTEB's main score for these tasks). It lies in [-1, 1]; papers print
it times 100. Ranks ignore the range of the gold scores, so no scaling of them matters.

Sources:
    - MTEB: Muennighoff et al., EACL 2023, https://arxiv.org/abs/2210.07316
    - The protocol: Gao et al., EMNLP 2021, appendix B, https://arxiv.org/abs/2104.08821
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.util import get_rank
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_gsinfonce.provenance import package_versions
from st_gsinfonce.sts_data import STS_TASKS, hub_pairs, read_pairs, warn_of_sample
from st_gsinfonce.sts_encoding import (
    encode_once,
    fingerprint,
    is_main_process,
    pooling_mode,
    random_states_kept,
    task_prompt,
)
from st_gsinfonce.sts_results import STSResults, model_name, record_in_model_card

__all__ = [
    "STS_TASKS",
    "STSEvaluationCallback",
    "STSEvaluator",
    "STSResults",
    "evaluate_sts",
    "pooling_mode",
    "record_in_model_card",
]

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_MTEB = 'the STS tasks are scored by MTEB: pip install "st_gsinfonce[eval]"'


def require_mteb() -> None:
    """Raise an ImportError that says what to install, unless MTEB can be imported."""
    if find_spec("mteb") is None:  # looked for, not imported: that would seed the generators
        raise ImportError(_NO_MTEB)


def evaluate_sts(
    model: SentenceTransformer,
    tasks: Sequence[str] = STS_TASKS,
    data_dir: str | Path | None = None,
    batch_size: int = 32,
    output_dir: str | Path | None = None,
    show_progress_bar: bool = True,
    name: str | None = None,
    revision: str | None = None,
) -> STSResults:
    """Score an encoder on STS tasks with MTEB's own task code.

    The scores are those of ``mteb.evaluate``; it is faster because every distinct sentence is encoded
    once over all tasks (once per prompt, where the model has a prompt for a task or for "STS"), in one
    call of ``encode``, which goes longest first. What is held is one float32 vector per distinct
    sentence. The model comes back in the mode (train or eval) it came in, and the global random states
    are left as they were. Call it on every rank of a distributed run or on one: it uses no collective
    of its own, and only rank 0 writes files.

    Args:
        model: The encoder, on the device where it is to run. Its prompts, ``truncate_dim`` and dtype
            apply; embeddings are scored in float32.
        tasks: MTEB names of STS tasks.
        data_dir: Folder with ``TASK/test.jsonl`` for each task, one object a line with ``sentence1``,
            ``sentence2`` (text) and ``score`` (number). None loads the tasks from the hub as MTEB
            defines them.
        batch_size: Sentences per forward pass.
        output_dir: If given, also leaves MTEB's result files there, as
            ``results/ORGANISATION__MODEL/REVISION/TASK.json`` with ``model_meta.json``. Nothing is
            ever read back from it.
        show_progress_bar: Whether to show one bar, over sentences.
        name: What to call the model, ``organisation/model``; a name without organisation becomes
            ``local/NAME``. By default it is ``local/encoder-`` and the start of the weights' hash.
        revision: Commit or version of the model; by default the hash of its weights and settings.

    Returns:
        The scores, their average, and what was evaluated.

    Raises:
        ImportError: If MTEB is not installed.
        FileNotFoundError: If ``data_dir`` lacks a task; the message names it.
        ValueError: On no task or an unknown one, a malformed row (named by file and line), a name with more
            than one slash, or embeddings that are NaN, infinite or all the same (naming the model).

    Warns:
        UserWarning: If a split does not have the published number of pairs. MTEB itself warns that
            STSBenchmark has a second version; published tables hold the first, which is scored here.

    Example:
        >>> results = evaluate_sts(model, data_dir="sts")  # doctest: +SKIP
        >>> print(results)  # doctest: +SKIP
    """
    weights_hash = fingerprint(model)
    name = model_name(name, weights_hash)
    revision = revision or weights_hash
    with random_states_kept(model):  # MTEB seeds the global generators as it builds tasks
        mteb = _import_mteb()
        loaded = [_mteb_task(mteb, task, data_dir) for task in tasks]
        if not loaded:
            raise ValueError("tasks is empty: give at least one STS task")
        start = perf_counter()
        encoder = _EncodedSentences(model, loaded, name, batch_size, show_progress_bar)
        encoder.mteb_model_meta = _model_meta(model, name, revision)
        kwargs = {"batch_size": batch_size, "show_progress_bar": False}
        # MTEB's cache is off: it goes by name and would return another run's scores.
        outcome = mteb.evaluate(
            encoder,
            loaded,
            cache=None,
            co2_tracker=False,
            show_progress_bar=False,
            encode_kwargs=dict(kwargs),
        )
        seconds = perf_counter() - start
    scores = {result.task_name: float(result.get_score()) for result in outcome.task_results}
    for task, score in scores.items():
        _check_score(score, name, task)
    if output_dir is not None and is_main_process():
        store = mteb.ResultCache(output_dir)
        for result in outcome.task_results:
            store.save_to_cache(result, encoder.mteb_model_meta, encode_kwargs=kwargs)
    return STSResults(
        scores=scores,
        model_name=name,
        revision=revision,
        pooling=pooling_mode(model),
        pairs={task.metadata.name: len(task.dataset["test"]) for task in loaded},
        versions=package_versions(),
        seconds=seconds,
    )


class STSEvaluator(EmbeddingSimilarityEvaluator):
    """Scores an encoder on one STS split while it trains, without MTEB, as MTEB does.

    By default on the validation split of STSBenchmark, by which SimCSE and GS-InfoNCE choose their
    checkpoint every 125 steps. Pass it to the Trainer as ``evaluator``, with
    ``metric_for_best_model="eval_" + evaluator.primary_metric``, which for the default split is
    ``"eval_sts-dev_spearman_cosine"``, and ``greater_is_better=True``. It returns
    ``NAME_pearson_cosine`` and ``NAME_spearman_cosine`` in [-1, 1], appends them to
    ``similarity_evaluation_NAME_results.csv`` and enters them in the model's card.

    Each distinct sentence is encoded once, in one call of ``encode``: under DDP the Trainer shares that
    call among the ranks.

    Args:
        data_dir: Folder with ``TASK/SPLIT.jsonl`` (see `evaluate_sts`); None loads from the hub.
        task: An MTEB name; from the hub, one of `STS_TASKS`.
        split: A split of that task.
        name: Prefix of the metrics; by default ``sts-dev`` for STSBenchmark's validation split,
            otherwise ``TASK-SPLIT``.
        batch_size: Sentences per forward pass.
        show_progress_bar: Whether to show a bar over sentences.
        write_csv: Whether to append to the CSV file when an output path is given.
        truncate_dim: Score the first so many dimensions; None uses the model's own setting.

    Raises:
        FileNotFoundError: If ``data_dir`` lacks the split.
        ValueError: On an unknown task, a malformed row, or gold scores that are all the same; and, when
            called, on embeddings that are NaN, infinite or all the same.

    Warns:
        UserWarning: If the split does not have the published number of pairs.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        task: str = "STSBenchmark",
        split: str = "validation",
        name: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        truncate_dim: int | None = None,
    ) -> None:
        pairs = read_pairs(data_dir, task, split) if data_dir else hub_pairs(task, split)
        default = (
            "sts-dev" if (task, split) == ("STSBenchmark", "validation") else f"{task}-{split}"
        )
        super().__init__(
            pairs.sentence1,
            pairs.sentence2,
            pairs.score,
            batch_size=batch_size,
            main_similarity="cosine",
            name=name or default,
            show_progress_bar=show_progress_bar,
            write_csv=write_csv,
            truncate_dim=truncate_dim,
        )
        self.task = task
        self.split = split
        self.primary_metric = f"{self.name}_spearman_cosine"
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def __call__(  # type: ignore[override]  # narrower than BaseEvaluator, as the parent's is
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
    ) -> dict[str, float]:
        """Encode, correlate, and return the metrics, their names prefixed with ``name``."""
        label = f"encoder (base model {model.model_card_data.base_model})"
        sentences = list(dict.fromkeys([*self.sentences1, *self.sentences2]))
        vectors = encode_once(
            model,
            sentences,
            label,
            task_prompt(model, self.task),
            self.batch_size,
            self.show_progress_bar,
            self.truncate_dim,
        )
        self._vectors = dict(zip(sentences, vectors, strict=True))
        if get_rank() > 0:
            output_path = None  # sentence-transformers 6.0 has every process write to the file
        try:
            metrics: dict[str, float] = super().__call__(model, output_path, epoch, steps)
        finally:
            self._vectors = {}
        _check_score(metrics[f"{self.name}_spearman_cosine"], label, self.name)
        return metrics

    def embed_inputs(
        self, model: SentenceTransformer, sentences: str | list[str] | NDArray[Any], **kwargs: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of one side, already encoded by ``__call__``."""
        return np.stack([self._vectors[sentence] for sentence in sentences])

    def get_config_dict(self) -> dict[str, Any]:
        """Return what the model card says about this evaluation."""
        config = {"task": self.task, "split": self.split, "pairs": len(self.scores)}
        return {**config, **super().get_config_dict()}  # type: ignore[no-untyped-call]


class STSEvaluationCallback(TrainerCallback):
    """Evaluates all STS tasks when training ends and enters the scores in the model's card.

    The Trainer has loaded the best checkpoint by then if it was asked to. Save the model afterwards and
    its card has one table with a column per task. Whatever can be wrong with the data or the
    installation is found when the callback is made, not after the training.

    Args:
        tasks: As for `evaluate_sts`.
        data_dir: As for `evaluate_sts`.
        **kwargs: Further arguments of `evaluate_sts`: ``batch_size``, ``output_dir``, ``name``...

    Attributes:
        results: The `STSResults`, None until training has ended.

    Raises:
        ImportError: If MTEB is not installed.
        FileNotFoundError: If ``data_dir`` lacks a task.
        ValueError: On a malformed row.
    """

    def __init__(
        self,
        tasks: Sequence[str] = STS_TASKS,
        data_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        require_mteb()
        if data_dir is not None:
            for task in tasks:
                read_pairs(data_dir, task, "test")
        self.arguments = {"tasks": tasks, "data_dir": data_dir, **kwargs}
        self.results: STSResults | None = None

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: SentenceTransformer | None = None,
        **kwargs: Any,
    ) -> None:
        """Evaluate on every rank (the same work on each), and fill the card."""
        if model is None:
            raise ValueError("STSEvaluationCallback needs the model that the Trainer hands out")
        self.results = evaluate_sts(model, **self.arguments)
        record_in_model_card(model, self.results, epoch=state.epoch or 0, step=state.global_step)


class _EncodedSentences:
    """An encoder in MTEB's protocol that answers from vectors computed beforehand."""

    mteb_model_meta: Any

    def __init__(
        self,
        model: SentenceTransformer,
        tasks: Sequence[Any],
        name: str,
        batch_size: int,
        show_progress_bar: bool,
    ) -> None:
        self.similarity = model.similarity
        self.similarity_pairwise = model.similarity_pairwise
        self._prompts = {
            task.metadata.name: task_prompt(model, task.metadata.name) for task in tasks
        }
        # prompt -> sentence -> row
        self._rows: dict[str | None, dict[str, int]] = {}
        for task in tasks:
            rows = self._rows.setdefault(self._prompts[task.metadata.name], {})
            for column in task.column_names:
                for sentence in task.dataset["test"][column]:
                    rows.setdefault(sentence, len(rows))
        self._vectors = {
            prompt: encode_once(model, list(rows), name, prompt, batch_size, show_progress_bar)
            for prompt, rows in self._rows.items()
        }

    def encode(self, inputs: Any, *, task_metadata: Any, **kwargs: Any) -> NDArray[np.float32]:
        """Return the vectors of a MTEB data loader's sentences, in its order."""
        prompt = self._prompts[task_metadata.name]
        rows = self._rows[prompt]
        return self._vectors[prompt][[rows[text] for batch in inputs for text in batch["text"]]]


def _check_score(score: float, label: str, task: str) -> None:
    if math.isnan(score):
        raise ValueError(
            f"{label}: cosine_spearman of {task} is undefined, every pair has the same cosine"
        )


def _import_mteb() -> Any:
    try:
        import mteb
    except ImportError as error:
        raise ImportError(_NO_MTEB) from error
    return mteb


def _mteb_task(mteb: Any, name: str, data_dir: str | Path | None) -> Any:
    """Return MTEB's task with its data loaded, from the folder or by MTEB from the hub."""
    from datasets import Dataset

    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise ValueError(
            f"MTEB has no task {name!r}; the paper's are {', '.join(STS_TASKS)}"
        ) from error
    if task.metadata.type != "STS" or task.metadata.is_multilingual:
        raise ValueError(f"{name} is no STS task of one language")
    if data_dir is None:
        task.load_data()
        warn_of_sample(name, "test", len(task.dataset["test"]))
    else:
        pairs = read_pairs(data_dir, name, "test")
        task.dataset = {"test": Dataset.from_dict(pairs._asdict())}
        task.data_loaded = True  # MTEB then scores this and loads nothing
    return task


def _model_meta(model: SentenceTransformer, name: str, revision: str) -> Any:
    from mteb.models import ModelMeta
    from mteb.models.model_meta import ScoringFunction

    similarity = model.similarity_fn_name
    return ModelMeta.create_empty(
        overwrites={
            "name": name,
            "revision": revision,
            "framework": ["Sentence Transformers", "PyTorch"],
            "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "embed_dim": model.get_embedding_dimension(),
            "max_tokens": model.max_seq_length,
            # MTEB's reader knows no other two of sentence-transformers' functions
            "similarity_fn_name": ScoringFunction(similarity)
            if similarity in ("cosine", "dot")
            else None,
        }
    )
