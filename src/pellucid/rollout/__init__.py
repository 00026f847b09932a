"""Samplers turn prompts into groups of completions, with the log-prob of every token.

native.py decodes whole groups by our decoder; hf.py is `generate()` of transformers, slow and beyond doubt, and the
oracle of the other; vllm.py has vLLM draw, whose weights freshness.py proves at every push, an adapter by itself as
adapters.py makes it, and servers.py has it draw on other machines, among which fleet.py deals out rows and each of
which remote.py asks. rollout.py is what all do
around their decoding. The room knows a policy and the records; it does not know rewards, processes or files.
"""
