"""Worker processes that run other people's code, which may hang, crash or fill the memory.

`pool.py` is what the parent sees of a worker, `worker.py` what runs inside one, and `values.py` turns what user code
returns or raises into plain data. Rewards and environments both stand on it; the sandbox itself knows neither.
"""
