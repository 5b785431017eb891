"""Unsupervised sentence encoders with GS-InfoNCE, as a sentence-transformers plugin."""

__version__ = "0.1.0"
