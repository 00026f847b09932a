"""Files, hardware, signals, text, and plugins: helpers that import nothing else of the package but `types`.

`files`: durable writes and locks. `hardware`: devices, dtypes and memory. `signals`: requests to stop, and standard
streams. `text`: escaping, hints and docstrings. `plugins`: the user's own objects and optional libraries. `endpoint`:
OpenAI-compatible services.
"""
