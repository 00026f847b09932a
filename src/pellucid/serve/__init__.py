"""`pellucid serve`: the trained model over HTTP. Requests that arrive together are decoded together.

engine.py decodes, with rows.py and group.py as its requests; api.py, completions.py and messages.py are what is asked
and answered; exchange.py, connections.py and gate.py hold clients to their bounds; daemon.py runs it all in the
background. The room knows policies, samplers' decoding and tasks; it knows nothing of training.
"""
