"""The policy: a causal language model that is scored, saved and followed by its reference.

Here a model's name becomes a model (pretrained.py, modelscope.py, access.py), messages become tokens (template.py,
hermes.py, literal.py) and what was sampled a message (tool_calls.py, call_forms.py), a batch becomes log-probs with
gradients (scorer.py, head.py, logprobs.py), and weights are kept, cast and saved (policy.py). The room knows
transformers, our decoders in models/ and the records of the algorithm; it does not know how tokens are sampled or how
many processes there are.
"""
