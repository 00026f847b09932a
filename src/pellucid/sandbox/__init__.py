"""Worker processes that run other people's code, which may hang, crash or fill the memory.

`pool.py` starts and calls workers from the parent process, `worker.py` runs inside a worker, and `values.py` converts
the results and errors of user code to plain data. Rewards and environments use this package; it imports neither.
"""
