"""`pellucid serve`: the trained model over HTTP. Requests that arrive together are decoded together.

engine.py decodes the rows of all requests (rows.py), and decoding.py passes a request to it. api.py, completions.py and
group.py answer the endpoints, whose bodies are in messages.py and whose choices in choices.py; gate.py, exchange.py and
connections.py hold clients to their bounds. command.py reads the options, host.py loads the model, and daemon.py runs
it all in the background. recorder.py is another service, within a run: the endpoint of agents that are trained, whose
requests are in asked.py; rollouts.py makes conversations of them. sampling.py is a third, `pellucid sampler`: rows for
a run on another machine, by an engine of vLLM's. The room knows settings, policies, our decoders, tasks, the processes
of agents and how advantages are computed; it knows nothing of training, above it.
"""
