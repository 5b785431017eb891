"""SimCSE's two views of a text as two columns, for any loss that takes (anchor, positive) pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sentence_transformers.sentence_transformer import SentenceTransformerDataCollator
from torch import Tensor


@dataclass
class SimCSEDataCollator(SentenceTransformerDataCollator):
    """Tokenize the one text column of a batch once and hand it out as anchor and as positive.

    The two columns are equal; the encoder's dropout makes two views of them. That turns every loss on
    (anchor, positive) pairs, sentence-transformers' own among them, into unsupervised SimCSE (Gao et
    al., EMNLP 2021, https://arxiv.org/abs/2104.08821).

    Args:
        preprocess_fn: The encoder's ``model.preprocess``.
        valid_label_columns: Columns that are labels rather than text.
        prompts: As in the Trainer's arguments, by the name of the dataset's column.

    Raises:
        ValueError: When a batch has no text column, or more than one.
        TypeError: When a text is not a string.

    Example:
        ::

            trainer = SentenceTransformerTrainer(
                model=model,
                train_dataset=Dataset.from_dict({"text": sentences}),
                loss=MultipleNegativesRankingLoss(model),
                data_collator=SimCSEDataCollator(model.preprocess),
            )
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch with the columns anchor and positive."""
        if not features:
            return {}
        column = self._text_column(features[0])
        for row, feature in enumerate(features, start=1):
            if not isinstance(feature[column], str):
                raise TypeError(
                    f"column {column!r}: text {row} of the batch is {feature[column]!r}, not a string; "
                    "load_sentences drops such rows and says which"
                )
        batch = super().__call__(features)
        prefix = f"{column}_"
        views: dict[str, Any] = {}
        for name, value in batch.items():
            if not name.startswith(prefix) or name == "dataset_name":
                views[name] = value
                continue
            views[f"anchor_{name.removeprefix(prefix)}"] = value
            # A copy, since a module may write to its input.
            copy = value.clone() if isinstance(value, Tensor) else value
            views[f"positive_{name.removeprefix(prefix)}"] = copy
        return views

    def _text_column(self, feature: dict[str, Any]) -> str:
        labels = [name for name in self.valid_label_columns if name in feature]
        texts = [name for name in feature if name not in ("dataset_name", *labels[:1])]
        if len(texts) == 1:
            return texts[0]
        found = f"the batch has the columns {list(feature)}"
        if labels:
            found += f", of which {labels[0]!r} is taken for labels"
        raise ValueError(
            f"SimCSE trains on exactly one text column, but {found}: keep one with "
            'dataset.select_columns("text"), renamed where its name is a label\'s'
        )
