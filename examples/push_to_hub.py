"""Push a trained encoder to the Hugging Face Hub, with a model card.

    python examples/push_to_hub.py --encoder runs/mine/encoder --repo-id me/my-encoder --dry-run
    python examples/push_to_hub.py --encoder runs/mine/encoder --repo-id me/my-encoder --run run.json
    python examples/push_to_hub.py --help    # base model, licence, scores, public, update

The repository is private unless --public is given. A checkpoint may be given: the train-only head stays
here. --dry-run prepares and checks everything, leaves the folder, prints the card and pushes nothing. With
--sts-data the encoder is scored on the seven STS tasks first, and so is a --baseline. The access token is the
one of ``hf auth login``, or HF_TOKEN; it is no argument, since others can see a command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging

from st_gsinfonce import STSResults, build_encoder, evaluate_sts, load_encoder, push_encoder
from st_gsinfonce.command_line import parser_of, run


@dataclass
class PushArguments:
    """What to push where, and what its card says."""

    encoder: str = field(metadata={"help": "Folder of the encoder, or a checkpoint."})
    repo_id: str = field(metadata={"help": "USER/MODEL or ORGANISATION/MODEL."})
    public: bool = field(default=False, metadata={"help": "Let everyone download it."})
    update: bool = field(
        default=False, metadata={"help": "Push to a repository that holds an encoder."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Prepare and check, push nothing."})
    run: str | None = field(default=None, metadata={"help": "run.json of the training."})
    base_model: str | None = field(default=None, metadata={"help": "Its base, as on the hub."})
    license: str | None = field(default=None, metadata={"help": "Such as apache-2.0."})
    language: str | None = field(default=None, metadata={"help": "Such as en."})
    results: str | None = field(
        default=None, metadata={"help": "JSON file of scores (STSResults.to_json)."}
    )
    sts_data: str | None = field(
        default=None,
        metadata={"help": "Score it now: 'hub', or a folder of TASK/test.jsonl."},
    )
    baseline: str | None = field(
        default=None,
        metadata={
            "help": "The scores before: a JSON file, or with --sts-data an encoder to score now."
        },
    )


def scores(
    settings: PushArguments,
) -> tuple[STSResults | None, STSResults | None]:
    """Return the scores after and before, read or made as the settings say."""
    results = baseline = None
    folder = None if settings.sts_data == "hub" else settings.sts_data
    if settings.sts_data is not None:
        encoder = load_encoder(settings.encoder)
        results = evaluate_sts(encoder, data_dir=folder, name=settings.repo_id)
    elif settings.results is not None:
        results = STSResults.from_json(Path(settings.results).read_text(encoding="utf-8"))
    if settings.baseline is None:
        return results, None
    if settings.baseline.endswith(".json"):
        baseline = STSResults.from_json(Path(settings.baseline).read_text(encoding="utf-8"))
    elif settings.sts_data is not None and results is not None:
        before = build_encoder(
            settings.baseline, pooling=results.pooling, max_seq_length=None, head=False
        )
        name = settings.baseline
        if Path(name).exists() or name.count("/") > 1:
            name = Path(name).name
        baseline = evaluate_sts(before, data_dir=folder, name=name)
    else:
        raise ValueError("--baseline is an encoder: give --sts-data as well, to score it on")
    return results, baseline


def main() -> None:
    """Score if asked to, then push; or show what would be pushed."""
    (settings,) = parser_of(PushArguments, __doc__).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    results, baseline = scores(settings)
    pushed = push_encoder(
        settings.encoder,
        settings.repo_id,
        results,
        not settings.public,
        baseline=baseline,
        run=settings.run,
        base_model=settings.base_model,
        license=settings.license,
        language=settings.language,
        update=settings.update,
        dry_run=settings.dry_run,
    )
    if settings.dry_run:
        print(f"\n{pushed.card}\n\nNothing was pushed. What would be lies in {pushed.folder}")
    else:
        print(f"Pushed: {pushed.commit_url}")


if __name__ == "__main__":
    run(main)
