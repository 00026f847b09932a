"""The decoder of the Llama family: the layers, sampling with a KV cache, and scoring with gradient.

`decoder` has the layers. `decode` samples with them, `score` computes the hidden states of rollouts with gradient. On a
CPU `fused_decode` computes a decode step in one call of the C++ in cpp/, on a GPU `cuda_graphs` replays it as a graph.
`hf_decode` decodes every other architecture with transformers.
"""
