"""GS-InfoNCE through ``model.fit``: ``python examples/train_fit_api.py MODEL SENTENCES.txt OUTPUT``."""

import os
import sys

from sentence_transformers import InputExample
from torch.utils.data import DataLoader

from st_gsinfonce import GSInfoNCELoss, build_encoder, load_sentences, save_encoder

if len(sys.argv) != 4:
    sys.exit(__doc__)
name, corpus, output = sys.argv[1:]
if os.path.exists(output):
    sys.exit(f"error: {output} exists and is not overwritten: choose another folder")
model = build_encoder(name)
examples = [InputExample(texts=[sentence]) for sentence in load_sentences(corpus).sentences]
model.fit(
    train_objectives=[(DataLoader(examples, batch_size=64, shuffle=True), GSInfoNCELoss(model))],
    epochs=1,
    warmup_steps=0,  # fit's own 10,000 would keep the learning rate near 0 on a small corpus
    optimizer_params={"lr": 3e-5},
)
save_encoder(model, output)  # without the train-only head
