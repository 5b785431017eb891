"""Unsupervised sentence encoders with GS-InfoNCE, as a sentence-transformers plugin."""

from st_gsinfonce.analysis import (
    alignment,
    anisotropy,
    effective_rank,
    probe_false_negatives,
    uniformity,
)
from st_gsinfonce.cached import CachedGSInfoNCELoss
from st_gsinfonce.checkpoints import last_checkpoint
from st_gsinfonce.collator import SimCSEDataCollator
from st_gsinfonce.corpus import load_sentences
from st_gsinfonce.diagnostics import DiagnosticsCallback
from st_gsinfonce.embedded import embedded_corpus
from st_gsinfonce.encoder import (
    ProjectionHead,
    build_encoder,
    embedded_encoder,
    has_head,
    load_encoder,
    save_encoder,
    strip_head,
)
from st_gsinfonce.evaluation import (
    STS_TASKS,
    STSEvaluationCallback,
    STSEvaluator,
    STSResults,
    evaluate_sts,
)
from st_gsinfonce.hub import push_encoder
from st_gsinfonce.losses import GSInfoNCELoss
from st_gsinfonce.objective import expected_log_noise_mass, gs_infonce
from st_gsinfonce.streamed import gs_infonce_streamed
from st_gsinfonce.training import NoiseStepCallback, build_trainer, precision_arguments

__version__ = "0.1.0"

__all__ = [
    "STS_TASKS",
    "CachedGSInfoNCELoss",
    "DiagnosticsCallback",
    "GSInfoNCELoss",
    "NoiseStepCallback",
    "ProjectionHead",
    "STSEvaluationCallback",
    "STSEvaluator",
    "STSResults",
    "SimCSEDataCollator",
    "alignment",
    "anisotropy",
    "build_encoder",
    "build_trainer",
    "effective_rank",
    "embedded_corpus",
    "embedded_encoder",
    "evaluate_sts",
    "expected_log_noise_mass",
    "gs_infonce",
    "gs_infonce_streamed",
    "has_head",
    "last_checkpoint",
    "load_encoder",
    "load_sentences",
    "precision_arguments",
    "probe_false_negatives",
    "push_encoder",
    "save_encoder",
    "strip_head",
    "uniformity",
]
