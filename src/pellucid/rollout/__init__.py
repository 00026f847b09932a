"""Samplers: they turn prompts into groups of completions, with the log-prob of every token.

`native` decodes with our decoder, and `scheduler` batches its rows. `hf` calls `generate()` of transformers and is the
reference that tests compare with. `vllm` runs vLLM in this process, or with `vllm_client` on sampler servers, to which
`nccl_transfer` sends weights from GPU to GPU. `sglang` samples on SGLang servers instead.
"""
