"""Decoders written out: what transformers computes for the Llama family, shared by sampling and scoring, and faster."""
