"""The policy: a causal language model with its tokenizer.

`load` finds and loads a model, `chat_template` turns messages into tokens and `tool_calls` tokens into messages,
`scorer` and `logprobs` compute log-probs with gradient, and `policy` holds, casts and saves the weights.
"""
