"""Decoders written out: what transformers computes for the Llama family, faster, and shared by sampling and scoring.

The same layers (decoder.py) have two faces: rows continued token by token (decoding.py) and whole responses scored with
gradients (packed.py). Where fusing.py finds that it may, fused.py decodes a token in one call of cpp/, and on a GPU
graphs.py in one of a graph. fallback.py gives any other architecture the first face by transformers. The room knows
torch and the tensors of algorithm/batch.py; it does not know where weights come from.
"""
