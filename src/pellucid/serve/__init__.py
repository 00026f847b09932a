"""`pellucid serve`: the trained model over HTTP. Requests that arrive together are decoded together.

`engine` decodes the rows of all requests. `api` has the endpoints, and `schemas` the bodies of requests and replies.
`middleware` checks access and limits clients. `command` has the options, and `daemon` runs the service in the
background.

Two more services belong to training: `agent_endpoint` is the endpoint for agents that are trained, and `vllm_server` is
`pellucid sampler`, which samples for a run on another machine; `transfer_routes` has its routes for weights over NCCL.
"""
